"""Which side of the split a sample is on: its folder's, where there are split folders, otherwise a hash of its group's."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, TypeAlias

Split: TypeAlias = Literal["train", "validation"]

_VALIDATION_NAMES = ("validation", "val", "valid")
SPLIT_NAMES = ("train", "training", *_VALIDATION_NAMES, "test")


def split_of(group: str, validation_fraction: float, seed: int = 0) -> Split:
    """The side of one group: a hash, so it never depends on other files. A larger fraction only moves groups to validation."""
    return "validation" if split_hash(group, seed) < split_threshold(validation_fraction) else "train"


def split_hash(group: str, seed: int) -> int:
    digest = hashlib.blake2b(group.encode("utf-8", "surrogatepass"), digest_size=8, key=str(seed).encode())
    return int.from_bytes(digest.digest(), "little")


def split_threshold(validation_fraction: float) -> int:
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"got validation_fraction {validation_fraction}; expected 0 or more and less than 1")
    return int(validation_fraction * 2**64)


def sides_by_folder(paths: Sequence[str]) -> list[Split | None] | None:
    """The side of each path by its topmost folder; None in the list is on neither side, None for all: no split folders.

    There must be train/ and one of validation/, val/, valid/; without those test/ takes their place. A test/ beside a validation
    folder is kept out of both, as is whatever lies outside of these folders.
    """
    tops = [path.split("/", 1)[0].lower() if "/" in path else "" for path in paths]
    found = defaultdict[str, int](int)
    for top in tops:
        found[top] += 1
    validation = {name for name in _VALIDATION_NAMES if found[name]} or {"test"}
    training = {"train", "training"}
    if not any(found[name] for name in training) or not any(found[name] for name in validation):
        return None
    return ["train" if top in training else "validation" if top in validation else None for top in tops]
