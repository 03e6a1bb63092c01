"""The canonical form against a slow version in plain Python, and its promises on random triangle soups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.canonical import Cleaning, clean, normalise, quantise, standardise, to_mesh
from tessera.media.meshes import Mesh

QUICK = settings(max_examples=40, deadline=None)


def mesh(vertices: object, faces: object) -> Mesh:
    return Mesh(np.array(vertices, np.float64).reshape(-1, 3), np.array(faces, np.int64).reshape(-1, 3))


@st.composite
def soups(draw: st.DrawFn) -> Mesh:
    """Few places and many faces, so that welds, repeats and degenerate faces are common."""
    steps = draw(st.integers(1, 6))
    place = st.tuples(*[st.integers(-steps, steps)] * 3)
    vertices = draw(st.lists(place, min_size=3, max_size=9))
    corner = st.integers(0, len(vertices) - 1)
    faces = draw(st.lists(st.tuples(corner, corner, corner), min_size=1, max_size=14))
    wobble = draw(st.sampled_from([0.0, 1e-3, 0.05]))
    noise = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(len(vertices), 3))
    return mesh(np.array(vertices) / steps * 0.9 + np.clip(wobble * noise, -0.1, 0.1), faces)


def slow_quantise(soup: Mesh, bins: int) -> list[tuple[tuple[int, ...], ...]]:
    """Straight from the definition: one face at a time."""
    found = set()
    for face in soup.faces.tolist():
        corners = []
        for vertex in face:
            x, y, z = (min(bins - 1, math.floor((value + 1) / 2 * bins)) for value in soup.vertices[vertex].tolist())
            corners.append((z, y, x))
        if len(set(corners)) == 3:
            found.add(min(tuple(corners[turn:] + corners[:turn]) for turn in range(3)))
    return sorted(found)


def shuffled(soup: Mesh, seed: int) -> Mesh:
    """The same triangles: vertices renumbered, some of them doubled, faces in another order and turned."""
    rng = np.random.default_rng(seed)
    vertices, faces = np.concatenate([soup.vertices, soup.vertices]), soup.faces.copy()
    faces += len(soup.vertices) * rng.integers(0, 2, faces.shape)
    order = rng.permutation(len(vertices))
    faces = np.argsort(order)[faces][rng.permutation(len(faces))]
    turns = rng.integers(0, 3, len(faces))
    return Mesh(vertices[order], np.stack([np.roll(face, turn) for face, turn in zip(faces, turns, strict=True)]))


def normals(soup: Mesh) -> list[tuple[float, ...]]:
    a, b, c = (soup.vertices[soup.faces[:, corner]] for corner in range(3))
    crossed = np.cross(b - a, c - a)
    return sorted(tuple(row) for row in (np.round(crossed, 6) + 0.0).tolist())


@given(soups(), st.sampled_from([16, 31, 128, 1024]))
@QUICK
def test_quantised_is_what_the_definition_says(soup: Mesh, bins: int) -> None:
    found = quantise(soup, bins)
    assert found.dtype == np.int64
    assert found.shape[1:] == (3, 3)
    assert [tuple(map(tuple, face)) for face in found.tolist()] == slow_quantise(soup, bins)


@given(soups(), st.sampled_from([16, 100, 128, 1023]))
@QUICK
def test_there_and_back_is_exact(soup: Mesh, bins: int) -> None:
    corners = quantise(soup, bins)
    back = to_mesh(corners, bins)
    assert np.array_equal(quantise(back, bins), corners)
    assert len(np.unique(back.vertices, axis=0)) == len(back.vertices)  # welded
    assert clean(back)[1] == Cleaning(num_faces_before=len(corners), num_faces_after=len(corners))  # nothing left to do


@given(soups(), st.integers(0, 999))
@QUICK
def test_the_order_of_faces_vertices_and_corners_does_not_matter(soup: Mesh, seed: int) -> None:
    other = shuffled(soup, seed)
    assert np.array_equal(quantise(soup, 64), quantise(other, 64))
    (one, _), (two, _) = clean(soup), clean(other)
    assert np.array_equal(one.vertices, two.vertices)
    assert np.array_equal(one.faces, two.faces)


@given(soups())
@QUICK
def test_cleaning_twice_is_cleaning_once(soup: Mesh) -> None:
    once, report = clean(soup)
    twice, nothing = clean(once)
    assert np.array_equal(once.vertices, twice.vertices)
    assert np.array_equal(once.faces, twice.faces)
    left = len(once.faces)
    assert nothing == Cleaning(num_faces_before=left, num_faces_after=left)
    assert report.num_faces_before - report.num_degenerate - report.num_duplicate == report.num_faces_after == left
    assert len(soup.vertices) - report.num_welded - report.num_unused == len(once.vertices)


@given(soups())
@QUICK
def test_every_face_keeps_its_normal(soup: Mesh) -> None:
    whole = {}  # by places, so that duplicates count once and degenerate faces not at all
    for a, b, c in soup.vertices[soup.faces].tolist():
        if len({tuple(a), tuple(b), tuple(c)}) == 3:
            turns = [(a, b, c), (b, c, a), (c, a, b)]
            whole[min(tuple(map(tuple, turn)) for turn in turns)] = True
    corners = np.array(list(whole), np.float64).reshape(-1, 3)
    separate = Mesh(corners, np.arange(len(corners), dtype=np.int64).reshape(-1, 3))
    assert normals(clean(soup)[0]) == normals(separate)


@given(soups(), st.floats(1e-3, 1e3), st.tuples(*[st.floats(-50, 50)] * 3))
@QUICK
def test_standard_meshes_are_centred_and_fill_the_box(soup: Mesh, size: float, place: tuple[float, ...]) -> None:
    done, report = standardise(Mesh(soup.vertices * size + place, soup.faces))
    if not len(done.faces):
        return
    low, high = done.vertices.min(axis=0), done.vertices.max(axis=0)
    assert np.abs(low + high).max() < 3e-6
    assert (high - low).max() == pytest.approx(1.9, abs=3e-6)
    assert np.array_equal(done.vertices.astype(np.float32).astype(np.float64), done.vertices)  # float32 holds them exactly
    assert np.abs(normalise(done).vertices - done.vertices).max() < 3e-6
    assert report.num_faces_after == len(done.faces)


def test_by_hand() -> None:
    """Two triangles of a square, a third that is the first turned, one of the other side, one without area, a vertex twice."""
    square = mesh([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0], [1, 1, 0], [9, 9, 9]],
                  [[0, 1, 2], [4, 3, 0], [1, 2, 0], [0, 2, 1], [2, 4, 3]])  # fmt: skip
    cleaned, report = clean(square)
    assert cleaned.vertices.tolist() == [[-1, -1, 0], [1, -1, 0], [-1, 1, 0], [1, 1, 0]]
    assert cleaned.faces.tolist() == [[0, 1, 3], [0, 3, 1], [0, 3, 2]]
    assert report == Cleaning(1, 1, 1, 1, 5, 3)
    # z is in the middle bin; y and x at either end
    low, right, left, far = [8, 0, 0], [8, 0, 15], [8, 15, 0], [8, 15, 15]
    corners = quantise(square, 16)
    assert corners.tolist() == [[low, right, far], [low, far, right], [low, far, left]]
    assert to_mesh(corners, 16).vertices[0].tolist() == [-1 + 1 / 16, -1 + 1 / 16, 1 / 16]


def test_the_middle_of_a_symmetric_shape_is_one_bin() -> None:
    """Centring leaves 1e-17 instead of 0, on either side of the border between two bins; the grid takes it away."""
    thirds = np.array([0.1, 0.2, 0.3]) * 3
    points = [[x, y, z] for x in thirds for y in thirds for z in thirds]
    faces = [[0, middle, 26] for middle in range(1, 26)]
    corners = quantise(normalise(mesh(points, faces)), 128)
    assert sorted({int(value) for value in corners.ravel()}) == [3, 64, 124]


def test_what_is_no_mesh_of_the_box_is_refused() -> None:
    with pytest.raises(ValueError, match="within"):
        quantise(mesh([[0, 0, 0], [1.01, 0, 0], [0, 1, 0]], [[0, 1, 2]]), 16)
    with pytest.raises(ValueError, match="without faces"):
        normalise(mesh([[0, 0, 0]], []))
    assert len(standardise(mesh([[0, 0, 0], [1, 1, 1]], [[0, 1, 0]]))[0].faces) == 0
    assert quantise(mesh([], []), 16).shape == (0, 3, 3)
