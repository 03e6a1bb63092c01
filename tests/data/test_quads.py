"""Triangles to quads and back: the same triangles, whatever the mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tessera.data.canonical import REACH, Corners, bounding_box, clean, quantise, snap, standardise, to_mesh
from tessera.data.quads import find_quads, join_quads, split_quads
from tessera.data.synth.furniture import write_furniture
from tessera.media.mesh_files import encode_obj, encode_ply
from tessera.media.meshes import Mesh, read_mesh, turn_up
from tessera.media.polygon_files import parse_obj

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
        ([(0, 0, 0), (8, 0, 0), (8, 8, 0), (0, 8, 3)], [(0, 1, 2), (0, 2, 3)]),  # diagonals pass each other by over a bin
        ([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)], [(0, 1, 2), (0, 2, 3)]),  # a bin that is bent
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


def test_a_quad_may_be_bent_by_nineteen_degrees() -> None:
    """Between the plane at a corner and that of the diagonals, which pass each other by half a bin."""
    corners = of([(0, 0, 0), (2, 0, 0), (2, 2, 0), (0, 2, 1)], [(0, 1, 2), (0, 2, 3)])
    assert len(assert_back(corners)) == 1


def test_bins_may_bend_a_quad() -> None:
    """Boxes turned any way, in bins: rounding leaves a quarter of the sides in one plane, and nearly all come back."""
    rng, found, flat = np.random.default_rng(0), 0, 0
    sides = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    for _ in range(100):
        box = np.stack(np.meshgrid(*([-side, side] for side in rng.uniform(0.1, 0.5, 3)), indexing="ij"), -1).reshape(8, 3)
        points = box @ np.linalg.qr(rng.standard_normal((3, 3)))[0]
        faces = [face for a, b, c, d in sides for face in ((a, b, c), (a, c, d))]
        corners = quantise(Mesh(points, np.array(faces)), 128)
        quads = assert_back(corners, 128)
        found += int((quads[:, 2] != quads[:, 3]).any(-1).sum())
        bins = np.floor((points + 1) * 64).astype(np.int64)
        volumes = [np.linalg.det(bins[list(side[1:])] - bins[side[0]]) for side in sides]
        flat += sum(abs(volume) < 0.5 for volume in volumes)
    assert flat < 200, "of 600"
    assert found == 600


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


@pytest.mark.parametrize(("suffix", "encode"), [(".obj", encode_obj), (".ply", encode_ply)])
def test_files_hold_quads(suffix: str, encode: Callable[[Mesh], bytes], tmp_path: Path) -> None:
    """Of a prism with sides of four corners and ends of three, of random triangles, and of nothing: those of the mesh, and read
    back they are the same triangles."""
    vertices = [(x, y, z) for z in (2, 20) for x, y in ((2, 2), (20, 2), (2, 20))]
    faces = [(0, 2, 1), (3, 4, 5), *(f for a, b in ((0, 1), (1, 2), (2, 0)) for f in ((a, b, b + 3), (a, b + 3, a + 3)))]
    prism = of(vertices, faces)
    for corners in (prism, canonical(np.random.default_rng(0).integers(0, 8, (60, 3, 3))), prism[:0]):
        plain = to_mesh(corners, BINS)
        mesh = Mesh(plain.vertices, plain.faces, find_quads(plain, BINS))
        assert mesh.quads is not None
        (tmp_path / f"it{suffix}").write_bytes(encode(mesh))
        if not len(corners):
            continue
        places = np.floor((mesh.vertices[mesh.quads][..., ::-1] + 1) * (BINS / 2)).astype(np.int64)
        np.testing.assert_array_equal(places, join_quads(corners))
        back = read_mesh(tmp_path / f"it{suffix}")
        np.testing.assert_array_equal(quantise(back.mesh, BINS), corners)
        assert back.polygons == (mesh.quads[:, 2] != mesh.quads[:, 3]).sum() == (3 if corners is prism else 0)


@pytest.mark.skipif(REAL_DATA is None, reason="set TESSERA_REAL_DATA")
def test_every_real_mesh_comes_back() -> None:
    """And so do nearly all quads of the files whose corners lie in four bins."""
    paths = sorted(Path(str(REAL_DATA), "lowpoly").rglob("*.obj"))
    assert len(paths) > 400
    before = after = there = found = 0
    for path in paths:
        mesh = read_mesh(path).mesh
        corners = quantise(standardise(mesh)[0], 128)
        quads = assert_back(corners, 128)
        before, after = before + len(corners), after + len(quads)
        made = {frozenset(map(tuple, quad)) for quad in quads.tolist()}
        file = parse_obj(path.read_bytes())
        centre, sides = bounding_box(clean(mesh)[0])
        points = snap((turn_up(file.vertices) - centre) / sides.max() * (2 * REACH))
        bins = np.minimum(np.floor((points + 1) * 64), 127).astype(np.int64)[:, ::-1]
        asked = [frozenset(map(tuple, bins[list(face)].tolist())) for face in file.faces if len(face) == 4]
        asked = [quad for quad in asked if len(quad) == 4]
        there, found = there + len(asked), found + sum(quad in made for quad in asked)
    assert after / before < 0.58
    assert found / there > 0.96
