"""How one token is drawn from a distribution: one uniform number a place, looked up in the cumulated probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COLDEST = 1e-6  # below it only the most probable token is left, and logits divided by it might overflow


def draw(logits: Tensor, numbers: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """logits ... v, numbers ... in [0, 1) -> ...: tokens with the probabilities of softmax(logits / temperature), perhaps only
    the k most probable ones.

    Gumbel noise would need v numbers a place and gives the same distribution. Sums are fp64, so that a token of probability 0
    cannot be reached by rounding.
    """
    if temperature < COLDEST:
        return logits.argmax(-1)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -math.inf)
    probs = (logits / temperature).softmax(-1)
    if top_p < 1:
        probs = nucleus(probs, top_p)
    sums = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(sums, numbers[..., None].double() * sums[..., -1:], right=True)[..., 0]


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """... v, 0 outside the fewest tokens that together have at least the probability top_p (Holtzman et al. 2020)."""
    ordered, places = probs.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(-1) - ordered >= top_p  # of those before it, so that the first one always stays
    return probs.masked_fill(torch.zeros_like(outside).scatter(-1, places, outside), 0.0)


def implausible(logits: Tensor, share: float) -> Tensor:
    """... v bool: tokens less than `share` times as probable as the most probable one."""
    return logits < logits.amax(-1, keepdim=True) + math.log(share)
