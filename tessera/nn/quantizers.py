"""Quantizers: continuous vectors to codes and ids. All in fp32, because a rounding in bf16 would move the code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from tessera.config import Config


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a quantizer makes of vectors `... d`."""

    codes: Tensor  # ... d, in [-1, 1]; gradients pass straight through the rounding
    ids: Tensor  # ... int64


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


class FSQ(nn.Module):
    """Mentzer et al. 2023, "Finite Scalar Quantization: VQ-VAE Made Simple" (appendix A.1)."""

    levels: Tensor
    basis: Tensor

    def __init__(self, config: FSQConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        levels = torch.tensor(config.levels)
        basis = torch.cumprod(torch.tensor([1, *config.levels[:-1]]), dim=0)
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, z: Tensor) -> Quantized:
        """z: ... d, any real numbers."""
        with torch.autocast(z.device.type, enabled=False):
            bounded = self.bound(z.float())
            rounded = bounded + (bounded.round() - bounded).detach()
            half = self.levels // 2
            return Quantized(rounded / half, self._ids(rounded.detach().round() + half))

    def bound(self, z: Tensor) -> Tensor:
        """Squashes channel i into an interval that rounds to exactly levels[i] integers."""
        half = (self.levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)  # an even number of integers is not symmetric about 0
        return torch.tanh(z + torch.atanh(offset / half)) * half - offset

    def decode(self, ids: Tensor) -> Tensor:
        """ids ... to codes ... d."""
        digits = ids[..., None] // self.basis % self.levels
        half = self.levels // 2
        return (digits - half) / half

    def _ids(self, digits: Tensor) -> Tensor:
        """NaN counts as 0: its code stays NaN, so the step refuses the loss; an id out of range would crash the device first."""
        return (digits.nan_to_num(0).long() * self.basis).sum(-1)


def code_counts(ids: Tensor, vocab_size: int, valid: Tensor | None = None) -> Tensor:
    """How often each code occurs, fp32; without a wait for the device, as bincount would need."""
    weights = torch.ones_like(ids, dtype=torch.float32)
    if valid is not None:
        weights = weights * valid.view(-1, *(1,) * (ids.ndim - 1))
    return torch.zeros(vocab_size, device=ids.device).index_add_(0, ids.flatten(), weights.flatten())


def code_use(counts: Tensor) -> dict[str, float]:
    """Share of codes that occur at all, and perplexity: how many codes a uniform use of that entropy would have."""
    share = counts.double() / counts.sum().clamp(min=1)
    entropy = -(share * share.clamp(min=1e-30).log()).sum()
    return {"codes_used": float((counts > 0).double().mean()), "perplexity": float(entropy.exp())}
