"""Pictures <-> a grid of ids. Convolutions only, so any size that the stride divides goes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config
from tessera.nn.conv import Downsample, GroupNorm, ResidualBlock, Upsample, channels_last, initialise, store_channels_last
from tessera.nn.quantizers import FSQConfig, Quantized, Quantizer, QuantizerConfig


class ConvConfig(Config):
    """A convolutional autoencoder around a quantizer; subclasses say of what."""

    kind: str
    """The kind of network."""
    widths: tuple[int, ...] = Field((64, 128, 256, 256), min_length=1)
    """Channels of each level, finest first. Between two levels height and width halve: four levels, stride 8."""
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    """Residual blocks of each level."""
    decoder_blocks: tuple[int, ...] | None = None
    """The decoder's residual blocks of each level, finest first; null: as many as the encoder's."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside residual blocks."""
    quantizer: QuantizerConfig = FSQConfig()
    """How latents become codes."""

    @model_validator(mode="after")
    def _levels(self) -> ConvConfig:
        for name, blocks in (("blocks", self.blocks), ("decoder_blocks", self.decoder_blocks)):
            if blocks is not None and len(blocks) != len(self.widths):
                raise ValueError(f"{name} has {len(blocks)} entries and widths {len(self.widths)}; give one number a level")
        if any(width < 4 or width % 4 for width in self.widths):
            raise ValueError(f"widths {list(self.widths)} must be multiples of 4")
        return self

    @property
    def stride(self) -> int:
        """Pixels per token along each axis."""
        return 2 ** (len(self.widths) - 1)


class ImageTokenizerConfig(ConvConfig):
    """A convolutional autoencoder around a quantizer."""

    kind: Literal["conv"] = "conv"
    """The kind of network."""


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """A picture there and back."""

    images: Tensor  # b c h w; not clamped
    latents: Tensor  # b h/s w/s d, as the encoder made them
    quantized: Quantized

    @property
    def ids(self) -> Tensor:
        """b h/s w/s; with a residual quantizer b h/s w/s q"""
        return self.quantized.ids


class Encoder(nn.Module):
    """b c h w -> b d h/s w/s"""

    def __init__(self, config: ConvConfig, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [initialise(nn.Conv2d(channels, config.widths[0], 3, padding=1))]
        for level, (width, num_blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
            if level:
                layers.append(Downsample(config.widths[level - 1], width))
            layers += [ResidualBlock(width, config.dropout) for _ in range(num_blocks)]
        self.layers = nn.Sequential(*layers)
        self.norm = GroupNorm(config.widths[-1])
        self.out = initialise(nn.Conv2d(config.widths[-1], config.quantizer.width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Unit variance in, roughly unit variance out, so that the quantizer's levels are all in use from the start."""
        return self.out(F.silu(self.norm(self.layers(channels_last(x)))))


class Decoder(nn.Module):
    """b d h/s w/s -> b c h w"""

    def __init__(self, config: ConvConfig, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [initialise(nn.Conv2d(config.quantizer.width, config.widths[-1], 3, padding=1))]
        plan = list(enumerate(zip(config.widths, config.decoder_blocks or config.blocks, strict=True)))
        for level, (width, num_blocks) in reversed(plan):
            layers += [ResidualBlock(width, config.dropout) for _ in range(num_blocks)]
            if level:
                layers.append(Upsample(width, config.widths[level - 1]))
        self.layers = nn.Sequential(*layers)
        self.norm = GroupNorm(config.widths[0])
        self.out = initialise(nn.Conv2d(config.widths[0], channels, 3, padding=1), gain=0)  # starts at mid-grey

    def forward(self, codes: Tensor) -> Tensor:
        """Not squashed: the loss sees how far outside [-1, 1] it goes; `decode` clamps."""
        return self.out(F.silu(self.norm(self.layers(channels_last(codes)))))


class LatentTokenizer(nn.Module):
    """What image and video tokenizers share: latents, standardised by their running mean and deviation before they are quantized.

    Otherwise a channel can drift to where FSQ's tanh is flat and stay there: on emoji, at width 256, seven eighths of the codes
    were lost in this way. For LFQ it puts the thresholds amid the values, for VQ it spreads the directions; both then normalise
    each vector by themselves. The statistics are those of past steps, so no sample sees another one.
    """

    latent_mean: Tensor
    latent_variance: Tensor
    quantizer: Quantizer

    def quantize_by(self, config: QuantizerConfig) -> None:
        """The last step of building: the quantizer draws its first codes behind the layers."""
        self.vocab_size = config.vocab_size
        self.quantizer = config.build()
        self.register_buffer("latent_mean", torch.zeros(config.width))
        self.register_buffer("latent_variance", torch.ones(config.width))
        store_channels_last(self)

    def standardise(self, latents: Tensor) -> Tensor:
        """... d -> the same with zero mean and unit deviation over the training data."""
        return (latents.float() - self.latent_mean) * torch.rsqrt(self.latent_variance + 1e-6)


class ImageTokenizer(LatentTokenizer):
    """The trained net. `contracts.Tokenizer` by its encode, decode and vocab_size.

    Ids are b h w, with a residual quantizer b h w q; vocab_size is that of one id.
    """

    def __init__(self, config: ImageTokenizerConfig, channels: int) -> None:
        super().__init__()
        self.stride = config.stride
        self.encoder, self.decoder = Encoder(config, channels), Decoder(config, channels)
        self.quantize_by(config.quantizer)

    def forward(self, images: Tensor, valid: Tensor | None = None) -> Reconstruction:
        """There and back, with gradients: b c h w in [-1, 1]; valid: b, which samples the quantizer's auxiliary terms count."""
        latents = self.latent(images)
        quantized = self.quantizer(self.standardise(latents), valid)
        decoded = self.decoder(rearrange(quantized.codes, "b h w d -> b d h w"))
        return Reconstruction(decoded.float(), latents, quantized)

    def latent(self, images: Tensor) -> Tensor:
        """b c h w -> b h/s w/s d, not yet bounded. Convolutions would round another size down without a word."""
        check_size(images, self.stride)
        return rearrange(self.encoder(images), "b d h w -> b h w d")

    def encode(self, x: Tensor) -> Tensor:
        """b c h w -> b h/s w/s, or b h/s w/s q"""
        return self.quantizer.ids_of(self.standardise(self.latent(x)))

    def decode(self, ids: Tensor) -> Tensor:
        """b h/s w/s, or b h/s w/s q -> b c h w in [-1, 1]"""
        return self.decode_latent(rearrange(self.quantizer.decode(ids), "b h w d -> b d h w"))

    def encode_latent(self, x: Tensor) -> Tensor:
        """b c h w -> b d h/s w/s: the latent before a code is chosen, for generators over continuous values.

        In [-1, 1] with FSQ; with LFQ and VQ of mean square 1 over the channels.
        """
        return rearrange(self.quantizer.prepare(self.standardise(self.latent(x))), "b h w d -> b d h w")

    def decode_latent(self, codes: Tensor) -> Tensor:
        """b d h/s w/s -> b c h w in [-1, 1]"""
        return self.decoder(codes).float().clamp(-1, 1)


def check_size(images: Tensor, stride: int) -> None:
    """... h w must be whole tokens."""
    height, width = images.shape[-2:]
    if height % stride or width % stride:
        raise ValueError(f"pictures of {height} x {width} pixels cannot be divided by the tokenizer's stride {stride}")
