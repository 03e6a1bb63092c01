"""Polygons cut into triangles: areas by the shoelace formula, winding, and every place covered once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.media.polygons import triangulate

ELL = [(0, 0), (2, 0), (2, 1), (1, 1), (1, 2), (0, 2)]  # area 3; a fan around five of its corners leaves it
ARROW = [(0, 0), (3, -2), (1, 0), (3, 2)]  # a concave quad
STRAIGHT = [(0, 0), (1, 0), (2, 0), (2, 2), (1, 2), (0, 2)]  # a square with a corner in the middle of two sides
TOOTH = [(2, 5), (2, 1), (1, 1), (1, 5)]
COMB = [(0, 0), (7, 0), (7, 5), *((x + step, y) for step in (4, 2, 0) for x, y in TOOTH), (0, 5)]


def shoelace(points: np.ndarray) -> float:
    x, y = points.T
    return float(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y)) / 2


def placed(points: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plane points somewhere in space, and the unit normal of their plane."""
    frame, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return points @ frame[:2] + [5.0, -3.0, 100.0], np.cross(frame[0], frame[1])


def areas(vertices: np.ndarray, triangles: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Signed: positive where a triangle is wound as the polygon is."""
    a, b, c = (vertices[triangles[:, index]] for index in range(3))
    return np.cross(b - a, c - a) @ normal / 2


@pytest.mark.parametrize(
    ("shape", "least"), [(ELL, 0.1), (ARROW, 0.1), (STRAIGHT, 0.1), (COMB, -1e-9)], ids=["ell", "arrow", "straight", "comb"]
)
def test_concave_polygons_are_covered_once(shape: list[tuple[int, int]], least: float) -> None:
    plane = np.array(shape, dtype=float)
    for shift in range(len(plane)):
        points = np.roll(plane, shift, axis=0)
        for seed, wound in ((0, points), (1, points[::-1])):
            vertices, normal = placed(wound, seed)
            triangles = triangulate(vertices, [range(len(points))])
            got = areas(vertices, triangles, normal * np.sign(shoelace(wound)))
            assert len(triangles) == len(points) - 2
            assert got.min() > least  # of signed areas with this sum: no triangle is turned or outside, nor, mostly, flat
            assert got.sum() == pytest.approx(abs(shoelace(points)), rel=1e-9)


def test_a_convex_polygon_is_a_fan_around_its_first_corner() -> None:
    angles = np.arange(6) / 6 * 2 * np.pi
    vertices = np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1)
    assert triangulate(vertices, [[2, 3, 4, 5, 0, 1]]).tolist() == [[2, 3, 4], [2, 4, 5], [2, 5, 0], [2, 0, 1]]


def test_faces_keep_their_order() -> None:
    vertices = np.array([(*point, 0.0) for point in ELL])
    got = triangulate(vertices, [[0, 1, 2], [0, 1, 2, 3], range(6), [3, 4, 5]])
    assert got[0].tolist() == [0, 1, 2]
    assert got[1:3].tolist() == [[0, 1, 2], [0, 2, 3]]
    assert len(got) == 1 + 2 + 4 + 1
    assert got[-1].tolist() == [3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 12), st.integers(0, 2**32 - 1))
def test_star_shaped_polygons(num_corners: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    angles = (np.arange(num_corners) + rng.uniform(0.1, 0.9, num_corners)) / num_corners * 2 * np.pi
    radii = rng.uniform(0.2, 1.0, num_corners)
    plane = np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)
    vertices, normal = placed(plane, seed % 97)
    got = areas(vertices, triangulate(vertices, [range(num_corners)]), normal)
    assert got.min() > -1e-9
    assert got.sum() == pytest.approx(shoelace(plane), rel=1e-6)


def test_a_polygon_without_area_still_gives_its_triangles() -> None:
    vertices = np.array([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]])
    assert triangulate(vertices, [[0, 1, 2, 3]]).tolist() == [[0, 1, 2], [0, 2, 3]]
    assert triangulate(vertices, []).shape == (0, 3)
