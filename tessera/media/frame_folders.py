"""A folder of numbered pictures as a clip: its pictures in the order of the numbers in their names, frame2 before frame10."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from tessera.media.animations import animation_facts
from tessera.media.clip_facts import PAUSE, ClipFacts, Look, UnreadableClip
from tessera.media.images import IMAGE_SUFFIXES, Pixels, UnreadableImage, read_image


def frame_files(folder: Path | str) -> list[Path]:
    """The pictures that lie in a folder, digits in their names compared as numbers. Hidden files are passed over."""
    try:
        found = [path for path in Path(folder).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != "."]
    except OSError as error:
        raise UnreadableClip(folder, (error.strerror or str(error)).lower()) from error
    return sorted(found, key=lambda path: (_natural(path.name), path.name))


def is_frame_folder(folder: Path | str) -> bool:
    """Whether all pictures of a folder, two or more, have one name but for a number: frame_001.png, frame_002.png."""
    names = [re.fullmatch(r"(.*?)(\d+)(\D*)", path.stem) for path in frame_files(folder)]
    parts = {(name[1], name[3]) for name in names if name}
    return len(names) > 1 and None not in names and len(parts) == 1


def folder_facts(folder: Path | str) -> ClipFacts:
    """Size and mode are those of the first picture. A frame is shown for a tenth of a second."""
    files = frame_files(folder)
    if not files:
        raise UnreadableClip(folder, f"no pictures in it; expected {' '.join(IMAGE_SUFFIXES)}")
    first, count = animation_facts(files[0]), len(files)
    times = np.arange(count, dtype=np.float64) * np.float64(PAUSE)
    return ClipFacts(
        count, first.width, first.height, times, count * PAUSE, "folder", first.format, first.mode,
        first.has_alpha, first.rotation,
    )  # fmt: skip


def folder_frames(folder: Path | str, wanted: Sequence[int], look: Look, facts: ClipFacts) -> Iterator[Pixels]:
    """The wanted pictures. One of another size than the first is refused: a player would not know what to do with it."""
    files = frame_files(folder)
    for index in wanted:
        try:
            array = read_image(files[index], channels=look.channels, background=look.background)
        except UnreadableImage as error:
            raise UnreadableClip(folder, f"{files[index].name}: {error.reason}") from error
        height, width = array.shape[:2]
        if (width, height) != (facts.width, facts.height):
            raise UnreadableClip(folder, f"{files[index].name} is {width} x {height}, the first {facts.width} x {facts.height}")
        yield look.of_array(array)


def frame_numbers(folder: Path | str) -> list[int]:
    """Of the pictures in their order the numbers in their names, counted from the lowest; where the names are not numbered, from
    0 on. Two pictures of one number are refused."""
    files, numbers = frame_files(folder), _numbers(folder)
    for path, (before, number) in zip(files[1:], pairwise(numbers), strict=False):
        if number == before:
            raise UnreadableClip(folder, f"{path.name} has the number of another picture")
    return [number - numbers[0] for number in numbers]


def missing_numbers(folder: Path | str) -> int:
    """How many numbers between the first and the last are not there; 0 where the names are not numbered. Pictures of one number
    count once: a clip has both, one after the other."""
    numbers = set(_numbers(folder))
    return max(numbers) - min(numbers) + 1 - len(numbers) if numbers else 0


def _numbers(folder: Path | str) -> list[int]:
    """Of the pictures in their order the numbers in their names; where the names are not numbered, from 0 on."""
    files = frame_files(folder)
    if not is_frame_folder(folder):
        return list(range(len(files)))
    return [int(re.findall(r"\d+", path.stem)[-1]) for path in files]


def _natural(name: str) -> list[tuple[int, str]]:
    """Runs of digits as numbers, before letters; what is between as lower case."""
    return [(int(part), "") if part.isdigit() else (-1, part.lower()) for part in re.split(r"([0-9]+)", name)]
