"""Sampling: start with every token hidden, and reveal some at each step. A sample is a function of its own seed, text and known
tokens.

All that changes from step to step lies in tensors, and shapes never change: one step can be recorded once and replayed for all
of them (`replay`), and nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.config import Config
from tessera.generators.masked.critic import judge
from tessera.generators.masked.model import MaskedTransformer
from tessera.generators.masked.order import halton_ranks, lowest, num_revealed
from tessera.nn.drawing import draw, implausible
from tessera.randomness import mix, mix_tensors, uniform

CHOICE, NOISE = 21, 22  # streams of random numbers


class MaskedSampleConfig(Config):
    """How a masked generator draws."""

    steps: int = Field(18, ge=1)
    """Passes through the network."""
    guidance: float = Field(3.0, ge=0, le=1000)
    """Pull towards the text: logits of the unconditional branch plus this times the difference. 1 is none, at half the cost."""
    guidance_ramp: bool = True
    """Rise linearly from 1 to the full guidance over the steps: early tokens stay varied."""
    temperature: float = Field(1.0, ge=0, le=1000)
    """Of the choice of tokens; 0 takes the most probable."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Choose only among the most probable tokens that together have this probability; of a large vocabulary, for each digit."""
    min_share: float = Field(0.1, ge=0, lt=1)
    """Leave out tokens that, given the text, are less than this share as probable as the most probable one."""
    order: Literal["halton", "confidence", "critic"] = "halton"
    """Which tokens are revealed first: an even spread over the grid, the surest ones, or those that a critic believes in, which
    also takes earlier ones back. The last two with some noise."""
    noise: float = Field(4.5, ge=0)
    """With order confidence or critic: strength of the Gumbel noise on it, falling to 0 over the steps. Less is more faithful and
    less varied."""
    remask: float = Field(0.3, ge=0, lt=1)
    """Share of the tokens revealed before a step that are hidden again after it, the least sure first; others are revealed for
    them: tokens drawn together may disagree. Not with order critic, which takes tokens back by itself."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same over the steps. Two branches, with text and without, are one batch of twice the size."""

    seeds: Tensor  # b int64
    text: TextStates  # b or 2b
    low: Tensor | None  # b or 2b, k
    frames: Tensor | None  # b or 2b, t bool: which steps of the first axis are there
    open: Tensor  # b n bool: to be drawn
    ranks: Tensor  # n: place in Halton order
    counts: Tensor  # steps + 1, b: how many of the open tokens are visible before each step
    guidance: Tensor  # steps
    noise: Tensor  # steps


@dataclass(frozen=True, slots=True)
class State:
    """What a step changes."""

    step: Tensor  # 1 int64
    ids: Tensor  # b n
    sure: Tensor  # b n: log-probability of each token when it was drawn
    previous: Tensor | None  # b or 2b, n d: features of the last pass, for self-conditioning


