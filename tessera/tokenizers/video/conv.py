"""The convolutional backbone. Frames are pictures, (b t) c h w and channels last; layers along time lie between them.

In that layout b c t (h w) is a view, so a convolution along time is a picture's, with a kernel of 3 x 1. Norms are of one frame,
every layer sees this frame and earlier ones, and before the first frame there is the first again: nothing comes from the future,
and the first frame is encoded and decoded as a picture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.nn.conv import Downsample, GroupNorm, ResidualBlock, Upsample, channels_last, initialise
from tessera.tokenizers.image.model import ConvConfig

Memory = tuple[Tensor, ...]  # what layers along time keep of a clip between two calls
REACH = 2  # frames before its own that a convolution along time sees


class CausalConvConfig(ConvConfig):
    """Convolutions: those of the image tokenizer on every frame, and causal ones along time between them."""

    kind: Literal["conv"] = "conv"
    """The kind of network."""
    widths: tuple[int, ...] = Field((64, 128, 256, 256), min_length=1)
    """Channels of each level, finest first. Between two levels height and width halve: four levels, stride 8."""
    blocks: tuple[int, ...] = (1, 1, 2, 2)
    """Residual blocks of each level, each with a layer along time behind it."""
    time_downsamples: int = Field(2, ge=0)
    """How many of the halvings halve time, too: the coarsest ones. 2: time stride 4."""

    @model_validator(mode="after")
    def _times(self) -> CausalConvConfig:
        if self.time_downsamples >= len(self.widths):
            raise ValueError(
                f"time_downsamples {self.time_downsamples} is more than the {len(self.widths) - 1} halvings between "
                f"{len(self.widths)} widths"
            )
        return self

    @property
    def time_stride(self) -> int:
        """Frames per latent frame, but for the first."""
        return 2**self.time_downsamples

    def halves_time(self, level: int) -> bool:
        """Whether time halves between the level before and this one."""
        return level > 0 and level >= len(self.widths) - self.time_downsamples


def along_time(x: Tensor, num: int) -> Tensor:
    """(b t) c h w -> b c t (h w), of num clips; a view of channels-last pictures."""
    return rearrange(x, "(b t) c h w -> b c t (h w)", b=num)


def as_pictures(x: Tensor, height: int) -> Tensor:
    """b c t (h w) -> (b t) c h w; a view, too."""
    return rearrange(x, "b c t (h w) -> (b t) c h w", h=height)


def reach_back(x: Tensor, past: Tensor | None = None) -> Tensor:
    """b c t n with two frames in front: those before, or at a clip's start the first twice."""
    if past is None:
        past = x[:, :, :1].expand(-1, -1, REACH, -1)
    return torch.cat([past, x], dim=2)


