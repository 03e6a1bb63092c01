"""What `tessera data check` says of any folder: the fields that all kinds of samples share, and how they are put in lines."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tessera.config import DataConfig
from tessera.data.folders import Reject
from tessera.data.sources import Stored

NUM_SHOWN = 10
_NUM_EXAMPLES = 3
_NUM_LETTERS = 200
# What a file name or a caption could do to a terminal: colours, cursor, title, text that runs backwards.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a folder holds. The fields are the keys of `--json`."""

    kind: str
    layout: str
    """How the samples are stored: `folder`, `webdataset` or `arrays`."""
    path: str
    num_samples: int
    num_captioned: int
    num_captions: int
    """More than the captioned samples where some have several."""
    uncaptioned: tuple[str, ...]
    """Samples without a caption."""
    short_of_captions: bool
    """Whether so many have none that training on captions would stop."""
    num_rejected: int
    rejects: tuple[Reject, ...]
    caption_examples: tuple[str, ...]
    split: Mapping[str, int]
    """Number of samples in train and validation: by folder where there are split folders, otherwise by a hash."""
    num_exact_duplicates: int
    """Samples that equal an earlier one: pictures and clips by their bytes, meshes by their canonical form in bins."""
    duplicates: tuple[tuple[str, ...], ...]
    """All groups of equal ones."""
    num_near_groups: int
    """Groups of samples that look almost the same, equal ones included."""
    num_near_duplicates: int
    """Samples in these groups."""
    num_straddling: int
    """Groups of which some samples are in train and others in validation."""
    near_duplicates: tuple[tuple[str, ...], ...]
    """All these groups, the largest first."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: counts first, then what is wrong."""
        lines = [
            f"{self.path}: {self.num_samples:,} {self.kind}, {self.num_captioned:,} captions, {self.num_rejected:,} rejects",
            *self.facts(),
            f"  split    {counts(self.split)}",
            *(f"  caption  {caption}" for caption in self.caption_examples),
        ]
        noun = {"meshes": "mesh", "clips": "clip"}.get(self.kind, "image")
        if self.uncaptioned:
            share = f"{len(self.uncaptioned) / self.num_samples:.1%}"
            lines.append(f"  {len(self.uncaptioned):,} of {self.num_samples:,} {self.kind} have no caption ({share})")
            lines.append(f"  without  {_few(self.uncaptioned)}")
        if self.num_captions > self.num_captioned:
            an = "an" if noun == "image" else "a"
            lines.append(f"  {self.num_captions:,} captions in all; where {an} {noun} has several, each epoch draws one")
        lines += self.remarks()
        lines += self._duplicate_lines()
        lines += [f"  note     {note}" for note in self.notes]
        lines += shortened([f"  reject   {reject.path}: {reject.reason}" for reject in self.rejects], NUM_SHOWN)
        return [_printable(" ".join(line.splitlines())) for line in lines]

    def facts(self) -> Iterable[str]:
        """Lines on what the samples are."""
        return ()

    def remarks(self) -> Iterable[str]:
        """Lines on what is odd about them."""
        return ()

    def _duplicate_lines(self) -> Iterator[str]:
        if self.num_exact_duplicates:
            yield f"  exact duplicates of another file: {self.num_exact_duplicates:,}"
            yield from shortened([f"  same     {_few(group)}" for group in self.duplicates], NUM_SHOWN)
        if self.num_near_groups:
            groups = f"{self.num_near_groups:,} group{'s'[: self.num_near_groups != 1]}"
            yield f"  near-duplicates: {self.num_near_duplicates:,} {self.kind} in {groups}"
            yield from shortened([f"  alike    {_few(group)}" for group in self.near_duplicates], NUM_SHOWN)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What a survey found, by index: the part of it that does not hang on the kind of samples."""

    source: Stored
    config: DataConfig
    seen: Sequence[int]
    num_unreadable: int
    held_out: frozenset[int]
    equal: Sequence[Sequence[int]]
    near: Sequence[Sequence[int]]

    def captions(self) -> dict[int, tuple[str, ...]]:
        return {index: texts for index in self.seen if (texts := self.source.captions(index))}

    def split(self) -> dict[str, int]:
        num_held_out = len(self.held_out.intersection(self.seen))
        return {"train": len(self.seen) - num_held_out, "validation": num_held_out}

    def num_straddling(self) -> int:
        return sum(0 < len(self.held_out.intersection(group)) < len(group) for group in self.near)

    def names(self, groups: Iterable[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self.source.name(index) for index in group) for group in groups)

    def num_without(self) -> int:
        """Samples without a caption, as training counts them: those that cannot be read among them."""
        return sum(self.source.caption(index) is None for index in range(len(self.source)))

    def fields(self, rejects: Sequence[Reject], notes: Iterable[str]) -> dict[str, Any]:
        """What every report has."""
        captions = self.captions()
        return {
            "kind": self.source.kind,
            "layout": self.source.layout,
            "num_samples": len(self.seen),
            "num_captioned": len(captions),
            "num_captions": sum(map(len, captions.values())),
            "uncaptioned": tuple(self.source.name(index) for index in self.seen if index not in captions),
            "short_of_captions": self.num_without() > self.config.uncaptioned_budget * len(self.source),
            "num_rejected": len(rejects),
            "rejects": tuple(rejects),
            "caption_examples": _examples([_cut(texts[0]) for texts in captions.values()]),
            "split": self.split(),
            "num_exact_duplicates": sum(len(group) - 1 for group in self.equal),
            "duplicates": self.names(self.equal),
            "num_near_groups": len(self.near),
            "num_near_duplicates": sum(map(len, self.near)),
            "num_straddling": self.num_straddling(),
            "near_duplicates": self.names(sorted(self.near, key=len, reverse=True)),
            "notes": (*self.source.notes, *self._obstacles(), *notes, *self._torn()),
        }

    def _obstacles(self) -> Iterator[str]:
        """What training would stumble over."""
        num_train, num_held_out = self.split().values()
        budget, many = self.config.corrupt_budget, "pictures" if self.source.kind == "images" else self.source.kind
        if num_train + num_held_out and not num_held_out:
            yield (
                f"train {num_train:,}, validation 0: training would have no validation and no best; "
                f"raise data.validation_fraction, or put {many} into train/ and val/"
            )
        if num_held_out and not num_train:
            yield f"train 0, validation {num_held_out:,}: there is nothing to train on; add {many} to the training side"
        if self.num_unreadable < len(self.source) and self.num_unreadable > budget * len(self.source):
            yield (
                f"{self.num_unreadable:,} of {len(self.source):,} {many} cannot be read, and data.corrupt_budget={budget:g} "
                f"allows {budget:.0%}: training would stop; repair or remove them, or raise it"
            )
        if (without := self.num_without()) > (budget := self.config.uncaptioned_budget) * len(self.source):
            unused = len(self.source) - len(self.seen)  # training counts before it reads
            yield (
                f"{f'counting the {unused:,} that cannot be used, ' if unused else ''}"
                f"{without:,} of {len(self.source):,} {many} have no caption, and data.uncaptioned_budget={budget:g} allows "
                f"{budget:.0%}: training on captions would stop; add some, raise it, or set text.kind=none"
            )

    def _torn(self) -> Iterator[str]:
        if num_straddling := self.num_straddling():
            by_folder = self.source.index.held_out is not None
            advice = (
                "remove them from one of the two folders"
                if by_folder
                else "keep each on one side with data.group_near_duplicates=true"
            )
            yield (
                f"group of near-duplicates that falls into both train and validation: {num_straddling:,}; {advice}, "
                "otherwise validation looks better than it is"
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


def histogram(values: Iterator[str], limit: int | None = None) -> dict[str, int]:
    """Most frequent first, equal counts by name; beyond the limit as `other`."""
    ordered = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    kept, rest = ordered[:limit], ordered[limit:] if limit is not None else []
    return dict(kept) | ({"other": sum(count for _, count in rest)} if rest else {})


def counts(numbers: Mapping[str, int]) -> str:
    """In one line."""
    return ", ".join(f"{name} {count:,}" for name, count in numbers.items()) or "none"


def shortened(lines: list[str], limit: int) -> list[str]:
    """The first ones, and how many more there are."""
    return lines if len(lines) <= limit else [*lines[:limit], f"  ... and {len(lines) - limit:,} more"]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6:,} more" if len(names) > 6 else "")


def equal_groups(digests: Mapping[int, bytes]) -> list[list[int]]:
    """The samples whose hashes are the same, in groups of two or more."""
    groups = defaultdict[bytes, list[int]](list)
    for index, digest in digests.items():
        groups[digest].append(index)
    return [group for group in groups.values() if len(group) > 1]
