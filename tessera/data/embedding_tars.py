"""Arrays in webdataset tars as embeddings, each beside its picture: every tar's headers are read once, then each is one seek."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.config import TarEmbeddingsConfig, UserError
from tessera.data.embeddings import Absent, Embeddings, KeyTable, Vector
from tessera.data.shards import TarShards, key_and_suffix
from tessera.files import read_array

SNIFFED = 64  # arrays whose width is looked at to learn which one is meant


@dataclass(frozen=True, eq=False)
class TarEmbeddings(Embeddings):
    """Arrays in tars, each one seek and one read."""

    width: int
    suffix: str
    paths: tuple[Path, ...]
    keys: KeyTable
    shard: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    def read(self, key: str) -> Vector:
        place = self.keys.find(key)
        if place is None:
            raise Absent(f"no *{self.suffix} of its own in its tar")
        return self.checked(_array_at(self.paths[int(self.shard[place])], int(self.offset[place]), int(self.size[place])))

    @classmethod
    def open(cls, config: TarEmbeddingsConfig, source: TarShards) -> TarEmbeddings:
        paths = tuple(source.files())
        found = [
            (number, f"{source.stem(number)}/{member.key}", member)
            for number, path in enumerate(paths)
            for member in array_members(path)
            if config.suffix is None or config.suffix.lower() == member.suffix
        ]
        suffixes = sorted({member.suffix for _, _, member in found})
        if len(suffixes) != 1:
            told = (
                f"arrays called {', '.join(f'*{suffix}' for suffix in suffixes)}" if suffixes else "no arrays beside the pictures"
            )
            raise UserError(
                f"the tars of {source.root} hold {told}; expected one .npy for every picture, such as 0001.img_emb.npy"
                f"{'; set suffix to the ending that is meant' if suffixes else ''}"
            )
        counts = Counter(key for _, key, _ in found)
        kept = [entry for entry in found if counts[entry[1]] == 1]  # of two arrays for one key nobody knows which is right
        if not kept:
            raise UserError(f"the tars of {source.root} hold several *{suffixes[0]} for every key; expected one")
        width = _usual_width(paths, kept[:SNIFFED], f"*{suffixes[0]} of {source.root}")
        return cls(
            width, suffixes[0], paths, KeyTable.of([key for _, key, _ in kept]),
            np.array([number for number, _, _ in kept], np.int32),
            np.array([member.offset for *_, member in kept], np.int64),
            np.array([member.size for *_, member in kept], np.int64),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayMember:
    """A .npy file in a tar."""

    key: str
    suffix: str
    offset: int
    size: int


def array_members(path: Path) -> Iterator[ArrayMember]:
    """Of a tar that is damaged in the middle, those before; that it is damaged its source has said."""
    try:
        length = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, suffix = key_and_suffix(member.name)
                whole = member.isfile() and not member.issparse() and member.offset_data + member.size <= length
                if key and whole and suffix.endswith(".npy"):
                    yield ArrayMember(key, suffix, member.offset_data, member.size)
    except Exception:  # from damaged headers tarfile leaks several kinds
        return


def _usual_width(paths: Sequence[Path], arrays: Sequence[tuple[int, str, ArrayMember]], what: str) -> int:
    """Of the vectors that most of these arrays are; each has the number of its tar and the key of its sample."""
    shapes = Counter[tuple[int, ...]]()
    for number, _, member in arrays:
        with contextlib.suppress(Absent):
            shapes[_array_at(paths[number], member.offset, member.size).shape] += 1
    if not shapes:
        raise UserError(f"of the first {len(arrays)} {what} none can be read as an array of floats")
    ((shape, count),) = shapes.most_common(1)
    if len(shape) != 1 or not shape[0]:
        raise UserError(
            f"{count} of the first {len(arrays)} {what} are arrays of shape {shape}; expected a vector for every picture, of "
            f"shape (channels,): set suffix to the ending of those; states of text are brought with text={{kind: precomputed}}"
        )
    return shape[0]


def _array_at(path: Path, offset: int, size: int) -> npt.NDArray[Any]:
    """A single vector, with or without an axis of one before it; never unpickled."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            array = read_array(io.BytesIO(file.read(size)))
    except (OSError, ValueError) as error:
        raise Absent(f"its array cannot be read ({error})") from None
    if not np.issubdtype(array.dtype, np.floating):
        raise Absent(f"{array.dtype}, expected floats")
    return array[0] if array.ndim == 2 and len(array) == 1 else array
