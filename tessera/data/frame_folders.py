"""Folders that are one clip each: a listed folder in, those of its folders that hold the numbered frames of a clip out.

A folder is one clip when it lies below the root, holds nothing but at least two png, jpg or bmp pictures of one format, which are
called the same up to their numbers, no number missing, and no table has a row for one of them. That is also what a class folder
of numbered pictures looks like. So one directly below the root (or its split folder) is taken for a clip only where something
says so, for it or for another one beside it: a caption file or a row for the folder, or pictures called `frame...`; or where
`data.class_folders=false` says that there are no class folders.
"""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.data.folders import CAPTION_SUFFIXES, Contents
from tessera.data.splits import SPLIT_NAMES
from tessera.data.tables import table_rows

_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".bmp": "bmp"}  # a .gif or .webp is more likely a clip itself
_NUMBER = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NumberedFolder:
    """A folder that looks like the frames of one clip."""

    path: str
    told: bool  # something says that it is one


def frame_folders(contents: Contents, *, split_folders: bool, class_folders: bool) -> list[str]:
    """The folders that are clips; a note names those that might be."""
    found = numbered_folders(contents)
    told = {posixpath.dirname(folder.path) for folder in found if folder.told}
    taken = []
    for folder in found:
        parts = folder.path.split("/")
        below_split = split_folders and parts[0].lower() in SPLIT_NAMES
        if posixpath.dirname(folder.path) in told or len(parts) - below_split > 1 or not class_folders:
            taken.append(folder.path)
        else:
            contents.note(
                "folder of numbered pictures, each of which is taken for a single picture; where it is a clip, caption it with "
                "NAME.txt beside the folder, name its pictures frame_0001.png and so on, or set data.class_folders=false",
                f"{folder.path}/",
            )
    return taken


def numbered_folders(contents: Contents) -> list[NumberedFolder]:
    """All that look like clips, sorted."""
    if not any("/" in path for path in contents.samples):
        return []
    pictures = defaultdict[str, list[str]](list)
    for path in contents.samples:
        pictures[posixpath.dirname(path)].append(posixpath.basename(path))
    impure = _folders_of_others(contents)
    captioned = {posixpath.splitext(name)[0] for name in contents.caption_files if name.endswith(CAPTION_SUFFIXES)}
    named = _named(contents)
    split_rows = {posixpath.dirname(path) for path in named}
    found = []
    for folder, names in sorted(pictures.items()):
        prefix = common_prefix(names)
        if prefix is None or folder in impure or folder == "" or folder.lower() in SPLIT_NAMES:
            continue
        if unicodedata.normalize("NFC", folder) in split_rows:
            continue
        told = folder in captioned or unicodedata.normalize("NFC", folder) in named or prefix.lower().startswith("frame")
        found.append(NumberedFolder(folder, told))
    return found


def common_prefix(names: Sequence[str]) -> str | None:
    """What pictures are called before their numbers, where these run on without a gap; None where they do not."""
    parts = [posixpath.splitext(name) for name in names]
    matches = [_NUMBER.fullmatch(stem) for stem, _ in parts]
    prefixes = {match[1] if match else None for match in matches}
    formats = {_FORMATS.get(suffix.lower()) for _, suffix in parts}
    numbers = {int(match[2]) for match in matches if match}
    prefix = prefixes.pop()
    if len(names) < 2 or prefixes or prefix is None or len(formats) != 1 or None in formats:
        return None
    return prefix if len(numbers) == len(names) == max(numbers) - min(numbers) + 1 else None


def _folders_of_others(contents: Contents) -> set[str]:
    """Folders that hold files of another kind, or folders."""
    files = (contents.caption_files.values(), contents.metadata, contents.shards, contents.arrays, contents.unread)
    held = {posixpath.dirname(path) for paths in files for path in paths}
    deepest = held | {posixpath.dirname(path) for path in contents.samples}
    return held | set(_parents(deepest))


def _parents(folders: Iterable[str]) -> Iterable[str]:
    for folder in folders:
        while folder:
            folder = posixpath.dirname(folder)
            yield folder


def _named(contents: Contents) -> set[str]:
    """What rows of tables speak of. Rows that are wrong are named when captions are read."""
    named = set()
    for name in contents.metadata:
        for _, columns in table_rows(contents.root / name):
            value = columns.get("file_name") if isinstance(columns, dict) else None
            if isinstance(value, str):
                path = posixpath.normpath(posixpath.join(posixpath.dirname(name), value.replace("\\", "/")))
                named.add(unicodedata.normalize("NFC", path))
    return named
