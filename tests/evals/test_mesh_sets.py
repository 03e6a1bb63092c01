"""Coverage, matching distance and 1-NNA: against loops, by hand, and where the answer is known."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.evals import mesh_sets
from tessera.evals.mesh_points import pairwise_chamfer
from tessera.evals.mesh_sets import (
    chance_accuracy,
    coverage,
    draw,
    minimum_matching_distance,
    nearest_neighbour_accuracy,
    own_neighbours,
    score_sets,
    set_rows,
    size_note,
)

Matrix = npt.NDArray[np.float64]


def distances(a: Matrix, b: Matrix) -> Matrix:
    return np.abs(a[:, None] - b[None])


def matrices(a: Matrix, b: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    return distances(a, a), distances(b, b), distances(a, b)


def by_loops(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Coverage, matching distance and 1-NNA of numbers on a line, one shape after another."""
    covered = {j for x in a for j, y in enumerate(b) if abs(x - y) == min(abs(x - z) for z in b)}
    matched = sum(min(abs(x - y) for x in a) for y in b) / len(b)
    labelled = [(x, 0) for x in a] + [(y, 1) for y in b]
    right = 0.0
    for i, (x, label) in enumerate(labelled):
        others = [(abs(x - y), other) for j, (y, other) in enumerate(labelled) if j != i]
        nearest = [other for gap, other in others if gap == min(others)[0]]
        right += nearest.count(label) / len(nearest)
    return len(covered) / len(b), matched, right / len(labelled)


numbers = st.lists(st.integers(0, 12).map(float), min_size=1, max_size=9)  # few values: ties and twins are common


@settings(max_examples=150, deadline=None)
@given(a=numbers, b=numbers)
def test_scores_are_those_of_loops(a: list[float], b: list[float]) -> None:
    found = score_sets(*matrices(np.array(a), np.array(b)))
    assert (found.coverage, found.mmd, found.nna) == pytest.approx(by_loops(a, b))
    parts = found.nna_samples * len(a) + found.nna_reference * len(b)
    assert found.nna == pytest.approx(parts / (len(a) + len(b)))


def test_by_hand() -> None:
    """Samples 0, 1, 10 against 2, 11, 20, 30."""
    found = score_sets(*matrices(np.array([0.0, 1, 10]), np.array([2.0, 11, 20, 30])))
    assert found.coverage == 2 / 4  # 2, 2 and 11
    assert found.mmd == (1 + 1 + 10 + 20) / 4
    # 0 -> 1 own; 1 -> 0 or 2, half; 10 -> 11 other; 2 -> 1 other; 11 -> 10 other; 20 -> 11 own; 30 -> 20 own
    assert found.nna == (1 + 0.5 + 0 + 0 + 0 + 1 + 1) / 7
    assert json.loads(json.dumps(found.as_dict()))["num_reference"] == 4


def test_identical_sets() -> None:
    same = np.array([0.0, 1, 5, 5, 9, 20])  # with a twin inside
    found = score_sets(*matrices(same, same))
    assert (found.coverage, found.mmd) == (1, 0)
    # each shape's twin is on the other side; the two 5s have one of their own beside two others
    assert found.nna == pytest.approx(4 * (1 / 3) / 12)


def test_sets_far_apart() -> None:
    found = score_sets(*matrices(np.arange(8.0), np.arange(1000.0, 1008)))
    assert (found.nna, found.coverage) == (1, 1 / 8)


def test_collapse_shows_in_coverage_and_in_the_samples_part() -> None:
    rng = np.random.default_rng(0)
    found = score_sets(*matrices(0.5 + rng.normal(size=100) * 1e-6, rng.random(100)))
    assert found.coverage <= 0.03
    assert found.nna_samples == 1
    assert found.nna > 0.7


@pytest.mark.parametrize(("n", "m"), [(60, 60), (90, 30), (1, 5)])
def test_one_distribution_scores_chance(n: int, m: int) -> None:
    rng = np.random.default_rng(0)
    found = [nearest_neighbour_accuracy(*matrices(rng.normal(size=n), rng.normal(size=m))) for _ in range(300)]
    assert np.mean(found) == pytest.approx(chance_accuracy(n, m), abs=4 * np.std(found) / np.sqrt(300))
    assert chance_accuracy(60, 60) == pytest.approx(59 / 119)


def test_order_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 12).astype(float), rng.integers(0, 9, 10).astype(float)
    mixed = score_sets(*matrices(rng.permutation(a), rng.permutation(b))).as_dict()
    assert score_sets(*matrices(a, b)).as_dict() == pytest.approx(mixed)


def clouds(num: int, seed: int, wide: float = 1.0) -> npt.NDArray[np.float32]:
    """Boxes full of points, of random sides."""
    rng = np.random.default_rng(seed)
    return (rng.random((num, 40, 3)) * (wide + rng.random((num, 1, 3)))).astype(np.float32)


def test_rows_of_clouds() -> None:
    samples, test, train = clouds(12, 0, 4.0), clouds(12, 1), clouds(30, 2)
    rows = set_rows({"samples": samples, "train": train[draw(len(train), 12, 5)]}, test)
    assert list(rows) == ["samples", "train"]
    assert rows["samples"] == score_sets(*map(pairwise_chamfer, (samples, test)), pairwise_chamfer(samples, test))
    assert rows["train"].num_samples == 12
    assert rows["samples"].nna == 1
    assert rows["train"].nna < 0.8
    assert rows["train"].mmd < rows["samples"].mmd
    assert set(draw(len(train), 12, 5)) != set(draw(len(train), 12, 6))
    assert coverage(pairwise_chamfer(test, test)) == 1
    assert minimum_matching_distance(pairwise_chamfer(test, test)) == 0


def test_equal_sides_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    test, sides = clouds(6, 1), {"real": clouds(6, 2), "samples": clouds(6, 3, 2.0), "reconstruction": clouds(6, 2)}
    alone = {name: set_rows({name: side}, test)[name] for name, side in sides.items()}
    asked: list[object] = []
    monkeypatch.setattr(mesh_sets, "pairwise_chamfer", lambda *a, **k: (asked.append(0), pairwise_chamfer(*a, **k))[1])
    assert set_rows(sides, test) == alone
    assert list(set_rows(sides, test)) == list(sides)
    assert len(asked) == 2 * 5, "the reference, and two for each different side"


def test_draws_do_not_repeat() -> None:
    assert len(set(draw(100, 40, 0).tolist())) == 40
    assert sorted(draw(5, 40, 0).tolist()) == list(range(5))


def test_unequal_numbers_are_noted() -> None:
    even, odd = (score_sets(*matrices(np.arange(3.0), np.arange(n))) for n in (3.0, 4.0))
    assert size_note(even) is None
    assert "3 samples against 4" in (size_note(odd) or "")


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one or more of each"):
        coverage(np.zeros((0, 3)))
    with pytest.raises(ValueError, match="one or more of each"):
        minimum_matching_distance(np.zeros((3, 0)))
    with pytest.raises(ValueError, match="expected n n and n m"):
        own_neighbours(np.zeros((2, 2)), np.zeros((3, 2)))
