"""Triangles to quads and back: the same triangles, whatever the mesh."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tessera.data.canonical import Corners, quantise, standardise, to_mesh
from tessera.data.quads import join_quads, split_quads
from tessera.data.synth.furniture import write_furniture
from tessera.media.meshes import read_mesh

BINS = 32
REAL_DATA = os.environ.get("TESSERA_REAL_DATA")


def canonical(corners: Corners) -> Corners:
    return quantise(to_mesh(corners, BINS), BINS)


def of(vertices: list[tuple[int, int, int]], faces: list[tuple[int, int, int]]) -> Corners:
    """Canonical, of bins (x, y, z)."""
    return canonical(np.array(vertices)[:, ::-1][np.array(faces)])


def assert_back(corners: Corners, bins: int = BINS) -> Corners:
    quads = join_quads(corners)
    back = quantise(to_mesh(split_quads(quads), bins), bins)
    np.testing.assert_array_equal(back, corners)
    np.testing.assert_array_equal(join_quads(back), quads)
    return quads


SQUARE = [(0, 0, 0), (4, 0, 0), (4, 4, 0), (0, 4, 0)]


def test_a_square_is_one_quad_that_starts_at_the_lower_end_of_its_diagonal() -> None:
    for faces in ([(0, 1, 2), (0, 2, 3)], [(1, 2, 3), (1, 3, 0)]):
        (quad,) = assert_back(of(SQUARE, faces))
        ends = quad[[0, 2]] @ np.array([BINS * BINS, BINS, 1])
        assert ends[0] < ends[1]
        assert {tuple(corner) for corner in quad[[0, 2]]} == {SQUARE[index][::-1] for index in {*faces[0]} & {*faces[1]}}


def test_a_box_has_six_sides() -> None:
    vertices = [(x, y, z) for x in (0, 5) for y in (0, 7) for z in (0, 3)]
    sides = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    faces = [face for a, b, c, d in sides for face in ((a, b, c), (a, c, d))]
    quads = assert_back(of(vertices, faces))
    assert quads.shape == (6, 4, 3)
    assert (quads[:, 2] != quads[:, 3]).any(-1).all()


@pytest.mark.parametrize(
    ("vertices", "faces"),
    [
        ([(0, 0, 0), (4, 0, 0), (4, 4, 0), (0, 4, 1)], [(0, 1, 2), (0, 2, 3)]),  # not in one plane
        ([(0, 0, 0), (4, 0, 0), (1, 1, 0), (0, 4, 0)], [(0, 1, 2), (0, 2, 3)]),  # an arrow
        ([(0, 0, 0), (4, 0, 0), (2, 2, 0), (0, 4, 0)], [(0, 1, 2), (0, 2, 3)]),  # three corners in a line
        (SQUARE, [(0, 1, 2), (0, 3, 2)]),  # one of them seen from behind
        ([*SQUARE, (2, 2, 3)], [(0, 1, 2), (0, 2, 3), (0, 2, 4)]),  # three at one side
        (SQUARE[:3], [(0, 1, 2)]),
    ],
)
def test_others_stay_triangles(vertices: list[tuple[int, int, int]], faces: list[tuple[int, int, int]]) -> None:
    quads = assert_back(of(vertices, faces))
    assert len(quads) == len(faces)
    np.testing.assert_array_equal(quads[:, 2], quads[:, 3])


def test_the_longest_diagonal_goes_first() -> None:
    """A strip of three triangles: the middle one is half of either, and goes with the larger."""
    vertices = [(0, 0, 0), (2, 0, 0), (0, 6, 0), (2, 6, 0), (0, 7, 0)]
    quads = assert_back(of(vertices, [(0, 1, 2), (1, 3, 2), (2, 3, 4)]))
    assert len(quads) == 2
    whole = quads[(quads[:, 2] != quads[:, 3]).any(-1)]
    assert {tuple(corner) for corner in whole[0]} == {vertices[index][::-1] for index in (0, 1, 2, 3)}


def test_any_triangles_come_back() -> None:
    rng = np.random.default_rng(0)
    for bins in (2, 3, 8, BINS):
        for num in (0, 1, 7, 60):
            corners = canonical(rng.integers(0, bins, (num, 3, 3)))
            assert_back(corners)


def test_furniture_halves(tmp_path: Path) -> None:
    write_furniture(tmp_path / "data", 24, 0)
    before = after = 0
    for path in sorted((tmp_path / "data" / "train").glob("*.obj")) or sorted((tmp_path / "data" / "train").glob("*.glb")):
        corners = quantise(standardise(read_mesh(path).mesh)[0], 128)
        before, after = before + len(corners), after + len(assert_back(corners, 128))
    assert 0.45 < after / before < 0.75


@pytest.mark.skipif(REAL_DATA is None, reason="set TESSERA_REAL_DATA")
def test_every_real_mesh_comes_back() -> None:
    paths = [path for path in sorted(Path(str(REAL_DATA), "lowpoly").rglob("*")) if path.suffix in (".obj", ".glb")]
    assert len(paths) > 100
    for path in paths:
        assert_back(quantise(standardise(read_mesh(path).mesh)[0], 128), 128)