@dataclass(frozen=True, slots=True)
class Drawer:
    """One way to sample from one generator."""

    net: MaskedTransformer
    config: MaskedSampleConfig
    critic: nn.Module | None = None

    def __post_init__(self) -> None:
        if self.config.order == "critic" and self.critic is None:
            raise ValueError("order critic needs a critic; train one (critic: {kind: net}), or choose order halton or confidence")

    @property
    def guided(self) -> bool:
        """Whether there is a second branch."""
        return self.config.guidance != 1

    def prepare(
        self, text: TextStates, seeds: Tensor, negative: TextStates | None, known: Tensor | None, low: Tensor | None,
        frames: Tensor | None = None,
    ) -> tuple[Setup, State]:  # fmt: skip
        """Everything on the device, before the first step."""
        net, steps, device = self.net, self.config.steps, seeds.device
        shape = len(seeds), math.prod(net.grid)
        ids = torch.full(shape, net.mask_id, device=device) if known is None else known.clone()
        if ids.shape != shape:
            raise ValueError(
                f"known tokens of shape {tuple(ids.shape)}; expected {shape}, the grid {net.grid} of each seed as a row"
            )
        if frames is not None:
            ids = ids.masked_fill(~net.spread(frames), 0)
        unknown = ids == net.mask_id
        if self.guided:
            none = text.without(torch.ones(len(seeds), dtype=torch.bool, device=device)) if negative is None else negative
            text = text.joined(none)
            low, frames = (None if part is None else torch.cat([part, part]) for part in (low, frames))
        progress = torch.arange(1, steps + 1, device=device) / steps
        guidance = 1 + (self.config.guidance - 1) * (progress if self.config.guidance_ramp else torch.ones_like(progress))
        counts, ranks = num_revealed(steps, unknown.sum(1)), halton_ranks(net.grid).to(device)
        setup = Setup(seeds, text, low, frames, unknown, ranks, counts, guidance, self.config.noise * (1 - progress))
        previous = None if net.recall is None else torch.zeros(len(text.mask), shape[1], net.width, device=device)
        return setup, State(torch.zeros(1, dtype=torch.long, device=device), ids, torch.zeros(shape, device=device), previous)

    def step_once(self, setup: Setup, state: State) -> State:
        """Guess every hidden token, reveal some."""
        seen, wanted = (setup.counts.index_select(0, state.step + later)[0] for later in (0, 1))
        guidance, noise = (table.index_select(0, state.step) for table in (setup.guidance, setup.noise))
        keys = mix_tensors(setup.seeds, state.step)
        drawn, sure, features = self.choose(setup, state, guidance, keys)
        hidden = state.ids == self.net.mask_id
        filled, sure = torch.where(hidden, drawn, state.ids), torch.where(hidden, sure, state.sure)
        left = setup.counts[-1] - wanted
        if self.config.order == "critic":
            hide = self.doubtful(setup, filled, left, noise, keys)
        else:
            back = (self.config.remask * seen).long().minimum(left)  # nothing is left after the last step
            first = self.first(setup, sure, noise, keys).masked_fill(~hidden, math.inf)
            hide = hidden & ~lowest(first, wanted - seen + back)
            if self.config.remask:
                hide = hide | lowest(sure.masked_fill(hidden | ~setup.open, math.inf), back)
        return State(state.step + 1, filled.masked_fill(hide, self.net.mask_id), sure, features)

    def choose(self, setup: Setup, state: State, guidance: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """A token for every place, the logarithm of its probability, and features for the next step. Both branches go through
        in one batch.

        Guidance lifts what the text makes likelier than it was without, however unlikely it still is; smoothed labels leave a
        floor of such tokens. So what is implausible given the text is left out first (Li et al. 2023, equation 2).
        """
        ids, net = state.ids, self.net
        features = net(torch.cat([ids, ids]) if self.guided else ids, setup.text, setup.low, state.previous, frames=setup.frames)
        digits, sure = [], torch.zeros_like(state.sure)
        for index, logits in enumerate(net.logits(features)):
            with_text, without = logits.chunk(2) if self.guided else (logits, logits)
            guided = without + guidance * (with_text - without) if self.guided else logits
            if self.config.min_share:
                guided = guided.masked_fill(implausible(with_text, self.config.min_share), -math.inf)
            logs = guided.log_softmax(-1)
            numbers = uniform(mix(CHOICE, index) >> 1, keys, ids.shape[1])
            digit = draw(logs, numbers, self.config.temperature, self.config.top_p)
            digits.append(digit)
            sure = sure + logs.gather(-1, digit[..., None])[..., 0]
        return net.join(digits), sure, None if net.recall is None else features.float()

    def first(self, setup: Setup, sure: Tensor, noise: Tensor, keys: Tensor) -> Tensor:
        """b n: the lowest are revealed first."""
        if self.config.order == "halton":
            return setup.ranks.float().expand_as(sure)
        return -sure - noise * gumbel(keys, sure.shape[1])

    def doubtful(self, setup: Setup, filled: Tensor, counts: Tensor, noise: Tensor, keys: Tensor) -> Tensor:
        """b n bool: so many open tokens that the critic believes in least (Lezama et al. 2022, algorithm 2)."""
        assert self.critic is not None
        size = len(filled)
        text = TextStates(setup.text.states[:size], setup.text.mask[:size], setup.text.pooled[:size])
        low, frames = (None if part is None else part[:size] for part in (setup.low, setup.frames))
        wrong = judge(self.critic, self.net, filled, text, low, frames)
        return lowest((noise * gumbel(keys, filled.shape[1]) - wrong).masked_fill(~setup.open, math.inf), counts)


@torch.no_grad()
def sample(
    net: MaskedTransformer, text: TextStates, seeds: Tensor, config: MaskedSampleConfig,
    negative: TextStates | None = None, known: Tensor | None = None,
    low: Tensor | None = None, critic: nn.Module | None = None,
    frames: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """ids b n. `seeds` b int64; `negative` replaces the empty text of the other branch; `known` b n holds tokens that stay, and
    `mask_id` where something is to be drawn; `low` b k are coarser tokens to refine; `critic` is for order critic; `frames` b t
    bool says which steps of the first axis are there, at least one of each row: tokens of the others are not looked at, not
    drawn, and come out as 0, whatever `known` has there."""
    drawer = Drawer(net, config, critic)
    setup, state = drawer.prepare(text, seeds, negative, known, low, frames)
    for _ in range(config.steps):
        state = drawer.step_once(setup, state)
    return state.ids


def gumbel(keys: Tensor, size: int) -> Tensor:
    """b -> b size, Gumbel noise of mode 0."""
    return -(-uniform(NOISE, keys, size).clamp(1e-9, 1 - 1e-7).log()).log()
