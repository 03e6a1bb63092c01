"""Which frames of a clip are taken, how a short one is filled up, and how a frame that is not square becomes one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.media.clips import ClipFacts, Frames
from tessera.media.images import Colour, Pixels, resize, with_channels

_SLACK = 1e-6  # of a frame: times in files are rounded


def room_from(facts: ClipFacts, fps: float | None, stride: int) -> npt.NDArray[np.int64]:
    """t: how many frames there are from each stored one on, at `fps` or every `stride`-th. A clip of one frame is a picture,
    however long it is shown."""
    if facts.num_frames == 1:
        return np.ones(1, np.int64)
    if fps is None:
        return np.arange(facts.num_frames - 1, -1, -1) // stride + 1
    left = facts.duration - (facts.times - facts.times[0])
    return np.maximum(1, np.ceil(left * fps - _SLACK).astype(np.int64))


def frames_from(facts: ClipFacts, start: int, count: int, fps: float | None, stride: int) -> list[int]:
    """So many from a stored frame on: every `stride`-th, or at `fps` those of the nearest times, where one may come several
    times."""
    if fps is None:
        return list(range(start, start + count * stride, stride))
    return nearest_frames(facts.times, facts.times[start] + np.arange(count) / fps, _SLACK / fps)


def nearest_frames(times: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], slack: float) -> list[int]:
    """Of each wanted time the nearest of rising times; halfway between two, and up to `slack` behind it, the earlier."""
    middles = (times[:-1] + times[1:]) / 2
    places: list[int] = np.searchsorted(middles, wanted - slack, side="left").tolist()
    return places


def filled(frames: Frames, num_frames: int) -> Frames:
    """t h w c -> so many frames: behind the end the last one again."""
    return frames[np.minimum(np.arange(num_frames), len(frames) - 1)]


def side_of(resolution: int, zoom: float, *, cropped: bool) -> int:
    """The shorter side to which large frames are scaled as they are read: their final one where nothing but a cut follows;
    otherwise twice as much, so that the second scaling decides how they look."""
    return resolution if cropped and zoom == 1 else 2 * round(resolution * zoom)


def letterbox(picture: Pixels, resolution: int, background: Colour) -> Pixels:
    """A square that holds the whole picture, its longer side from edge to edge, with bars of the background."""
    height, width, channels = picture.shape
    longest = max(height, width)
    height, width = (max(1, round(side * resolution / longest)) for side in (height, width))
    colour = with_channels(np.array([[background]], np.uint8), channels=channels)
    square = np.tile(colour, (resolution, resolution, 1))
    top, left = (resolution - height) // 2, (resolution - width) // 2
    square[top : top + height, left : left + width] = resize(picture, height, width)
    return square
