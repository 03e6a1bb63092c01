"""A folder of captioned clips in, numbered samples out: clip files, single pictures, folders of frames, NumPy arrays.

Opening lists files and reads captions; of arrays it reads the headers, and it decodes no frame. What `read` returns decodes the
frames that it is asked for and no others, so that a window of a long clip costs what the window costs.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from tessera.config import UserError, VideoDataConfig
from tessera.data.arrays import MODES, Stacked, checked_length, map_array
from tessera.data.captions import pair_captions
from tessera.data.folders import Contents, holds_nothing, list_folder
from tessera.data.frame_folders import frame_folders
from tessera.data.kinds import CLIPS, IMAGES
from tessera.data.sketches import no_sketches, pair_sketches, take_sketches
from tessera.data.sources import DatasetSource, Reading, Source, Stored, StringTable, entry, index_of
from tessera.data.unread import note_beside_clips
from tessera.media.clip_facts import PAUSE, AvMissing, ClipFacts, Look, UnreadableClip
from tessera.media.clips import VIDEO_SUFFIXES, Clip, Frames, Inspection, Pick, inspect_clip, read_clip, read_facts
from tessera.media.frame_folders import frame_numbers, missing_numbers
from tessera.media.framing import side_of
from tessera.media.images import WHITE, Channels, Colour, Pixels, with_channels

UNREADABLE = UnreadableClip, AvMissing, UserError, OSError  # UserError from a user's own dataset
See = Callable[[int, Pixels], None]  # place and picture, as RGB

_NEVER_ANIMATED = (".jpg", ".jpeg", ".bmp")


class StoredClip(Protocol):
    """A clip that was found and is not read yet."""

    def facts(self) -> ClipFacts:
        """What it holds; raises `UnreadableClip`."""

    def read(self, pick: Pick) -> Clip:
        """The frames that are picked, by rising numbers, each once; raises `UnreadableClip`."""

    def inspect(self, see: See) -> Inspection:
        """Decodes all of it, frame by frame; raises `UnreadableClip`."""

    def is_single(self) -> bool:
        """Whether it is one picture; not where it cannot be read."""

    def digest(self) -> bytes:
        """A hash of what is stored."""


@runtime_checkable
class Sketched(Protocol):
    """A source whose clips may have sketches."""

    def sketch(self, index: int) -> StoredClip | None:
        """Frame k of it belongs to frame k of the clip, however fast either is shown; it may be shorter. Raises
        `UnreadableClip`."""


@dataclass(frozen=True, slots=True)
class ClipFile:
    """A file, or a folder of frames."""

    path: Path
    look: Look

    def facts(self) -> ClipFacts:
        return read_facts(self.path)

    def read(self, pick: Pick) -> Clip:
        look = self.look
        return read_clip(self.path, pick, channels=look.channels, background=look.background, min_side=look.min_side)

    def inspect(self, see: See) -> Inspection:
        return inspect_clip(self.path, see)

    def is_single(self) -> bool:
        suffix = self.path.suffix.lower()
        if suffix in _NEVER_ANIMATED or suffix not in IMAGES.suffixes:
            return suffix in _NEVER_ANIMATED and not self.path.is_dir()
        try:
            return self.facts().num_frames == 1
        except UNREADABLE:
            return False

    def digest(self) -> bytes:
        known = hashlib.sha256()
        for path in files_of(self.path):
            with path.open("rb") as file:
                known.update(hashlib.file_digest(file, "sha256").digest())
        return known.digest()


@dataclass(frozen=True, slots=True, eq=False)
class ClipArray:
    """Frames in memory, or mapped into it."""

    name: str
    frames: Frames  # t h w c, c being 1, 3 or 4
    look: Look
    fps: float = 1 / PAUSE

    def facts(self) -> ClipFacts:
        count, height, width, channels = self.frames.shape
        times = np.arange(count) / self.fps
        mode = MODES[channels]
        return ClipFacts(count, width, height, times, count / self.fps, "NPY", "NPY", mode, has_alpha=channels == 4)

    def read(self, pick: Pick) -> Clip:
        try:
            frames = [self.look.of_array(np.array(self.frames[index])) for index in pick(self.facts())]
        except (OSError, IndexError) as error:  # the file was replaced or cut after it was opened
            raise UnreadableClip(self.name, f"damaged: {error}") from error
        return Clip(np.stack(frames), self.fps)

    def inspect(self, see: See) -> Inspection:
        for place, frame in enumerate(self.frames):
            see(place, with_channels(np.array(frame), channels=3))
        return Inspection(self.facts(), ())

    def is_single(self) -> bool:
        return len(self.frames) == 1

    def digest(self) -> bytes:
        known = hashlib.sha256(f"{self.frames.shape}".encode())
        for frame in self.frames:
            known.update(frame.tobytes())
        return known.digest()


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredClips(Stored):
    """Clips that were opened from the user's files."""

    kind = "clips"
    reading: Reading

    @property
    def look(self) -> Look:
        """How frames are read."""
        return Look(self.reading.channels, self.reading.background, self.reading.min_side)

    @abstractmethod
    def read(self, index: int) -> StoredClip:
        """The clip, from which frames can be read; raises `UnreadableClip`."""

    def sketch(self, index: int) -> StoredClip | None:
        """That of the clip, as `Sketched` has it; stacks have none."""
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class ClipFolder(StoredClips):
    """The clips under one folder. Build it with `ClipFolder.open`."""

    layout = "folder"
    _paths: StringTable
    _sketches: StringTable  # one a clip, empty where it has none

    @classmethod
    def open(cls, path: Path | str, config: VideoDataConfig) -> Self:
        """Lists the files and pairs them with captions."""
        return cls.of(list_folder(Path(path).absolute()), reading_of(config))

    @classmethod
    def of(cls, contents: Contents, reading: Reading) -> Self:
        """Of a folder that was listed."""
        sketches = take_sketches(contents)
        frames = frame_folders(contents, split_folders=reading.split_folders, class_folders=reading.class_folders)
        contents.take_clips(frames, [file for file in contents.arrays if _is_clip(contents, file)])
        if not contents.samples:
            raise holds_nothing(contents)
        _require_av(contents, list(sketches.values()) if reading.sketches else [])
        pair_captions(contents, split_folders=reading.split_folders, class_folders=reading.class_folders)
        note_beside_clips(contents)
        paired = pair_sketches(contents, sketches, read=reading.sketches)
        index = index_of(contents, reading.group_by)  # before the notes: it adds to them
        return cls(
            root=contents.root,
            rejects=tuple(contents.rejects),
            notes=contents.notes(),
            reading=reading,
            index=index,
            _paths=StringTable(contents.samples),
            _sketches=StringTable(paired),
        )

    def path(self, index: int) -> Path:
        """Where the file, or the folder of frames, lies."""
        return self.root / self._paths[index]

    def files(self) -> Iterator[Path]:
        for index in range(len(self)):
            yield from files_of(self.path(index))
            if self.reading.sketches and self._sketches[index]:
                yield from files_of(self.root / self._sketches[index])

    def name(self, index: int) -> str:
        return self._paths[index]

    def read(self, index: int) -> StoredClip:
        return self._stored(self.path(index))

    def sketch(self, index: int) -> StoredClip | None:
        if not self._sketches[index]:
            return None
        path = self.root / self._sketches[index]
        if path.is_dir():
            frame_numbers(path)  # refuses two pictures of one number: the frames behind them would move up
            if gaps := missing_numbers(path):
                raise UnreadableClip(path, f"numbers are missing between its pictures: {gaps}; expected one for every frame")
        return self._stored(path)

    def _stored(self, path: Path) -> StoredClip:
        if path.suffix.lower() != ".npy" or path.is_dir():
            return ClipFile(path, self.look)
        try:
            frames = map_array(path)
        except (OSError, ValueError) as error:
            raise UnreadableClip(path, f"damaged: {error}") from error
        if not is_clip_array(frames):  # a sketch, or a file that was replaced
            raise UnreadableClip(path, f"{frames.dtype} shaped {frames.shape}; expected uint8, t x h x w x 1, 3 or 4")
        return ClipArray(str(path), frames, self.look)


