"""A folder of captioned files in, numbered samples out: key, group, captions, and the picture when it is asked for.

`opening.py` finds out which kind of source a path is. Opening lists files and reads captions; it decodes no picture (`survey.py`
does). Meshes have their own source on the same base (`mesh_sources.py`). The index is a few NumPy arrays, cheap to fork and to
pickle, and its order is that of the sorted paths, so it depends neither on the file system nor on the number of workers. What
cannot be used is named in `rejects`; what was decided on the user's behalf, in `notes`.
"""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
from PIL import Image

from tessera.config import UserError
from tessera.data.captions import pair_captions
from tessera.data.folders import Contents, Reject, group_values, holds_nothing, list_folder
from tessera.data.splits import Split, split_hash, split_of, split_threshold
from tessera.data.unread import note_beside_images
from tessera.media.images import (
    WHITE,
    Channels,
    Colour,
    ImageFacts,
    ImageFile,
    Pixels,
    inspect_image,
    read_image,
    to_array,
    with_channels,
)

__all__ = [
    "DatasetSource", "Examined", "ImageDataset", "ImageFolder", "Index", "Reading", "Reject", "Sample", "Source", "Stored",
    "StoredImages", "StringTable", "as_source", "captions_of", "split_indices", "split_of",
]  # fmt: skip


class StringTable:
    """Many strings as one blob of UTF-8 and offsets: no Python object per string, so forked workers share its pages."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in strings]  # file names need not be valid Unicode
        self._offsets: npt.NDArray[np.int64] = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(text) for text in encoded], out=self._offsets[1:])
        self._blob: npt.NDArray[np.uint8] = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        position = _position(index, len(self))
        start, stop = self._offsets[position : position + 2]
        return self._blob[start:stop].tobytes().decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture, uint8 h w c, with the key that names it for ever and its caption, if it has one."""

    key: str
    image: Pixels
    caption: str | None


@runtime_checkable
class Source(Protocol):
    """Numbered samples. All but `read` must be cheap: splits and orders ask them for every sample."""

    def __len__(self) -> int: ...
    def key(self, index: int) -> str: ...
    def group(self, index: int) -> str: ...
    def caption(self, index: int) -> str | None: ...
    def read(self, index: int) -> Any: ...  # what the modality's loader takes: pixels, uint8 h w c; or a `Mesh`


@dataclass(frozen=True, slots=True)
class Examined:
    """One picture decoded in full: what it was, a hash of what is stored, and its pixels as RGB."""

    facts: ImageFacts
    digest: bytes
    picture: Pixels


