"""`tessera data check`: a folder in, a report out that a person or a program can read. Every picture is decoded in full.

What is counted is what training would see: a sample is an image that opens, and whatever does not is a reject with its reason.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera.config.sections import ImageDataConfig
from tessera.data.captions import names_side
from tessera.data.duplicates import near_groups
from tessera.data.opening import open_source
from tessera.data.sources import Reject, StoredImages, split_indices
from tessera.data.survey import Seen, survey

_NUM_SIZES = 10
_NUM_EXAMPLES = 3
_NUM_GROUPS = 10
_NUM_SHOWN = 10
_NUM_LETTERS = 200
# What a file name or a caption could do to a terminal: colours, cursor, title, text that runs backwards.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a folder holds. The fields are the keys of `--json`."""

    kind: str
    layout: str
    """How the pictures are stored: `folder`, `webdataset` or `arrays`."""
    path: str
    num_samples: int
    num_captioned: int
    num_captions: int
    """More than the captioned samples where some have several."""
    num_naming_sides: int
    """Samples whose captions say left or right; `data.flip=true` does not mirror them."""
    num_rejected: int
    rejects: tuple[Reject, ...]
    sizes: Mapping[str, int]
    """width x height -> number of images: the ten most frequent, and `other`."""
    modes: Mapping[str, int]
    formats: Mapping[str, int]
    caption_examples: tuple[str, ...]
    split: Mapping[str, int]
    """Number of samples in train and validation: by folder where there are split folders, otherwise at the default fraction."""
    num_exact_duplicates: int
    """Pictures whose bytes equal those of an earlier one."""
    duplicates: tuple[tuple[str, ...], ...]
    """The first ten groups of equal files."""
    num_near_groups: int
    """Groups of pictures that look almost the same, equal ones included."""
    num_near_duplicates: int
    """Pictures in these groups."""
    num_straddling: int
    """Groups of which some pictures are in train and others in validation."""
    near_duplicates: tuple[tuple[str, ...], ...]
    """All these groups, the largest first."""
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
            missing = self.num_samples - self.num_captioned
            lines.append(f"  {missing:,} of {self.num_samples:,} images have no caption ({missing / self.num_samples:.1%})")
        if self.num_captions > self.num_captioned:
            lines.append(f"  {self.num_captions:,} captions in all; where an image has several, each epoch draws one")
        if self.num_naming_sides:
            lines.append(
                f"  captions of {self.num_naming_sides:,} images say left or right; data.flip=true leaves these as they are"
            )
        lines += self._duplicate_lines()
        lines += [f"  note     {note}" for note in self.notes]
        lines += _shortened([f"  reject   {reject.path}: {reject.reason}" for reject in self.rejects], _NUM_SHOWN)
        return [_printable(" ".join(line.splitlines())) for line in lines]

    def _duplicate_lines(self) -> Iterator[str]:
        if self.num_exact_duplicates:
            yield f"  exact duplicates of another file: {self.num_exact_duplicates:,}"
            yield from (f"  same     {', '.join(group)}" for group in self.duplicates)
        if self.num_near_groups:
            yield f"  near-duplicates: {self.num_near_duplicates:,} images in {self.num_near_groups:,} groups"
            yield from _shortened([f"  alike    {_few(group)}" for group in self.near_duplicates], _NUM_SHOWN)


def check_folder(path: Path | str, *, group_by: str | None = None, progress: Callable[[int, int], None] | None = None) -> Report:
    """Decodes every image with a thread a core. `progress(done, total)` is called from this thread after each file."""
    config = ImageDataConfig(group_by=group_by)
    source = open_source(path, config)
    seen, rejects = dict[int, Seen](), list(source.rejects)
    for index, result in enumerate(survey(source)):
        if isinstance(result, Seen):
            seen[index] = result
        else:
            rejects.append(Reject(source.name(index), result.reason))
        if progress is not None:
            progress(index + 1, len(source))

    captions = {index: texts for index in seen if (texts := source.captions(index))}
    held_out = set(split_indices(source, config.validation_fraction)[1].tolist())
    copies, near = _equal(seen), _alike(seen)
    straddling = [group for group in near if 0 < len(held_out.intersection(group)) < len(group)]
    facts = [each.facts for each in seen.values()]
    split = {"train": len(seen.keys() - held_out), "validation": len(seen.keys() & held_out)}
    return Report(
        kind="images",
        layout=source.layout,
        path=str(path),
        num_samples=len(seen),
        num_captioned=len(captions),
        num_captions=sum(map(len, captions.values())),
        num_naming_sides=sum(map(names_side, captions.values())),
        num_rejected=len(rejects),
        rejects=tuple(rejects),
        sizes=_histogram((f"{each.width}x{each.height}" for each in facts), _NUM_SIZES),
        modes=_histogram(each.mode for each in facts),
        formats=_histogram(each.format for each in facts),
        caption_examples=_examples([_cut(texts[0]) for texts in captions.values()]),
        split=split,
        num_exact_duplicates=sum(len(group) - 1 for group in copies),
        duplicates=_named(source, copies[:_NUM_GROUPS]),
        num_near_groups=len(near),
        num_near_duplicates=sum(map(len, near)),
        num_straddling=len(straddling),
        near_duplicates=_named(source, sorted(near, key=len, reverse=True)),
        notes=(*source.notes, *_obstacles(config, split, len(source)), *_remarks(source, seen, len(straddling))),
    )


