"""Class labels as captions: each distinct caption has a learned vector, trained with the generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from tessera.batches import Text, TextStates
from tessera.config import Config, UserError, nearest

MOST_CLASSES = 10_000
FEW_CLASSES = 100  # up to here a class may have a single sample: a first try on a handful of pictures is no mistake
MOST_SHOWN = 12


class ClassTextConfig(Config):
    """Each distinct caption is a class with a learned vector, trained with the generator."""

    kind: Literal["classes"] = "classes"
    """The kind of encoder."""
    width: int = Field(256, ge=1)
    """Channels."""
    names: tuple[str, ...] = ()
    """The classes, in the order of their vectors; left empty, the distinct captions of the data, sorted."""

    @model_validator(mode="after")
    def _distinct(self) -> ClassTextConfig:
        if twice := [name for name, count in Counter(self.names).items() if count > 1]:
            raise ValueError(f"names has {twice[0]!r} {self.names.count(twice[0])} times; expected each class once")
        if not all(name.strip() for name in self.names):
            raise ValueError("names has an empty name, which stands for no class; leave it out")
        return self


def settle_classes(config: ClassTextConfig, captions: Iterable[str | None]) -> ClassTextConfig:
    """The same with `names` filled in from the captions; names that the user gave stay, and must cover the captions."""
    counts = Counter(caption for caption in captions if caption and caption.strip())
    if config.names:
        for caption in counts:
            if caption not in config.names:
                raise _unknown(caption, config.names)
        return config
    _refuse_sentences(counts)
    return config.model_copy(update={"names": tuple(sorted(counts))})


def _refuse_sentences(counts: Counter[str]) -> None:
    """Captions that hardly repeat are sentences, not classes."""
    num_samples, instead = counts.total(), "for free text use text={kind: bytes} or {kind: minilm}"
    if not counts:
        raise UserError("no caption to take classes from; caption the data, put it into class folders, or use text={kind: none}")
    if len(counts) > MOST_CLASSES:
        raise UserError(f"{len(counts)} distinct captions; expected at most {MOST_CLASSES} classes; {instead}")
    if len(counts) > FEW_CLASSES and 2 * len(counts) > num_samples:
        raise UserError(
            f"{len(counts)} distinct captions among {num_samples}; expected classes of two samples or more on average; {instead}"
        )


@dataclass(frozen=True)
class ClassReader:
    """Captions -> ids b 1: 1 to the number of classes, 0 where there is no caption. Picklable."""

    names: tuple[str, ...]

    def __call__(self, captions: Sequence[str | None], keys: Sequence[str]) -> Text:
        return Text(torch.tensor([[self._id(caption)] for caption in captions], dtype=torch.int64).reshape(-1, 1))

    def _id(self, caption: str | None) -> int:
        if not caption or not caption.strip():
            return 0
        if caption not in self._ids:
            raise _unknown(caption, self.names)
        return self._ids[caption]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index + 1 for index, name in enumerate(self.names)}


def _unknown(caption: str, names: Sequence[str]) -> UserError:
    shown = ", ".join(repr(name) for name in names[:MOST_SHOWN])
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    near = nearest(caption[:200], names)
    meant = f"; did you mean {near!r}?" if near else ""
    return UserError(f"{caption[:200]!r} is not a class of this model; expected one of {shown}{more}{meant}")


class ClassEncoder(nn.Module):
    """Class ids -> states, one for each caption."""

    def __init__(self, config: ClassTextConfig) -> None:
        super().__init__()
        self.width = config.width
        self.embed = nn.Embedding(len(config.names) + 1, config.width)  # row 0, no class, is never seen
        nn.init.normal_(self.embed.weight, std=1.0)

    def forward(self, text: Text) -> TextStates:
        """b 1 ids -> b 1 d"""
        mask = text.mask
        states = self.embed(text.ids) * mask[..., None]
        return TextStates(states, mask, states[:, 0])
