"""What lies in a folder: a path in; images, clips, meshes, captions, tables, tars and arrays below it out. No file is opened."""

from __future__ import annotations

import os
import posixpath
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.config import UserError, nearest
from tessera.data.kinds import CLIPS, IMAGES, MESHES, Kind
from tessera.data.splits import SPLIT_NAMES, Split, sides_by_folder
from tessera.data.tables import METADATA_NAMES, Row

CAPTION_SUFFIXES = (".txt", ".caption")  # the first one wins
ARCHIVES = (".zip", ".gz", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".zst")
FAMILIES = {
    "meshes": MESHES.suffixes,
    "videos": tuple(suffix for suffix in CLIPS.suffixes if suffix not in IMAGES.suffixes),
    "archives; unpack them first": ARCHIVES,
    "tables or archives of arrays; write them out as image files": (".parquet", ".arrow", ".npz"),
    "images of another format; convert them to png or jpg": (
        ".tif", ".tiff", ".heic", ".heif", ".avif", ".svg", ".jfif", ".jxl", ".jp2", ".psd", ".tga", ".ppm", ".pgm", ".exr",
    ),
}  # fmt: skip
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")  # what Windows leaves in folders; macOS hides its own


@dataclass(frozen=True, slots=True)
class Reject:
    """A file, or a line of a metadata file (`metadata.csv:12`), that is not used, and why."""

    path: str
    reason: str


@dataclass
class Contents:
    """Filled by `list_folder`, then by `captions.pair_captions`. Every path is relative to the root and written with `/`; of a
    root that is itself a file it is empty."""

    root: Path
    kind: Kind = IMAGES
    samples: list[str] = field(default_factory=list)  # sorted: the images; what was taken after `take_meshes`, `take_clips`
    captions: list[tuple[str, ...]] = field(default_factory=list)  # one entry a sample
    rows: dict[str, Row] = field(default_factory=dict)  # by sample
    spoilt_rows: set[str] = field(default_factory=set)  # the samples whose rows were rejected; "" where none could be told
    metadata: list[str] = field(default_factory=list)
    caption_files: dict[str, str] = field(default_factory=dict)  # by path with the suffix in lower case
    shards: list[str] = field(default_factory=list)  # webdataset tars, sorted
    arrays: list[str] = field(default_factory=list)  # NumPy files, sorted
    meshes: list[str] = field(default_factory=list)  # sorted; among the unread until they are taken
    videos: list[str] = field(default_factory=list)  # sorted; among the unread until they are taken
    frame_folders: set[str] = field(default_factory=set)  # the samples that are folders of frames
    sketches: set[str] = field(default_factory=set)  # of clips, with the frames of those that are folders: no samples
    tops: list[str] = field(default_factory=list)  # folders directly below the root, those without samples included
    sides: list[Split] | None = None  # one a sample, where split folders decide
    unread: list[str] = field(default_factory=list)  # files of any other kind, sorted
    suffixes: Counter[str] = field(default_factory=Counter)  # of all files
    rejects: list[Reject] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # what happened -> where
    summaries: list[str] = field(default_factory=list)  # notes that name no places

    def take_meshes(self) -> None:
        """Makes the meshes the samples; images, tars and arrays beside them are not read."""
        self.kind = MESHES
        self.unread = sorted({*self.unread, *self.samples, *self.shards, *self.arrays}.difference(self.meshes))
        self.samples = self.meshes

    def take_clips(self, frame_folders: Sequence[str], arrays: Sequence[str]) -> None:
        """Makes clips, single pictures, folders of frames and these arrays the samples; nothing else is read."""
        self.kind, self.frame_folders = CLIPS, set(frame_folders)
        taken = [path for path in self.samples if posixpath.dirname(path) not in self.frame_folders]
        self.unread = sorted({*self.unread, *self.shards}.difference(self.videos))
        self.samples = sorted((*taken, *self.videos, *frame_folders, *arrays))

    def stem(self, sample: str) -> str:
        """Its path without the extension; a folder's name has none."""
        return sample if sample in self.frame_folders else posixpath.splitext(sample)[0]

    def note(self, what: str, where: str) -> None:
        self.remarks[what].append(where)

    def notes(self) -> tuple[str, ...]:
        """One line a kind of remark, with its count and first places."""
        told = (
            f"{what}: {len(places):,} ({', '.join(places[:3])}{', ...' if len(places) > 3 else ''})"
            for what, places in self.remarks.items()
        )
        return (*told, *self.summaries)


def list_folder(path: Path, kind: Kind = IMAGES) -> Contents:
    """Everything below a folder; or a single .tar or .npy file. Where there is none, what such a kind is expected as is told."""
    contents = Contents(_existing(path, kind))
    if path.is_file():
        (contents.shards if path.suffix.lower() == ".tar" else contents.arrays).append("")
        return contents
    if (path / "synth.json").is_file() and (path / "train").is_dir():
        contents.root = path / "train"
        contents.note("synth.json stands beside train/, so only train/ is read", str(contents.root))
    _list_files(contents)
    return contents


def holds_nothing(contents: Contents) -> UserError:
    return UserError(f"{contents.root} holds no {contents.kind.many}: {_inventory(contents.suffixes)}; {contents.kind.expected}")