class TimeLayer(nn.Module, ABC):
    """Norm, silu, causal convolution of three frames. Subclasses say what becomes of it.

    Their forward takes (b t) c h w of num clips and what it kept of the frames before (None: the clip starts here), and returns
    pictures and what it keeps.
    """

    def __init__(self, width: int, width_out: int, stride: int = 1, gain: float = 1.0) -> None:
        super().__init__()
        self.norm = GroupNorm(width)
        self.conv = initialise(nn.Conv2d(width, width_out, (1 + REACH, 1), stride=(stride, 1)), gain)

    def mixed(self, x: Tensor, num: int, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """b c' t' (h w), and the last frames of the convolution's input."""
        h = reach_back(along_time(F.silu(self.norm(x)), num), past)
        return self.conv(h), h[:, :, -REACH:]

    @abstractmethod
    def forward(self, x: Tensor, num: int, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(b t) c h w -> (b t') c h w"""


class TimeBlock(TimeLayer):
    """x + convolution; starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, gain=0)

    def forward(self, x: Tensor, num: int, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As many frames."""
        h, kept = self.mixed(x, num, past)
        return x + as_pictures(h, x.shape[-2]), kept


class TimeDownsample(TimeLayer):
    """Halves time: 1 + 2m frames -> 1 + m. The last of each two, + a convolution; starts as that frame alone."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, stride=2, gain=0)

    def forward(self, x: Tensor, num: int, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Half as many frames."""
        h, kept = self.mixed(x, num, past)
        return as_pictures(along_time(x, num)[:, :, ::2] + h, x.shape[-2]), kept


class TimeUpsample(TimeLayer):
    """Doubles time: 1 + m frames -> 1 + 2m; the first gives one, others two. A frame, + a convolution; starts by repeating."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * width, gain=0)

    def forward(self, x: Tensor, num: int, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Twice as many frames, less one at a clip's start."""
        h, kept = self.mixed(x, num, past)
        h = rearrange(h, "b (two c) t n -> b c (t two) n", two=2) + along_time(x, num).repeat_interleave(2, dim=2)
        return channels_last(as_pictures(h if past is not None else h[:, :, 1:], x.shape[-2])), kept


class Encoder(nn.Module):
    """b c t h w -> b d k h/s w/s"""

    def __init__(self, config: CausalConvConfig, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [initialise(nn.Conv2d(channels, config.widths[0], 3, padding=1))]
        for level, (width, num_blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
            if level:
                layers.append(Downsample(config.widths[level - 1], width))
            if config.halves_time(level):
                layers.append(TimeDownsample(width))
            layers += blocks(width, num_blocks, config.dropout)
        self.layers = nn.ModuleList(layers)
        self.norm = GroupNorm(config.widths[-1])
        self.out = initialise(nn.Conv2d(config.widths[-1], config.quantizer.width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Unit variance in, roughly unit variance out."""
        num = len(x)
        h, _ = through(self.layers, channels_last(rearrange(x, "b c t h w -> (b t) c h w")), num)
        return rearrange(self.out(F.silu(self.norm(h))), "(b t) c h w -> b c t h w", b=num)


class Decoder(nn.Module):
    """b d k h/s w/s -> b c t h w"""

    def __init__(self, config: CausalConvConfig, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [initialise(nn.Conv2d(config.quantizer.width, config.widths[-1], 3, padding=1))]
        plan = list(enumerate(zip(config.widths, config.decoder_blocks or config.blocks, strict=True)))
        for level, (width, num_blocks) in reversed(plan):
            layers += blocks(width, num_blocks, config.dropout)
            if config.halves_time(level):
                layers.append(TimeUpsample(width))
            if level:
                layers.append(Upsample(width, config.widths[level - 1]))
        self.layers = nn.ModuleList(layers)
        self.norm = GroupNorm(config.widths[0])
        self.out = initialise(nn.Conv2d(config.widths[0], channels, 3, padding=1), gain=0)  # starts at mid-grey

    def forward(self, codes: Tensor, memory: Memory | None = None, keep: bool = False) -> tuple[Tensor, Memory]:
        """Not squashed. With a memory the codes continue the clip that it is of; `keep` returns the next one."""
        num = len(codes)
        h, kept = through(self.layers, channels_last(rearrange(codes, "b c t h w -> (b t) c h w")), num, memory, keep)
        return rearrange(self.out(F.silu(self.norm(h))), "(b t) c h w -> b c t h w", b=num), kept


def blocks(width: int, num: int, dropout: float) -> list[nn.Module]:
    """Residual blocks of frames, each followed by one along time."""
    return [layer for _ in range(num) for layer in (ResidualBlock(width, dropout), TimeBlock(width))]


def through(
    layers: nn.ModuleList, x: Tensor, num: int, memory: Sequence[Tensor] | None = None, keep: bool = False
) -> tuple[Tensor, Memory]:
    """(b t) c h w through all layers, and copies of what those along time keep."""
    past = None if memory is None else iter(memory)
    kept = []
    for layer in layers:
        if isinstance(layer, TimeLayer):
            x, own = layer(x, num, None if past is None else next(past))
            if keep:
                kept.append(own.clone())
        else:
            x = layer(x)
    return x, tuple(kept)
