"""NumPy stacks of pictures in, a source out. The files are mapped into memory: a picture is read when it is asked for. Stacks of
clips (`clip_sources.py`) share what does not hang on what a sample is.

A stack is a .npy file of uint8, n h w c or n h w. Its captions stand beside it in the same order: STEM.txt or captions.txt with a
line a picture (an empty one is no caption), or STEM.jsonl or captions.jsonl with a string, a list of strings or an object a line.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tessera.config import UserError
from tessera.data.folders import Contents, Reject, divide, group_values
from tessera.data.kinds import CLIPS
from tessera.data.sources import Examined, Index, Reading, Stored, StoredImages, StringTable
from tessera.data.splits import Split
from tessera.data.tables import clean_captions, filled_captions, jsonl_rows
from tessera.data.unread import note_beside_stacks
from tessera.files import read_array, read_lines
from tessera.media.images import ImageFacts, Pixels, UnreadableImage, with_channels

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by channels


@dataclass(frozen=True, eq=False, kw_only=True)
class Stacked(Stored):
    """Samples in the .npy files of a folder, or in a single one."""

    layout = "arrays"
    reading: Reading
    _files: StringTable  # paths below the root
    _starts: npt.NDArray[np.int64]  # file i has the samples from starts[i] to starts[i + 1]

    @classmethod
    def of(cls, contents: Contents, reading: Reading) -> Self:
        """Of a folder that was listed."""
        files, sides, lengths = _stacks(contents, reading.split_folders, cls.length_of)
        stacks = list(zip(files, lengths, strict=True))
        per_folder = Counter(posixpath.dirname(file) for file in files)
        beside = [_captions_beside(contents.root / file, per_folder[posixpath.dirname(file)] == 1) for file in files]
        lines = [
            line for (file, length), found in zip(stacks, beside, strict=True) for line in _lines(contents, file, length, found)
        ]
        if files != [""]:  # of a single file nothing is listed
            note_beside_stacks(contents, (found.relative_to(contents.root).as_posix() for found in beside if found))
        keys = [
            f"{posixpath.splitext(file or contents.root.name)[0]}/{number:06d}"
            for file, length in stacks
            for number in range(length)
        ]
        groups = None
        if reading.group_by is not None:
            groups = group_values(contents, [line.columns for line in lines], keys, reading.group_by)
        spread = None if sides is None else [side for side, length in zip(sides, lengths, strict=True) for _ in range(length)]
        return cls(
            root=contents.root,
            rejects=tuple(contents.rejects),
            notes=contents.notes(),
            reading=reading,
            index=Index.of(keys, [line.captions for line in lines], spread, groups),
            _files=StringTable(files),
            _starts=np.cumsum([0, *lengths], dtype=np.int64),
        )

    def files(self) -> Iterator[Path]:
        return (self.root / self._files[index] for index in range(len(self._files)))

    def name(self, index: int) -> str:
        file, place = self._place(index)
        return f"{self._files[file] or self.root.name}[{place}]"

    def where(self, index: int) -> str:
        """File and place, for messages."""
        file, place = self._place(range(len(self))[index])
        return f"{self.root / self._files[file]}[{place}]"

    def mapped(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        """The stack of a sample and its place there."""
        file, place = self._place(range(len(self))[index])
        return map_array(self.root / self._files[file]), place

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return file, index - int(self._starts[file])

    @staticmethod
    @abstractmethod
    def length_of(array: npt.NDArray[Any]) -> int:
        """Samples of a stack, one or more; ValueError says what was expected."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayStacks(Stacked, StoredImages):
    """Pictures in stacks. Build it with `ArrayStacks.of`."""

    def read(self, index: int) -> Pixels:
        return with_channels(self._stored(index), channels=self.reading.channels, background=self.reading.background)

    def examine(self, index: int) -> Examined:
        stored = self._stored(index)
        height, width, channels = stored.shape
        facts = ImageFacts(width, height, MODES[channels], "NPY", False)
        digest = hashlib.sha256(f"{stored.shape}".encode() + stored.tobytes()).digest()
        return Examined(facts, digest, with_channels(stored, channels=3))

    def _stored(self, index: int) -> Pixels:
        try:
            stack, place = self.mapped(index)
            picture = np.array(stack[place])  # a copy, so that nobody holds on to the file
        except (OSError, ValueError, IndexError) as error:  # it was replaced or cut after it was opened
            raise UnreadableImage(self.where(index), f"damaged: {error}") from error
        return picture if picture.ndim == 3 else picture[:, :, None]

    @staticmethod
    def length_of(array: npt.NDArray[Any]) -> int:
        shape = array.shape
        if array.dtype == np.uint8 and 0 not in shape and (len(shape) == 3 or (len(shape) == 4 and shape[3] in MODES)):
            return shape[0]
        turned = "; its channels stand first: transpose it to n h w c" if len(shape) == 4 and shape[1] in MODES else ""
        raise ValueError(f"expected uint8, n x height x width, or with 1, 3 or 4 channels last{turned}")


