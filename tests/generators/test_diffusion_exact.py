"""Gaussian data, whose denoiser is known: samples have its mean and covariance, paths are those of the equation, and what is
inpainted has the conditional distribution."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.processes import Process
from tessera.generators.diffusion.sample import START, DiffusionSampler
from tessera.generators.diffusion.samplers import Passes
from tessera.randomness import normal
from tests.generators.diffusion_toys import COVARIANCE, MEAN, gaussian, process, sampler_of

FAMILIES = ["flow", "v", "edm"]
PREDICTED = [*FAMILIES, "noise", "clean"]  # of the family of v: where the network is asked
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


@pytest.mark.parametrize("name", PREDICTED)
@pytest.mark.parametrize("sampler", ["ancestral", "ddim", "dpm"])
def test_samples_have_mean_and_covariance(name: str, sampler: str) -> None:
    made, num = process(name), 6000
    ours = sampler_of(
        made, gaussian(made), sampler=sampler, steps=64 if sampler == "dpm" else 300, eta=0.5 if sampler == "ddim" else 0.0
    )
    x = ours((3,), Condition(), torch.arange(num)).double()
    error = 4 / math.sqrt(num)  # four standard errors
    assert ((x.mean(0) - MEAN).abs() < error * COVARIANCE.diagonal().sqrt()).all()
    spread = torch.outer(COVARIANCE.diagonal(), COVARIANCE.diagonal()).sqrt()
    assert ((torch.cov(x.T) - COVARIANCE).abs() < error * math.sqrt(2) * spread + 0.02).all(), "0.02: steps are finite"


def denoiser(made: Process, level: float) -> tuple[Array, Array]:
    """(matrix, offset) of E[clean | x]."""
    at = torch.tensor(level, dtype=torch.float64)
    alpha, sigma = float(made.family.alpha(at)), float(made.family.sigma(at))
    mean, covariance = MEAN.double().numpy(), COVARIANCE.double().numpy()
    matrix = alpha * covariance @ np.linalg.inv(alpha**2 * covariance + sigma**2 * np.eye(3))
    return matrix, mean - matrix @ (alpha * mean)


def moments(made: Process, passes: Passes, known: float | None) -> tuple[Array, Array]:
    """Mean and covariance of what a table of one pass a step draws, with NumPy and no samples; coordinate 0 may be known."""
    sigma = float(made.family.sigma(passes.level[0]))
    mean, covariance = np.zeros(3), sigma**2 * np.eye(3)
    columns = (passes.level, passes.base, passes.guess, passes.noise, passes.alpha, passes.sigma, passes.up, passes.up_noise)
    denoisers = {level: denoiser(made, level) for level in passes.level.unique().tolist()}
    for level, base, guess, noise, alpha, sigma, up, up_noise in zip(*(part.tolist() for part in columns), strict=True):
        matrix, offset = denoisers[level]
        step = base * np.eye(3) + guess * matrix
        mean, covariance = step @ mean + guess * offset, step @ covariance @ step.T + noise**2 * np.eye(3)
        if known is not None:
            mean[0] = alpha * known
            covariance[0], covariance[:, 0] = 0, 0
            covariance[0, 0] = sigma**2
            mean, covariance = up * mean, up**2 * covariance + up_noise**2 * np.eye(3)
    return mean, covariance


def painter(made: Process, steps: int, times: int) -> DiffusionSampler:
    return sampler_of(made, gaussian(made), sampler="ancestral", steps=steps, resample_times=times)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_inpainted_has_the_conditional_distribution(name: str) -> None:
    made, known = process(name), 1.2
    mean, covariance = MEAN.double().numpy(), COVARIANCE.double().numpy()
    slope = covariance[1:, 0] / covariance[0, 0]
    wanted = mean[1:] + slope * (known - mean[0]), covariance[1:, 1:] - np.outer(slope, covariance[0, 1:])
    errors = []
    for steps, times in ((100, 1), (100, 10), (300, 30)):
        found = moments(made, painter(made, steps, times).inpainting, known)
        errors.append((np.abs(found[0][1:] - wanted[0]).max(), np.abs(found[1][1:, 1:] - wanted[1]).max()))
    assert errors[0][0] > 0.15, "without resampling the new does not fit the known"
    assert errors[1][0] < 0.05
    assert max(errors[2]) < 0.03


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_known_is_noised_as_what_is_drawn(name: str) -> None:
    """After a pass it has the pass's level, or the one that it is brought back to."""
    made, num = process(name), 6000
    ours, known = painter(made, 6, 2), torch.full((num, 3), 2.0)
    kept = torch.ones(num, 3, dtype=torch.bool)
    setup, state = ours.prepare((3,), Condition(), ours.inpainting, torch.arange(num), known, kept)
    levels = [*ours.inpainting.level[1:], torch.tensor(math.inf, dtype=torch.float64)]
    for level in levels:
        state = ours.step(setup, state, (1.0,))
        alpha, sigma = float(made.family.alpha(level)), float(made.family.sigma(level))
        assert float(state.base.mean()) == pytest.approx(2 * alpha, abs=4 * sigma / math.sqrt(3 * num) + 1e-6)
        assert float(state.base.std()) == pytest.approx(sigma, rel=4 / math.sqrt(6 * num), abs=1e-6)


@pytest.mark.parametrize("name", PREDICTED)
def test_samples_have_the_moments_of_their_table(name: str) -> None:
    made, num = process(name), 6000
    for known in (None, 1.2):
        ours = painter(made, 12, 4)
        given = (None, None)
        if known is not None:
            given = torch.tensor([[known, 9.0, 9.0]]).expand(num, 3), torch.tensor([[True, False, False]]).expand(num, 3)
        x = ours((3,), Condition(), torch.arange(num), known=given[0], kept=given[1]).double().numpy()
        mean, covariance = moments(made, ours.passes if known is None else ours.inpainting, known)
        np.testing.assert_allclose(x.mean(0), mean, atol=4 * math.sqrt(0.5 / num))
        np.testing.assert_allclose(np.cov(x.T), covariance, atol=4 * 0.5 * math.sqrt(2 / num))
        if known is not None:
            assert (x[:, 0] == np.float32(known)).all()
