"""A U-Net that denoises pictures of any size that its stride divides, also those that are not square."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config, UserError
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.conditioning import Conditioning, Inputs
from tessera.nn.attention import Attention, RMSNorm, linear
from tessera.nn.conv import Downsample, GroupNorm, Upsample, channels_last, initialise, store_channels_last

SKIP = 1 / math.sqrt(2)  # of features that go around the lower levels (Saharia et al. 2022, appendix B)


class UNetConfig(Config):
    """A convolutional U-Net with attention at its lower levels."""

    kind: Literal["unet"] = "unet"
    """The kind of network."""
    widths: tuple[int, ...] = Field((96, 192, 384), min_length=1)
    """Channels of each level, finest first. Between two levels height and width halve."""
    blocks: tuple[int, ...] = (2, 2, 2)
    """Residual blocks of each level, as many on the way down as on the way up."""
    attention: tuple[bool, ...] = (False, True, True)
    """Levels whose pixels attend to each other. Below the last level they always do."""
    cross: tuple[bool, ...] = (False, True, True)
    """Levels whose pixels attend to text and embedding. Below the last level they always do."""
    head_width: int = Field(64, ge=2, multiple_of=2)
    """Channels of an attention head."""
    embedding_tokens: int = Field(4, ge=1)
    """Tokens made of an embedding, to attend to."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside residual blocks."""
    efficient: bool = False
    """Halve once more before the first level, so that no block works at full size: for upsamplers, with more blocks below."""

    @model_validator(mode="after")
    def _levels(self) -> UNetConfig:
        for name in ("blocks", "attention", "cross"):
            if len(getattr(self, name)) != len(self.widths):
                found, wanted = len(getattr(self, name)), len(self.widths)
                raise ValueError(f"{name} has {found} entries and widths {wanted}; give one a level")
        if any(width < 8 or width % 8 for width in self.widths):
            raise ValueError(f"widths {list(self.widths)} must be multiples of 8")
        if any(count < 1 for count in self.blocks):
            raise ValueError(f"blocks {list(self.blocks)} must be at least 1 a level")
        looks = [here or there for here, there in zip(self.attention[:-1], self.cross[:-1], strict=True)]
        for width, looking in zip(self.widths, [*looks, True], strict=True):
            if looking and width % self.head_width:
                raise ValueError(f"width {width} of a level with attention cannot be divided by head_width {self.head_width}")
        return self

    @property
    def stride(self) -> int:
        """What heights and widths must be multiples of."""
        return 2 ** (len(self.widths) - 1 + self.efficient)


