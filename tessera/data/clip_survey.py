"""Every clip of a source decoded once, by a thread a core; what leaves is small. And the clips that look almost the same.

Two clips are near-duplicates when their first frames are, their middle ones, and their last ones (`duplicates.py`): so a copy in
another format, size or rate is found, one that was cut at its ends is not, and neither is one that starts alike and moves on
differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tessera.data.clip_sources import StoredClip, StoredClips
from tessera.data.duplicates import Fingerprint, fingerprint, near_sequences
from tessera.media.clip_facts import AvMissing, ClipFacts, UnreadableClip
from tessera.media.images import Pixels, with_channels

T = TypeVar("T")
_CHUNK = 64  # clips in flight


@dataclass(frozen=True, slots=True)
class SeenClip:
    """What is kept of a clip."""

    facts: ClipFacts
    odd: tuple[str, ...]  # what is strange about it
    digest: bytes
    prints: tuple[Fingerprint, ...]  # of its first, middle and last frame


def survey_clips(source: StoredClips) -> Iterator[SeenClip | UnreadableClip]:
    """In the source's order; an error in the place of a clip that cannot be decoded to its end."""
    return _each(source, lambda index: _examine(source.read(index)))


def survey_sketches(source: StoredClips) -> Iterator[ClipFacts | UnreadableClip | None]:
    """Of every clip what its sketch is, decoded to its end; None where it has none."""

    def look(index: int) -> ClipFacts | None:
        sketch = source.sketch(index)
        return None if sketch is None else sketch.inspect(lambda place, picture: None).facts

    return _each(source, look)


def near_clips(source: StoredClips) -> list[list[int]]:
    """The samples that look almost the same, in groups. Decodes three frames of each."""
    every = _each(source, lambda index: _prints(source.read(index)))
    prints = {index: found for index, found in enumerate(every) if not isinstance(found, UnreadableClip)}
    places = list(prints)
    return [[places[member] for member in group] for group in near_sequences(list(prints.values()))]


def _examine(clip: StoredClip) -> SeenClip:
    wanted = _three(clip.facts())
    seen: dict[int, Fingerprint] = {}

    def see(place: int, picture: Pixels) -> None:
        if place in wanted:
            seen[place] = fingerprint(picture)

    inspected = clip.inspect(see)
    return SeenClip(inspected.facts, inspected.odd, clip.digest(), tuple(seen[place] for place in wanted))


def _prints(clip: StoredClip) -> tuple[Fingerprint, ...]:
    return tuple(fingerprint(with_channels(picture, channels=3)) for picture in clip.read(_three).frames)


def _three(facts: ClipFacts) -> list[int]:
    return [0, (facts.num_frames - 1) // 2, facts.num_frames - 1]


def _each(source: StoredClips, look: Callable[[int], T]) -> Iterator[T | UnreadableClip]:
    def tried(index: int) -> T | UnreadableClip:
        try:
            return look(index)
        except UnreadableClip as error:
            return error
        except AvMissing as error:  # a video under another name
            return UnreadableClip(source.name(index), str(error))
        except OSError as error:  # it vanished between two reads
            return UnreadableClip(source.name(index), (error.strerror or str(error)).lower())

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for start in range(0, len(source), _CHUNK):
            yield from pool.map(tried, range(start, min(start + _CHUNK, len(source))))
