"""Gaussian data, whose denoiser is known: samples have its mean and covariance, paths are those of the equation, and what is
inpainted has the conditional distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.processes import Process, Schedule
from tessera.generators.diffusion.sample import START
from tessera.generators.diffusion.samplers import Passes
from tessera.randomness import normal
from tests.generators.diffusion_toys import COVARIANCE, MEAN, gaussian, process, sampler_of

FAMILIES = ["flow", "v", "edm"]
PREDICTED = [*FAMILIES, "noise", "clean"]  # of the family of v: where the network is asked
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
TABLES: list[tuple[str, Schedule | None]] = [("flow", None), ("edm", None), *(("v", schedule) for schedule in SCHEDULES)]
CELLS = [*TABLES, *((name, schedule) for name in ("noise", "clean") for schedule in SCHEDULES)]
SAMPLERS = [("euler", 0.0), ("heun", 0.0), ("dpm", 0.0), ("ddim", 0.0), ("ddim", 1.0), ("ancestral", 0.0)]
BOUNDS = {"euler": 0.025, "heun": 0.01, "dpm": 0.01, "ddim": 0.05, "ancestral": 0.05}
Array = npt.NDArray[np.float64]


def path_end(made: Process, start: Tensor, level: Tensor) -> Tensor:
    """Where the probability flow ends: in the axes of the covariance each coordinate keeps its place among the quantiles."""
    values, vectors = torch.linalg.eigh(COVARIANCE.double())
    alpha, sigma = made.family.alpha(level), made.family.sigma(level)
    off = (start.double() - alpha * MEAN) @ vectors
    return MEAN + (off * torch.sqrt(values / (alpha**2 * values + sigma**2))) @ vectors.T


def error_of(name: str, sampler: str, steps: int, grid: str) -> float:
    made = process(name)
    ours = sampler_of(made, gaussian(made), sampler=sampler, steps=steps, grid=grid)
    seeds = torch.arange(40)
    start = normal(START, seeds, 3) * made.family.sigma(ours.levels[0])
    return float((ours((3,), Condition(), seeds) - path_end(made, start, ours.levels[0])).abs().max())


@pytest.mark.parametrize("name", PREDICTED)
@pytest.mark.parametrize(("sampler", "order", "bound"), [("euler", 1, 0.025), ("heun", 2, 1e-3), ("dpm", 2, 1e-3)])
def test_paths_are_those_of_the_equation(name: str, sampler: str, order: int, bound: float) -> None:
    """And more steps have less error, by their order."""
    grid = "karras" if name == "edm" else "uniform"
    coarse, fine = (error_of(name, sampler, steps, grid) for steps in (64, 256 if order == 1 else 192))
    assert fine < bound * (2 if name == "edm" else 1)
    assert fine < coarse * (0.3 if order == 1 else 0.25)


def denoiser(made: Process, level: float) -> tuple[Array, Array]:
    """(matrix, offset) of E[clean | x]."""
    at = torch.tensor(level, dtype=torch.float64)
    alpha, sigma = float(made.family.alpha(at)), float(made.family.sigma(at))
    mean, covariance = MEAN.double().numpy(), COVARIANCE.double().numpy()
    matrix = alpha * covariance @ np.linalg.inv(alpha**2 * covariance + sigma**2 * np.eye(3))
    return matrix, mean - matrix @ (alpha * mean)


def moments(made: Process, passes: Passes, known: float | None = None) -> tuple[Array, Array]:
    """Mean and covariance of what a table draws, with NumPy and no samples: every pass is linear in (base, point, guess before).
    Coordinate 0 may be known."""
    one, zero = np.eye(3), np.zeros((3, 3))
    still = np.hstack([one, zero, zero])
    mean, covariance = np.zeros(9), np.zeros((9, 9))
    covariance[:6, :6] = float(made.family.sigma(passes.level[0])) ** 2 * np.tile(one, (2, 2))
    denoisers = {level: denoiser(made, level) for level in passes.level.unique().tolist()}
    for row in range(len(passes)):
        now = {field.name: float(getattr(passes, field.name)[row]) for field in fields(passes)}
        matrix, offset = denoisers[now["level"]]
        x = np.hstack([now["base"] * one, now["guess"] * matrix, now["before"] * one])
        shift, fresh = now["guess"] * offset, now["noise"] ** 2 * one
        if known is not None:
            x[0], shift[0], fresh[0, 0] = 0, now["alpha"] * known, now["sigma"] ** 2
            x, shift, fresh = now["up"] * x, now["up"] * shift, now["up"] ** 2 * fresh + now["up_noise"] ** 2 * one
        settles = now["settles"]
        step = np.vstack([x if settles else still, x, np.hstack([zero, matrix, zero])])
        spread = np.outer([settles, 1, 0], [settles, 1, 0])
        mean = step @ mean + np.concatenate([settles * shift, shift, offset])
        covariance = step @ covariance @ step.T + np.kron(spread, fresh)
    return mean[:3], covariance[:3, :3]


def furthest(found: tuple[Array, Array], wanted: tuple[Array, Array]) -> tuple[float, float]:
    """By how much: the mean, the covariance."""
    return float(np.abs(found[0] - wanted[0]).max()), float(np.abs(found[1] - wanted[1]).max())


@pytest.mark.parametrize(("name", "schedule"), TABLES)
@pytest.mark.parametrize(("sampler", "eta"), SAMPLERS)
def test_steps_lead_to_mean_and_covariance(name: str, schedule: Schedule | None, sampler: str, eta: float) -> None:
    """But for what is missed at the start: noise has no mean, and alpha there is at most 0.028."""
    made, errors = process(name, schedule=schedule), []
    for steps in (32, 128):
        ours = sampler_of(made, gaussian(made), sampler=sampler, eta=eta, steps=steps)
        errors.append(furthest(moments(made, ours.passes), (MEAN.double().numpy(), COVARIANCE.double().numpy())))
    assert errors[1][0] < 0.01
    assert errors[1][1] < BOUNDS[sampler]
    assert errors[1][1] < errors[0][1] * 0.4


@pytest.mark.parametrize(("name", "schedule"), CELLS)
@pytest.mark.parametrize(("sampler", "eta"), SAMPLERS)
@pytest.mark.parametrize("known", [None, 1.2])
def test_samples_have_mean_and_covariance_of_their_table(
    name: str, schedule: Schedule | None, sampler: str, eta: float, known: float | None
) -> None:
    """Within 4.5 standard errors of normal data. What is known stays as it was given."""
    made, num = process(name, schedule=schedule), 3000
    ours = sampler_of(made, gaussian(made), sampler=sampler, eta=eta, steps=8, resample_times=2)
    given = None if known is None else torch.tensor([[known, 9.0, 9.0]]).expand(num, 3)
    kept = None if known is None else torch.tensor([[True, False, False]]).expand(num, 3)
    x = ours((3,), Condition(), torch.arange(num), known=given, kept=kept).double().numpy()
    mean, covariance = moments(made, ours.passes if known is None else ours.inpainting, known)
    variance = covariance.diagonal()
    assert (np.abs(x.mean(0) - mean) <= 4.5 * np.sqrt(variance / num) + 1e-6).all()
    assert (np.abs(np.cov(x.T) - covariance) <= 4.5 * np.sqrt((np.outer(variance, variance) + covariance**2) / num) + 1e-6).all()
    if known is not None:
        assert (x[:, 0] == np.float32(known)).all()


def inpainting_errors(made: Process, steps: int, times: Sequence[int], **options: object) -> list[tuple[float, float]]:
    """Of the mean and the covariance of what is unknown, for so many resamplings."""
    known, mean, covariance = 1.2, MEAN.double().numpy(), COVARIANCE.double().numpy()
    slope = covariance[1:, 0] / covariance[0, 0]
    wanted = mean[1:] + slope * (known - mean[0]), covariance[1:, 1:] - np.outer(slope, covariance[0, 1:])
    samplers = (sampler_of(made, gaussian(made), steps=steps, resample_times=count, **options) for count in times)
    found = (moments(made, sampler.inpainting, known) for sampler in samplers)
    return [furthest((mean[1:], covariance[1:, 1:]), wanted) for mean, covariance in found]


@pytest.mark.parametrize(("name", "schedule"), TABLES)
@pytest.mark.parametrize(("sampler", "eta"), SAMPLERS)
def test_what_is_inpainted_nears_the_conditional_mean(name: str, schedule: Schedule | None, sampler: str, eta: float) -> None:
    errors = inpainting_errors(process(name, schedule=schedule), 40, (1, 3, 10), sampler=sampler, eta=eta)
    assert errors[0][0] > 0.15, "without resampling the new does not fit the known"
    assert errors[1][0] < min(0.16, 0.6 * errors[0][0])
    assert errors[2][0] < min(0.08, 0.6 * errors[1][0])
    assert errors[2][1] < 0.12


@pytest.mark.parametrize("name", FAMILIES)
def test_the_limit_of_inpainting_is_the_conditional_distribution(name: str) -> None:
    errors = inpainting_errors(process(name), 60, (30,), sampler="heun")
    assert max(errors[0]) < 0.03


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("sampler", "eta"), SAMPLERS)
def test_what_is_known_is_noised_as_what_is_drawn(name: str, sampler: str, eta: float) -> None:
    """After a pass it has the pass's level, or the one that it is brought back to."""
    made, num = process(name), 6000
    ours = sampler_of(made, gaussian(made), sampler=sampler, eta=eta, steps=6, resample_times=2)
    known = torch.full((num, 3), 2.0)
    kept = torch.ones(num, 3, dtype=torch.bool)
    setup, state = ours.prepare((3,), Condition(), ours.inpainting, torch.arange(num), known, kept)
    levels = [*ours.inpainting.level[1:], torch.tensor(math.inf, dtype=torch.float64)]
    for level in levels:
        state = ours.step(setup, state, (1.0,))
        alpha, sigma = float(made.family.alpha(level)), float(made.family.sigma(level))
        assert float(state.point.mean()) == pytest.approx(2 * alpha, abs=4 * sigma / math.sqrt(3 * num) + 1e-6)
        assert float(state.point.std()) == pytest.approx(sigma, rel=4 / math.sqrt(6 * num), abs=1e-6)
