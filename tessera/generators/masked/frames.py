"""Which latent frames of a clip are there in training, and which are shown whole: what makes clips of any length, continuation,
interpolation and windows of longer clips something that the generator has seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.config import Config
from tessera.generators.masked.masking import FRAMES
from tessera.randomness import mix, uniform


class FrameMaskConfig(Config):
    """Clips with whole latent frames shown, or taken away. Of what is not shown, single tokens are hidden as always. What is too
    much for a short clip is not asked of it: it is trained like any other."""

    prefix_prob: float = Field(0.1, ge=0, le=1)
    """How often the first frames are shown, any number but all: to go on from them."""
    between_prob: float = Field(0.05, ge=0, le=1)
    """How often some at both ends are shown, any number but all: to fill in what lies between."""
    later_prob: float = Field(0.1, ge=0, le=1)
    """How often the first one is taken away and those that follow are shown, any number but all: the clip is then a window of a
    longer one, which goes on from the window before it."""
    shorter_prob: float = Field(0.05, ge=0, le=1)
    """How often the end is taken away, before all else: a clip of any length."""

    @model_validator(mode="after")
    def _sum(self) -> FrameMaskConfig:
        total = self.prefix_prob + self.between_prob + self.later_prob
        if total > 1 + 1e-9:
            raise ValueError(
                f"prefix_prob, between_prob and later_prob are shares of all clips, and add up to {total:g}; at most 1"
            )
        return self


@dataclass(frozen=True, slots=True)
class Frames:
    """Steps of the first axis of token grids."""

    present: Tensor  # b t bool: those that are there, at least one of each sample
    shown: Tensor  # b t bool: of those, the ones in which nothing is hidden, never all


def plain_frames(lengths: Tensor, num_steps: int) -> Frames:
    """So many of each sample, none of them shown."""
    present = torch.arange(num_steps, device=lengths.device) < lengths[:, None]
    return Frames(present, torch.zeros_like(present))


def draw_frames(config: FrameMaskConfig, seed: int, step: int, positions: Tensor, lengths: Tensor, num_steps: int) -> Frames:
    """Of clips of these lengths (b, at least 1): a function of seed, step and place in the stream."""
    kind, cut, end, first, second = uniform(mix(seed, step) >> 1, positions, 5, FRAMES).double().unbind(1)
    lengths = torch.where(cut < config.shorter_prob, any_from_1(lengths - 1, end), lengths)
    prefix, between = (kind < config.prefix_prob) & (lengths >= 2), (kind < config.prefix_prob + config.between_prob)
    between = between & (kind >= config.prefix_prob) & (lengths >= 3)
    later = (kind >= 1 - config.later_prob) & (lengths >= 3)
    place = torch.arange(num_steps, device=positions.device) - later[:, None].long()  # among those that are there
    size = (lengths - later.long())[:, None]
    present = (place >= 0) & (place < size)
    before = place < any_from_1(size - 1, first[:, None])
    gap = any_from_1(size - 2, first[:, None])
    start = any_from_1(size - 1 - gap, second[:, None])
    around = (place < start) | (place >= start + gap)
    return Frames(present, present & ((prefix | later)[:, None] & before | between[:, None] & around))


def any_from_1(most: Tensor, numbers: Tensor) -> Tensor:
    """Numbers in [0, 1) to whole ones from 1 to `most`, each as often; 1 where that is less."""
    return 1 + (numbers * most).long().clamp(min=0)
