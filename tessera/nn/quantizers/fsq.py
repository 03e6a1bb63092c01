"""Finite scalar quantization: every channel is rounded to a few levels. No codebook, no auxiliary loss, nothing to save."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from tessera.config import Config
from tessera.nn.quantizers.codes import Quantizer


class FSQConfig(Config):
    """Finite scalar quantization: every channel is rounded to a few levels; no codebook, no auxiliary loss."""

    kind: Literal["fsq"] = "fsq"
    """The kind of quantizer."""
    levels: tuple[int, ...] = Field((8, 5, 5, 5), min_length=1)
    """Levels of each channel; their product is the number of codes. [8, 5, 5, 5]: 1,000 codes."""

    @field_validator("levels")
    @classmethod
    def _levels(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 2 <= level <= 1000 for level in levels):  # beyond, the margin of `FSQ.bound` would round to one level more
            raise ValueError(f"levels {list(levels)}: each channel needs 2 to 1000 levels")
        if math.prod(levels) > 2**31:
            raise ValueError(f"levels {list(levels)} make {math.prod(levels):,} codes; at most 2**31 can be numbered")
        return levels

    @property
    def vocab_size(self) -> int:
        """Number of codes."""
        return math.prod(self.levels)

    @property
    def width(self) -> int:
        """Channels of the latent."""
        return len(self.levels)

    def build(self, depth: int = 0) -> FSQ:
        """The module; depth is its place in a residual chain."""
        return FSQ(self, depth)


class FSQ(Quantizer):
    """Mentzer et al. 2023, "Finite Scalar Quantization: VQ-VAE Made Simple" (appendix A.1).

    Deeper in a residual chain the cell that rounding left, one step wide, is cut into `levels` equal parts again: a channel is a
    number in base `levels`, one digit a link, and no link needs a tanh of its own.
    """

    levels: Tensor
    basis: Tensor
    centre: Tensor
    unit: Tensor

    def __init__(self, config: FSQConfig, depth: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.width = config.vocab_size, config.width
        levels = torch.tensor(config.levels)
        basis = torch.cumprod(torch.tensor([1, *config.levels[:-1]]), dim=0)
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("basis", basis, persistent=False)
        # The digit of code 0; digits a unit of code. An even number of integers is not symmetric about 0; parts of a cell are.
        self.register_buffer("centre", (levels // 2).float() if depth == 0 else (levels - 1) / 2, persistent=False)
        self.register_buffer("unit", (levels // 2) * levels.double().pow(depth).float(), persistent=False)

    def prepare(self, z: Tensor) -> Tensor:
        """Into [-1, 1], but for the margin of a thousandth."""
        return self.bound(z) / (self.levels // 2)

    def bound(self, z: Tensor) -> Tensor:
        """Squashes channel i into an interval that rounds to exactly levels[i] integers."""
        half = (self.levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)  # an even number of integers is not symmetric about 0
        return torch.tanh(z + torch.atanh(offset / half)) * half - offset

    def nearest(self, prepared: Tensor) -> Tensor:
        """The first channel's digit changes fastest."""
        digits = (prepared * self.unit + self.centre).round()
        digits = torch.minimum(digits.nan_to_num(0).clamp(min=0), self.levels - 1)
        return (digits.long() * self.basis).sum(-1)

    def decode(self, ids: Tensor) -> Tensor:
        """ids ... to codes ... d."""
        digits = ids[..., None] // self.basis % self.levels
        return (digits - self.centre) / self.unit
