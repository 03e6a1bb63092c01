"""`tessera data check`: a folder in, a report out that a person or a program can read. Every file is decoded in full.

What is counted is what training would see: a sample is an image that opens, and whatever does not is a reject with its reason.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera.config.sections import DataConfig
from tessera.data.sources import ImageFolder, Reject, split_of
from tessera.media.images import ImageFacts, UnreadableImage, inspect_image

_NUM_SIZES = 10
_NUM_EXAMPLES = 3
_NUM_DUPLICATE_GROUPS = 10
_NUM_SHOWN = 10
_CHUNK = 512  # files in flight, so that a million of them need no million futures


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a folder holds. The fields are the keys of `--json`."""

    kind: str
    path: str
    num_samples: int
    num_captioned: int
    num_rejected: int
    rejects: tuple[Reject, ...]
    sizes: Mapping[str, int]
    """width x height -> number of images: the ten most frequent, and `other`."""
    modes: Mapping[str, int]
    formats: Mapping[str, int]
    caption_examples: tuple[str, ...]
    split: Mapping[str, int]
    """Number of samples in train and validation at the default fraction."""
    num_exact_duplicates: int
    """Files whose bytes equal those of an earlier one."""
    duplicates: tuple[tuple[str, ...], ...]
    """The first ten groups of equal files."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: counts first, then what is wrong."""
        lines = [
            f"{self.path}: {self.num_samples:,} images, {self.num_captioned:,} captions, {self.num_rejected:,} rejects",
            f"  sizes    {_counts(self.sizes)}",
            f"  formats  {_counts(self.formats)}; modes {_counts(self.modes)}",
            f"  split    {_counts(self.split)}",
            *(f"  caption  {caption}" for caption in self.caption_examples),
        ]
        if self.num_captioned < self.num_samples:
            lines.append(f"  {self.num_samples - self.num_captioned:,} of {self.num_samples:,} images have no caption")
        if self.num_exact_duplicates:
            lines.append(f"  exact duplicates of another file: {self.num_exact_duplicates:,}")
            lines += _shortened([f"  same     {', '.join(paths)}" for paths in self.duplicates], len(self.duplicates))
        lines += [f"  note     {note}" for note in self.notes]
        lines += _shortened([f"  reject   {reject.path}: {reject.reason}" for reject in self.rejects], _NUM_SHOWN)
        return [" ".join(line.splitlines()).encode("utf-8", "backslashreplace").decode() for line in lines]


@dataclass(frozen=True, slots=True)
class _File:
    facts: ImageFacts
    digest: bytes


def check_folder(path: Path | str, *, group_by: str | None = None, progress: Callable[[int, int], None] | None = None) -> Report:
    """Decodes every image with a thread a core. `progress(done, total)` is called from this thread after each file."""
    source = ImageFolder.open(path, group_by=group_by)
    files, rejects = dict[int, _File](), list(source.rejects)
    for index, result in enumerate(_examine_all(source)):
        if isinstance(result, UnreadableImage):
            rejects.append(Reject(_name(source, index), result.reason))
        else:
            files[index] = result
        if progress is not None:
            progress(index + 1, len(source))

    captions = {index: caption for index in files if (caption := source.caption(index)) is not None}
    fraction = DataConfig().validation_fraction
    sides = {index: split_of(source.group(index), fraction) for index in files}
    copies = _equal_files(files)
    animated = [_name(source, index) for index, file in files.items() if file.facts.animated]
    return Report(
        kind="images",
        path=str(path),
        num_samples=len(files),
        num_captioned=len(captions),
        num_rejected=len(rejects),
        rejects=tuple(rejects),
        sizes=_histogram((f"{file.facts.width}x{file.facts.height}" for file in files.values()), _NUM_SIZES),
        modes=_histogram(file.facts.mode for file in files.values()),
        formats=_histogram(file.facts.format for file in files.values()),
        caption_examples=_examples(list(captions.values())),
        split={side: sum(found == side for found in sides.values()) for side in ("train", "validation")},
        num_exact_duplicates=sum(len(group) - 1 for group in copies),
        duplicates=tuple(tuple(_name(source, index) for index in group) for group in copies[:_NUM_DUPLICATE_GROUPS]),
        notes=(*source.notes, *_remarks(animated, [{sides[index] for index in group} for group in copies])),
    )


def _examine_all(source: ImageFolder) -> Iterator[_File | UnreadableImage]:
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # PIL decodes and hashlib hashes outside the interpreter's lock
        for start in range(0, len(source), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(source)))
            yield from pool.map(lambda index: _examine(source.path(index)), chunk)


def _examine(path: Path) -> _File | UnreadableImage:
    try:
        facts = inspect_image(path)
        with path.open("rb") as file:
            return _File(facts, hashlib.file_digest(file, "sha256").digest())
    except UnreadableImage as error:
        return error


def _equal_files(files: Mapping[int, _File]) -> list[list[int]]:
    groups = defaultdict[bytes, list[int]](list)
    for index, file in files.items():
        groups[file.digest].append(index)
    return [group for group in groups.values() if len(group) > 1]


def _remarks(animated: Sequence[str], duplicate_sides: Sequence[set[str]]) -> list[str]:
    remarks = []
    if animated:
        remarks.append(f"animation, of which only the first frame is read as an image: {len(animated):,} ({animated[0]}, ...)")
    torn = sum(len(sides) > 1 for sides in duplicate_sides)
    if torn:
        remarks.append(
            f"group of equal files that fall into both train and validation: {torn:,}; "
            "remove the copies, or give them one value in a metadata column and name it with data.group_by"
        )
    return remarks


def _examples(captions: Sequence[str]) -> tuple[str, ...]:
    """Evenly spaced, so that they differ in a sorted folder and stay the same from check to check."""
    count = min(_NUM_EXAMPLES, len(captions))
    return tuple(captions[(2 * k + 1) * len(captions) // (2 * count)] for k in range(count))


def _histogram(values: Iterator[str], limit: int | None = None) -> dict[str, int]:
    """Most frequent first, equal counts by name; beyond the limit as `other`."""
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    kept, rest = ordered[:limit], ordered[limit:] if limit is not None else []
    return dict(kept) | ({"other": sum(count for _, count in rest)} if rest else {})


def _name(source: ImageFolder, index: int) -> str:
    return source.path(index).relative_to(source.root).as_posix()


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _shortened(lines: list[str], limit: int) -> list[str]:
    return lines if len(lines) <= limit else [*lines[:limit], f"  ... and {len(lines) - limit:,} more"]