def map_array(path: Path) -> npt.NDArray[np.uint8]:
    """A mapping per process and file, remade when the file changes: a source that is pickled for a worker carries paths only."""
    status = path.stat()
    return _mapping(str(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _mapping(path: str, size: int, changed: int) -> npt.NDArray[np.uint8]:
    return read_array(Path(path), mapped=True)


def _stacks(
    contents: Contents, split_folders: bool, length_of: Callable[[npt.NDArray[Any]], int]
) -> tuple[list[str], list[Split] | None, list[int]]:
    """The files that are stacks, their sides and lengths; the others are rejects."""
    good = {file: length for file in contents.arrays if (length := checked_length(contents, file, length_of))}
    if not good:
        reasons = "; ".join(f"{reject.path}: {reject.reason}" for reject in contents.rejects[:3])
        raise UserError(f"{contents.root} holds .npy files without {_things(contents)} ({reasons}); {contents.kind.expected}")
    files, sides = divide(contents, list(good), split_folders)
    return files, sides, [good[file] for file in files]


def checked_length(contents: Contents, file: str, length_of: Callable[[npt.NDArray[Any]], int]) -> int:
    """Samples of a file by its header; 0 and a reject where it has none."""
    path = contents.root / file
    try:
        array = map_array(path)
    except (OSError, ValueError) as error:
        reason = f"not an array that can be mapped: {error}"
    else:
        try:
            return length_of(array)
        except ValueError as error:
            empty = f"has no {_things(contents)}: " if 0 in array.shape else ""
            reason = f"{empty}{array.dtype} shaped {array.shape}; {error}"
    contents.rejects.append(Reject(file or path.name, reason))
    return 0


def _things(contents: Contents) -> str:
    return "clips" if contents.kind is CLIPS else "pictures"


@dataclass(frozen=True, slots=True)
class _Line:
    captions: tuple[str, ...] = ()
    columns: dict[str, Any] | None = None


def _captions_beside(path: Path, single: bool) -> Path | None:
    """captions.txt and captions.jsonl speak for the only stack of their folder."""
    names = [path.with_suffix(".txt"), path.with_suffix(".jsonl")]
    names += [path.with_name("captions.txt"), path.with_name("captions.jsonl")] if single else []
    return next((name for name in names if name.is_file()), None)


def _lines(contents: Contents, file: str, length: int, found: Path | None) -> Sequence[_Line]:
    """One for each picture of a stack."""
    path, things = contents.root / file, _things(contents)
    if found is None:
        return [_Line()] * length
    try:
        lines = _text_lines(found) if found.suffix == ".txt" else _json_lines(contents, found)
    except OSError as error:
        raise UserError(f"{found} cannot be read: {error.strerror}; repair it, or remove it") from None
    if len(lines) != length:
        one = things == "pictures" and len(lines) == 1
        clip = f"; where it is one clip of {length:,} frames: data check --kind clips, train phenaki" if one else ""
        raise UserError(
            f"{found} has {len(lines):,} lines, and {path.name} has {length:,} {things}; "
            f"expected a line a {things[:-1]}, in the same order (an empty one where there is no caption){clip}"
        )
    return lines


def _text_lines(path: Path) -> list[_Line]:
    try:
        lines = read_lines(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    return [_Line(clean_captions(line, "the caption")) for line in lines]


def _json_lines(contents: Contents, path: Path) -> list[_Line]:
    lines = []
    for number, value in jsonl_rows(path):
        try:
            if isinstance(value, ValueError):
                raise value
            columns = value if isinstance(value, dict) else None
            lines.append(_Line(clean_captions(value, "the line") if columns is None else filled_captions(columns), columns))
        except ValueError as error:
            lines.append(_Line())
            contents.rejects.append(Reject(f"{path.name}:{number}", str(error)))
    return lines
