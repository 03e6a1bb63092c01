"""Which samples make up which batch: a pure function of seed and step.

The stream of samples is endless: position p is in epoch p // size, and each epoch is another permutation. Step s takes the
positions [s * batch_size, (s + 1) * batch_size); ranks and micro-batches only cut that interval, so the samples of an
update never depend on them. No sample is dropped at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.randomness import mix, permute_one

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    """The endless stream over `size` samples."""

    size: int
    seed: int

    def locate(self, position: int) -> tuple[int, int]:
        """Position in the stream -> epoch, sample."""
        epoch, place = divmod(position, self.size)
        return epoch, permute_one(place, self.size, mix(self.seed, epoch))


@dataclass(frozen=True, slots=True)
class Cut:
    """How a global batch is cut: into equal shares of ranks, then into micro-batches."""

    batch_size: int
    micro_batch_size: int | None
    rank: int
    world_size: int

    def micro_batches(self, step: int) -> list[Indices]:
        """This rank's positions of one step, in as few and as equal micro-batches as fit."""
        share = np.array_split(np.arange(step * self.batch_size, (step + 1) * self.batch_size), self.world_size)[self.rank]
        most = self.micro_batch_size or len(share)
        return np.array_split(share, -(-len(share) // most))

    def all_micro_batches(self, first_step: int) -> Iterator[list[int]]:
        """Endless; every step has equally many micro-batches."""
        step = first_step
        while True:
            yield from (micro.tolist() for micro in self.micro_batches(step))
            step += 1
