"""Rows of .npy files as embeddings: one file a tar, found by its number, or files with the list of their keys beside them."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.config import ShardEmbeddingsConfig, UserError
from tessera.data.embeddings import Absent, Embeddings, KeyTable, Vector, as_float32
from tessera.data.shards import TarShards
from tessera.files import read_lines, told_of_array

BLOCK_ROWS = 4096  # read at once


@dataclass(frozen=True, slots=True)
class Rows:
    """A .npy file of rows x channels, read row by row and not mapped: a map of a file that is cut later kills its reader."""

    path: Path
    num: int
    width: int
    dtype: str
    start: int  # of the first row, in bytes

    @classmethod
    def open(cls, path: Path) -> Rows:
        """Reads the header and checks the file's size; `Absent` says what is wrong with all of it."""
        try:
            with path.open("rb") as file, told_of_array():
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, by_column, dtype = read(file)
                start, size = file.tell(), path.stat().st_size
        except FileNotFoundError:
            raise Absent(f"{path.name} is missing") from None
        except (OSError, ValueError) as error:
            raise Absent(f"{path.name} is no .npy file ({error})") from None
        if len(shape) != 2 or shape[1] < 1 or by_column or not np.issubdtype(dtype, np.floating):
            raise Absent(f"{path.name} holds {dtype} of shape {shape}{', column by column' * by_column}, expected floats by rows")
        if size != start + shape[0] * shape[1] * dtype.itemsize:
            raise Absent(f"{path.name} has {size:,} bytes, its header says {start + shape[0] * shape[1] * dtype.itemsize:,}")
        return cls(path, shape[0], shape[1], dtype.str, start)

    def read(self, row: int) -> npt.NDArray[Any]:
        """One of them; `Absent` where the file is no longer what it was."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start + row * self.size)
                content = file.read(self.size)
        except OSError as error:
            raise self._unreadable(error) from None
        if len(content) != self.size:
            raise self._cut()
        return np.frombuffer(content, self.dtype)

    def sound(self) -> npt.NDArray[np.bool_]:
        """Which rows are there, finite, and not all zeros; reads the file once."""
        found, start = np.zeros(self.num, np.bool_), 0
        with contextlib.suppress(OSError):
            for block in map(as_float32, self.blocks()):
                found[start : start + len(block)] = np.isfinite(block).all(1) & block.any(1)
                start += len(block)
        return found

    def empty_from(self, row: int) -> bool:
        """Whether this row and all behind it are zeros; `Absent` as in `read`. Stops at the first block that holds something."""
        try:
            for block in self.blocks(row):
                if block.any():
                    return False
                row += len(block)
        except OSError as error:
            raise self._unreadable(error) from None
        if row < self.num:
            raise self._cut()
        return True

    def blocks(self, row: int = 0) -> Iterator[npt.NDArray[Any]]:
        """This row and all behind it, many at once; the file is opened once. Fewer where it was cut since then."""
        with self.path.open("rb") as file:
            file.seek(self.start + row * self.size)
            for start in range(row, self.num, BLOCK_ROWS):
                content = file.read(min(BLOCK_ROWS, self.num - start) * self.size)
                yield np.frombuffer(content[: len(content) // self.size * self.size], self.dtype).reshape(-1, self.width)

    def _unreadable(self, error: OSError) -> Absent:
        return Absent(f"{self.path.name} cannot be read ({(error.strerror or str(error)).lower()})")

    def _cut(self) -> Absent:
        return Absent(f"{self.path.name} was cut since it was opened")

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return self.width * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class FileEmbeddings(Embeddings):
    """Rows of .npy files. A file that is not whole, or too short or too long for its samples, gives nothing."""

    width: int
    files: tuple[Rows | str, ...]  # or why not
    keys: KeyTable
    file: npt.NDArray[np.int32]  # of each key
    row: npt.NDArray[np.int64]  # of each key; -1: none
    expected: str

    def read(self, key: str) -> Vector:
        rows, row = self.place(key)
        return self.checked(rows.read(row))

    def absent(self, keys: Iterable[str]) -> dict[str, str]:
        """File by file, which is faster; a row that is not sound is read by itself, and says why."""
        reasons, sound = dict[str, str](), dict[Path, npt.NDArray[np.bool_]]()
        for key in keys:
            try:
                rows, row = self.place(key)
                if rows.path not in sound:
                    sound[rows.path] = rows.sound()
                if not sound[rows.path][row]:
                    self.checked(rows.read(row))
            except Absent as absent:
                reasons[key] = str(absent)
        return reasons

    def place(self, key: str) -> tuple[Rows, int]:
        """The file of a key and its row there."""
        place = self.keys.find(key)
        if place is None:
            raise Absent(self.expected)
        rows, row = self.files[int(self.file[place])], int(self.row[place])
        if isinstance(rows, str):
            raise Absent(rows)
        if row < 0:
            raise Absent("the sample's name does not end in a number")
        return rows, row

    @classmethod
    def of_shards(cls, config: ShardEmbeddingsConfig, source: TarShards) -> FileEmbeddings:
        """One file a tar, found by number."""
        stems = [source.stem(number) for number in range(len(list(source.files())))]
        found = _numbered(config, stems)
        keys = [source.key(index) for index in range(len(source))]
        shard = np.array([source.shard(index) for index in range(len(source))], np.int32)
        if config.rows == "place":
            row = _places(shard, np.array([source.offset(index) for index in range(len(source))], np.int64))
        else:
            row = np.array([_number(key, config.digits) for key in keys], np.int64)
        files: list[Rows | str] = []
        for number, path in enumerate(found):
            files.append(_fitting(path, row[shard == number], config) if isinstance(path, Path) else path)
        return cls(_usual_width(files, config.path), tuple(files), KeyTable.of(keys), shard, row, "not a sample of the data")

    @classmethod
    def listed(cls, path: Path) -> FileEmbeddings:
        """Files with the list of their keys beside them."""
        if not path.exists():
            raise UserError(f"{path} does not exist; expected NAME.npy with its keys in NAME.txt or NAME.json, or their folder")
        arrays = sorted(path.glob("*.npy")) if path.is_dir() else [path]
        if not arrays:
            raise UserError(f"{path} holds no .npy file; expected NAME.npy with its keys in NAME.txt or NAME.json")
        files, keys, file, row = list[Rows | str](), list[str](), list[int](), list[int]()
        for number, array in enumerate(arrays):
            named = _listed_keys(array)
            try:
                rows: Rows | str = Rows.open(array)
                if isinstance(rows, Rows) and rows.num != len(named):
                    rows = f"{array.name} has {rows.num:,} rows, and its list {len(named):,} keys"
            except Absent as absent:
                rows = str(absent)
            files.append(rows)
            keys += named
            file += [number] * len(named)
            row += range(len(named))
        repeated = next((key for key, count in Counter(keys).items() if count > 1), None)
        if repeated is not None:
            raise UserError(f"the key {repeated!r} is listed twice in {path}; expected one embedding for each")
        expected = f"not among the keys listed in {path.name}"
        return cls(
            _usual_width(files, path),
            tuple(files),
            KeyTable.of(keys),
            np.array(file, np.int32),
            np.array(row, np.int64),
            expected,
        )


def _numbered(config: ShardEmbeddingsConfig, stems: Sequence[str]) -> list[Path | str]:
    """For each tar its file, or why there is none."""
    if not config.path.is_dir():
        raise UserError(f"{config.path} is no folder; expected one with <prefix>_<number of the tar>.npy for every tar")
    by_number, prefixes = dict[int, list[Path]](), set[str]()
    for path in sorted(config.path.glob("*.npy")):
        parts = re.fullmatch(r"(.*)_(\d+)", path.stem)
        if parts and config.prefix in (None, parts[1]):
            prefixes.add(parts[1])
            by_number.setdefault(int(parts[2]), []).append(path)
    if not by_number:
        wanted = "<prefix>" if config.prefix is None else config.prefix
        raise UserError(f"{config.path} holds no {wanted}_<number>.npy; expected one for every tar, such as img_emb_0000.npy")
    if len(prefixes) > 1:
        raise UserError(f"{config.path} holds arrays called {', '.join(sorted(prefixes))}; set prefix to the one that is meant")
    numbers = [int(found[1]) if (found := re.search(r"(\d+)$", stem)) else None for stem in stems]
    twice = next((number for number, count in Counter(numbers).items() if number is not None and count > 1), None)
    if twice is not None or any(len(paths) > 1 for paths in by_number.values()):
        number = twice if twice is not None else next(number for number, paths in by_number.items() if len(paths) > 1)
        raise UserError(f"several tars, or several arrays of {config.path}, have the number {number}; expected one of each")
    (prefix,) = prefixes
    files: list[Path | str] = []
    for stem, shard in zip(stems, numbers, strict=True):
        if shard is None:
            files.append(f"{stem}.tar has no number at its end, by which its array is found")
        else:
            files.append(by_number.get(shard, [config.path / f"{prefix}_{shard:04d}.npy"])[0])
    return files


def _fitting(path: Path, rows: npt.NDArray[np.int64], config: ShardEmbeddingsConfig) -> Rows | str:
    """The file of a tar whose samples have these rows. One of another length was made for other samples: none of it is used."""
    try:
        found = Rows.open(path)
    except Absent as absent:
        return str(absent)
    if config.rows == "place" and found.num != len(rows):
        return f"{path.name} has {found.num:,} rows, and its tar {len(rows):,} pictures"
    if len(rows) and rows.max() >= found.num:
        advice = "" if config.digits else "; if a name begins with its tar's number, set digits"
        return f"{path.name} has {found.num:,} rows, and a sample of its tar asks for row {rows.max():,}{advice}"
    if len(np.unique(rows[rows >= 0])) < (rows >= 0).sum():
        return f"{path.name}: two samples of its tar ask for the same row"
    return _unclaimed(found, int(rows.max(initial=-1)) + 1) or found


def _unclaimed(found: Rows, end: int) -> str:
    """Why a file that goes on behind the rows of its tar was made for others; empty rows there are of samples that are gone."""
    try:
        if not end or found.empty_from(end):
            return ""
    except Absent as absent:
        return str(absent)
    return (
        f"{found.path.name} has {found.num:,} rows, and no sample of its tar asks for rows {end:,} to {found.num - 1:,}, which "
        f"should then be missing or zeros"
    )


def _places(shard: npt.NDArray[np.int32], offset: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of each sample: how many pictures of its tar lie before its own, wherever captions lie. The source has them tar by tar."""
    place = np.empty(len(shard), np.int64)
    place[np.lexsort((offset, shard))] = np.arange(len(shard))
    return place - np.searchsorted(shard, shard)