class ModulatedBlock(nn.Module):
    """shortcut(x) + conv(silu(scale * norm(conv(silu(norm(x)))) + shift)), scale and shift by the condition (Dhariwal and Nichol
    2021, section 3). Without a change of width it starts as the identity."""

    def __init__(self, width_in: int, width: int, condition_width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = GroupNorm(width_in), GroupNorm(width)
        self.conv1 = initialise(nn.Conv2d(width_in, width, 3, padding=1))
        self.conv2 = initialise(nn.Conv2d(width, width, 3, padding=1), gain=0)
        self.modulate = linear(condition_width, 2 * width, gain=0, bias=True)
        self.shortcut = nn.Identity() if width_in == width else initialise(nn.Conv2d(width_in, width, 1))
        self.dropout = dropout

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        """b c h w, and b d -> b c' h w"""
        scale, shift = self.modulate(vector).chunk(2, dim=1)
        h = self.norm2(self.conv1(F.silu(self.norm1(x))), (scale, shift))
        return self.shortcut(x) + self.conv2(F.dropout(F.silu(h), self.dropout, self.training))


class PixelAttention(nn.Module):
    """x + attention of its pixels to each other, or to a context. It starts as the identity. Pixels know their places from the
    padding of the convolutions around it."""

    def __init__(self, width: int, heads: int, context_width: int | None = None) -> None:
        super().__init__()
        self.norm, self.attention = RMSNorm(width), Attention(width, heads, context_width)
        nn.init.zeros_(self.attention.out.weight)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """b c h w, and b m d with b m -> b c h w"""
        pixels = rearrange(x, "b c h w -> b (h w) c")  # no copy of channels-last pictures
        seen = self.attention(self.norm(pixels), context, mask)
        return x + rearrange(seen, "b (h w) c -> b c h w", w=x.shape[-1])


class Layer(nn.Module):
    """A residual block, and the attention of its level."""

    def __init__(self, config: UNetConfig, width_in: int, width: int, *, attention: bool, context_width: int | None) -> None:
        super().__init__()
        heads = width // config.head_width
        self.block = ModulatedBlock(width_in, width, condition_width(config), config.dropout)
        self.attention = PixelAttention(width, heads) if attention else None
        self.cross = None if context_width is None else PixelAttention(width, heads, context_width)

    def forward(
        self, x: Tensor, vector: Tensor, context: Tensor | None, mask: Tensor | None, around: Tensor | None = None
    ) -> Tensor:
        """b c h w -> b c' h w. On the way up `around`, as x, comes from the way down; put beside x in here, compiled."""
        x = x if around is None else torch.cat([x, around * SKIP], dim=1)
        x = self.block(x, vector)
        if self.attention is not None:
            x = self.attention(x)
        return x if self.cross is None else self.cross(x, context, mask)


class LastNorm(GroupNorm):
    """That of no layer, by a name of its own, as the next two: they are compiled by themselves, which those of other nets, frozen
    ones among them, are not."""

    def forward(self, x: Tensor, around: Tensor) -> Tensor:  # type: ignore[override]  # as of a layer on the way up
        """b c h w twice -> b 2c h w, what the last convolution sees"""
        return F.silu(super().forward(torch.cat([x, around * SKIP], dim=1)))


class Shrink(Downsample):
    """From a level to the one below."""


class Grow(Upsample):
    """From a level to the one above."""


class UNet(nn.Module):
    """Down through the levels, and up again beside what each layer of the way down has put out. An untrained one guesses 0."""

    def __init__(self, config: UNetConfig, inputs: Inputs) -> None:
        super().__init__()
        self.inputs, self.stride = inputs, config.stride
        refuse_size(inputs.size, self.stride)
        width, widths, context = condition_width(config), config.widths, condition_width(config) if inputs.attended else None
        stem = widths[0] // 2 if config.efficient else widths[0]
        self.conditioning = Conditioning(inputs, width, config.embedding_tokens)
        self.stem = initialise(nn.Conv2d(inputs.channels_in, stem, 3, padding=1))
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, (own, above) in enumerate(zip(widths, (stem, *widths[:-1]), strict=True)):
            crosses, looks = context if config.cross[level] else None, config.attention[level]
            halves = level > 0 or config.efficient
            self.shrink.append(Shrink(above, own) if halves else nn.Identity())
            self.grow.append(Grow(own, above) if halves else nn.Identity())
            for path, width_in in ((self.down, own), (self.up, 2 * own)):
                layers = (
                    Layer(config, width_in, own, attention=looks, context_width=crosses) for _ in range(config.blocks[level])
                )
                path.append(nn.ModuleList(layers))
        self.middle = nn.ModuleList([
            Layer(config, widths[-1], widths[-1], attention=True, context_width=context),
            Layer(config, widths[-1], widths[-1], attention=False, context_width=None),
        ])  # fmt: skip
        self.norm = LastNorm(2 * stem)
        self.out = initialise(nn.Conv2d(2 * stem, inputs.channels_out, 3, padding=1), gain=0)
        store_channels_last(self)

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        """x b c h w, level b the log-SNR of the noise on it -> b c h w, with variance b 2c h w"""
        refuse_size(x.shape[-2:], self.stride)
        vector, context, mask = self.conditioning(level, condition)
        vector = F.silu(vector)
        stem = self.stem(channels_last(self.inputs.stack(x, condition)))
        h, around = stem, []
        for shrink, layers in zip(self.shrink, self.down, strict=True):
            h = shrink(h)
            for layer in layers:  # type: ignore[attr-defined]
                h = layer(h, vector, context, mask)
                around.append(h)
        for layer in self.middle:
            h = layer(h, vector, context, mask)
        for grow, layers in zip(reversed(self.grow), reversed(self.up), strict=True):
            for layer in layers:  # type: ignore[attr-defined]
                h = layer(h, vector, context, mask, around.pop())
            h = grow(h)
        return self.out(self.norm(h, stem)).to(x.dtype)


def condition_width(config: UNetConfig) -> int:
    """Of the vector that shifts and scales, and of the context."""
    return 4 * config.widths[0]


def refuse_size(size: Sequence[int], stride: int) -> None:
    """Halvings must come out even."""
    if wrong := [side for side in size if side % stride]:
        near = sorted({near for side in wrong for near in (side // stride * stride, -(-side // stride) * stride) if near})
        raise UserError(
            f"pictures of {size[0]} x {size[1]} pixels cannot be divided by the U-Net's stride {stride}; "
            f"use sides like {' or '.join(map(str, near))}, or fewer widths"
        )
