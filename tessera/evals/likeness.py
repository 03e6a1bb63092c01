"""LPIPS of pictures and what was made of them, pair by pair."""

from __future__ import annotations

import numpy as np
import torch

from tessera.batches import from_uint8
from tessera.evals.distances import Doubles, Estimate, resampled
from tessera.evals.nets import Pictures
from tessera.nn.lpips import Lpips
from tessera.recipes.precision import full_precision

_CHUNK = 8  # pairs that are looked at at once: maps of a large picture are large


@torch.no_grad()
def perceptual_distances(net: Lpips, made: Pictures, real: Pictures) -> Doubles:
    """n h w c uint8, twice -> n, on the net's device."""
    device, found = net.heads[0].device, [torch.empty(0)]
    pairs = (torch.from_numpy(np.ascontiguousarray(side)).permute(0, 3, 1, 2).split(_CHUNK) for side in (made, real))
    with full_precision(device):
        for a, b in zip(*pairs, strict=True):
            found.append(net(from_uint8(a.to(device)), from_uint8(b.to(device))).cpu())
    return torch.cat(found).double().numpy()


def estimate_mean(values: Doubles, *, resamples: int, seed: int) -> Estimate:
    """With a bootstrap interval over the samples."""
    value, n = float(values.mean()), len(values)

    def draw(rng: np.random.Generator) -> float:
        return float(values[rng.integers(n, size=n)].mean())

    return Estimate(value, n, *resampled(value, draw, resamples, seed))
