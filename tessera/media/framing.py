"""Which frames of a clip are taken, and how a frame that is not square becomes one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.media.clips import ClipFacts
from tessera.media.images import Colour, Pixels, resize, with_channels

SLACK = 1e-6  # of a frame: times in files are rounded


def every_frame(facts: ClipFacts, fps: float | None, stride: int, most: int | None = None) -> list[int]:
    """All stored frames, or every `stride`-th; with `fps` those of the nearest times, where one may come several times. Not more
    than `most`. A clip of one frame is a picture, however long it is shown."""
    if facts.num_frames == 1:
        return [0]
    if fps is None:
        return list(range(0, facts.num_frames, stride))[:most]
    count = max(1, int(np.ceil(facts.duration * fps - SLACK)))
    wanted = facts.times[0] + np.arange(count if most is None else min(count, most)) / fps
    return nearest_frames(facts.times, wanted, SLACK / fps)


def nearest_frames(times: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], slack: float) -> list[int]:
    """Of each wanted time the nearest of rising times; halfway between two, and up to `slack` behind it, the earlier."""
    middles = (times[:-1] + times[1:]) / 2
    places: list[int] = np.searchsorted(middles, wanted - slack, side="left").tolist()
    return places


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
