"""What is hidden or disturbed in training: a function of seed, step and place in the stream, whatever batch a sample is in."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tessera.randomness import fraction, mix, uniform

GOLDEN = (math.sqrt(5) - 1) / 2
TIME, ORDER, TEXT, RECALL, FILL, LOW_SHARE, LOW_PLACE, LOW_TOKEN, FRAMES = range(11, 20)  # streams of random numbers


def masking_times(seed: int, step: int, positions: Tensor) -> Tensor:
    """b in [0, 1): uniform over steps for each sample, and spread evenly over any samples that follow each other.

    A random start plus multiples of the golden ratio (Weyl's sequence): so the number of hidden tokens of a micro-batch hardly
    varies, and a bound on it is known (`capacity`).
    """
    turns = positions.double() * GOLDEN + fraction(mix(seed, step, TIME))
    return (turns - turns.floor()).clamp(max=1 - 1e-9)


def num_hidden(times: Tensor, num_tokens: int | Tensor) -> Tensor:
    """Cosine schedule (Chang et al. 2022, section 3.3): between 1 and all."""
    return torch.ceil(torch.cos(times * (math.pi / 2)) * num_tokens).long().clamp(min=1).clamp(max=num_tokens)


def hide(seed: int, step: int, positions: Tensor, num_tokens: int, among: Tensor | None = None) -> Tensor:
    """b -> b n bool, True where a token is hidden: the lowest of random scores. `among` b n bool says which tokens may be, at
    least one of each sample; the share is of those."""
    scores = uniform(mix(seed, step) >> 1, positions, num_tokens, stream=ORDER)
    if among is not None:
        scores = scores.masked_fill(~among, 2.0)
    ranks = scores.argsort(dim=1).argsort(dim=1)
    most = num_tokens if among is None else among.sum(1)
    return ranks < num_hidden(masking_times(seed, step, positions), most)[:, None]


def chance(prob: float, seed: int, step: int, positions: Tensor, stream: int) -> Tensor:
    """b bool, True that often."""
    return uniform(mix(seed, step) >> 1, positions, 1, stream)[:, 0] < prob


def disturb(low: Tensor, vocab_size: int, most: float, seed: int, step: int, positions: Tensor) -> Tensor:
    """b k ids with some replaced by any others: of each sample a share between 0 and `most`. A generator that refines another's
    tokens sees flawless ones in training and flawed ones in use; so it learns not to trust each single one (Ho et al. 2021)."""
    key, size = mix(seed, step) >> 1, low.shape[1]
    share = most * uniform(key, positions, 1, LOW_SHARE)
    others = (uniform(key, positions, size, LOW_TOKEN).double() * vocab_size).long()
    return torch.where(uniform(key, positions, size, LOW_PLACE) < share, others, low)


@functools.lru_cache(maxsize=64)
def capacity(num_samples: int, num_tokens: int) -> int:
    """The most tokens that can be hidden in so many samples that follow each other.

    Between two starts at which some sample's time wraps to 0 the count only falls, so the largest count is at such a start. Of
    fewer tokens fewer are hidden at the same time, so it also bounds what is hidden among some of them.
    """
    index = torch.arange(num_samples, dtype=torch.float64)
    times = index[None] * GOLDEN - index[:, None] * GOLDEN
    times = times - times.floor()
    times = torch.where(times > 1 - 1e-6, 0.0, times)  # rounding: as if wrapped
    return min(num_samples * num_tokens, int(num_hidden((times - 1e-6).clamp(min=0), num_tokens).sum(1).max()))


def gather_hidden(hidden: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """b n bool -> flat places of hidden tokens, room of them, and which are real: a fixed shape, no wait for the device."""
    flat = hidden.flatten()
    places = torch.argsort((~flat).to(torch.uint8), stable=True)[:room]
    return places, flat[places]
