"""Distances against closed forms, NumPy, SciPy and torchmetrics."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tessera.evals.distances import (
    Moments,
    estimate_frechet,
    estimate_kernel,
    frechet_distance,
    frechet_from_moments,
    kernel_distance,
    size_note,
)

Matrix = npt.NDArray[np.float64]


def draws(n: int, d: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> Matrix:
    return np.random.default_rng(seed).normal(shift, scale, (n, d))


def exact(mean: Matrix, covariance: Matrix, n: int = 1000) -> Moments:
    """Moments of a set with exactly this mean and covariance."""
    return Moments(n, n * mean, covariance * (n - 1) + n * np.outer(mean, mean))


class Flat(nn.Module):
    """Pictures as they are, for torchmetrics."""

    num_features = 12

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).float()


def test_gaussians_have_the_closed_form() -> None:
    """Diagonal covariances commute: |m|^2 + sum (sqrt a - sqrt b)^2."""
    a, b = np.array([1.0, 4.0, 9.0]), np.array([4.0, 1.0, 0.25])
    found = frechet_from_moments(exact(np.zeros(3), np.diag(a)), exact(np.array([1.0, 2.0, 3.0]), np.diag(b)))
    assert found == pytest.approx(14 + np.square(np.sqrt(a) - np.sqrt(b)).sum(), rel=1e-9)


def test_frechet_agrees_with_scipy() -> None:
    linalg = pytest.importorskip("scipy.linalg")
    a, b = draws(300, 6, 0) @ draws(6, 6, 1), draws(200, 6, 2, 0.5)
    s, t = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(s + t - 2 * linalg.sqrtm(s @ t).real)
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-8)


def test_frechet_agrees_with_torchmetrics() -> None:
    fid = pytest.importorskip("torchmetrics.image.fid")
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.integers(0, top, (64, 3, 2, 2), dtype=np.uint8)) for top in (256, 200))
    metric = fid.FrechetInceptionDistance(feature=Flat(), input_img_size=(3, 2, 2))
    metric.update(a, real=True)
    metric.update(b, real=False)
    assert frechet_distance(a.flatten(1).numpy().astype(float), b.flatten(1).numpy().astype(float)) == pytest.approx(
        float(metric.compute()), rel=1e-4
    )


def test_kernel_distance_agrees_with_torchmetrics() -> None:
    kid = pytest.importorskip("torchmetrics.image.kid")
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.random((40, 3, 2, 2)) * top).float() for top in (1.0, 2.0))
    metric = kid.KernelInceptionDistance(feature=Flat(), subsets=1, subset_size=40)
    metric.update(a, real=True)
    metric.update(b, real=False)
    mean, _ = metric.compute()
    assert kernel_distance(a.flatten(1).numpy(), b.flatten(1).numpy()) == pytest.approx(float(mean), rel=1e-3)


def test_kernel_distance_by_hand() -> None:
    a, b = np.array([[0.0], [1.0]]), np.array([[2.0], [1.0]])
    # pairs within a: k(0,1) = 1; within b: k(2,1) = 27; across: k(0,2) = k(0,1) = 1, k(1,2) = 27, k(1,1) = 8
    assert kernel_distance(a, b) == pytest.approx(1 + 27 - 2 * (1 + 1 + 27 + 8) / 4)


def test_kernel_distance_has_no_bias() -> None:
    values = [kernel_distance(draws(20, 4, seed), draws(20, 4, 1000 + seed)) for seed in range(300)]
    assert abs(np.mean(values)) < 3 * np.std(values) / np.sqrt(len(values))


def test_equal_sets_are_at_no_distance() -> None:
    a = draws(50, 5, 0)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_frechet_is_finite_where_covariances_are_singular() -> None:
    assert 0 < frechet_distance(draws(5, 30, 0), draws(5, 30, 1)) < 1e3


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 60), d=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_moments_are_those_of_numpy(n: int, d: int, seed: int) -> None:
    features = draws(n, d, seed, 3.0)
    whole = Moments.of(features)
    assert whole.count == n
    np.testing.assert_allclose(whole.mean, features.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(whole.covariance, np.atleast_2d(np.cov(features, rowvar=False)), rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(0.1, 10))
def test_frechet_is_symmetric_and_scales_as_a_square(seed: int, scale: float) -> None:
    a, b = draws(20, 3, seed), draws(30, 3, seed + 1, 1.0)
    distance = frechet_distance(a, b)
    assert frechet_distance(b, a) == pytest.approx(distance, rel=1e-7)
    assert frechet_distance(scale * a, scale * b) == pytest.approx(scale**2 * distance, rel=1e-6)


@pytest.mark.parametrize("estimate", [estimate_frechet, estimate_kernel])
def test_an_interval_holds_its_value_and_repeats(estimate: object) -> None:
    assert callable(estimate)
    a, b = draws(80, 4, 0), draws(80, 4, 1, 1.0)
    found = estimate(a, b, resamples=40, seed=3)
    low, high = found.interval
    assert low < found.value < high
    assert found == estimate(a, b, resamples=40, seed=3)
    assert found.as_dict() == {"value": found.value, "n": 80, "interval": [low, high], "resamples": 40}
    assert estimate(a, b, resamples=0, seed=3).interval is None


def test_intervals_shrink_with_n() -> None:
    def width(n: int) -> float:
        low, high = estimate_frechet(draws(n, 3, 0), draws(n, 3, 1, 1.0), resamples=60, seed=0).interval or (0, 0)
        return high - low

    assert width(800) < 0.6 * width(50)


def test_few_samples_are_noted() -> None:
    assert size_note(1000, 64) is None
    assert "n=50 < d=64" in (size_note(50, 64) or "")
    assert "too few" in (size_note(3, 64) or "")


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected samples x width"):
        Moments.of(np.zeros(4))
    with pytest.raises(ValueError, match="two samples or more"):
        frechet_distance(np.zeros((1, 4)), np.zeros((5, 4)))
    with pytest.raises(ValueError, match="two samples or more"):
        kernel_distance(np.zeros((1, 4)), np.zeros((5, 4)))
