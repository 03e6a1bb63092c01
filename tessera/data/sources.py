"""A folder of captioned images in, numbered samples out: key, group, captions, and the picture when it is asked for.

Opening lists files and reads captions; it decodes no picture (`check.py` does). The index is a few NumPy arrays, cheap to fork
and to pickle, and its order is that of the sorted paths, so it depends neither on the file system nor on the number of workers.
What cannot be used is named in `rejects`; what was decided on the user's behalf, in `notes`.
"""

from __future__ import annotations

import hashlib
import operator
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from PIL import Image

from tessera.config import UserError
from tessera.data.folders import Reject, group_values, read_folder
from tessera.media.images import WHITE, Channels, Colour, Pixels, read_image, to_array

__all__ = ["DatasetSource", "ImageFolder", "Reject", "Sample", "Source", "StringTable", "as_source", "split_indices", "split_of"]

Split: TypeAlias = Literal["train", "validation"]


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
    def read(self, index: int) -> Pixels: ...


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """The images under one folder. Build it with `ImageFolder.open`."""

    root: Path
    rejects: tuple[Reject, ...]
    notes: tuple[str, ...]
    channels: Channels
    background: Colour
    min_side: int | None
    _paths: StringTable
    _keeps_suffix: npt.NDArray[np.bool_]
    _captions: StringTable
    _caption_starts: npt.NDArray[np.int64]  # sample i has the captions from starts[i] to starts[i + 1]
    _groups: StringTable | None

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        channels: Channels = 3,
        background: Colour = WHITE,
        group_by: str | None = None,
        min_side: int | None = None,
    ) -> ImageFolder:
        """`group_by` names a column of the metadata: samples that share its value fall on one side of every split.
        `min_side` is `read_image`'s: large JPEGs decode faster when only that many pixels are needed."""
        contents = read_folder(Path(path).absolute())
        keys, keeps_suffix = _keys(contents.images)
        groups = None
        if group_by is not None:
            values = group_values(contents, group_by)
            groups = StringTable(key if value is None else value for key, value in zip(keys, values, strict=True))
        return cls(
            root=contents.root,
            rejects=tuple(contents.rejects),
            notes=contents.notes(),
            channels=channels,
            background=background,
            min_side=min_side,
            _paths=StringTable(contents.images),
            _keeps_suffix=keeps_suffix,
            _captions=StringTable(text for texts in contents.captions for text in texts),
            _caption_starts=np.cumsum([0, *map(len, contents.captions)], dtype=np.int64),
            _groups=groups,
        )

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.read(index), self.caption(index))

    def key(self, index: int) -> str:
        """The path below the root, with `/`, without its extension unless another file would have the same key."""
        path = self._paths[index]
        return path if self._keeps_suffix[index] else posixpath.splitext(path)[0]

    def group(self, index: int) -> str:
        return self.key(index) if self._groups is None else self._groups[index]

    def captions(self, index: int) -> tuple[str, ...]:
        start, stop = self._caption_starts[_position(index, len(self)) :][:2]
        return tuple(self._captions[position] for position in range(start, stop))

    def caption(self, index: int) -> str | None:
        return next(iter(self.captions(index)), None)

    def path(self, index: int) -> Path:
        return self.root / self._paths[index]

    def read(self, index: int) -> Pixels:
        """The picture; raises `UnreadableImage`."""
        return read_image(self.path(index), channels=self.channels, background=self.background, min_side=self.min_side)


def split_of(group: str, validation_fraction: float, seed: int = 0) -> Split:
    """The side of one group: a hash, so it never depends on other files. A larger fraction only moves groups to validation."""
    return "validation" if _split_hash(group, seed) < _split_threshold(validation_fraction) else "train"


def split_indices(
    source: Source, validation_fraction: float, seed: int = 0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The samples of `train` and of `validation`, each in the source's order."""
    hashes = np.fromiter((_split_hash(source.group(i), seed) for i in range(len(source))), np.uint64, len(source))
    validation = hashes < np.uint64(_split_threshold(validation_fraction))
    return np.flatnonzero(~validation), np.flatnonzero(validation)


def as_source(dataset: Any, *, channels: Channels = 3, background: Colour = WHITE) -> Source:
    """A `Source` as it is, or any object with `__len__` and `__getitem__` whose items have `key`, `image` (uint8 array h w c,
    or a PIL image), `caption` and perhaps `group`, as attributes or as entries of a mapping. Such a dataset is read through
    once, here, for its keys and captions; one that is too large for that should be a `Source` itself."""
    return dataset if isinstance(dataset, Source) else DatasetSource(dataset, channels=channels, background=background)


class DatasetSource:
    """A map-style dataset of samples as a `Source`; see `as_source`."""

    def __init__(self, dataset: Any, *, channels: Channels = 3, background: Colour = WHITE) -> None:
        self._dataset, self._channels, self._background = dataset, channels, background
        keys, groups, captions = list[str](), list[str](), list[str | None]()
        for index in range(len(dataset)):
            item = dataset[index]
            self._picture(item, index)  # a wrong item stops here, not in the middle of a run
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

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.read(index), self.caption(index))

    def key(self, index: int) -> str:
        return self._keys[index]

    def group(self, index: int) -> str:
        return self._groups[index]

    def caption(self, index: int) -> str | None:
        return self._captions[index] or None

    def read(self, index: int) -> Pixels:
        return self._picture(self._dataset[index], index)

    def _picture(self, item: Any, index: int) -> Pixels:
        if not isinstance(item, Mapping) and not hasattr(item, "image"):
            raise UserError(
                f"sample {index} of the dataset is a {type(item).__name__} without an image; "
                "expected key, image and caption as attributes or as entries of a mapping"
            )
        image = _entry(item, "image")
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] in (1, 3, 4):
            if image.shape[2] == self._channels:
                return image
            image = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
        if not isinstance(image, Image.Image):
            shape = getattr(image, "shape", None)
            found = type(image).__name__ + (f" of {image.dtype} shaped {tuple(shape)}" if shape is not None else "")
            raise UserError(
                f"sample {index} of the dataset has an image that is a {found}; "
                "expected a uint8 array of height x width x 1, 3 or 4, or a PIL image"
            )
        return to_array(image, channels=self._channels, background=self._background)


def _entry(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _text(item: Any, name: str, index: int, default: str | None = None) -> str:
    value = _entry(item, name)
    if value is None:
        value = default
    if not isinstance(value, str):
        raise UserError(f"sample {index} of the dataset has {name} {value!r}; expected a string")
    return value


def _keys(paths: Sequence[str]) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Paths without extensions, except where two would then be equal; and which ones kept theirs."""
    keys = [posixpath.splitext(path)[0] for path in paths]
    keeps = np.zeros(len(paths), dtype=np.bool_)
    while repeated := {key for key, count in Counter(keys).items() if count > 1}:  # twice for a.png, a.jpg and a.png.png
        for index, key in enumerate(keys):
            if key in repeated:
                keys[index], keeps[index] = paths[index], True
    return keys, keeps


def _position(index: int, length: int) -> int:
    position = operator.index(index)
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range for {length} entries")
    return position % length


def _split_hash(group: str, seed: int) -> int:
    digest = hashlib.blake2b(group.encode("utf-8", "surrogatepass"), digest_size=8, key=str(seed).encode())
    return int.from_bytes(digest.digest(), "little")


def _split_threshold(validation_fraction: float) -> int:
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"got validation_fraction {validation_fraction}; expected 0 or more and less than 1")
    return int(validation_fraction * 2**64)
