"""Which samples make up which batch: a pure function of seed and step.

The stream of samples is endless: position p is in epoch p // size, and each epoch is another permutation. Step s takes the
positions [s * batch_size, (s + 1) * batch_size); ranks and micro-batches only cut that interval, so the samples of an
update never depend on them. No sample is dropped at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tessera.randomness import mix, mix_text, permute_one

Indices = npt.NDArray[np.int64]
_WINDOW = mix_text("window")  # keeps these draws apart from all others


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
class Mixture:
    """Two endless streams in one: of any n positions in a row, n * share are of the second, rounded up or down."""

    share: Fraction

    @classmethod
    def of(cls, share: float) -> Mixture:
        """Of a share as the user writes it: 0.2 is one fifth."""
        return cls(Fraction(repr(share)))

    def locate(self, position: int) -> tuple[bool, int]:
        """Position -> whether it is of the second stream, and which position of its own stream it is."""
        before, after = (number * self.share.numerator // self.share.denominator for number in (position, position + 1))
        return after > before, before if after > before else position - before


@dataclass(frozen=True, slots=True)
class Cut:
    """How a global batch is cut: into equal shares of ranks, then into micro-batches."""

    batch_size: int
    micro_batch_size: int | None
    rank: int
    world_size: int

    def micro_batches(self, step: int) -> list[Indices]:
        """This rank's positions of one step, in as few and as equal micro-batches as fit."""
        return self.of(np.arange(step * self.batch_size, (step + 1) * self.batch_size))

    def of(self, batch: Indices) -> list[Indices]:
        """This rank's micro-batches of a global batch; as many as the largest share needs, on every rank, because slices of nets
        are gathered for each. Only with micro-batches of one sample a smaller share has fewer: none is empty."""
        share = np.array_split(batch, self.world_size)[self.rank]
        largest = -(-len(batch) // self.world_size)
        return np.array_split(share, min(-(-largest // (self.micro_batch_size or largest)), len(share)))

    def all_micro_batches(self, first_step: int) -> Iterator[list[int]]:
        """Endless; every step has equally many micro-batches."""
        step = first_step
        while True:
            yield from (micro.tolist() for micro in self.micro_batches(step))
            step += 1


@dataclass(frozen=True)
class Windows:
    """The same stream in batches of samples that are alike in length: every `width` batches in a row are sorted by length, cut
    anew, and shuffled. Each of their positions comes exactly once, and a step's batch stays a function of seed and step."""

    cut: Cut
    seed: int
    lengths: Callable[[Indices], Indices]  # positions -> lengths
    width: int = 16

    def all_micro_batches(self, first_step: int) -> Iterator[list[int]]:
        """Endless; every step has equally many micro-batches."""
        step, window, batches = first_step, -1, np.zeros((0, 0), np.int64)
        while True:
            if step // self.width != window:
                window = step // self.width
                batches = self._sorted(window)
            yield from (micro.tolist() for micro in self.cut.of(batches[self._place(step)]))
            step += 1

    def _sorted(self, window: int) -> Indices:
        size = self.width * self.cut.batch_size
        positions = np.arange(window * size, (window + 1) * size)
        return positions[np.argsort(self.lengths(positions), kind="stable")].reshape(self.width, self.cut.batch_size)

    def _place(self, step: int) -> int:
        window, place = divmod(step, self.width)
        return permute_one(place, self.width, mix(self.seed, window, _WINDOW))