@dataclass(frozen=True, eq=False)
class Index:
    """What is known of every sample without opening its picture."""

    keys: StringTable
    captions: StringTable
    caption_starts: npt.NDArray[np.int64]  # sample i has the captions from starts[i] to starts[i + 1]
    groups: StringTable | None  # None: every sample is a group of its own
    held_out: npt.NDArray[np.bool_] | None  # None: a hash of the group decides

    @classmethod
    def of(
        cls, keys: Sequence[str], captions: Sequence[Sequence[str]], sides: Sequence[Split] | None,
        groups: Sequence[str | None] | None = None,
    ) -> Index:  # fmt: skip
        """A sample whose group is None is a group of its own."""
        named = None if groups is None else [key if group is None else group for key, group in zip(keys, groups, strict=True)]
        return cls(
            keys=StringTable(keys),
            captions=StringTable(text for texts in captions for text in texts),
            caption_starts=np.cumsum([0, *map(len, captions)], dtype=np.int64),
            groups=None if named is None else StringTable(named),
            held_out=None if sides is None else np.array([side == "validation" for side in sides], dtype=np.bool_),
        )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read: what a source is opened with."""

    channels: Channels = 3
    background: Colour = WHITE
    min_side: int | None = None
    """`read_image`'s: large JPEGs decode faster when only that many pixels are needed."""
    group_by: str | None = None
    """A column of the metadata: samples that share its value fall on one side of every split."""
    split_folders: bool = True
    class_folders: bool = True
    sketches: bool = False
    """Of clips: sketches beside them are read."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored(ABC):
    """A source that was opened from the user's files, with what was rejected and what was decided on the way."""

    root: Path
    rejects: tuple[Reject, ...]
    notes: tuple[str, ...]
    index: Index
    kind: ClassVar[Literal["images", "meshes", "clips"]]
    layout: ClassVar[Literal["folder", "webdataset", "arrays"]]

    def __len__(self) -> int:
        return len(self.index.keys)

    def key(self, index: int) -> str:
        return self.index.keys[index]

    def group(self, index: int) -> str:
        return self.key(index) if self.index.groups is None else self.index.groups[index]

    def captions(self, index: int) -> tuple[str, ...]:
        start, stop = self.index.caption_starts[_position(index, len(self)) :][:2]
        return tuple(self.index.captions[position] for position in range(start, stop))

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def stamp(self) -> str:
        """Changes when a file does: sizes and times of all of them."""
        known = hashlib.sha256()
        for path in self.files():
            status = path.stat()
            known.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
        return known.hexdigest()

    @abstractmethod
    def files(self) -> Iterator[Path]:
        """The files that hold the samples."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the sample lies, below the root."""

    @abstractmethod
    def read(self, index: int) -> Any:
        """The sample; raises what its reader raises."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredImages(Stored):
    """Pictures that were opened from the user's files."""

    kind = "images"
    reading: Reading

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.read(index), self.caption(index))

    def decoded(self, file: ImageFile) -> Pixels:
        reading = self.reading
        return read_image(file, channels=reading.channels, background=reading.background, min_side=reading.min_side)

    def reading_at(self, side: int) -> Self:
        """The same source, read so that pictures keep at least so many pixels a side."""
        if self.reading.min_side is None or self.reading.min_side >= side:
            return self
        return replace(self, reading=replace(self.reading, min_side=side))

    @abstractmethod
    def read(self, index: int) -> Pixels:
        """The picture; raises `UnreadableImage`."""

    @abstractmethod
    def examine(self, index: int) -> Examined:
        """The picture decoded in full, whatever `min_side` says; raises `UnreadableImage`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageFolder(StoredImages):
    """The images under one folder. Build it with `ImageFolder.open`."""

    layout = "folder"
    _paths: StringTable

    @classmethod
    def open(
        cls, path: Path | str, *, channels: Channels = 3, background: Colour = WHITE, group_by: str | None = None,
        min_side: int | None = None,
    ) -> Self:  # fmt: skip
        """Of a folder that is known to hold image files."""
        reading = Reading(channels=channels, background=background, group_by=group_by, min_side=min_side)
        return cls.of(list_folder(Path(path).absolute()), reading)

    @classmethod
    def of(cls, contents: Contents, reading: Reading) -> Self:
        """Of a folder that was listed."""
        if not contents.samples:
            raise holds_nothing(contents)
        pair_captions(contents, split_folders=reading.split_folders, class_folders=reading.class_folders)
        note_beside_images(contents)
        index = index_of(contents, reading.group_by)  # before the notes: it adds to them
        return cls(
            root=contents.root,
            rejects=tuple(contents.rejects),
            notes=contents.notes(),
            reading=reading,
            index=index,
            _paths=StringTable(contents.samples),
        )

    def path(self, index: int) -> Path:
        return self.root / self._paths[index]

    def files(self) -> Iterator[Path]:
        return (self.path(index) for index in range(len(self)))

    def name(self, index: int) -> str:
        return self._paths[index]

    def read(self, index: int) -> Pixels:
        return self.decoded(self.path(index))

    def examine(self, index: int) -> Examined:
        facts, picture = inspect_image(self.path(index))
        with self.path(index).open("rb") as file:
            return Examined(facts, hashlib.file_digest(file, "sha256").digest(), picture)


def index_of(contents: Contents, group_by: str | None) -> Index:
    """Keys, captions and sides of a folder whose captions are paired, and groups where a column names them."""
    groups = None
    if group_by is not None:
        rows = [row.columns if (row := contents.rows.get(path)) else None for path in contents.samples]
        groups = group_values(contents, rows, contents.samples, group_by)
    keys = unique_keys(contents.samples, [contents.stem(path) for path in contents.samples])
    return Index.of(keys, contents.captions, contents.sides, groups)


def captions_of(source: Source, index: int) -> tuple[str, ...]:
    """All captions of a sample; a source of the user's own has at most one."""
    if isinstance(source, Stored):
        return source.captions(index)
    caption = source.caption(index)
    return () if caption is None else (caption,)


