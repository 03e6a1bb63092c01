"""Guidance: guesses of a network that is told less are leant on, to be more of what it was told. All branches are one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field, model_validator

from tessera.batches import TextStates
from tessera.config import Config
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.processes import Guess


class GuidanceConfig(Config):
    """How far guesses are pulled towards what the network is told. They are nested: with nothing, with the embedding, with both;
    to the first, each difference is added times its scale."""

    text: float = Field(3.0, ge=0)
    """Pull of the text. 1 is none."""
    embedding: float = Field(1.0, ge=0)
    """Pull of the embedding. 1 is none; both equal spare a branch. Without an embedding the text's counts alone."""
    levels: tuple[float, float] | None = None
    """Lowest and highest level (log-SNR) with guidance (Kynkäänniemi et al. 2024); others cost one branch. null: all."""

    @model_validator(mode="after")
    def _levels(self) -> GuidanceConfig:
        if self.levels is not None and self.levels[0] > self.levels[1]:
            raise ValueError(f"levels {list(self.levels)}: the lower one comes first")
        return self

    def at(self, level: float) -> bool:
        """Whether there is guidance."""
        return self.levels is None or self.levels[0] <= level <= self.levels[1]


def branches_of(config: GuidanceConfig, condition: Condition) -> tuple[float, float, float]:
    """Shares of the guesses that are told everything, the embedding, nothing. Their sum is 1, and one of 0 need not be made."""
    if condition.text is None and condition.embedding is None:
        return 1.0, 0.0, 0.0
    text = config.embedding if condition.text is None else config.text
    embedding = text if condition.embedding is None else config.embedding
    return text, embedding - text, 1 - embedding


def branched(condition: Condition, shares: Sequence[float], negative: TextStates | None = None) -> Condition:
    """As one batch, the branches that have a share, told everything first, which is always there. `negative` stands where text
    was taken away."""
    branches = [condition]
    for share, with_embedding in zip(shares[1:], (True, False), strict=True):
        if share:
            some = condition.embedding if condition.text is None else condition.text.mask
            assert some is not None
            every = torch.ones(len(some), dtype=torch.bool, device=some.device)
            branch = condition.without(every, every & (not with_embedding))
            branches.append(branch if negative is None or condition.text is None else replace(branch, text=negative))
    return stacked(branches) if len(branches) > 1 else condition


def stacked(conditions: Sequence[Condition]) -> Condition:
    """One after another, as one batch."""
    first = conditions[0]
    text = first.text
    for other in conditions[1:]:
        text = None if text is None or other.text is None else text.joined(other.text)
    names = ("embedding", "has_embedding", "low", "low_level", "before")
    told = [name for name in names if _told(first, name) is not None]
    return replace(first, text=text, **{name: torch.cat([_told(each, name) for each in conditions]) for name in told})


def guided(guess: Guess, shares: Sequence[float]) -> Guess:
    """Branches to one guess. The variance is that of the first: it is no place to go to, and not to be exaggerated."""
    kept = [share for index, share in enumerate(shares) if share or not index]
    parts = guess.clean.chunk(len(kept))
    clean = sum((share * part for share, part in zip(kept[1:], parts[1:], strict=True)), start=kept[0] * parts[0])
    return Guess(clean, None if guess.fraction is None else guess.fraction[: len(clean)])


def _told(condition: Condition, name: str) -> Any:
    found = getattr(condition, name)
    if name == "has_embedding" and found is None and condition.embedding is not None:  # all rows have theirs
        return torch.ones(len(condition.embedding), dtype=torch.bool, device=condition.embedding.device)
    return found