def divide(contents: Contents, paths: Sequence[str], by_folder: bool) -> tuple[list[str], list[Split] | None]:
    """The paths that are used, and their sides where split folders decide; says so in the notes."""
    sides = sides_by_folder(paths) if by_folder else None
    if sides is None:
        for name in contents.tops if by_folder else ():
            if name.lower() in SPLIT_NAMES:
                contents.note(
                    f"folder named as a part of a split, not taken as one: expected {contents.kind.many} both in train/ and in "
                    f"validation/, val/, valid/ or test/; so data.validation_fraction divides all {contents.kind.many}",
                    f"{name}/",
                )
        return list(paths), None
    kept = [(path, side) for path, side in zip(paths, sides, strict=True) if side is not None]
    for name in dict.fromkeys(f"{path.split('/')[0]}/ is {side}" for path, side in kept):
        contents.note(
            "split folder, which decides instead of the hash and data.validation_fraction (data.split=hash: they do)", name
        )
    for path, side in zip(paths, sides, strict=True):
        if side is None:
            contents.note("file outside the training and validation folders, not used", path)
    return [path for path, _ in kept], [side for _, side in kept]


def group_values(
    contents: Contents, rows: Sequence[Mapping[str, Any] | None], names: Sequence[str], column: str
) -> list[str | None]:
    """The value of one metadata column for each sample, None (and a note with its name) where there is none."""
    known = {name for row in rows if row for name in row}
    if column not in known:
        guess = nearest(column, known)
        raise UserError(
            f"group_by names the column {column!r}, which the metadata of {contents.root} do not have; "
            + (f"they have {', '.join(sorted(known))}" if known else f"expected a {' or '.join(METADATA_NAMES)} with that column")
            + (f"; did you mean {guess!r}?" if guess else "")
        )
    values: list[str | None] = []
    for row, name in zip(rows, names, strict=True):
        value = row.get(column) if row else None
        values.append(None if value in (None, "") else str(value))
        if values[-1] is None:
            contents.note(f"{contents.kind.noun} without a value in the column {column!r}, so it is a group of its own", name)
    return values


def _existing(path: Path, kind: Kind) -> Path:
    try:
        if path.is_dir():
            return path
        if path.exists():
            return _single_file(path, kind)
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    except OSError as error:  # no permission on the way, or a name too long for the file system
        raise UserError(f"{path} cannot be opened: {error.strerror}; {kind.expected}") from None
    guess = nearest(path.name, beside)
    raise UserError(f"{path} does not exist; {kind.expected}" + (f"; did you mean {path.with_name(guess)}?" if guess else ""))


def _single_file(path: Path, kind: Kind) -> Path:
    suffix = path.suffix.lower()
    if path.is_file() and suffix in (".tar", ".npy"):
        return path
    advice = "; unpack the archive and name the folder" if suffix in ARCHIVES else ""
    raise UserError(f"{path} is a file; {kind.expected}{advice}")


def _list_files(contents: Contents) -> None:
    """Follows links to folders, each folder once. Real folders come first, so that a link to one of them adds nothing."""
    seen: set[tuple[int, int]] = set()
    folders, links = [""], list[str]()
    while folders or links:
        is_link = not folders
        folder = links.pop(links.index(min(links))) if is_link else folders.pop()
        try:
            status = os.stat(contents.root / folder)
            entries = sorted(os.scandir(contents.root / folder), key=lambda entry: entry.name)
        except OSError as error:
            if not folder:
                raise UserError(
                    f"{contents.root} cannot be listed: {error.strerror}; correct its rights, or name another folder"
                ) from None
            contents.rejects.append(Reject(folder, f"cannot be listed: {error.strerror}"))
            continue
        if (status.st_dev, status.st_ino) in seen:
            contents.note("link to a folder that is read already, not followed", folder)
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if not entry.name.startswith("."):
                _sort_entry(contents, entry, path, folders, links)
    tables, stores = contents.metadata, (contents.shards, contents.arrays)
    for paths in (contents.samples, contents.meshes, contents.videos, tables, *stores, contents.unread):
        paths.sort()


def _sort_entry(contents: Contents, entry: os.DirEntry[str], path: str, folders: list[str], links: list[str]) -> None:
    stem, suffix = posixpath.splitext(path)
    try:
        if entry.is_dir():
            (links if entry.is_symlink() else folders).append(path)
            if "/" not in path:
                contents.tops.append(path)
            return
        usable = entry.is_file()
    except OSError:  # a link to itself
        usable = False
    if not usable:
        contents.rejects.append(Reject(path, "a broken link, or not a regular file"))
        return
    contents.suffixes[suffix.lower()] += 1
    if suffix.lower() in IMAGES.suffixes:
        contents.samples.append(path)
    elif suffix.lower() in CAPTION_SUFFIXES:
        contents.caption_files[stem + suffix.lower()] = path
    elif entry.name.lower() in METADATA_NAMES:
        contents.metadata.append(path)
    elif suffix.lower() == ".tar":
        contents.shards.append(path)
    elif suffix.lower() == ".npy":
        contents.arrays.append(path)
    elif entry.name.lower() not in _SYSTEM_FILES:
        contents.unread.append(path)
        if suffix.lower() in MESHES.suffixes:
            contents.meshes.append(path)
        elif suffix.lower() in CLIPS.suffixes:
            contents.videos.append(path)


def _inventory(suffixes: Counter[str]) -> str:
    if not suffixes:
        return "it is empty"
    most = [f"{count:,} {suffix or 'extensionless'} file{'s' if count > 1 else ''}" for suffix, count in suffixes.most_common(4)]
    totals = {what: sum(suffixes[suffix] for suffix in family) for what, family in FAMILIES.items()}
    family = max(totals, key=lambda what: totals[what])
    return f"found {', '.join(most)}" + (f": that looks like {family}" if totals[family] else "")
