"""Copies: how near each sample lies to its nearest training picture, beside the same for real pictures that were held out.

A sample is called a copy when it lies as near as only one in a hundred held-out pictures does. That shows memorised pictures; it
cannot show a copied idea, and where the data themselves hold near-duplicates the held-out share says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.evals.nets import Pictures, shrink

SIDE = 16  # pictures are compared at this size: where things are and their colours, not their noise
PERCENTILE = 1.0
_QUERIES, _BANK = 1024, 8192  # rows of a matrix product: 32 MiB


def pixel_vectors(pictures: Pictures) -> npt.NDArray[np.float32]:
    """n h w c -> n d in [0, 1], downscaled; a distance is the root mean squared difference of pixels."""
    small = shrink(pictures, SIDE).flatten(1).numpy().astype(np.float32) / 255
    return (small / np.sqrt(small.shape[1])).astype(np.float32)


def nearest(
    queries: npt.NDArray[np.float32], bank: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For each query the index of the nearest row of the bank (the first of equals) and its Euclidean distance.

    By blocks of matrix products, so memory is bounded; the winner's distance is computed again by differences, because
    |a|^2 + |b|^2 - 2ab leaves rounding where two rows are equal.
    """
    best, index = np.full(len(queries), np.inf), np.zeros(len(queries), np.int64)
    lengths = np.einsum("nd,nd->n", bank, bank, dtype=np.float64)  # casts in small pieces: no second bank in memory
    for top in range(0, len(queries), _QUERIES):
        rows = slice(top, top + _QUERIES)
        for start in range(0, len(bank), _BANK):
            block = bank[start : start + _BANK]
            gaps = lengths[start : start + _BANK] - 2 * (queries[rows] @ block.T)  # without |query|^2, equal in a row
            winner = gaps.argmin(1)
            value = gaps[np.arange(len(winner)), winner]
            nearer = value < best[rows]
            index[rows], best[rows] = np.where(nearer, start + winner, index[rows]), np.where(nearer, value, best[rows])
    distances = np.concatenate(
        [
            np.sqrt(np.square(queries[i : i + _QUERIES].astype(np.float64) - bank[index[i : i + _QUERIES]]).sum(1))
            for i in range(0, len(queries), _QUERIES)
        ]
        or [np.zeros(0)]
    )
    return index, distances


@dataclass(frozen=True, slots=True)
class Copies:
    """Of one space: distances of samples and of held-out pictures to the training set."""

    indices: npt.NDArray[np.int64]  # of each sample's nearest training picture
    distances: npt.NDArray[np.float64]
    held_out: npt.NDArray[np.float64]
    threshold: float

    @property
    def ranked(self) -> npt.NDArray[np.int64]:
        """Samples by distance, nearest first: the ones to look at."""
        return np.argsort(self.distances, kind="stable")

    def as_dict(self) -> dict[str, object]:
        """Plain JSON; `share` beside `held_out_share`, which is about one in a hundred by construction."""
        return {
            "median": float(np.median(self.distances)),
            "held_out_median": float(np.median(self.held_out)),
            "share": float((self.distances <= self.threshold).mean()),
            "held_out_share": float((self.held_out <= self.threshold).mean()),
            "threshold": self.threshold,
            "nearest": [[int(i), int(self.indices[i]), float(self.distances[i])] for i in self.ranked[:8]],
        }


def find_copies(samples: npt.NDArray[np.float32], held_out: npt.NDArray[np.float32], train: npt.NDArray[np.float32]) -> Copies:
    """Vectors of any space, n d each. As near as the first percentile of the held-out distances, or nearer, is a copy; "as near",
    because with duplicates in the data that percentile is 0."""
    indices, distances = nearest(samples, train)
    _, real = nearest(held_out, train)
    return Copies(indices, distances, real, float(np.percentile(real, PERCENTILE)))


def few_note(num_held_out: int, things: str = "pictures") -> str | None:
    """What a reader must know where the percentile rests on few."""
    if num_held_out >= 100:
        return None
    return (
        f"{num_held_out} held-out {things}: the threshold is about the nearest of them, and moves with it; 100 or more are needed"
    )