@dataclass(frozen=True, eq=False, kw_only=True)
class ClipStacks(Stacked, StoredClips):
    """Clips in stacks: .npy files of uint8, n t h w c; or a single one, perhaps of one clip. Build it with `ClipStacks.of`."""

    @classmethod
    def of(cls, contents: Contents, reading: Reading) -> Self:
        """Of a folder that was listed."""
        contents.kind = CLIPS
        for sketch in take_sketches(contents).values():
            contents.note("sketch beside a stack of clips, not read; stacks have none: write clips and sketches as files", sketch)
        if reading.sketches:
            raise no_sketches(str(contents.root))
        return super().of(contents, reading)

    def read(self, index: int) -> StoredClip:
        try:
            stack, place = self.mapped(index)
            return ClipArray(self.where(index), stack[place] if stack.ndim == 5 else stack, self.look)
        except (OSError, ValueError, IndexError) as error:
            raise UnreadableClip(self.where(index), f"damaged: {error}") from error

    @staticmethod
    def length_of(array: npt.NDArray[Any]) -> int:
        if is_clip_array(array):
            return 1
        if array.ndim == 5 and len(array) and is_clip_array(array[0]):
            return len(array)
        raise ValueError("expected uint8, n x frames x height x width x 1, 3 or 4 channels, or one clip without the n")