def _number(key: str, digits: int | None) -> int:
    """At the end of a sample's name; -1 where there is none, or a shorter one."""
    found = re.search(r"\d+$" if digits is None else rf"\d{{{digits}}}$", key.rpartition("/")[2])
    return int(found[0][-18:]) if found else -1


def _listed_keys(array: Path) -> list[str]:
    lines, listed = array.with_suffix(".txt"), array.with_suffix(".json")
    try:
        if lines.is_file():
            return read_lines(lines)
        keys = json.loads(listed.read_text(encoding="utf-8-sig"))
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError("expected a list of strings")
    except FileNotFoundError:
        raise UserError(f"{array} has no list of its keys; expected {lines.name}, a line a row, or {listed.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the keys of {array} cannot be read: {error}") from None
    return keys


def _usual_width(files: list[Rows | str], where: Path) -> int:
    """The width that most rows have; files of another one are then out."""
    widths = Counter[int]()
    for rows in files:
        if isinstance(rows, Rows):
            widths[rows.width] += rows.num
    if not widths:
        raise UserError(f"no array of {where} can be used: {'; '.join(str(reason) for reason in files[:3])}")
    width = widths.most_common(1)[0][0]
    for number, rows in enumerate(files):
        if isinstance(rows, Rows) and rows.width != width:
            files[number] = f"{rows.path.name} has rows of {rows.width} channels, others have {width}"
    return width
