"""Exponential moving average of weights: a second copy of the net that can be called, so weights are never swapped."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tessera.engine.shard import own

Pairs = list[tuple[Tensor, Tensor]]


def average_of(net: nn.Module) -> nn.Module:
    """A copy in eval mode that no optimizer sees."""
    return copy.deepcopy(net).eval().requires_grad_(False)


def decay_at(step: int, decay: float) -> float:
    """Rises from 0.1 to the final decay, so that early averages forget the initial weights; no counter to save."""
    return min(decay, (1 + step) / (10 + step))


def pairs_of(average: nn.Module, net: nn.Module) -> Pairs:
    """Parameters and buffers of the average beside those of the net."""
    return list(zip((*average.parameters(), *average.buffers()), (*net.parameters(), *net.buffers()), strict=True))


@torch.no_grad()
def update_average(pairs: Pairs, decay: float) -> None:
    """average <- decay * average + (1 - decay) * net, all in one call; counters and other whole numbers are copied."""
    floats = [(kept, new) for kept, new in pairs if kept.is_floating_point()]
    torch._foreach_lerp_([own(kept) for kept, _ in floats], [own(new) for _, new in floats], 1 - decay)
    for kept, new in pairs:
        if not kept.is_floating_point():
            kept.copy_(new)
