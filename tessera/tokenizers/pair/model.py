"""The pair: a tower of convolutions for pictures, a text encoder with a head for captions, and one sphere for both."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.batches import Text, TextStates
from tessera.config import Config
from tessera.nn.attention import RMSNorm, linear
from tessera.nn.conv import Downsample, GroupNorm, ResidualBlock, channels_last, initialise, store_channels_last

MOST_SHARPNESS = 100.0  # Radford et al. 2021, section 2.5


class EmbedderConfig(Config):
    """A pair of encoders, of pictures and of captions, that is trained on the user's data."""

    width: int = Field(128, ge=8)
    """Channels of an embedding."""
    widths: tuple[int, ...] = Field((32, 64, 128, 256), min_length=1)
    """Channels of the picture tower at each level; each level but the first has half the pixels a side of the one before."""
    blocks: int = Field(1, ge=0)
    """Residual blocks of each level."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout in the residual blocks."""


class PictureTower(nn.Module):
    """Pictures -> vectors. The mean over all places, so that any size goes; two channels beside the pixels say where they are, or
    that mean would not tell left from right (Liu et al. 2018)."""

    def __init__(self, config: EmbedderConfig, channels: int) -> None:
        super().__init__()
        first, last = config.widths[0], config.widths[-1]
        layers: list[nn.Module] = [initialise(nn.Conv2d(channels + 2, first, 3, padding=1))]
        for level, width in enumerate(config.widths):
            layers += [Downsample(config.widths[level - 1], width)] if level else []
            layers += [ResidualBlock(width, config.dropout) for _ in range(config.blocks)]
        self.layers = nn.Sequential(*layers, GroupNorm(last), nn.SiLU())
        self.head = linear(last, config.width)
        store_channels_last(self)

    def forward(self, images: Tensor) -> Tensor:
        """b c h w in [-1, 1] -> b e"""
        places = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, size) for size in images.shape[2:]), indexing="ij"))
        placed = torch.cat([images, places.to(images).expand(len(images), -1, -1, -1)], dim=1)
        return self.head(self.layers(channels_last(placed)).mean((2, 3)))


class Embedder(nn.Module):
    """Both towers, and how sharply they are compared. `text` reads raw captions; None where states come from a frozen encoder."""

    def __init__(self, config: EmbedderConfig, channels: int, text_width: int, text: nn.Module | None = None) -> None:
        super().__init__()
        self.width, self.text = config.width, text
        self.tower = PictureTower(config, channels)
        self.norm, self.head = RMSNorm(text_width), linear(text_width, config.width)
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # Radford et al. 2021, section 2.5

    def forward(self, images: Tensor, text: Text | TextStates) -> tuple[Tensor, Tensor]:
        """Vectors of pictures and of captions, b e each."""
        return self.pictures(images), self.captions(text)

    def pictures(self, images: Tensor) -> Tensor:
        """b c h w in [-1, 1] -> b e of length 1, fp32"""
        return F.normalize(self.tower(images).float(), dim=-1)

    def captions(self, text: Text | TextStates) -> Tensor:
        """b captions -> b e of length 1, fp32; an empty one is 0, near to nothing."""
        states = self.states(text)
        told = states.mask.any(1, keepdim=True)
        return F.normalize(self.head(self.norm(states.pooled)).float(), dim=-1) * told

    def states(self, text: Text | TextStates) -> TextStates:
        """What the caption head reads."""
        if isinstance(text, TextStates):
            return text
        if self.text is None:
            raise ValueError("raw captions, but this pair was built without a text encoder; give it states")
        found = self.text(text)
        assert isinstance(found, TextStates)
        return found

    @property
    def sharpness(self) -> Tensor:
        """The inverse of the temperature."""
        return self.log_sharpness.exp().clamp(max=MOST_SHARPNESS)
