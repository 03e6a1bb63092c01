"""Points on surfaces and distances of clouds, against loops, closed forms and areas."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.config import UserError
from tessera.evals import mesh_points
from tessera.evals.mesh_points import Cloud, compare, has_surface, nearest_point, pairwise_chamfer, sample_points, sample_set
from tessera.media.meshes import Mesh
from tessera.randomness import fraction, mix


def square(side: float = 1.0, height: float = 0.0) -> Mesh:
    """Two triangles in the plane z = height, facing up."""
    vertices = np.array([[0, 0, height], [side, 0, height], [side, side, height], [0, side, height]])
    return Mesh(vertices, np.array([[0, 1, 2], [0, 2, 3]]))


def clouds(num: int, points: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(num, points, 3)).astype(np.float32)


def chamfer_by_loops(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    def one_way(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> float:
        return sum(min(sum((float(p) - float(q)) ** 2 for p, q in zip(u, v, strict=True)) for v in y) for u in x) / len(x)

    return one_way(a, b) + one_way(b, a)


@settings(max_examples=15, deadline=None)
@given(s=st.integers(1, 3), t=st.integers(1, 4), n=st.integers(1, 6), m=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_chamfer_is_that_of_loops(s: int, t: int, n: int, m: int, seed: int) -> None:
    a, b = clouds(s, n, seed), clouds(t, m, seed + 1)
    expected = [[chamfer_by_loops(x, y) for y in b] for x in a]
    np.testing.assert_allclose(pairwise_chamfer(a, b), expected, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 7, 64, 500, 2**20])
def test_memory_does_not_change_chamfer(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = clouds(3, 11, 0), clouds(5, 13, 1)
    whole = pairwise_chamfer(a, b)
    monkeypatch.setattr(mesh_points, "_CPU_GAPS", budget)
    np.testing.assert_allclose(pairwise_chamfer(a, b), whole, rtol=1e-12)
    assert (nearest_point(a[0].astype(float), b[0].astype(float)) == np.square(a[0][:, None] - b[0]).sum(2).argmin(1)).all()


def test_within_a_set_each_pair_is_computed_once() -> None:
    a = clouds(5, 9, 0)
    np.testing.assert_array_equal(pairwise_chamfer(a), pairwise_chamfer(a, a))
    assert pairwise_chamfer(a).diagonal().tolist() == [0] * 5


def test_chamfer_by_hand() -> None:
    a, b = np.array([[[0, 0, 0], [1, 0, 0]]], np.float32), np.array([[[0, 0, 2]]], np.float32)
    assert pairwise_chamfer(a, b).tolist() == [[(4 + 5) / 2 + 4]]


def test_points_lie_on_their_faces_and_by_area() -> None:
    vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [5, 5, 5], [5, 8, 5], [5, 5, 7.0]])
    far = Mesh(vertices, np.array([[0, 1, 2], [0, 1, 1], [3, 4, 5]]))
    found = sample_points(far, 20_000, 1)
    second = found.points[:, 0] > 2
    assert second.mean() == pytest.approx(3 / 3.5, abs=0.01)  # areas 1/2, 0 and 3
    np.testing.assert_allclose(found.points[second, 0], 5, rtol=1e-12)
    np.testing.assert_allclose(found.points[second].mean(0), [5, 6, 5 + 2 / 3], atol=0.03)  # the centroid
    assert (found.points[~second, :2].sum(1) <= 1 + 1e-12).all()
    assert np.allclose(found.normals[second], [1, 0, 0])
    assert np.allclose(found.normals[~second], [0, 0, 1])


def test_points_are_those_of_loops() -> None:
    """A face by its share of the area, then 1 - sqrt(u), sqrt(u) (1 - v) and sqrt(u) v of its corners, in the order of draws."""
    rng = np.random.default_rng(5)
    mesh = Mesh(rng.normal(size=(9, 3)), np.array([[0, 1, 2], [3, 3, 4], [2, 5, 6], [8, 7, 0], [1, 1, 1]]))
    found = sample_points(mesh, 300, 4)
    np.testing.assert_array_equal(sample_set([mesh], 300, 4).points[0], found.points.astype(np.float32))
    draws = [[fraction(mix(4, stream, index)) for index in range(300)] for stream in range(3)]
    corners = mesh.vertices[mesh.faces]
    areas = [float(np.linalg.norm(np.cross(b - a, c - a)) / 2) for a, b, c in corners]
    for which, u, v, point in zip(*draws, found.points, strict=True):
        rest, face = which * sum(areas), 0
        while rest >= areas[face]:
            rest, face = rest - areas[face], face + 1
        a, b, c = corners[face]
        np.testing.assert_allclose(point, (1 - u**0.5) * a + u**0.5 * (1 - v) * b + u**0.5 * v * c, rtol=1e-9, atol=1e-12)


def test_points_are_uniform_inside_a_face() -> None:
    inside = sample_points(square(), 32_000, 0).points[:, :2]
    counts = np.histogram2d(*inside.T, bins=8, range=[[0, 1], [0, 1]])[0]
    assert np.square(counts - 500).sum() / 500 < 100  # chi-squared of 63 degrees of freedom: one in 500


def test_points_are_a_function_of_mesh_and_seed() -> None:
    many, few = sample_points(square(), 100, 3), sample_points(square(), 40, 3)
    np.testing.assert_array_equal(many.points[:40], few.points)
    assert not np.array_equal(few.points, sample_points(square(), 40, 4).points)
    assert few.points[0].tolist() == sample_points(square(), 1, 3).points[0].tolist()


def test_a_surface_sampled_twice_is_at_the_distance_of_chance() -> None:
    """In the plane the nearest of n points per area A lies at a mean square of A / (pi n)."""
    a, b = (sample_points(square(3.0), 2048, seed).points.astype(np.float32)[None] for seed in (0, 1))
    assert pairwise_chamfer(a, b).item() == pytest.approx(2 * 9 / (np.pi * 2048), rel=0.1)


def test_parallel_squares() -> None:
    near = compare(sample_points(square()), sample_points(square(height=0.5)))
    assert near.chamfer == pytest.approx(0.5)  # the same random numbers: every point has its partner above
    assert near.normal_consistency == 1
    assert near.chamfer == pytest.approx(chamfer_of(square(), square(height=0.5)), rel=1e-6)


def chamfer_of(a: Mesh, b: Mesh) -> float:
    return float(pairwise_chamfer(sample_set([a]).points, sample_set([b]).points)[0, 0])


def test_distances_and_normals_by_hand() -> None:
    slanted = np.array([[0, 3, 4], [0, 0, 5]]) / 5
    a = Cloud(np.array([[0.0, 0, 0], [1, 0, 0]]), slanted)
    b = Cloud(np.array([[0.0, 0, 0], [4, 0, 0]]), np.array([[0.0, 0, -1], [1, 0, 0]]))
    found = compare(a, b)
    assert found.chamfer == pytest.approx((0 + 1) / 2 + (0 + 9) / 2)
    assert found.normal_consistency == pytest.approx(((0.8 + 1) / 2 + (0.8 + 0) / 2) / 2)


def test_meshes_without_a_surface_are_left_out_of_a_set_and_refused_alone() -> None:
    line = Mesh(np.array([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]]), np.array([[0, 1, 2]]))
    nothing = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))
    broken = Mesh(np.array([[0.0, 0, 0], [1, 0, np.nan], [2, 1, 0]]), np.array([[0, 1, 2]]))
    assert [has_surface(mesh) for mesh in (line, nothing, broken, square())] == [False, False, False, True]
    found = sample_set([line, square(), nothing, broken, square(2.0)], 16)
    assert (found.kept.tolist(), found.num_empty, found.points.shape) == ([1, 4], 3, (2, 16, 3))
    for mesh in (line, nothing, broken):
        with pytest.raises(UserError, match="finite area above 0"):
            sample_points(mesh)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected shapes x points x 3"):
        pairwise_chamfer(np.zeros((4, 3), np.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_finds_the_same() -> None:
    a, b = clouds(20, 300, 0), clouds(33, 200, 1)
    np.testing.assert_allclose(pairwise_chamfer(a, b, device=torch.device("cuda")), pairwise_chamfer(a, b), rtol=1e-5)
    assert pairwise_chamfer(a, device="cuda").diagonal().tolist() == [0] * 20
    near, far = sample_points(square(), 500, 0), sample_points(square(2.0), 700, 1)
    found, expected = asdict(compare(near, far, device="cuda")), asdict(compare(near, far))
    assert found == pytest.approx(expected, rel=1e-9)
