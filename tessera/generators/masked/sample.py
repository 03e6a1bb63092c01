"""Sampling: start with every token hidden, and reveal some at each step. A sample is a function of its own seed and text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from tessera.batches import TextStates
from tessera.config import Config
from tessera.generators.masked.model import MaskedTransformer
from tessera.randomness import mix, uniform

CHOICE, NOISE = 21, 22  # streams of random numbers


class MaskedSampleConfig(Config):
    """How a masked generator draws."""

    steps: int = Field(18, ge=1)
    """Passes through the network."""
    guidance: float = Field(3.0, ge=0)
    """Pull towards the text: logits of the unconditional branch plus this times the difference. 1 is none."""
    guidance_ramp: bool = True
    """Rise linearly from 1 to the full guidance over the steps: early tokens stay varied."""
    temperature: float = Field(1.0, ge=0)
    """Of the choice of tokens; 0 takes the most probable."""
    order: Literal["halton", "confidence"] = "halton"
    """Which tokens are revealed first: an even spread over the grid, or the surest ones with some noise."""
    noise: float = Field(4.5, ge=0)
    """With order confidence: strength of the Gumbel noise on it, falling to 0 over the steps."""


def halton_order(grid: Sequence[int]) -> Tensor:
    """The cells of a grid, each far from those before it: the places of a Halton sequence (Besnier et al. 2025)."""
    primes = (2, 3, 5)
    if len(grid) > len(primes):
        raise ValueError(f"a grid of {len(grid)} axes; Halton order is defined here for at most {len(primes)}")
    seen: dict[int, None] = {}
    index, size = 1, math.prod(grid)
    while len(seen) < size:
        cell = 0
        for axis, prime in zip(grid, primes, strict=False):
            cell = cell * axis + int(radical_inverse(index, prime) * axis)
        seen.setdefault(cell)
        index += 1
    return torch.tensor(list(seen))


def radical_inverse(index: int, base: int) -> float:
    """The digits of a number mirrored at the point."""
    value, scale = 0.0, 1.0
    while index:
        scale /= base
        index, digit = divmod(index, base)
        value += digit * scale
    return value


def num_revealed(step: int, steps: int, num_tokens: int) -> int:
    """Tokens that are visible after a step: the cosine schedule of training, run backwards; at least one a step."""
    visible = num_tokens - math.floor(math.cos((step + 1) / steps * math.pi / 2) * num_tokens + 1e-9)
    return num_tokens if step + 1 == steps else min(num_tokens, max(visible, step + 1))


@torch.no_grad()
def sample(
    net: MaskedTransformer, text: TextStates, seeds: Tensor, config: MaskedSampleConfig,
    negative: TextStates | None = None, known: Tensor | None = None, smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """ids b n. `seeds` b int64; `negative` replaces the empty text of the other branch; `known` b n holds tokens that stay, and
    `mask_id` where something is to be drawn; `smoothing` is that of the labels in training."""
    size, num_tokens = len(seeds), math.prod(net.grid)
    ids = torch.full((size, num_tokens), net.mask_id, device=seeds.device) if known is None else known.clone()
    rank = torch.empty(num_tokens, dtype=torch.long, device=seeds.device)
    rank[halton_order(net.grid).to(seeds.device)] = torch.arange(num_tokens, device=seeds.device)
    none = text.without(torch.ones(size, dtype=torch.bool, device=seeds.device)) if negative is None else negative
    for step in range(config.steps):
        progress = (step + 1) / config.steps
        guidance = 1 + (config.guidance - 1) * (progress if config.guidance_ramp else 1.0)
        drawn, sure = choose(net, ids, text, none, guidance, seeds, step, config.temperature, smoothing)
        hidden = ids == net.mask_id
        if config.order == "halton":
            score = -rank.double().expand_as(ids)
        else:
            draws = uniform(mix(NOISE, step), seeds, num_tokens).clamp(1e-9, 1 - 1e-7)
            score = sure - config.noise * (1 - progress) * (-draws.log()).log()
        wanted = num_revealed(step, config.steps, num_tokens)
        score = torch.where(hidden, score, math.inf)
        best = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1) < wanted
        ids = torch.where(hidden & best, drawn, ids)
    return ids


def choose(
    net: MaskedTransformer, ids: Tensor, text: TextStates, none: TextStates, guidance: float, seeds: Tensor, step: int,
    temperature: float, smoothing: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A token for every place, and the logarithm of its probability. Both branches go through in one batch.

    Smoothed labels put smoothing / size on every token. Drawn as they are, a tenth of all tokens would be noise, which an order
    that does not ask for confidence never takes back; so tokens that the text does not lift off that floor are left out.
    """
    features = net(torch.cat([ids, ids]), join_texts(text, none))
    digits, sure = [], torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
    for index, logits in enumerate(net.logits(features)):
        with_text, without = logits.chunk(2)
        guided = without + guidance * (with_text - without)
        floor = with_text.softmax(-1) <= 2 * smoothing / logits.shape[-1]
        logs = guided.masked_fill(floor, -math.inf).log_softmax(-1)
        draws = uniform(mix(CHOICE, step, index), seeds, ids.shape[1] * logs.shape[-1]).view(logs.shape)
        gumbel = -(-(draws.clamp(1e-9, 1 - 1e-7).log())).log()
        digit = (logs + temperature * gumbel).argmax(-1)
        digits.append(digit)
        sure += logs.gather(-1, digit[..., None])[..., 0]
    return net.join(digits), sure


def join_texts(first: TextStates, second: TextStates) -> TextStates:
    """One after the other, as one batch."""
    return TextStates(
        torch.cat([first.states, second.states]), torch.cat([first.mask, second.mask]), torch.cat([first.pooled, second.pooled])
    )
