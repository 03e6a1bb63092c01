"""Embeddings of pictures, one vector a sample: a sample's key in, its own vector out, or None, and then why.

Several kinds of files (`embedding_files`, `embedding_tars`) and a cache (`embedding_cache`) behind one interface. What cannot be
read is missing, by name, and nothing is ever in its place: a vector is found by the key alone, in a file whose length and width
were checked, and no array outlives the call that read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.config import UserError
from tessera.data.sources import StringTable
from tessera.randomness import mix_text

Vector = npt.NDArray[np.float32]
MOST_NAMED = 5
NOT_FINITE, ZEROS = "numbers that are not finite", "all zeros, which stands for none"


class Absent(Exception):
    """A sample has no embedding, and why."""


class Embeddings(ABC):
    """Vectors by key. Picklable, small in the loader's processes: files are opened where they are used."""

    width: int

    def of(self, key: str) -> Vector | None:
        """The sample's own vector, `width` long; None where there is none that can be used."""
        try:
            return self.read(key)
        except Absent:
            return None

    @abstractmethod
    def read(self, key: str) -> Vector:
        """The same; raises `Absent` with the reason."""

    def checked(self, row: npt.NDArray[Any]) -> Vector:
        """One row as float32."""
        if row.shape != (self.width,):
            raise Absent(f"an array of shape {row.shape}, expected ({self.width},)")
        vector = as_float32(row)
        if not np.isfinite(vector).all():
            raise Absent(NOT_FINITE)
        if not vector.any():
            raise Absent(ZEROS)
        return vector

    def absent(self, keys: Iterable[str]) -> dict[str, str]:
        """The keys without a vector, and why; reads all."""
        reasons: dict[str, str] = {}
        for key in keys:
            try:
                self.read(key)
            except Absent as absent:
                reasons[key] = str(absent)
        return reasons


def as_float32(rows: npt.NDArray[Any]) -> Vector:
    """What is beyond it becomes infinite, and what is too small 0; neither is an embedding."""
    with np.errstate(over="ignore"):
        return rows.astype(np.float32)


@dataclass(frozen=True)
class Missing:
    """The samples without an embedding."""

    reasons: Mapping[str, str]  # key -> why
    num_samples: int

    @classmethod
    def among(cls, embeddings: Embeddings, keys: Sequence[str]) -> Missing:
        """Reads the embedding of every key."""
        return cls(embeddings.absent(keys), len(keys))

    def by_reason(self) -> Mapping[str, Sequence[str]]:
        """Why -> all keys of which it is said."""
        found = defaultdict[str, list[str]](list)
        for key, reason in self.reasons.items():
            found[reason].append(key)
        return found

    def told(self) -> str:
        """One line: how many, and of each reason the first by name."""
        parts = [
            f"{reason}: {len(keys):,} ({', '.join(keys[:MOST_NAMED])}{', ...' if len(keys) > MOST_NAMED else ''})"
            for reason, keys in self.by_reason().items()
        ]
        return f"{len(self.reasons):,} of {self.num_samples:,} samples have no embedding. {'; '.join(parts)}"

    def refuse(self, budget: float) -> None:
        """More than that share is the user's to look at, and all of them in any case."""
        if len(self.reasons) == self.num_samples:
            raise UserError(f"{self.told()}. None is left to learn from: bring the embeddings of these samples")
        if len(self.reasons) > budget * self.num_samples:
            raise UserError(
                f"{self.told()}. That is more than data.corrupt_budget={budget:g} allows: bring the missing embeddings, take "
                f"these samples out of the data, or raise data.corrupt_budget, and they are left out"
            )


@dataclass(frozen=True, eq=False)
class KeyTable:
    """Where a key stands in a list, by hash, then compared letter by letter. Arrays alone, so that forked workers share it."""

    hashes: npt.NDArray[np.uint64]  # sorted
    order: npt.NDArray[np.int64]
    keys: StringTable = field(repr=False)

    @classmethod
    def of(cls, keys: Sequence[str]) -> KeyTable:
        """Distinct keys."""
        hashes = np.fromiter(map(mix_text, keys), np.uint64, len(keys))
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], order, StringTable(keys))

    def find(self, key: str) -> int | None:
        """Its place; None where it is not among them."""
        number = np.uint64(mix_text(key))
        for place in range(int(np.searchsorted(self.hashes, number)), len(self.hashes)):
            if self.hashes[place] != number:
                return None
            if self.keys[int(self.order[place])] == key:
                return int(self.order[place])
        return None
