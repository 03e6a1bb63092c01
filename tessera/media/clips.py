"""Clip files in, uint8 frames out: animations (gif, apng, webp) by Pillow, videos by PyAV, folders of numbered pictures.

A file is what its first bytes say, whatever its name. Frames leave as t h w c, RGB, grey or RGBA; transparency is composited on
a stated background, rotation is applied. Only wanted frames are kept, so memory is bounded by what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.media.animations import animation_facts, animation_frames
from tessera.media.clip_facts import AvMissing, ClipFacts, Look, UnreadableClip, name_of
from tessera.media.images import WHITE, Channels, Colour, ImageFile, Pixels, stream_of
from tessera.media.videos import HEAD, container_of, video_facts, video_frames

__all__ = ["CLIP_SUFFIXES", "AvMissing", "Clip", "ClipFacts", "Frames", "Pick", "UnreadableClip", "read_clip", "read_facts"]

Frames: TypeAlias = npt.NDArray[np.uint8]  # t h w c
Pick: TypeAlias = Callable[[ClipFacts], Sequence[int]]

VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".avi")  # these need PyAV
CLIP_SUFFIXES = (".gif", ".apng", ".webp", ".png", *VIDEO_SUFFIXES)  # the names of files that may be clips


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames, t h w c, and how many of them a second shows."""

    frames: Frames
    fps: float


def read_facts(file: ImageFile) -> ClipFacts:
    """What a file holds. No pixels are decoded, but the first frame of a video; all frames of one whose packets have no times
    (some avi). A still picture is a clip of one frame that is shown for a tenth of a second."""
    return video_facts(file) if _is_video(file) else animation_facts(file)


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
    facts = facts or read_facts(file)
    read = video_frames if _is_video(file) else animation_frames
    return _gathered(facts, pick, lambda wanted: read(file, wanted, Look(channels, background, min_side), facts))


def _is_video(file: ImageFile) -> bool:
    try:
        with stream_of(file) as stream:
            return container_of(stream.read(HEAD)) is not None
    except OSError as error:
        raise UnreadableClip(name_of(file), (error.strerror or str(error)).lower()) from error


def _gathered(facts: ClipFacts, pick: Pick, read: Callable[[list[int]], Iterator[Pixels]]) -> Clip:
    """One array, made once: no list of frames beside it."""
    places = np.asarray(pick(facts), dtype=np.int64)
    if places.ndim != 1 or not len(places) or np.any(np.diff(places) < 0) or places[0] < 0 or places[-1] >= facts.num_frames:
        raise ValueError(f"got frames {places.tolist()} of {facts.num_frames}; expected at least one, rising, from 0")
    wanted, counts = np.unique(places, return_counts=True)
    frames: Frames | None = None
    at = 0
    for picture, count in zip(read(wanted.tolist()), counts.tolist(), strict=True):
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
