"""Sketches beside clips: NAME.sketch.gif, or the folder NAME.sketch, belongs to the clip NAME and is no sample of its own."""

from __future__ import annotations

import posixpath

from tessera.config import UserError
from tessera.data.folders import Contents

MARK = ".sketch"


def sketch_at(path: str) -> str | None:
    """The sketch that a file is, or that it is a frame of: itself, or a folder above it."""
    folders = path.split("/")[:-1]
    for depth, name in enumerate(folders, 1):
        if name.endswith(MARK):
            return "/".join(folders[:depth])
    return path if posixpath.splitext(path)[0].endswith(MARK) else None


def take_sketches(contents: Contents) -> dict[str, str]:
    """Takes them from among the samples: the stem of the clip that each belongs to -> the sketch."""
    found: dict[str, str] = {}
    videos = {path for path in contents.videos if sketch_at(path) is not None}
    contents.unread = [path for path in contents.unread if path not in videos]
    for paths in (contents.samples, contents.videos, contents.arrays):
        for path in paths:
            if (sketch := sketch_at(path)) is None:
                continue
            contents.sketches |= {sketch, path}
            stem = (sketch if sketch != path else posixpath.splitext(path)[0]).removesuffix(MARK)
            if found.setdefault(stem, sketch) != sketch:
                contents.note("another sketch of the same clip, not read", sketch)
        paths[:] = [path for path in paths if sketch_at(path) is None]
    return found


def pair_sketches(contents: Contents, found: dict[str, str], *, read: bool) -> list[str]:
    """The sketch of every sample, empty where it has none."""
    sketches = [found.get(contents.stem(sample), "") for sample in contents.samples]
    paired = set(sketches)
    for sketch in found.values():
        if sketch not in paired:
            contents.note("sketch without a clip", sketch)
        elif not read:
            contents.note("sketch of a clip, not read (data.sketch=files: it is)", sketch)
    if read and not any(sketches):
        raise no_sketches(str(contents.root))
    return sketches


def no_sketches(where: str) -> UserError:
    return UserError(
        f"data.sketch=files, and no clip of {where} has a sketch; expected NAME.sketch.gif (or another format, or a folder "
        f"NAME.sketch of frames) beside the clip NAME; data.sketch=edges draws the outlines of clips instead"
    )
