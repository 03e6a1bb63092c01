"""Every picture of a source decoded in full, once, by a thread a core; what leaves is small."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tessera.data.duplicates import Fingerprint, connected, fingerprint, near_groups
from tessera.data.sources import Stored, StoredImages
from tessera.media.images import ImageFacts, UnreadableImage

_CHUNK = 512  # pictures in flight, so that a million of them need no million futures


@dataclass(frozen=True, slots=True)
class Seen:
    """What is kept of a picture."""

    facts: ImageFacts
    digest: bytes
    print: Fingerprint


def survey(source: StoredImages) -> Iterator[Seen | UnreadableImage]:
    """In the source's order; an error in the place of a picture that cannot be decoded."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # PIL decodes and hashlib hashes outside the interpreter's lock
        for start in range(0, len(source), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(source)))
            yield from pool.map(lambda index: _look(source, index), chunk)


def near_pictures(source: StoredImages) -> list[list[int]]:
    """The samples that look almost the same, in groups. Decodes all of them."""
    prints = {index: seen.print for index, seen in enumerate(survey(source)) if isinstance(seen, Seen)}
    places = list(prints)
    return [[places[member] for member in group] for group in near_groups(list(prints.values()))]


def merged_groups(source: Stored, near: Sequence[Sequence[int]]) -> list[str]:
    """The group of every sample, with near-duplicates in one: that of the first among them."""
    groups = [source.group(index) for index in range(len(source))]
    first: dict[str, int] = {}
    for index, group in enumerate(groups):
        first.setdefault(group, index)
    pairs = [(group[0], other) for group in near for other in group[1:]]
    for part in connected(len(source), [*pairs, *((first[group], index) for index, group in enumerate(groups))]):
        for member in part:
            groups[member] = groups[part[0]]
    return groups


def _look(source: StoredImages, index: int) -> Seen | UnreadableImage:
    try:
        examined = source.examine(index)
    except UnreadableImage as error:
        return error
    except OSError as error:  # it vanished between two reads
        return UnreadableImage(source.name(index), (error.strerror or str(error)).lower())
    return Seen(examined.facts, examined.digest, fingerprint(examined.picture))
