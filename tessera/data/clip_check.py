"""A folder of clips in, a report out: codecs, sizes, lengths, rates, what is odd, what is rejected and why, what is alike."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.config import VideoDataConfig
from tessera.data.captions import names_side
from tessera.data.clip_sources import UNREADABLE, StoredClips, num_axes
from tessera.data.clip_survey import SeenClip, survey_clips, survey_sketches
from tessera.data.duplicates import near_sequences
from tessera.data.folders import Contents, Reject
from tessera.data.frame_folders import numbered_folders
from tessera.data.report import NUM_SHOWN, Report, Tally, counts, equal_groups, histogram, shortened
from tessera.data.sketches import sketch_at
from tessera.data.sources import split_indices
from tessera.media.clip_facts import ClipFacts, UnreadableClip
from tessera.media.clips import read_facts
from tessera.media.framing import room_from

_NUM_SIZES = 10
_NUM_LOOKED_AT = 64  # files that may be animated, to tell what a folder holds
_SHAPE_SLACK = 0.02  # width to height of a sketch that is smaller or larger than its clip
_LIMITS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # of the lengths histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipEntry:
    """One clip of the report."""

    path: str
    num_frames: int
    seconds: float
    fps: float
    width: int
    height: int
    format: str
    codec: str
    num_taken: int
    """Frames that training takes of it: at `data.fps` or `data.stride`, up to `data.frames`."""

    @classmethod
    def of(cls, path: str, facts: ClipFacts, num_taken: int) -> ClipEntry:
        return cls(
            path=path,
            num_frames=facts.num_frames,
            seconds=round(facts.duration, 3),
            fps=round(facts.fps, 3),
            width=facts.width,
            height=facts.height,
            format=facts.format,
            codec=facts.codec,
            num_taken=num_taken,
        )


@dataclass(frozen=True, kw_only=True)
class ClipReport(Report):
    """What a folder of clips holds. Single pictures are clips of one frame; they count in no length and no rate."""

    num_stills: int
    """Single pictures among the clips."""
    num_alpha: int
    """Clips with transparency, which is composited on data.background."""
    num_naming_sides: int
    """Clips whose captions say left or right; `data.flip=true` does not mirror them."""
    frames: int
    """data.frames."""
    num_short: int
    """Clips, single pictures aside, of which fewer frames than data.frames are taken."""
    sizes: Mapping[str, int]
    """width x height -> number of clips: the ten most frequent, and `other`."""
    formats: Mapping[str, int]
    codecs: Mapping[str, int]
    lengths: Mapping[str, int]
    """Range of frames -> number of clips."""
    fewest_frames: int
    median_frames: int
    most_frames: int
    least_seconds: float
    most_seconds: float
    shortest: str
    """The clip of the fewest frames; empty where there are only single pictures."""
    longest: str
    fps: Mapping[str, int]
    """Frames a second -> number of clips: the ten most frequent, and `other`."""
    odd: tuple[Reject, ...]
    """What is strange about clips that are used: cut short, nothing moves, uneven times."""
    num_sketches: int
    """Clips that have a sketch beside them, readable or not; data.sketch=files learns from it."""
    num_first_sketches: int
    """Those whose sketch is a picture: of the first frame alone."""
    odd_sketches: tuple[Reject, ...]
    """Sketches that cannot be read, or that are shorter, longer or of another shape than their clips."""
    files: tuple[ClipEntry, ...]

    def facts(self) -> Iterator[str]:
        if self.shortest:
            yield f"  lengths  {counts(self.lengths)} frames; {self.least_seconds:g} to {self.most_seconds:g} seconds"
            yield (
                f"           fewest {self.fewest_frames:,} ({self.shortest}), median {self.median_frames:,}, "
                f"most {self.most_frames:,} ({self.longest})"
            )
            yield f"  fps      {counts(self.fps)}"
        yield f"  sizes    {counts(self.sizes)}"
        yield f"  formats  {counts(self.formats)}; codecs {counts(self.codecs)}"
        if self.num_stills or self.num_alpha:
            yield f"  pictures {self.num_stills:,} of one frame; with transparency {self.num_alpha:,}"
        if self.num_sketches:
            yield f"  sketches of {self.num_sketches:,} clips; of the first frame alone {self.num_first_sketches:,}"

    def remarks(self) -> Iterator[str]:
        if self.num_short:
            yield f"  {self.num_short:,} clips give fewer than data.frames={self.frames} frames; what is missing counts nowhere"
        if self.num_naming_sides:
            yield f"  captions of {self.num_naming_sides:,} clips say left or right; data.flip=true leaves these as they are"
        yield from shortened([f"  odd      {each.path}: {each.reason}" for each in self.odd], NUM_SHOWN)
        yield from shortened([f"  sketch   {each.path}: {each.reason}" for each in self.odd_sketches], NUM_SHOWN)


def check_clips(
    source: StoredClips, config: VideoDataConfig, path: str, progress: Callable[[int, int], None] | None = None
) -> ClipReport:
    """Decodes every frame of every clip."""
    seen, rejects = dict[int, SeenClip](), list(source.rejects)
    for index, result in enumerate(survey_clips(source)):
        if isinstance(result, SeenClip):
            seen[index] = result
        else:
            rejects.append(Reject(source.name(index), result.reason))
        if progress is not None:
            progress(index + 1, len(source))
    places = list(seen)
    tally = Tally(
        source=source,
        config=config,
        seen=places,
        num_unreadable=len(source) - len(seen),
        held_out=frozenset(split_indices(source, config.validation_fraction)[1].tolist()),
        equal=equal_groups({index: each.digest for index, each in seen.items()}),
        near=[[places[member] for member in group] for group in near_sequences([each.prints for each in seen.values()])],
    )
    files = [
        ClipEntry.of(source.name(index), each.facts, min(config.frames, int(room_from(each.facts, config.fps, config.stride)[0])))
        for index, each in seen.items()
    ]
    facts = [each.facts for each in seen.values()]
    moving = [file for file in files if file.num_frames > 1]
    return ClipReport(
        path=path,
        num_stills=len(files) - len(moving),
        num_alpha=sum(each.has_alpha for each in facts),
        num_naming_sides=sum(map(names_side, tally.captions().values())),
        frames=config.frames,
        num_short=sum(file.num_taken < config.frames for file in moving),
        sizes=histogram((f"{each.width}x{each.height}" for each in facts), _NUM_SIZES),
        formats=histogram(each.format for each in facts),
        codecs=histogram(each.codec for each in facts),
        **_lengths(moving),
        odd=tuple(Reject(source.name(index), reason) for index, each in seen.items() for reason in each.odd),
        **_sketches(source, seen),
        files=tuple(files),
        **tally.fields(rejects, ()),
    )


def _sketches(source: StoredClips, seen: Mapping[int, SeenClip]) -> dict[str, Any]:
    found = {index: sketch for index, sketch in enumerate(survey_sketches(source)) if sketch is not None}
    odd = [Reject(source.name(index), reason) for index, sketch in found.items() for reason in _odd(sketch, seen.get(index))]
    return {
        "num_sketches": len(found),
        "num_first_sketches": sum(isinstance(sketch, ClipFacts) and sketch.num_frames == 1 for sketch in found.values()),
        "odd_sketches": tuple(odd),
    }


def _odd(sketch: ClipFacts | UnreadableClip, clip: SeenClip | None) -> Iterator[str]:
    if isinstance(sketch, UnreadableClip):
        yield f"its sketch cannot be read, so data.sketch=files leaves the clip out: {sketch}"
    elif clip is not None:
        facts = clip.facts
        if sketch.num_frames not in (1, facts.num_frames):
            rest = "those behind have none" if sketch.num_frames < facts.num_frames else "the others are not read"
            yield f"its sketch has {sketch.num_frames:,} frames for {facts.num_frames:,}; {rest}"
        if abs(sketch.width * facts.height / (sketch.height * facts.width) - 1) > _SHAPE_SLACK:
            sizes = f"{sketch.width} x {sketch.height} for {facts.width} x {facts.height}"
            yield f"its sketch is of another shape, so it is cut at other places: {sizes}"


def _lengths(moving: Sequence[ClipEntry]) -> dict[str, Any]:
    numbers = np.array([file.num_frames for file in moving] or [0])
    seconds = [file.seconds for file in moving] or [0.0]
    by_length = sorted(moving, key=lambda file: file.num_frames)
    return {
        "lengths": length_histogram([file.num_frames for file in moving]),
        "fewest_frames": int(numbers.min()),
        "median_frames": int(np.median(numbers)),
        "most_frames": int(numbers.max()),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "shortest": by_length[0].path if moving else "",
        "longest": by_length[-1].path if moving else "",
        "fps": histogram((f"{file.fps:.4g}" for file in moving), _NUM_SIZES),
    }


def length_histogram(numbers: Sequence[int]) -> dict[str, int]:
    """Ranges that about double, those without clips left out."""
    found = dict[str, int]()
    for low, high in zip(_LIMITS, (*_LIMITS[1:], None), strict=True):
        count = sum(low < number and (high is None or number <= high) for number in numbers)
        if count:
            found[f"{low + 1}-{high}" if high is not None else f"over {low}"] = count
    return found


# --- what a folder holds


def mostly_clips(contents: Contents) -> bool:
    """Whether half of the files or more are videos, animations (told by the headers of a few), or frames in folders that are said
    to be clips; where there are only arrays, whether one is a stack of clips."""
    if not contents.samples and not contents.videos:
        return not contents.shards and any(num_axes(contents.root / file) == 5 for file in contents.arrays)
    folders = {folder.path for folder in numbered_folders(contents) if folder.told}
    samples = [path for path in contents.samples if sketch_at(path) is None]
    loose = [path for path in samples if posixpath.dirname(path) not in folders]
    in_folders = len(samples) - len(loose)
    may_move = [path for path in loose if path.lower().endswith((".gif", ".webp", ".png"))]
    step = max(1, len(may_move) // _NUM_LOOKED_AT)
    looked_at = may_move[::step]
    share = sum(_is_animated(contents, path) for path in looked_at) / max(1, len(looked_at))
    animated = share * len(may_move)
    return len(contents.videos) + in_folders + animated >= len(loose) - animated


def _is_animated(contents: Contents, path: str) -> bool:
    try:
        return read_facts(contents.root / path).num_frames > 1
    except UNREADABLE:
        return False
