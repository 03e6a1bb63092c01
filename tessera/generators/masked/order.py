"""In which order, and how many at a time, tokens are revealed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def halton_order(grid: Sequence[int]) -> Tensor:
    """The cells of a grid, each far from those before it: the places of a Halton sequence (Besnier et al. 2025)."""
    primes = (2, 3, 5, 7)  # time, rows, columns, links of a residual quantizer
    if len(grid) > len(primes):
        raise ValueError(f"a grid of {len(grid)} axes; Halton order is defined here for at most {len(primes)}")
    seen: dict[int, None] = {}
    index, size = 1, math.prod(grid)
    while len(seen) < size:
        cell = 0
        for axis, prime in zip(grid, primes, strict=False):
            cell = cell * axis + int(radical_inverse(index, prime) * axis)
        seen.setdefault(cell)
        index += 1
    return torch.tensor(list(seen))


def radical_inverse(index: int, base: int) -> float:
    """The digits of a number mirrored at the point."""
    value, scale = 0.0, 1.0
    while index:
        scale /= base
        index, digit = divmod(index, base)
        value += digit * scale
    return value


@functools.lru_cache(maxsize=16)
def halton_ranks(grid: tuple[int, ...]) -> Tensor:
    """n: how early each cell is in Halton order."""
    return halton_order(grid).argsort()


def num_revealed(steps: int, num_hidden: Tensor) -> Tensor:
    """b -> steps + 1, b: how many of a sample's hidden tokens are visible before each step, and at the end.

    The cosine schedule of training, run backwards, over what is hidden at the start; at least one token a step while some are
    left.
    """
    done = torch.arange(steps + 1, device=num_hidden.device)[:, None]
    left = torch.floor(torch.cos(done.double() / steps * (math.pi / 2)) * num_hidden + 1e-9).long()
    return torch.minimum(torch.maximum(num_hidden - left, done), num_hidden)


def lowest(scores: Tensor, counts: Tensor) -> Tensor:
    """b n, b -> b n bool: so many of the lowest scores of each sample; of equal ones the first."""
    return scores.argsort(dim=1, stable=True).argsort(dim=1) < counts[:, None]
