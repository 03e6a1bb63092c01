"""Which frames of a clip are taken, and how fast they are shown."""

from __future__ import annotations

import numpy as np

from tessera.config import MAX_FPS, VideoDataConfig
from tessera.data.clip_sources import UNREADABLE
from tessera.data.sources import Source
from tessera.media.clips import ClipFacts
from tessera.media.framing import frames_from, room_from
from tessera.randomness import mix

_LOOKED_AT = 64  # samples


def pick_frames(facts: ClipFacts, config: VideoDataConfig, draw: int | None) -> list[int]:
    """At most `config.frames` stored frames, in order: every `stride`-th, or at `fps` those of the nearest times, where one may
    come several times. A window of a longer clip starts at any frame where it still fits, as the draw says; without a draw at the
    middle one of these, or at the first frame. A clip of one frame is a picture, however long it is shown."""
    room = room_from(facts, config.fps, config.stride)
    count = min(config.frames, int(room[0]))
    last = int(np.flatnonzero(room >= count)[-1])  # the last start with room for them
    start = 0 if config.start == "first" else last // 2 if draw is None else mix(draw, 6) % (last + 1)
    return frames_from(facts, start, count, config.fps, config.stride)


def frame_rate(source: Source, config: VideoDataConfig) -> float | None:
    """Frames a second of what is picked: the config's, or those of the first clip that moves, within what a config may say; None
    where nothing does."""
    if config.fps is not None:
        return config.fps
    for index in range(min(len(source), _LOOKED_AT)):
        try:
            facts = source.read(index).facts()
        except UNREADABLE:
            continue
        if facts.num_frames > 1:
            return min(max(round(float(facts.fps) / config.stride, 3), 0.001), MAX_FPS)
    return None


def single_frame(facts: ClipFacts, draw: int) -> list[int]:
    """Any one."""
    return [mix(draw, 7) % facts.num_frames]