def _equal(seen: Mapping[int, Seen]) -> list[list[int]]:
    groups = defaultdict[bytes, list[int]](list)
    for index, each in seen.items():
        groups[each.digest].append(index)
    return [group for group in groups.values() if len(group) > 1]


def _alike(seen: Mapping[int, Seen]) -> list[list[int]]:
    places = list(seen)
    return [[places[member] for member in group] for group in near_groups([each.print for each in seen.values()])]


def _named(source: StoredImages, groups: Iterable[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(source.name(index) for index in group) for group in groups)


def _obstacles(config: ImageDataConfig, split: Mapping[str, int], num_pictures: int) -> Iterator[str]:
    """What training would stumble over."""
    num_train, num_held_out = split["train"], split["validation"]
    unreadable = num_pictures - num_train - num_held_out
    if num_train + num_held_out and not num_held_out:
        yield (
            f"train {num_train:,}, validation 0: training would have no validation and no best; "
            "raise data.validation_fraction, or put pictures into train/ and val/"
        )
    if num_held_out and not num_train:
        yield f"train 0, validation {num_held_out:,}: there is nothing to train on; add pictures to the training side"
    if unreadable < num_pictures and unreadable > config.corrupt_budget * num_pictures:
        yield (
            f"{unreadable:,} of {num_pictures:,} pictures cannot be read, and data.corrupt_budget={config.corrupt_budget:g} "
            f"allows {config.corrupt_budget:.0%}: training would stop; repair or remove them, or raise it"
        )


def _remarks(source: StoredImages, seen: Mapping[int, Seen], num_straddling: int) -> Iterator[str]:
    animated = [source.name(index) for index, each in seen.items() if each.facts.animated]
    if animated:
        yield f"animation, of which only the first frame is read as an image: {len(animated):,} ({animated[0]}, ...)"
    if num_straddling:
        by_folder = source.index.held_out is not None
        yield (
            f"group of near-duplicates that falls into both train and validation: {num_straddling:,}; "
            + (
                "remove them from one of the two folders"
                if by_folder
                else "keep each on one side with data.group_near_duplicates=true"
            )
            + ", otherwise validation looks better than it is"
        )


def _examples(captions: Sequence[str]) -> tuple[str, ...]:
    """Evenly spaced, so that they differ in a sorted folder and stay the same from check to check."""
    count = min(_NUM_EXAMPLES, len(captions))
    return tuple(captions[(2 * k + 1) * len(captions) // (2 * count)] for k in range(count))


def _cut(text: str) -> str:
    return text if len(text) <= _NUM_LETTERS else f"{text[:_NUM_LETTERS]}... ({len(text):,} letters)"


def _printable(line: str) -> str:
    """With escapes in the place of what a terminal would obey or cannot encode."""
    escaped = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), line)
    return escaped.encode("utf-8", "backslashreplace").decode()


def _histogram(values: Iterator[str], limit: int | None = None) -> dict[str, int]:
    """Most frequent first, equal counts by name; beyond the limit as `other`."""
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    kept, rest = ordered[:limit], ordered[limit:] if limit is not None else []
    return dict(kept) | ({"other": sum(count for _, count in rest)} if rest else {})


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _shortened(lines: list[str], limit: int) -> list[str]:
    return lines if len(lines) <= limit else [*lines[:limit], f"  ... and {len(lines) - limit:,} more"]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6:,} more" if len(names) > 6 else "")