def holds_stacks(contents: Contents) -> bool:
    """Whether there are only arrays, none of them a single clip; or it is one file."""
    if contents.samples or contents.videos or not contents.arrays:
        return False
    return contents.root.is_file() or not any(num_axes(contents.root / file) == 4 for file in contents.arrays)


def num_axes(path: Path) -> int:
    """Of an array, by its header; 0 where that is damaged."""
    try:
        return map_array(path).ndim
    except Exception:  # a damaged header leaks what parsing it may raise; it is a reject later
        return 0


def is_clip_array(array: npt.NDArray[Any]) -> bool:
    """Whether it is one clip: uint8, t h w c."""
    return array.dtype == np.uint8 and array.ndim == 4 and 0 not in array.shape and array.shape[3] in MODES


def reading_of(config: VideoDataConfig) -> Reading:
    """How a config has clips read."""
    return Reading(
        channels=config.channels,
        background=config.background,
        min_side=side_of(config.resolution, config.zoom, cropped=config.fit == "crop"),
        group_by=config.group_by,
        split_folders=config.split == "auto",
        class_folders=config.class_folders,
        sketches=config.sketch == "files",
    )


def files_of(path: Path) -> list[Path]:
    """The files of a clip: itself, or the frames in its folder."""
    return sorted(file for file in path.iterdir() if not file.name.startswith(".")) if path.is_dir() else [path]


def single_pictures(source: Source, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which samples are single pictures, by their files; those that cannot be read are not."""

    def is_single(index: int) -> bool:
        try:
            found: StoredClip = source.read(index)
            return found.is_single()
        except UNREADABLE:
            return False

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return np.fromiter(pool.map(is_single, indices.tolist()), np.bool_, len(indices))


def _is_clip(contents: Contents, file: str) -> bool:
    """Whether a .npy is one clip; what holds none is a reject."""
    if not checked_length(contents, file, ClipStacks.length_of):
        return False
    if map_array(contents.root / file).ndim == 5:
        contents.note("stack of clips beside clips, not read; move it to a folder of its own", file)
        return False
    return True


def _require_av(contents: Contents, sketches: Sequence[str]) -> None:
    """Before anything is read: without PyAV every video would be a reject."""
    for path in [*contents.videos, *(each for each in sketches if each.lower().endswith(VIDEO_SUFFIXES))][:1]:
        try:
            read_facts(contents.root / path)
        except AvMissing as error:
            raise UserError(str(error)) from None
        except (UnreadableClip, OSError):
            pass


# --- a dataset of the user's own


def as_clip_source(dataset: Any, *, channels: Channels = 3, background: Colour = WHITE) -> Source:
    """A `Source` of `StoredClip`s as it is, or any object with `__len__` and `__getitem__` whose items have `key`, `clip` (a
    uint8 array t h w c, or a `Clip`), `caption` and perhaps `group` and `sketch` (as `clip`), as attributes or as entries of a
    mapping; read through once, here."""
    source = dataset if isinstance(dataset, Source) else ClipDataset(dataset, channels=channels, background=background)
    if not len(source):
        raise UserError(f"the dataset ({type(dataset).__name__}) has no samples; expected one or more")
    return source


class ClipDataset(DatasetSource):
    """A map-style dataset of clips as a `Source`; see `as_clip_source`."""

    def __init__(self, dataset: Any, *, channels: Channels = 3, background: Colour = WHITE) -> None:
        self._look = Look(channels, background)
        super().__init__(dataset)

    def content(self, item: Any, index: int) -> StoredClip:
        """Its clip; its sketch is looked at, too."""
        if entry(item, "sketch") is not None:
            self._clip(item, index, "sketch")
        return self._clip(item, index, "clip")

    def sketch(self, index: int) -> StoredClip | None:
        """As `Sketched` has it."""
        item = self._dataset[index]
        return None if entry(item, "sketch") is None else self._clip(item, index, "sketch")

    def _clip(self, item: Any, index: int, name: str) -> StoredClip:
        clip = entry(item, name)
        frames, fps = (clip.frames, clip.fps) if isinstance(clip, Clip) else (clip, 1 / PAUSE)
        if not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
            raise UserError(f"sample {index} of the dataset has a {name} of {fps!r} frames a second; expected a number above 0")
        if not isinstance(frames, np.ndarray) or not is_clip_array(frames):
            shape = getattr(frames, "shape", None)
            found = type(frames).__name__ + (f" of {frames.dtype} shaped {tuple(shape)}" if shape is not None else "")
            raise UserError(
                f"sample {index} of the dataset has a {name} that is a {found}; expected key, clip and caption, where {name} is "
                "a uint8 array of frames x height x width x 1, 3 or 4, or a Clip of such frames with its frames a second"
            )
        return ClipArray(str(entry(item, "key")), frames, self._look, fps)
