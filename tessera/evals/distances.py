"""Distances between two sets of samples by their features, n d: Fréchet (Heusel et al. 2017) and kernel (Bińkowski et al. 2018).

Both are 0 for equal distributions, grow without limit and mean nothing by themselves: show the floor, the distance of two
disjoint sets of real samples, beside them. The Fréchet distance of finite sets is too large,
the more so the smaller n: compare equal n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Features: TypeAlias = npt.NDArray[np.floating]  # n d
Doubles: TypeAlias = npt.NDArray[np.float64]

MIN_SAMPLES = 8  # below this a covariance of features is a joke, and a note takes the place of the number
MOST_RESAMPLED = 4096  # rows up to which whole kernel matrices are kept for resampling (three of 128 MiB)
_ROWS = 1024  # of a kernel matrix, or of features, at once


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of outer products in fp64."""

    count: int
    total: Doubles  # d
    outer: Doubles  # d d

    @classmethod
    def of(cls, features: Features) -> Moments:
        """n d, any float type."""
        if features.ndim != 2:
            raise ValueError(f"features are shaped {features.shape}; expected samples x width")
        total, outer = np.zeros(features.shape[1]), np.zeros((features.shape[1], features.shape[1]))
        for start in range(0, len(features), _ROWS):
            rows = features[start : start + _ROWS].astype(np.float64)
            total += rows.sum(0)
            outer += rows.T @ rows
        return cls(len(features), total, outer)

    @property
    def mean(self) -> Doubles:
        """d"""
        return self.total / self.count

    @property
    def covariance(self) -> Doubles:
        """d d, unbiased."""
        if self.count < 2:
            raise ValueError(f"a covariance needs two samples or more; got {self.count}")
        return (self.outer - np.outer(self.total, self.mean)) / (self.count - 1)


def frechet_from_moments(a: Moments, b: Moments) -> float:
    """|m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^1/2), Heusel et al. 2017, equation 6.

    The trace of the root is the sum of the roots of the eigenvalues of S_a^1/2 S_b S_a^1/2, which is symmetric: no complex
    numbers, where the root of a product of singular covariances may come out so.
    """
    values, vectors = np.linalg.eigh(a.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ b.covariance @ root), 0)).sum()
    spread = np.trace(a.covariance) + np.trace(b.covariance) - 2 * cross
    return max(0.0, float(np.square(a.mean - b.mean).sum() + spread))  # below 0 by rounding only


def frechet_distance(a: Features, b: Features) -> float:
    """Of two sets of features, n d and m d."""
    return frechet_from_moments(Moments.of(a), Moments.of(b))


def kernel_distance(a: Features, b: Features) -> float:
    """Unbiased squared MMD with the kernel (x.y / d + 1)^3, Bińkowski et al. 2018, over all pairs: no subsets, no chance.

    Around 0 for equal distributions, so it may be below 0.
    """
    refuse_few(min(len(a), len(b)))
    n, m = len(a), len(b)
    inside_a = (_kernel_sum(a, a) - float(_self_kernel(a).sum())) / (n * (n - 1))
    inside_b = (_kernel_sum(b, b) - float(_self_kernel(b).sum())) / (m * (m - 1))
    return inside_a + inside_b - 2 * _kernel_sum(a, b) / (n * m)


def refuse_few(n: int) -> None:
    """Pairs within a set need two samples."""
    if n < 2:
        raise ValueError(f"a distance needs two samples or more on both sides; got {n}")


def _kernel(a: Features, b: Features) -> Doubles:
    return (a.astype(np.float64) @ b.astype(np.float64).T / a.shape[1] + 1) ** 3


def _self_kernel(a: Features) -> Doubles:
    return (np.square(a.astype(np.float64)).sum(1) / a.shape[1] + 1) ** 3


def _kernel_sum(a: Features, b: Features) -> float:
    return sum(float(_kernel(a[start : start + _ROWS], b).sum()) for start in range(0, len(a), _ROWS))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measure with its 95 % interval; resamples is 0 where there is none."""

    value: float
    n: int  # samples on the smaller side
    interval: tuple[float, float] | None = None
    resamples: int = 0

    def as_dict(self) -> dict[str, object]:
        """Plain JSON."""
        interval = None if self.interval is None else list(self.interval)
        return {"value": self.value, "n": self.n, "interval": interval, "resamples": self.resamples}


def estimate_frechet(a: Features, b: Features, *, resamples: int, seed: int) -> Estimate:
    """Fréchet distance with a bootstrap interval over both sides."""
    value = frechet_distance(a, b)

    def draw(rng: np.random.Generator) -> float:
        return frechet_distance(a[rng.integers(len(a), size=len(a))], b[rng.integers(len(b), size=len(b))])

    return Estimate(value, min(len(a), len(b)), *resampled(value, draw, resamples, seed))


def estimate_kernel(a: Features, b: Features, *, resamples: int, seed: int) -> Estimate:
    """Kernel distance with a bootstrap interval over both sides; without one above `MOST_RESAMPLED` rows."""
    value = kernel_distance(a, b)
    n, m = len(a), len(b)
    if max(n, m) > MOST_RESAMPLED:
        return Estimate(value, min(n, m))
    inside_a, inside_b, across = _kernel(a, a), _kernel(b, b), _kernel(a, b)

    def draw(rng: np.random.Generator) -> float:
        x = rng.multinomial(n, np.full(n, 1 / n)).astype(np.float64)  # how often each row was drawn
        y = rng.multinomial(m, np.full(m, 1 / m)).astype(np.float64)
        part_a = (x @ inside_a @ x - x @ inside_a.diagonal()) / (n * (n - 1))
        part_b = (y @ inside_b @ y - y @ inside_b.diagonal()) / (m * (m - 1))
        return float(part_a + part_b - 2 * (x @ across @ y) / (n * m))

    return Estimate(value, min(n, m), *resampled(value, draw, resamples, seed))


def resampled(
    value: float, draw: Callable[[np.random.Generator], float], resamples: int, seed: int
) -> tuple[tuple[float, float] | None, int]:
    """Percentiles 2.5 and 97.5 of the resampled values, moved so that their mean is the value: rows that are drawn twice make
    every resampled distance too large, and every score too small."""
    if resamples < 1:
        return None, 0
    rng = np.random.default_rng(seed)
    drawn = np.array([draw(rng) for _ in range(resamples)])
    low, high = np.percentile(drawn, [2.5, 97.5]) - drawn.mean() + value
    return (float(low), float(high)), resamples


def size_note(n: int, width: int) -> str | None:
    """What a reader must know when there are few samples."""
    if n < MIN_SAMPLES:
        return f"n={n}: too few for a distance; {MIN_SAMPLES} or more are needed on each side"
    if n < width:
        return f"n={n} < d={width}: the covariances are singular and the distance is far too large; compare equal n only"
    return None
