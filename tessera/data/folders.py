"""What lies in a folder of images: a path in; image paths, their captions and metadata rows, rejects and notes out.

The conventions that users bring are read here and nowhere else: same-stem caption files, and Hugging Face's metadata.jsonl or
metadata.csv beside the images or above them. No picture is opened.
"""

from __future__ import annotations

import csv
import json
import os
import posixpath
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.config import UserError, nearest

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
CAPTION_SUFFIXES = (".txt", ".caption")  # the first one wins
CAPTION_COLUMNS = ("text", "caption", "prompt")  # the first one that is filled wins
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
EXPECTED = "expected a folder of png, jpg, jpeg, webp, gif or bmp files, subfolders included"
_OTHER_FAMILIES = {
    "meshes": (".obj", ".glb", ".gltf", ".ply", ".stl", ".off"),
    "videos": (".mp4", ".webm", ".mov", ".avi", ".mkv"),
    "archives; unpack them first": (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"),
    "tables or arrays; write them out as image files": (".parquet", ".arrow", ".npy", ".npz"),
    "images of another format; convert them to png or jpg": (".tif", ".tiff", ".heic", ".avif", ".svg", ".jfif", ".jxl"),
}


@dataclass(frozen=True, slots=True)
class Reject:
    """A file, or a line of a metadata file (`metadata.csv:12`), that is not used, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of metadata: where it stands, its caption, and all its columns."""

    where: str
    caption: str | None
    columns: Mapping[str, Any]


@dataclass
class Contents:
    """Filled by `read_folder`; every path is relative to the root and written with `/`."""

    root: Path
    images: list[str] = field(default_factory=list)  # sorted
    captions: list[tuple[str, ...]] = field(default_factory=list)  # one entry an image
    rows: dict[str, Row] = field(default_factory=dict)  # by image
    metadata: list[str] = field(default_factory=list)
    caption_files: dict[str, str] = field(default_factory=dict)  # by path with the suffix in lower case
    suffixes: Counter[str] = field(default_factory=Counter)  # of all files
    rejects: list[Reject] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # what happened -> where

    def note(self, what: str, where: str) -> None:
        self.remarks[what].append(where)

    def notes(self) -> tuple[str, ...]:
        """One line a kind of remark, with its count and first places."""
        return tuple(
            f"{what}: {len(places):,} ({', '.join(places[:3])}{', ...' if len(places) > 3 else ''})"
            for what, places in self.remarks.items()
        )


def read_folder(path: Path) -> Contents:
    contents = Contents(_existing(path))
    if (path / "synth.json").is_file() and (path / "train").is_dir():
        contents.root = path / "train"
        contents.note("synth.json stands beside train/, so only train/ is read", str(contents.root))
    _list_files(contents)
    if not contents.images:
        raise UserError(f"{path} holds no images: {_inventory(contents.suffixes)}; {EXPECTED}")
    _read_metadata(contents)
    _read_captions(contents)
    contents.rejects = list(dict.fromkeys(contents.rejects))  # two images of one stem share a caption file
    return contents


def group_values(contents: Contents, column: str) -> list[str | None]:
    """The value of one metadata column for each image, None where there is none."""
    known = {name for row in contents.rows.values() for name in row.columns}
    if column not in known:
        guess = nearest(column, known)
        raise UserError(
            f"group_by names the column {column!r}, which the metadata of {contents.root} do not have; "
            + (f"they have {', '.join(sorted(known))}" if known else f"expected a {' or '.join(METADATA_NAMES)} with that column")
            + (f"; did you mean {guess!r}?" if guess else "")
        )
    values: list[str | None] = []
    for image in contents.images:
        value = contents.rows[image].columns.get(column) if image in contents.rows else None
        values.append(None if value in (None, "") else str(value))
        if values[-1] is None:
            contents.note(f"image without a value in the column {column!r}, so it is a group of its own", image)
    return values


def _existing(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.exists():
        archive = path.suffix.lower() in (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")
        raise UserError(f"{path} is a file; {EXPECTED}" + ("; unpack the archive and name the folder" if archive else ""))
    beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    guess = nearest(path.name, beside)
    raise UserError(f"{path} does not exist; {EXPECTED}" + (f"; did you mean {path.with_name(guess)}?" if guess else ""))


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
                raise UserError(f"{contents.root} cannot be listed: {error.strerror}; {EXPECTED}") from None
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
    contents.images.sort()
    contents.metadata.sort()


def _sort_entry(contents: Contents, entry: os.DirEntry[str], path: str, folders: list[str], links: list[str]) -> None:
    stem, suffix = posixpath.splitext(path)
    try:
        if entry.is_dir():
            (links if entry.is_symlink() else folders).append(path)
            return
        usable = entry.is_file()
    except OSError:  # a link to itself
        usable = False
    if not usable:
        contents.rejects.append(Reject(path, "a broken link, or not a regular file"))
        return
    contents.suffixes[suffix.lower()] += 1
    if suffix.lower() in IMAGE_SUFFIXES:
        contents.images.append(path)
    elif suffix.lower() in CAPTION_SUFFIXES:
        contents.caption_files[stem + suffix.lower()] = path
    elif entry.name in METADATA_NAMES:
        contents.metadata.append(path)
    elif entry.name == "metadata.parquet":
        contents.note("metadata.parquet is not read; write it as metadata.jsonl", path)


def _inventory(suffixes: Counter[str]) -> str:
    if not suffixes:
        return "it is empty"
    most = [f"{count:,} {suffix or 'extensionless'} file{'s' if count > 1 else ''}" for suffix, count in suffixes.most_common(4)]
    totals = {what: sum(suffixes[suffix] for suffix in family) for what, family in _OTHER_FAMILIES.items()}
    family = max(totals, key=lambda what: totals[what])
    return f"found {', '.join(most)}" + (f": that looks like {family}" if totals[family] else "")


def _read_metadata(contents: Contents) -> None:
    by_name = {unicodedata.normalize("NFC", image): image for image in contents.images}  # macOS writes names as NFD
    folders = Counter(posixpath.dirname(name) for name in contents.metadata)
    for folder, count in folders.items():
        if count > 1:
            raise UserError(f"{contents.root / folder} holds both {' and '.join(METADATA_NAMES)}; keep the one that is right")
    for name in contents.metadata:
        read_rows = _jsonl_rows if name.endswith(".jsonl") else _csv_rows
        for line, columns in read_rows(contents.root / name):
            where = f"{name}:{line}"
            try:
                image = _image_of(columns, posixpath.dirname(name), by_name)
                row = Row(where, _filled_caption(columns), columns)
            except ValueError as error:
                contents.rejects.append(Reject(where, str(error)))
                continue
            if image in contents.rows:
                contents.rejects.append(
                    Reject(where, f"another row for {image}; the one in {contents.rows[image].where} is used")
                )
            else:
                contents.rows[image] = row


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Each line's number with what it holds; an exception in its place when it is not JSON."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, json.loads(text)
            except UnicodeDecodeError:
                yield number, ValueError("not UTF-8")
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not JSON: {error}; expected one object a line")


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Each row's last line number with its columns; an exception in their place when their number is wrong."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines)
        try:
            names = next(reader, [])
            if "file_name" not in names:
                raise UserError(
                    f"{path} has the columns {', '.join(names) or '(none)'}; expected, separated by commas, "
                    f"file_name and one of {', '.join(CAPTION_COLUMNS)}"
                )
            for values in reader:
                if len(values) == len(names):
                    yield reader.line_num, dict(zip(names, values, strict=True))
                elif values:  # otherwise an empty line
                    wrong = f"{len(values)} fields under a header of {len(names)}; a text with commas in it needs quotes"
                    yield reader.line_num, ValueError(wrong)
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num} is not CSV: {error}") from None


def _image_of(columns: Any, folder: str, by_name: Mapping[str, str]) -> str:
    """The image that a row names; ValueError says what is wrong with the row."""
    if isinstance(columns, ValueError):
        raise columns
    if not isinstance(columns, dict):
        raise ValueError(
            f"a JSON {type(columns).__name__}; expected an object with file_name and one of {', '.join(CAPTION_COLUMNS)}"
        )
    name = columns.get("file_name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"file_name is {name!r}; expected the path of an image")
    path = unicodedata.normalize("NFC", posixpath.normpath(posixpath.join(folder, name.replace("\\", "/"))))
    if path.startswith(("/", "../")):
        raise ValueError(f"{name} lies outside the folder; expected a path relative to the metadata file")
    if path not in by_name:
        raise ValueError(f"{name}: no such file" if path.lower().endswith(IMAGE_SUFFIXES) else f"{name}: not an image file")
    return by_name[path]


def _filled_caption(columns: Mapping[str, Any]) -> str | None:
    for column in CAPTION_COLUMNS:
        value = columns.get(column)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{column} is {value!r:.60}; expected a string")
        if value and value.strip():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{column} holds half of a surrogate pair, which is not Unicode text") from None
            return str(value.strip())
    return None


def _read_captions(contents: Contents) -> None:
    """A row's caption, otherwise that of the file beside the image."""
    unused = set(contents.caption_files)
    covered = [posixpath.join(posixpath.dirname(name), "") for name in contents.metadata]  # metadata speak for what lies below
    for image in contents.images:
        stem = posixpath.splitext(image)[0]
        beside = [stem + suffix for suffix in CAPTION_SUFFIXES if stem + suffix in contents.caption_files]
        unused.difference_update(beside)
        row = contents.rows.get(image)
        caption = row.caption if row else None
        if row is None and any(image.startswith(folder) for folder in covered):
            contents.note("image that no row of the metadata names", image)
        elif row and caption is None:
            contents.note("metadata row without a caption", row.where)
        if beside and caption is not None:
            contents.note("caption file not used, because the metadata have a caption for its image", beside[0])
        elif beside:
            caption = _caption_file(contents, contents.caption_files[beside[0]])
            if len(beside) > 1:
                contents.note("image with two caption files, of which .txt is used", image)
        contents.captions.append(() if caption is None else (caption,))
    for name in sorted(unused):
        contents.note("caption file without an image", contents.caption_files[name])


def _caption_file(contents: Contents, name: str) -> str | None:
    try:
        caption = (contents.root / name).read_bytes().decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start}); its image is used without a caption"
    except OSError as error:
        reason = f"{error.strerror}; its image is used without a caption"
    else:
        if not caption:
            contents.note("empty caption file", name)
        return caption or None
    contents.rejects.append(Reject(name, reason))
    return None
