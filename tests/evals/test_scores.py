"""The inception score against sums written out, exact cases and torchmetrics; and what stands in for Inception."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from tessera.evals.features import FeatureNet, Fitting, fit_extractor
from tessera.evals.nets import run_net
from tessera.evals.scores import estimate_score, inception_score

Matrix = npt.NDArray[np.float64]


def chances(n: int, v: int, sharp: float = 2.0) -> Matrix:
    logits = sharp * np.random.default_rng(0).normal(size=(n, v))
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def test_the_score_is_the_sum_written_out() -> None:
    given = chances(23, 7)
    marginal = [sum(row[k] for row in given) / 23 for k in range(7)]
    divergences = [sum(p * math.log(p / q) for p, q in zip(row, marginal, strict=True)) for row in given]
    assert inception_score(given) == pytest.approx(math.exp(sum(divergences) / 23), rel=1e-12)


def test_exact_scores() -> None:
    assert inception_score(np.full((9, 4), 0.25)) == pytest.approx(1)
    assert inception_score(np.tile(np.eye(5), (3, 1))) == pytest.approx(5), "sure, and every class as often"
    assert inception_score(np.eye(5)[[2] * 8]) == pytest.approx(1), "sure, and always of the same"
    halves = np.array([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    assert inception_score(halves) == pytest.approx(2)


class Logits(nn.Module):
    """Pictures are their own logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def test_the_score_agrees_with_torchmetrics() -> None:
    inception = pytest.importorskip("torchmetrics.image.inception")
    given = chances(64, 12)
    metric = inception.InceptionScore(feature=Logits(), splits=1)
    metric.update(torch.from_numpy(np.log(given)).view(64, 3, 2, 2))
    assert inception_score(given) == pytest.approx(float(metric.compute()[0]), rel=1e-6)


def test_an_interval_is_around_the_score_and_repeats() -> None:
    given = chances(50, 6)
    found = estimate_score(given, resamples=50, seed=1)
    assert found == estimate_score(given, resamples=50, seed=1)
    assert found.interval is not None
    assert found.interval[0] < found.value == inception_score(given) < found.interval[1]
    assert estimate_score(given, resamples=0, seed=1).interval is None


def squares(n: int) -> tuple[npt.NDArray[np.uint8], list[str | None]]:
    pictures = np.random.default_rng(3).integers(0, 40, (n, 16, 16, 3)).astype(np.uint8)
    for index in range(n):
        pictures[index, :, :, index % 3] += 180
    return pictures, [("red", "green", "blue")[index % 3] for index in range(n)]


def test_a_fitted_net_tells_words_apart() -> None:
    """Of a caption with one word, its chance is nearly 1: three colours score almost 3, one colour scores 1."""
    pictures, captions = squares(60)
    extractor = fit_extractor(pictures, captions, Fitting(steps=40, batch_size=24))
    assert extractor.measure_name("IS") == f"IS-words-{extractor.sha256[:8]}"
    assert extractor.classify is not None
    assert isinstance(extractor.net, FeatureNet)
    found = extractor.classify(pictures)
    hidden = run_net(extractor.net.trunk, pictures).astype(np.float64)  # type: ignore[arg-type]
    weight, bias = (extractor.net.state_dict()[f"head.{name}"].double().numpy() for name in ("weight", "bias"))
    there = 1 / (1 + np.exp(-(hidden / (1 + np.exp(-hidden)) @ weight.T + bias)))
    np.testing.assert_allclose(found, there / there.sum(1, keepdims=True), rtol=1e-4)
    assert 1.5 < inception_score(found) <= 3
    assert inception_score(found[::3]) == pytest.approx(1, abs=0.05)


def test_how_a_picture_was_turned_is_no_class() -> None:
    extractor = fit_extractor(squares(12)[0], [None] * 12, Fitting(steps=2, batch_size=4))
    assert extractor.classify is None
