"""Data of which everything is known: Gaussians, and the network that denoises them exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.processes import DdpmConfig, EdmConfig, FlowConfig, Process, Schedule, build_process
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler
from tessera.generators.diffusion.samplers import passes_of

PROCESSES = {
    "flow": FlowConfig(),
    "edm": EdmConfig(),
    "noise": DdpmConfig(predicts="noise"),
    "clean": DdpmConfig(predicts="clean"),
    "v": DdpmConfig(predicts="v"),
}
MEAN = torch.tensor([0.3, -0.5, 0.2])
COVARIANCE = torch.tensor([[0.5, 0.3, 0.0], [0.3, 0.4, -0.2], [0.0, -0.2, 0.3]])


def process(name: str, told_all: bool = True, schedule: Schedule | None = None) -> Process:
    """One of those, whose network is told every level as it is."""
    config = PROCESSES[name]
    made = build_process(config.model_copy(update={"schedule": schedule}) if schedule else config)
    if told_all and name != "edm":
        made.ends = (-1e4, 1e4)
    return made


class Exact(nn.Module):
    """Puts out what the process asks for, of a known guess of clean."""

    def __init__(self, process: Process, guess: Callable[[Tensor, Tensor, Condition], Tensor], fraction: float | None = None):
        super().__init__()
        self.process, self.guess, self.fraction = process, guess, fraction

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        wide = level.view(-1, *[1] * (x.ndim - 1))
        x = x / self.process.fed(torch.ones_like(x), level)
        clean, family = self.guess(x, wide, condition), self.process.family
        noise = (x - family.alpha(wide) * clean) / family.sigma(wide)
        clean_share, noise_share = self.process.shares(wide)
        out = clean_share * clean + noise_share * noise
        return out if self.fraction is None else torch.cat([out, torch.full_like(out, 2 * self.fraction - 1)], dim=1)


def gaussian(process: Process, mean: Tensor = MEAN, covariance: Tensor = COVARIANCE) -> Callable[..., Tensor]:
    """E[clean | x] of Gaussian data b d."""
    values, vectors = torch.linalg.eigh(covariance.double())

    def guess(x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        alpha, sigma = process.family.alpha(level.double()), process.family.sigma(level.double())
        off = (x.double() - alpha * mean) @ vectors
        return (mean + (off * alpha * values / (alpha**2 * values + sigma**2)) @ vectors.T).to(x.dtype)

    return guess


def crooked(x: Tensor, level: Tensor, condition: Condition) -> Tensor:
    """Any smooth function, not linear, so that no error of a sampler cancels."""
    return torch.tanh(0.8 * x.roll(1, -1) + 0.3 * x - 0.05 * level.clamp(-10, 10)) + 0.1 * torch.sin(3 * x)


def sampler_of(
    process: Process, guess: Callable[..., Tensor], levels: Tensor | None = None, fraction: float | None = None, **options: object
) -> DiffusionSampler:
    """With a network that guesses so, over given levels."""
    config = DiffusionSampleConfig(**{"threshold": "none", **options})
    made = DiffusionSampler(Exact(process, guess, fraction), process, config)
    if levels is not None:
        made.levels = torch.cat([levels.double(), torch.tensor([math.inf], dtype=torch.float64)])
        made.passes = passes_of(config.sampler, process.family, made.levels, config.eta)
    return made


def walk(sampler: DiffusionSampler, start: Tensor, seeds: Tensor | None = None) -> list[Tensor]:
    """What stands after every step, from a given start."""
    seeds = torch.arange(len(start)) if seeds is None else seeds
    setup, state = sampler.prepare(start.shape[1:], Condition(), sampler.passes, seeds)
    state = type(state)(state.index, start, start, state.clean)
    found = []
    for settles in sampler.passes.settles.tolist():
        state = sampler.step(setup, state, (1.0,))
        if settles:
            found.append(state.base)
    return found