def split_indices(
    source: Source, validation_fraction: float, seed: int = 0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The samples of `train` and of `validation`, each in the source's order."""
    if isinstance(source, Stored) and source.index.held_out is not None:
        validation = source.index.held_out
    else:
        hashes = np.fromiter((split_hash(source.group(i), seed) for i in range(len(source))), np.uint64, len(source))
        validation = hashes < np.uint64(split_threshold(validation_fraction))
    return np.flatnonzero(~validation), np.flatnonzero(validation)


def as_source(dataset: Any, *, channels: Channels = 3, background: Colour = WHITE) -> Source:
    """A `Source` as it is, or any object with `__len__` and `__getitem__` whose items have `key`, `image` (uint8 array h w c,
    or a PIL image), `caption` and perhaps `group`, as attributes or as entries of a mapping. Such a dataset is read through
    once, here, for its keys and captions; one that is too large for that should be a `Source` itself."""
    source = dataset if isinstance(dataset, Source) else ImageDataset(dataset, channels=channels, background=background)
    if not len(source):
        raise UserError(f"the dataset ({type(dataset).__name__}) has no samples; expected one or more")
    return source


class DatasetSource(ABC):
    """A map-style dataset of samples as a `Source`; see `as_source`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        keys, groups, captions = list[str](), list[str](), list[str | None]()
        for index in range(len(dataset)):
            item = dataset[index]
            self.content(item, index)  # a wrong item stops here, not in the middle of a run
            keys.append(_text(item, "key", index))
            groups.append(_text(item, "group", index, keys[-1]))
            captions.append(_text(item, "caption", index, "") or None)
        repeated = [key for key, count in Counter(keys).items() if count > 1]
        if repeated:
            raise UserError(f"the dataset has several samples with the key {repeated[0]!r}; expected a key of its own for each")
        self._keys, self._groups = StringTable(keys), StringTable(groups)
        self._captions = StringTable(caption or "" for caption in captions)

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, index: int) -> str:
        return self._keys[index]

    def group(self, index: int) -> str:
        return self._groups[index]

    def caption(self, index: int) -> str | None:
        return self._captions[index] or None

    def read(self, index: int) -> Any:
        return self.content(self._dataset[index], index)

    @abstractmethod
    def content(self, item: Any, index: int) -> Any:
        """What an item holds, checked."""


class ImageDataset(DatasetSource):
    """A dataset of pictures."""

    def __init__(self, dataset: Any, *, channels: Channels = 3, background: Colour = WHITE) -> None:
        self._channels, self._background = channels, background
        super().__init__(dataset)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.read(index), self.caption(index))

    def content(self, item: Any, index: int) -> Pixels:
        """Its picture."""
        if not isinstance(item, Mapping) and not hasattr(item, "image"):
            raise UserError(
                f"sample {index} of the dataset is a {type(item).__name__} without an image; "
                "expected key, image and caption as attributes or as entries of a mapping"
            )
        image = entry(item, "image")
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] in (1, 3, 4):
            return with_channels(image, channels=self._channels, background=self._background)
        if not isinstance(image, Image.Image):
            shape = getattr(image, "shape", None)
            found = type(image).__name__ + (f" of {image.dtype} shaped {tuple(shape)}" if shape is not None else "")
            raise UserError(
                f"sample {index} of the dataset has an image that is a {found}; "
                "expected a uint8 array of height x width x 1, 3 or 4, or a PIL image"
            )
        return to_array(image, channels=self._channels, background=self._background)


def entry(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _text(item: Any, name: str, index: int, default: str | None = None) -> str:
    value = entry(item, name)
    if value is None:
        value = default
    if not isinstance(value, str):
        raise UserError(f"sample {index} of the dataset has {name} {value!r}; expected a string")
    return value


def unique_keys(paths: Sequence[str], stems: Sequence[str]) -> list[str]:
    """Stems, but paths where two would be equal."""
    keys = list(stems)
    while repeated := {key for key, count in Counter(keys).items() if count > 1}:  # twice for a.png, a.jpg and a.png.png
        keys = [path if key in repeated else key for key, path in zip(keys, paths, strict=True)]
    return keys


def _position(index: int, length: int) -> int:
    position = operator.index(index)
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range for {length} entries")
    return position % length
