"""Copies of shapes: the nearest against a full search, copies that were planted, and corners against comparing all pairs."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.evals.mesh_copies import find_equals, find_shape_copies, nearest_shapes
from tessera.evals.mesh_points import pairwise_chamfer, sample_set
from tessera.media.meshes import Mesh

Clouds = npt.NDArray[np.float32]


def tents(num: int, seed: int, points: int = 512) -> Clouds:
    """Four triangles over a square, of random sides and heights."""
    rng = np.random.default_rng(seed)
    vertices = np.array([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0], [0, 0, 1.0]])
    faces = np.array([[0, 1, 4], [1, 2, 4], [2, 3, 4], [3, 0, 4]])
    return sample_set([Mesh(vertices * rng.uniform(0.2, 1, 3), faces) for _ in range(num)], points).points


def test_the_shortlist_finds_what_a_full_search_finds() -> None:
    queries, bank = tents(12, 0), tents(60, 1)
    full = pairwise_chamfer(queries, bank)
    for shortlist in (16, len(bank), 1000):
        index, distances = nearest_shapes(queries, bank, shortlist=shortlist)
        assert index.tolist() == full.argmin(1).tolist()
        np.testing.assert_allclose(distances, full.min(1), rtol=1e-12)


def test_a_shortlist_of_one_is_the_nearest_by_the_first_points() -> None:
    queries, bank = tents(8, 0), tents(30, 1)
    rough = pairwise_chamfer(queries[:, :256], bank[:, :256]).argmin(1)
    index, distances = nearest_shapes(queries, bank, shortlist=1)
    assert index.tolist() == rough.tolist()
    np.testing.assert_allclose(distances, pairwise_chamfer(queries, bank)[np.arange(8), rough], rtol=1e-12)


def test_of_equals_the_first() -> None:
    bank = tents(30, 0)
    bank[[7, 20]] = bank[25]
    index, distances = nearest_shapes(bank[[25, 3]], bank, shortlist=4)
    assert (index.tolist(), distances.tolist()) == ([7, 3], [0, 0])
    assert nearest_shapes(bank[:0], bank)[0].shape == (0,)


def test_copies_are_found_and_honest_samples_are_not() -> None:
    train, held_out, samples = tents(80, 0, 64), tents(100, 1, 64), tents(100, 2, 64)
    honest = find_shape_copies(samples, held_out, train).as_dict()
    assert honest["share"] <= 0.05
    assert honest["held_out_share"] == pytest.approx(0.01)
    samples[:30] = train[:30] + 1e-4
    found = find_shape_copies(samples, held_out, train)
    assert 0.3 <= found.as_dict()["share"] <= 0.35
    assert set(found.ranked[:30].tolist()) == set(range(30))
    assert found.indices[:30].tolist() == list(range(30))
    assert found.distances[:30] == pytest.approx(2 * 3 * 1e-8, rel=0.01)  # all moved by 1e-4 on three axes, both ways
    assert json.loads(json.dumps(found.as_dict()))["threshold"] == found.threshold


corners = st.lists(st.integers(0, 1), min_size=9, max_size=9).map(lambda bins: np.array(bins).reshape(1, 3, 3))
faces = st.lists(corners, max_size=2).map(lambda found: np.concatenate([np.zeros((0, 3, 3), np.int64), *found]))
shapes = st.lists(faces, max_size=6)


@settings(max_examples=60, deadline=None)
@given(samples=shapes, held_out=shapes, train=shapes)
def test_equals_are_those_of_all_pairs(samples: list, held_out: list, train: list) -> None:
    def first(shape: npt.NDArray[np.int64]) -> int:
        return next((i for i, other in enumerate(train) if np.array_equal(shape, other)), -1)

    found = find_equals(samples, held_out, train)
    assert found.samples.tolist() == [first(shape) for shape in samples]
    assert found.held_out.tolist() == [first(shape) for shape in held_out]


def test_equals_as_json() -> None:
    train = [np.full((2, 3, 3), value) for value in range(4)]
    found = find_equals([train[2].astype(np.int32), train[3] + 1, train[0][:1]], [train[1], train[1] + 9], train)
    assert found.as_dict() == {"share": 1 / 3, "held_out_share": 0.5, "pairs": [[0, 2]]}
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert find_equals([], [], train).as_dict()["share"] == 0


def test_empty_sides_are_refused() -> None:
    some = tents(2, 0, 8)
    with pytest.raises(ValueError, match="bank holds no shapes"):
        nearest_shapes(some, some[:0])
    with pytest.raises(ValueError, match="2 samples and 0 held-out shapes"):
        find_shape_copies(some, some[:0], some)
    with pytest.raises(ValueError, match="expected faces x 3 x 3"):
        find_equals([np.zeros((3, 3), np.int64)], [], [])
