"""Captions from the names of files and folders, for meshes: packs of them come named and without captions."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from tessera.data.folders import Contents
from tessera.data.splits import SPLIT_NAMES

_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")  # withoutBase
_GAP = re.compile(r"[^\w]|_")
_HASH = re.compile(r"(?=.*\d)[0-9a-f]{8,}", re.IGNORECASE)
_GENERIC = frozenset({"mesh", "meshes", "model", "models", "object", "obj", "scene", "untitled", "normalized", "simplified"})


def name_files(contents: Contents) -> None:
    """Each sample is captioned with the words of its file's name; where those say nothing, with those of its nearest folder."""
    named = [name_caption(path.split("/"), contents.sides is not None) for path in contents.samples]
    contents.captions = [(words,) if words else () for words in named]
    if count := sum(map(bool, named)):
        first = next(place for place, words in enumerate(named) if words)
        contents.summaries.append(
            f"no caption file and no table, so names of files or folders are the captions of {count:,} {contents.kind.many}: "
            f"{contents.samples[first]} is {named[first]!r} (data.name_captions=false: they are not)"
        )


def name_caption(parts: Sequence[str], split_folder: bool = False) -> str:
    """furniture, chair_wooden-02.obj -> chair wooden; apple, apple_000, mesh.obj -> apple. The name of a split folder is none."""
    folders = [part for part in parts[split_folder:-1] if part.lower() not in SPLIT_NAMES]
    return next((words for name in (posixpath.splitext(parts[-1])[0], *reversed(folders)) if (words := words_of(name))), "")


def words_of(name: str) -> str:
    """In lower case, without numbers and hashes; nothing where only words are left that any mesh may be called."""
    if any("\ud800" <= letter <= "\udfff" for letter in name):  # file names need not be text; captions must
        return ""
    words = [word.lower() for word in _GAP.sub(" ", _HUMP.sub(" ", name)).split()]
    words = [word for word in words if not word.isdigit() and not _HASH.fullmatch(word)]
    return "" if _GENERIC.issuperset(words) else " ".join(words)
