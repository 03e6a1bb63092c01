"""The inception score (Salimans et al. 2016): how sure a classifier is of each sample, and how much samples differ.

It looks at no real samples: 1 where all look the same, and at most the number of classes. Whoever draws one perfect picture of
each class has the best score. It grows with n: compare equal n only.
"""

from __future__ import annotations

import numpy as np

from tessera.evals.distances import Doubles, Estimate, Features, resampled


def inception_score(chances: Features) -> float:
    """exp of the mean over samples of KL(p(y | x) || p(y)), p(y) being the mean of all; n v, rows that sum to 1."""
    exact = chances.astype(np.float64)
    return float(np.exp((_negentropy(exact) - _negentropy(exact.mean(0))).mean()))


def _negentropy(chances: Doubles) -> Doubles:
    """... v -> ...: the sum of p log p, where 0 log 0 is 0."""
    return (chances * np.log(chances, out=np.zeros_like(chances), where=chances > 0)).sum(-1)


def estimate_score(chances: Features, *, resamples: int, seed: int) -> Estimate:
    """With a bootstrap interval over the samples."""
    value, n = inception_score(chances), len(chances)

    def draw(rng: np.random.Generator) -> float:
        return inception_score(chances[rng.integers(n, size=n)])

    return Estimate(value, n, *resampled(value, draw, resamples, seed))
