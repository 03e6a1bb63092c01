"""Drawing: from noise through a sampler's passes to a clean sample, which is a function of its own seed and condition.

All that changes from pass to pass lies in tensors, and shapes never change: on a GPU a pass is recorded once and replayed for all
of them, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.config import Config
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.guidance import GuidanceConfig, branched, branches_of, guided
from tessera.generators.diffusion.processes import Edm, Guess, Process, recalling
from tessera.generators.diffusion.samplers import Grid, Passes, Sampler, levels_of, passes_of, resampled
from tessera.randomness import mix_tensors, normal
from tessera.recording import Recording, mapped, sampling_precision, shapes_of

START, FRESH, KNOWN, AGAIN = range(41, 45)  # streams of random numbers


class SamplerConfig(Config):
    """How a denoiser draws, but for guidance."""

    sampler: Sampler = "dpm"
    """euler, heun (two passes a step), dpm (DPM-Solver++ 2M), ddim, or ancestral (DDPM's)."""
    steps: int = Field(32, ge=1)
    """From noise to clean."""
    eta: float = Field(0.0, ge=0, le=1)
    """With ddim: how much of the noise is fresh in every step; 0 is euler, 1 ancestral with the least variance."""
    grid: Grid | None = None
    """Where the steps lie: even in time, or as Karras et al. 2022. null: karras with edm, uniform with others."""
    shift: float = Field(1.0, gt=0)
    """Noise of all levels times this, against clean, beside the shift of training: above 1 more steps are spent on much noise."""
    threshold: Literal["none", "static", "dynamic"] = "static"
    """Guesses are kept in [-1, 1]: cut off there, or scaled down to it by their percentile; none for what is no picture."""
    percentile: float = Field(0.995, gt=0, le=1)
    """With dynamic: the share of a sample's values that is not cut off."""
    resample_times: int = Field(5, ge=1)
    """In inpainting: how often each step is made, so that what is new and what is known agree."""

    @model_validator(mode="after")
    def _eta(self) -> SamplerConfig:
        if self.eta and self.sampler != "ddim":
            raise ValueError(f"eta {self.eta} is for the sampler ddim, not for {self.sampler}; set it to 0, or sampler to ddim")
        return self


class DiffusionSampleConfig(SamplerConfig):
    """How a denoiser draws."""

    guidance: GuidanceConfig = GuidanceConfig()
    """Pull towards text and embedding."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same over the passes. The condition has all branches of guidance, told everything first."""

    seeds: Tensor  # b int64
    condition: Condition
    passes: Passes
    known: Tensor | None  # as what is drawn
    kept: Tensor | None  # b ... bool, broadcast against it: True where the known stays


@dataclass(frozen=True, slots=True)
class State:
    """What a pass changes."""

    index: Tensor  # 1 int64: of the pass
    base: Tensor  # b ...
    point: Tensor  # b ...: where the network looks
    clean: Tensor  # b ...: what it guessed last


class DiffusionSampler:
    """Samples with fixed options. On a GPU the first call of each shape records, unless `records` is false; on a CPU it is the
    plain loop.

    Weights are read where they lie: updating them in place is seen, moving the network to another place is not.
    """

    def __init__(
        self, net: nn.Module, process: Process, config: DiffusionSampleConfig, *, recalls: bool = False, bf16: bool = False,
        records: bool = True,
    ) -> None:  # fmt: skip
        self.records = records
        self.net, self.process, self.config, self.recalls, self.bf16 = net, process, config, recalls, bf16
        grid = config.grid or ("karras" if isinstance(process, Edm) else "uniform")
        self.levels = levels_of(process, config.steps, grid, config.shift)
        self.passes = passes_of(config.sampler, process.family, self.levels, config.eta)
        self.stochastic = bool(self.passes.noise.any())
        self.tables: dict[tuple[bool, torch.device], Passes] = {}
        self.recordings: dict[tuple[Any, ...], Recording[Setup, State]] = {}

    @torch.no_grad()
    def __call__(
        self, shape: Sequence[int], condition: Condition, seeds: Tensor, negative: TextStates | None = None,
        known: Tensor | None = None, kept: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """b and the shape. `seeds` b int64; `negative` replaces the empty text of guidance's other branches; of `known`, as large
        as what is drawn, stays what `kept` says (b ... bool, broadcast against it), and the rest is drawn to fit."""
        passes = self.passes if known is None else self.inpainting
        shares = branches_of(self.config.guidance, condition)
        table = self.table(known is not None, seeds.device)
        setup, state = self.prepare(shape, branched(condition, shares, negative), table, seeds, known, kept)
        told = passes.level.clamp(*self.process.ends).tolist()  # as the network is: noise alone is of an infinite level
        on = [any(shares[1:]) and self.config.guidance.at(level) for level in told]
        for guides, group in groupby(on):
            state = self.play(setup, state, shares if guides else (1.0,), len(list(group)))
        return state.base

    @cached_property
    def inpainting(self) -> Passes:
        """The table with repeated steps."""
        return resampled(self.passes, self.process.family, self.levels, self.config.resample_times)

    def table(self, inpaints: bool, device: torch.device) -> Passes:
        """The numbers of all passes where they are used; moved once, because moving them waits for the device."""
        if (inpaints, device) not in self.tables:
            self.tables[inpaints, device] = (self.inpainting if inpaints else self.passes).to(device)
        return self.tables[inpaints, device]

    def prepare(
        self, shape: Sequence[int], condition: Condition, passes: Passes, seeds: Tensor,
        known: Tensor | None = None, kept: Tensor | None = None,
    ) -> tuple[Setup, State]:  # fmt: skip
        """Before the first pass: noise alone."""
        start = normal(START, seeds, math.prod(shape)).view(-1, *shape) * float(self.process.family.sigma(self.levels[0]))
        state = State(torch.zeros(1, dtype=torch.int64, device=seeds.device), start, start, torch.zeros_like(start))
        return Setup(seeds, condition, passes.to(seeds.device), known, kept), state

    def play(self, setup: Setup, state: State, shares: Sequence[float], count: int) -> State:
        """So many passes with the same branches."""
        step = partial(self.step, shares=shares)
        if setup.seeds.device.type != "cuda" or not self.records:
            for _ in range(count):
                state = step(setup, state)
            return state
        shapes = (*shares, *shapes_of(setup, state))
        if shapes not in self.recordings:
            self.recordings[shapes] = Recording(step, setup, state)
        recording = self.recordings[shapes]
        recording.load(setup, state)
        for _ in range(count):
            recording.play()
        return mapped(recording.state, Tensor.clone)

    def step(self, setup: Setup, state: State, shares: Sequence[float]) -> State:
        """One pass."""
        now, keys = setup.passes[state.index], partial(mix_tensors, setup.seeds, state.index)
        with sampling_precision(state.point.device, self.bf16):
            guess = self.guess(setup, state, now.level, shares)
        clean = threshold(guess.clean, self.config.threshold, self.config.percentile)
        x = now.base * state.base + now.guess * clean + now.before * state.clean
        if self.stochastic:
            std = now.noise if guess.fraction is None else now.noise * torch.exp(guess.fraction * now.widening / 2)
            x = x + std * noise_like(x, keys(), FRESH)
        if setup.known is not None and setup.kept is not None:
            x = torch.where(setup.kept, now.alpha * setup.known + now.sigma * noise_like(x, keys(), KNOWN), x)
            x = now.up * x + now.up_noise * noise_like(x, keys(), AGAIN)
        return State(state.index + 1, torch.where(now.settles > 0, x, state.base), x, clean)

    def guess(self, setup: Setup, state: State, level: Tensor, shares: Sequence[float]) -> Guess:
        """All branches in one batch, then guidance."""
        num = sum(1 for index, share in enumerate(shares) if share or not index)
        rows = num * len(state.point)
        condition = mapped(setup.condition, lambda part: part[:rows])
        if self.recalls:
            condition = recalling(condition, state.clean.repeat(num, *[1] * (state.clean.ndim - 1)))
        x = state.point.repeat(num, *[1] * (state.point.ndim - 1))
        return guided(self.process.guess(self.net, x, level.expand(rows), condition), shares)


def threshold(clean: Tensor, kind: Literal["none", "static", "dynamic"], percentile: float) -> Tensor:
    """Guesses within [-1, 1]; dynamic is Saharia et al. 2022, section 2.3: b ... alone, each by its own percentile."""
    if kind == "none":
        return clean
    if kind == "static":
        return clean.clamp(-1, 1)
    sizes = clean.abs().flatten(1)
    place = percentile * (sizes.shape[1] - 1)
    below = math.floor(place)
    largest = sizes.topk(sizes.shape[1] - below).values  # falling; its last is the one below the percentile
    limit = torch.lerp(largest[:, -1], largest[:, max(-2, -largest.shape[1])], place - below).clamp(min=1)
    limit = limit.view(-1, *[1] * (clean.ndim - 1))
    return clean.clamp(-limit, limit) / limit


def noise_like(x: Tensor, keys: Tensor, stream: int) -> Tensor:
    """As x: standard normal, a function of the keys b."""
    return normal(stream, keys, x[0].numel()).view_as(x)
