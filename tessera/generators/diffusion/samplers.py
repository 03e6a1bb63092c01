"""Samplers as tables. Every one of them is made of passes of one form,

    x' = a * base + b * guess + c * guess of the pass before + s * noise,

so a sampler is no more than the numbers of its passes, made once, in fp64. One step of `sample` plays them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from tessera.generators.diffusion.algebra import Family, step_back, widening
from tessera.generators.diffusion.processes import Process

Sampler = Literal["euler", "heun", "dpm", "ddim", "ancestral"]
Grid = Literal["uniform", "karras"]
RHO = 7.0  # Karras et al. 2022, equation 5


@dataclass(frozen=True, slots=True)
class Passes:
    """Numbers of each pass through the network; all have shape p."""

    level: Tensor  # at which the network looks
    base: Tensor  # what is taken of the base,
    guess: Tensor  # of what it guesses,
    before: Tensor  # of what it guessed in the pass before,
    noise: Tensor  # and of fresh noise
    widening: Tensor  # of the noise: logarithm of its largest variance by its least, for networks that choose
    settles: Tensor  # 1 where the result becomes the base of what follows, 0 where it is only a place to look from
    alpha: Tensor  # of clean in the result,
    sigma: Tensor  # and of noise: what a known sample is brought to
    up: Tensor  # then: times this,
    up_noise: Tensor  # and as much fresh noise more; 1 and 0 but for inpainting
    step: Tensor  # which step of the grid it belongs to

    def __len__(self) -> int:
        return len(self.level)

    def __getitem__(self, index: Tensor) -> Passes:
        """Some of them."""
        return Passes(*(getattr(self, part.name).index_select(0, index) for part in fields(self)))

    def to(self, device: torch.device) -> Passes:
        """As fp32, where they are used."""
        return Passes(*(getattr(self, part.name).float().to(device) for part in fields(self)))


def levels_of(process: Process, steps: int, grid: Grid, shift: float = 1.0) -> Tensor:
    """steps + 1, fp64: from the noisiest level that can be drawn from to clean. `shift` multiplies the noise of all of them,
    against clean."""
    lower = 2 * math.log(shift)
    if grid == "uniform":
        first = time_at(process, process.start + lower)
        levels = process.level_at(torch.linspace(first, 0, steps + 1, dtype=torch.float64))[:-1]
    else:
        noisiest, cleanest = process.ends
        most, least = (math.exp(-end / 2 / RHO) for end in (max(noisiest, process.start + lower), cleanest))
        levels = -2 * RHO * torch.linspace(most, least, steps, dtype=torch.float64).log()
    return torch.cat([levels - lower, torch.tensor([math.inf], dtype=torch.float64)])


def time_at(process: Process, level: float) -> float:
    """The latest time whose level is at least that."""
    low, high = 0.0, 1.0
    if process.level_at(torch.tensor(high, dtype=torch.float64)) >= level:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        reached = bool(process.level_at(torch.tensor(middle, dtype=torch.float64)) >= level)
        low, high = (middle, high) if reached else (low, middle)
    return low


def passes_of(sampler: Sampler, family: Family, levels: Tensor, eta: float = 0.0) -> Passes:
    """The table of a sampler over levels; `eta` is for ddim."""
    if sampler == "heun":
        return heun(family, levels)
    if sampler == "dpm":
        return dpm(family, levels)
    if sampler == "ancestral":
        return ancestral(family, levels)
    return ddim(family, levels, eta if sampler == "ddim" else 0.0)


def ddim(family: Family, levels: Tensor, eta: float) -> Passes:
    """Song et al. 2020, equation 12. With eta 0 it is Euler's method, in all families, along straight lines; with 1 ancestral."""
    level, target = levels[:-1], levels[1:]
    _, _, open_std = step_back(family, level, target)
    kept = torch.sqrt((family.sigma(target) ** 2 - (eta * open_std) ** 2).clamp(min=0)) / family.sigma(level)
    return plain(family, levels, kept, family.alpha(target) - kept * family.alpha(level), noise=eta * open_std)


def ancestral(family: Family, levels: Tensor) -> Passes:
    """Ho et al. 2020, equation 7: a draw from what the guess leaves open of the cleaner sample."""
    level, target = levels[:-1], levels[1:]
    base, guess, noise = step_back(family, level, target)
    passes = plain(family, levels, base, guess, noise=noise)
    return replace(passes, widening=torch.where(noise > 0, widening(family, level, target), 0))


def dpm(family: Family, levels: Tensor) -> Passes:
    """DPM-Solver++ 2M (Lu et al. 2022, algorithm 2). Where a step is infinitely long, from noise alone or to clean, the step
    before says nothing, and it is of first order."""
    level, target = levels[:-1], levels[1:]
    length = (target - level) / 2
    weight = torch.zeros_like(level)
    weight[1:] = length[1:] / length[:-1] / 2
    weight = torch.where(weight.isfinite(), weight, 0)
    guess = -family.alpha(target) * torch.expm1(-length)
    kept = family.sigma(target) / family.sigma(level)
    return replace(plain(family, levels, kept, guess * (1 + weight)), before=-guess * weight)


def heun(family: Family, levels: Tensor) -> Passes:
    """Karras et al. 2022, algorithm 1: two passes a step, one at each of its ends; the last step has one."""
    first = ddim(family, levels, 0.0)
    (scale, time), (next_scale, next_time) = family.straight(levels[:-2]), family.straight(levels[1:-1])
    length = next_time - time
    second = plain(
        family, levels[:-1], next_scale / scale * next_time / time, -next_scale * length / next_time / 2,
        before=next_scale * length * (0.5 / next_time - 1 / time),
    )  # fmt: skip
    second = replace(second, level=levels[1:-1])
    settles = torch.zeros_like(first.settles)
    settles[-1] = 1
    both = joined(replace(first, settles=settles), second)
    return both[torch.argsort(both.step, stable=True)]


def plain(
    family: Family, levels: Tensor, base: Tensor, guess: Tensor, before: Tensor | None = None, noise: Tensor | None = None
) -> Passes:
    """One pass a step, without resampling."""
    zeros, target = torch.zeros_like(base), levels[1:]
    return Passes(
        level=levels[:-1], base=base, guess=guess,
        before=zeros if before is None else before, noise=zeros if noise is None else noise,
        widening=zeros, settles=zeros + 1, alpha=family.alpha(target), sigma=family.sigma(target),
        up=zeros + 1, up_noise=zeros, step=torch.arange(len(base)),
    )  # fmt: skip


def resampled(passes: Passes, family: Family, levels: Tensor, times: int) -> Passes:
    """Every step so many times; in between the sample is brought back to the step's level by fresh noise (RePaint, Lugmayr et al.
    2022, algorithm 1). But once from noise alone, where nothing would be carried over, and once to clean."""
    last = len(levels) - 2
    parts = []
    for step in range(last + 1):
        rows = passes[(passes.step == step).nonzero()[:, 0]]
        again = replace(rows, guess=rows.guess.clone(), before=rows.before.clone())
        again.guess[0] += again.before[0]  # the pass before was another's
        again.before[0] = 0
        count = times if step < last and levels[step].isfinite() else 1
        for turn in range(count):
            part = rows if turn == 0 else again
            if turn < count - 1:
                up, up_noise = family.noisier(levels[step + 1], levels[step])
                part = replace(part, up=part.up.clone(), up_noise=part.up_noise.clone())
                part.up[-1], part.up_noise[-1] = up, up_noise
            parts.append(part)
    return joined(*parts)


def joined(*parts: Passes) -> Passes:
    """One table after another."""
    return Passes(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Passes)))
