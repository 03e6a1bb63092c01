"""Copies of shapes: how near each sample lies to its nearest training shape, beside the same for real shapes that were held out.

As for pictures (`copies`): a sample is called a copy when it lies as near as only one in a hundred held-out shapes does.
Distances are Chamfer's, so a copy that was moved, turned or scaled is none. Where canonical quantised corners are given, samples
that equal a training shape face for face are counted too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tessera.evals.copies import PERCENTILE, Copies
from tessera.evals.mesh_points import Clouds, Doubles, pairwise_chamfer

Ints: TypeAlias = npt.NDArray[np.int64]
Corners: TypeAlias = npt.NDArray[np.int64]  # f 3 3: canonical, so that equal arrays are equal shapes

COARSE_POINTS = 256  # the first search compares at most so many points of each shape: 64 times as fast as 2,048
SHORTLIST = 16  # of it, so many of the nearest are compared by all points


@dataclass(frozen=True, slots=True)
class Equals:
    """Shapes that equal a training shape face for face."""

    samples: Ints  # the first training shape that each sample equals, or -1
    held_out: Ints

    def as_dict(self) -> dict[str, object]:
        """Plain JSON; `pairs` are a sample and its training shape."""
        found = np.flatnonzero(self.samples >= 0)
        return {
            "share": _share(self.samples),
            "held_out_share": _share(self.held_out),
            "pairs": [[int(i), int(self.samples[i])] for i in found[:8]],
        }


def nearest_shapes(
    queries: Clouds, bank: Clouds, *, shortlist: int = SHORTLIST, coarse: int = COARSE_POINTS, device: torch.device | str = "cpu"
) -> tuple[Ints, Doubles]:
    """For each query the index of the nearest shape of the bank (the first of equals) and its Chamfer distance.

    The shortlist is found by the first points of each cloud; shortlist=len(bank) compares all by all points and misses nothing.
    """
    if not len(bank):
        raise ValueError("the bank holds no shapes; the nearest of none is not defined")
    if shortlist >= len(bank):
        gaps = pairwise_chamfer(queries, bank, device=device)
        return gaps.argmin(1), gaps.min(1)
    rough = pairwise_chamfer(queries[:, :coarse], bank[:, :coarse], device=device)
    places = np.sort(np.argsort(rough, axis=1, kind="stable")[:, :shortlist], axis=1)  # in the bank's order: the first of equals
    index, distances = np.zeros(len(queries), np.int64), np.zeros(len(queries))
    for row, chosen in enumerate(places):
        gaps = pairwise_chamfer(queries[row : row + 1], bank[chosen], device=device)[0]
        index[row], distances[row] = chosen[gaps.argmin()], gaps.min()
    return index, distances


def find_shape_copies(
    samples: Clouds, held_out: Clouds, train: Clouds, *, shortlist: int = SHORTLIST, coarse: int = COARSE_POINTS,
    device: torch.device | str = "cpu",
) -> Copies:  # fmt: skip
    """Clouds, s n 3 each. As near as the first percentile of the held-out distances, or nearer, is a copy."""
    if not len(samples) or not len(held_out):
        raise ValueError(
            f"{len(samples)} samples and {len(held_out)} held-out shapes; both are needed: the threshold of a copy is a "
            "percentile of held-out distances"
        )
    indices, distances = nearest_shapes(samples, train, shortlist=shortlist, coarse=coarse, device=device)
    _, real = nearest_shapes(held_out, train, shortlist=shortlist, coarse=coarse, device=device)
    return Copies(indices, distances, real, float(np.percentile(real, PERCENTILE)))


def find_equals(samples: Sequence[Corners], held_out: Sequence[Corners], train: Sequence[Corners]) -> Equals:
    """By canonical quantised corners, f 3 3, of one number of bins; in time of one pass over all."""
    first: dict[bytes, int] = {}
    for index, corners in enumerate(train):
        first.setdefault(_key(corners), index)
    found, real = (np.array([first.get(_key(corners), -1) for corners in side], np.int64) for side in (samples, held_out))
    return Equals(found, real)


def _key(corners: Corners) -> bytes:
    if corners.ndim != 3 or corners.shape[1:] != (3, 3):
        raise ValueError(f"corners are shaped {corners.shape}; expected faces x 3 x 3")
    return np.ascontiguousarray(corners, np.int64).tobytes()  # nine numbers a face: the length tells the number of faces


def _share(found: Ints) -> float:
    return float((found >= 0).mean()) if len(found) else 0.0
