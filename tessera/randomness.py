"""Randomness as a function: nothing here has state, so nothing has to be saved and resuming equals never stopping.

One integer hash (splitmix64) in three forms: Python ints, NumPy arrays, torch tensors. The bits are the same in all of
them and in every version of those libraries, which their own generators do not promise.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL = 2**64 - 1

Words = npt.NDArray[np.uint64]
T = TypeVar("T")


def mix(*values: int) -> int:
    """Any integers to 64 bits; order matters."""
    mixed = 0
    for value in values:
        mixed = _absorb(mixed, value)
    return mixed


def _absorb(mixed: int, value: int) -> int:
    mixed = (mixed + value + _GAMMA) & _ALL
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _ALL
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _ALL
    return mixed ^ (mixed >> 31)


def mix_array(start: int, values: npt.NDArray[np.integer]) -> Words:
    """`mix` continued from a mixed start, for every value: mix_array(mix(a), [b])[0] == mix(a, b)."""
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64) + np.uint64((start + _GAMMA) & _ALL)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        return mixed ^ (mixed >> np.uint64(31))


def mix_text(text: str) -> int:
    """64 bits of a name; file names need not be valid Unicode."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def fraction(word: int) -> float:
    """64 bits to [0, 1), with the 53 bits that a double holds."""
    return (word >> 11) / 2**53


class Draws:
    """Numbers one after another (splitmix64: Steele, Lea and Flood 2014), for code that makes a sample: a function of its key."""

    def __init__(self, *key: int) -> None:
        self.state = 0
        for part in key:
            self.state = self.bits() ^ (part & _ALL)

    def bits(self) -> int:
        """64 of them."""
        drawn = _absorb(self.state, 0)
        self.state = (self.state + _GAMMA) & _ALL
        return drawn

    def below(self, count: int) -> int:
        """A whole number from 0 to count - 1."""
        return (self.bits() * count) >> 64

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * fraction(self.bits())

    def choose(self, options: Sequence[T]) -> T:
        """One of them."""
        return options[self.below(len(options))]

    def shuffled(self, options: Iterable[T]) -> list[T]:
        """All of them, in another order."""
        keyed = [(self.bits(), option) for option in options]
        return [option for _, option in sorted(keyed, key=lambda pair: pair[0])]


def permute(positions: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """A pseudo-random permutation of range(size), evaluated only where asked: no memory, no state.

    A Feistel network on the next even number of bits; values outside the range walk on along their cycle until inside.
    """
    half = _half_bits(size)
    mask = np.uint64(2**half - 1)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & mask
        for start in _round_keys(key):
            left, right = right, left ^ (mix_array(start, right) & mask)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= size
    return values.astype(np.int64)


def permute_one(position: int, size: int, key: int) -> int:
    """`permute` of a single position, ten times as fast as an array of one."""
    half = _half_bits(size)
    mask = 2**half - 1
    while True:
        left, right = position >> half, position & mask
        for start in _round_keys(key):
            left, right = right, left ^ (_absorb(start, right) & mask)
        position = left << half | right
        if position < size:
            return position


def _half_bits(size: int) -> int:
    return max(1, math.ceil(math.log2(max(size, 2)) / 2))


@functools.lru_cache(maxsize=16)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(key, turn) for turn in range(6))


def uniform(seed: int, positions: Tensor, size: int, stream: int = 0) -> Tensor:
    """b -> b size, in [0, 1): noise of a sample is a function of its place in the stream, whatever batch it is in."""
    index = torch.arange(size, device=positions.device)
    start = _mix_tensor(_signed(mix(seed, stream)), positions)
    return (_mix_tensor(start[:, None], index[None]) >> 40 & 0xFFFFFF).float() / 2**24


def normal(seed: int, positions: Tensor, size: int, stream: int = 0) -> Tensor:
    """b -> b size, standard normal (Box-Muller)."""
    # Streams below 0: a loss may draw uniform and normal numbers of one stream, and they must have nothing in common.
    radius = torch.sqrt(-2 * torch.log1p(-uniform(seed, positions, size, -2 * stream - 1)))
    return radius * torch.cos(2 * math.pi * uniform(seed, positions, size, -2 * stream - 2))


def mix_tensors(*values: Tensor) -> Tensor:
    """`mix` of int64 tensors that broadcast: the same bits, for numbers that the host must not wait for."""
    mixed = _mix_tensor(0, values[0])
    for value in values[1:]:
        mixed = _mix_tensor(mixed, value)
    return mixed


def _mix_tensor(start: int | Tensor, values: Tensor) -> Tensor:
    """int64 arithmetic wraps as uint64 does; right shifts are masked, because torch's are arithmetic."""
    mixed = values + start + _signed(_GAMMA)
    mixed = (mixed ^ (mixed >> 30 & (2**34 - 1))) * _signed(_FIRST)
    mixed = (mixed ^ (mixed >> 27 & (2**37 - 1))) * _signed(_SECOND)
    return mixed ^ (mixed >> 31 & (2**33 - 1))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
