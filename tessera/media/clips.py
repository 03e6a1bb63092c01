"""Clip files in, uint8 frames out: animations (gif, apng, webp) by Pillow, videos by PyAV, folders of numbered pictures.

A file is what its first bytes say, whatever its name. Frames leave as t h w c, RGB, grey or RGBA; transparency is composited on
a stated background, rotation is applied. Only wanted frames are kept, so memory is bounded by what is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.media.animations import animation_facts, animation_frames, animation_oddities
from tessera.media.clip_facts import AvMissing, ClipFacts, Look, UnreadableClip, name_of
from tessera.media.frame_folders import folder_facts, folder_frames, missing_numbers
from tessera.media.images import WHITE, Blob, Channels, Colour, ImageFile, Pixels, stream_of
from tessera.media.videos import HEAD, container_of, video_facts, video_frames, video_index

__all__ = [
    "CLIP_SUFFIXES", "VIDEO_SUFFIXES", "AvMissing", "Clip", "ClipFacts", "Frames", "Inspection", "Pick", "UnreadableClip",
    "inspect_clip", "read_clip", "read_facts",
]  # fmt: skip

Frames: TypeAlias = npt.NDArray[np.uint8]  # t h w c
Pick: TypeAlias = Callable[[ClipFacts], Sequence[int]]

VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".avi")  # these need PyAV
CLIP_SUFFIXES = (".gif", ".apng", ".webp", ".png", *VIDEO_SUFFIXES)  # the names of files that may be clips


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames, t h w c, and how many of them a second shows."""

    frames: Frames
    fps: float

    def __repr__(self) -> str:
        return f"Clip({' x '.join(map(str, np.shape(self.frames)))}, {self.fps} fps)"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a clip is and what is odd about it, a line each; nothing where all is well."""

    facts: ClipFacts
    odd: tuple[str, ...]


def read_facts(file: ImageFile) -> ClipFacts:
    """What a file, or a folder of numbered pictures, holds. No pixels are decoded, but the first frame of a video; all frames of
    an avi, whose packets have no times. A frame is shown for a tenth of a second where nothing says how long: in a folder,
    in a gif without durations, in a still picture, which is a clip of one frame. A file that is cut short has the frames that
    are there as a whole."""
    match _kind(file):
        case "folder":
            return folder_facts(_path(file))
        case "video":
            return video_facts(file)
        case _:
            return animation_facts(file)


def read_clip(
    file: ImageFile,
    pick: Pick,
    *,
    channels: Channels = 3,
    background: Colour = WHITE,
    min_side: int | None = None,
    facts: ClipFacts | None = None,
) -> Clip:
    """The frames that `pick` chooses by their place in the file, rising, repeats allowed. `min_side` scales a larger frame down
    until that is its shorter side. `facts`, where they are known already, are not read again. The rate of the clip is that of
    the chosen frames: every second one of 24 fps gives 12."""
    return _gathered(file, facts or read_facts(file), pick, Look(channels, background, min_side))


def inspect_clip(file: ImageFile, see: Callable[[int, Pixels], None] | None = None) -> Inspection:
    """Decode all of a file, exactly as `read_clip` does; a frame that cannot be decoded raises `UnreadableClip`. `see` is given
    every frame, as RGB, one at a time."""
    facts, kind = read_facts(file), _kind(file)
    odd = list(video_index(file).odd) if kind == "video" else animation_oddities(file) if kind == "animation" else []
    if kind == "folder" and (gaps := missing_numbers(_path(file))):
        odd.append(f"{gaps} numbers are missing between the first and the last picture")
    previous: Pixels | None = None
    moves, sizes = False, set[tuple[int, int]]()
    frames = range(facts.num_frames)
    read = video_frames(file, frames, Look(), facts, sizes) if kind == "video" else _frames(file, frames, Look(), facts)
    for place, frame in enumerate(read):
        moves = moves or (previous is not None and not np.array_equal(frame, previous))
        previous = frame
        if see is not None:
            see(place, frame)
    if facts.num_frames > 1 and not moves:
        odd.append(f"nothing moves: all {facts.num_frames} frames are equal")
    if len(sizes) > 1:
        odd.append(f"the picture changes its size: {', '.join(f'{width} x {height}' for width, height in sorted(sizes))}")
    gaps_between = np.diff(facts.times)
    if len(gaps_between) and gaps_between.max() > 2 * gaps_between.min():
        odd.append(f"frames are shown for {gaps_between.min():.3g} to {gaps_between.max():.3g} s")
    return Inspection(facts, tuple(odd))


def _path(file: ImageFile) -> Path | str:
    assert not isinstance(file, Blob)
    return file


def _kind(file: ImageFile) -> Literal["folder", "video", "animation"]:
    if not isinstance(file, Blob) and os.path.isdir(file):
        return "folder"
    try:
        with stream_of(file) as stream:
            return "animation" if container_of(stream.read(HEAD)) is None else "video"
    except OSError as error:
        raise UnreadableClip(name_of(file), (error.strerror or str(error)).lower()) from error


def _frames(file: ImageFile, wanted: Sequence[int], look: Look, facts: ClipFacts) -> Iterator[Pixels]:
    match _kind(file):
        case "folder":
            return folder_frames(_path(file), wanted, look, facts)
        case "video":
            return video_frames(file, wanted, look, facts)
        case _:
            return animation_frames(file, wanted, look, facts)


def _gathered(file: ImageFile, facts: ClipFacts, pick: Pick, look: Look) -> Clip:
    """One array, made once: no list of frames beside it."""
    places = np.asarray(pick(facts), dtype=np.int64)
    if places.ndim != 1 or not len(places) or np.any(np.diff(places) < 0) or places[0] < 0 or places[-1] >= facts.num_frames:
        raise ValueError(f"got frames {places.tolist()} of {facts.num_frames}; expected at least one, rising, from 0")
    wanted, counts = np.unique(places, return_counts=True)
    frames: Frames | None = None
    at = 0
    for picture, count in zip(_frames(file, wanted.tolist(), look, facts), counts.tolist(), strict=True):
        if frames is None:
            frames = np.empty((len(places), *picture.shape), dtype=np.uint8)
        frames[at : at + count] = picture
        at += count
    assert frames is not None
    return Clip(frames, _rate(facts, wanted, len(places)))


def _rate(facts: ClipFacts, wanted: npt.NDArray[np.int64], num_frames: int) -> float:
    """Of the distinct frames by their times; repeats are shown within the time of the frame that they repeat."""
    span = float(facts.times[wanted[-1]] - facts.times[wanted[0]])
    pace = (len(wanted) - 1) / span if span > 0 else facts.fps
    return pace * num_frames / len(wanted)
