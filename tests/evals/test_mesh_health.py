"""Integrity of meshes: against loops and exhaustive search, by hand, and against trimesh."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.evals.mesh_health import MeshHealth, check_health, summarise_health
from tessera.media.meshes import Mesh

Face = tuple[int, int, int]


def cube(at: float = 0.0, side: float = 1.0) -> Mesh:
    """Twelve triangles, counter-clockwise from outside."""
    vertices = np.array(list(itertools.product((0.0, 1.0), repeat=3))) * side + at  # vertex 4 x + 2 y + z
    quads = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    return Mesh(vertices, np.array([face for a, b, c, d in quads for face in ((a, b, c), (a, c, d))]))


def joined(*meshes: Mesh) -> Mesh:
    starts = np.cumsum([0, *(len(mesh.vertices) for mesh in meshes)])
    return Mesh(
        np.concatenate([mesh.vertices for mesh in meshes]),
        np.concatenate([mesh.faces + start for mesh, start in zip(meshes, starts, strict=False)]),
    )


def moved(mesh: Mesh, *by: float) -> Mesh:
    return Mesh(mesh.vertices + np.array(by), mesh.faces)


def turned(mesh: Mesh, *faces: int) -> Mesh:
    changed = mesh.faces.copy()
    changed[list(faces)] = changed[list(faces)][:, ::-1]
    return Mesh(mesh.vertices, changed)


def without(mesh: Mesh, *faces: int) -> Mesh:
    return Mesh(mesh.vertices, np.delete(mesh.faces, list(faces), axis=0))


def more(mesh: Mesh, *faces: Face) -> Mesh:
    return Mesh(mesh.vertices, np.concatenate([mesh.faces, np.array(faces)]))


def moebius(num: int = 9) -> Mesh:
    """A strip of triangles over a ring of num vertices, num odd: i, i + 1, i + 2, with one half turn."""
    angles = np.arange(num) * 4 * np.pi / num
    vertices = np.stack([np.cos(angles), np.sin(angles), np.sin(angles / 2)], 1)
    faces = [(i, i + 1, i + 2) if i % 2 else (i + 1, i, i + 2) for i in range(num)]
    return Mesh(vertices, np.array(faces) % num)


def soup(mesh: Mesh) -> Mesh:
    """Every face with its own three vertices."""
    return Mesh(mesh.vertices[mesh.faces].reshape(-1, 3), np.arange(3 * len(mesh.faces)).reshape(-1, 3))


def by_loops(faces: list[Face]) -> dict[str, float]:
    """The definitions, one face and one edge after another; turned faces by trying all ways of turning."""
    whole = [face for face in faces if len(set(face)) == 3]
    passes: dict[frozenset[int], list[tuple[int, tuple[int, int]]]] = defaultdict(list)
    for index, face in enumerate(whole):
        for a, b in zip(face, (*face[1:], face[0]), strict=True):
            passes[frozenset((a, b))].append((index, (a, b)))
    kinds = Counter(min(len(found), 3) for found in passes.values())
    pairs = [found for found in passes.values() if len(found) == 2]
    same = sum(one[1] == two[1] for one, two in pairs)
    groups = group(len(whole), [[face for face, _ in found] for found in passes.values()])
    flips, orientable = 0, True
    for part in group(len(whole), [[face for face, _ in found] for found in pairs]):
        costs = []
        for bits in itertools.product((False, True), repeat=len(part)):
            turn = dict(zip(part, bits, strict=True))
            if all((one[1] == two[1]) == (turn[one[0]] != turn[two[0]]) for one, two in pairs if one[0] in turn):
                costs.append(sum(bits))
        flips, orientable = flips + min(costs, default=0), orientable and bool(costs)
    edges, total = max(1, len(passes)), max(1, len(faces))
    return {
        "watertight": bool(whole) and kinds[2] == len(passes) and same == 0,
        "orientable": orientable,
        "manifold_edges": kinds[2] / edges,
        "boundary_edges": kinds[1] / edges,
        "non_manifold_edges": kinds[3] / edges,
        "flipped_edges": same / edges,
        "flipped_faces": flips / total,
        "duplicate_faces": (len(faces) - len({tuple(sorted(face)) for face in faces})) / total,
        "components": len(groups),
        "euler": len({v for face in whole for v in face}) - len(passes) + len(whole),
        "num_edges": len(passes),
    }


def group(num: int, together: list[list[int]]) -> list[list[int]]:
    """Connected parts by flooding."""
    beside = defaultdict(set)
    for members in together:
        for a in members:
            beside[a].update(members)
    left, parts = set(range(num)), []
    while left:
        part, front = set(), {min(left)}
        while front:
            part |= front
            front = {other for node in front for other in beside[node]} - part
        left -= part
        parts.append(sorted(part))
    return parts


corner = st.integers(0, 5)
face_lists = st.lists(st.tuples(corner, corner, corner), max_size=9)


@settings(max_examples=200, deadline=None)
@given(faces=face_lists)
def test_all_is_that_of_loops(faces: list[Face]) -> None:
    vertices = np.random.default_rng(0).normal(size=(6, 3))
    found = check_health(Mesh(vertices, np.array(faces, np.int64).reshape(-1, 3))).as_dict()
    expected = by_loops(faces)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["degenerate_faces"] * max(1, len(faces)) == pytest.approx(sum(len(set(face)) < 3 for face in faces))


@settings(max_examples=40, deadline=None)
@given(which=st.sets(st.integers(0, 11)), lost=st.sets(st.integers(0, 11), max_size=9))
def test_parts_of_a_cube_with_turned_faces_are_those_of_loops(which: set[int], lost: set[int]) -> None:
    mesh = without(turned(cube(), *which), *lost)
    expected = by_loops([tuple(face) for face in mesh.faces.tolist()])
    found = check_health(mesh).as_dict()
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_cube() -> None:
    found = check_health(cube())
    assert found == MeshHealth(
        watertight=True, orientable=True, manifold_edges=1, boundary_edges=0, non_manifold_edges=0, flipped_edges=0,
        flipped_faces=0, degenerate_faces=0, duplicate_faces=0, components=1, inside_out=0, euler=2, num_vertices=8, num_edges=18,
        num_faces=12,
    )  # fmt: skip
    assert check_health(soup(cube())) == found


def test_faults_of_a_cube() -> None:
    opened = check_health(without(cube(), 3))
    assert (opened.watertight, opened.boundary_edges, opened.orientable) == (False, 3 / 18, True)
    flipped = check_health(turned(cube(), 5))
    assert (flipped.watertight, flipped.manifold_edges, flipped.flipped_edges, flipped.flipped_faces) == (
        False,
        1,
        3 / 18,
        1 / 12,
    )
    doubled = check_health(more(cube(), (0, 1, 3)))
    assert (doubled.non_manifold_edges, doubled.duplicate_faces, doubled.watertight) == (3 / 18, 1 / 13, False)
    collapsed = check_health(more(cube(), (0, 1, 1)))
    assert (collapsed.degenerate_faces, collapsed.watertight) == (1 / 13, True)  # nothing of the surface changed


def test_faces_without_area_are_degenerate_though_their_vertices_differ() -> None:
    line = Mesh(np.array([[0.1, 0.2, 0.3], [0.2, 0.4, 0.6], [0.7, 1.4, 2.1], [1, 0, 0]]), np.array([[0, 1, 2], [0, 1, 3]]))
    assert check_health(line).degenerate_faces == 0.5
    thin = Mesh(np.array([[0.0, 0, 0], [1, 0, 0], [0.5, 1e-5, 0]]) * 1e-3, np.array([[0, 1, 2]]))
    assert check_health(thin).degenerate_faces == 0


def test_parts_and_their_volumes() -> None:
    two = joined(cube(), cube(5.0))
    assert (check_health(two).components, check_health(two).euler, check_health(two).watertight) == (2, 4, True)
    inside_out = turned(two, *range(12, 24))
    assert (check_health(inside_out).inside_out, check_health(inside_out).flipped_faces) == (1, 0)
    assert check_health(turned(cube(1e3, 1e-3), *range(12))).inside_out == 1
    assert check_health(without(turned(two, *range(12, 24)), 20)).inside_out == 0  # open: nothing is inside
    touching = check_health(joined(cube(), moved(cube(), 1.0, 1.0, 0.0)))
    assert (touching.components, touching.non_manifold_edges, touching.watertight) == (1, 1 / 35, False)  # by an edge
    assert check_health(joined(cube(), cube(1.0))).components == 2  # by a corner


def test_a_moebius_strip_cannot_be_turned_right() -> None:
    found = check_health(moebius())
    assert (found.orientable, found.watertight, found.euler, found.flipped_faces) == (False, False, 0, 0)
    assert found.flipped_edges > 0


def test_nothing() -> None:
    found = check_health(Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64)))
    assert (found.watertight, found.num_edges, found.components, found.boundary_edges) == (False, 0, 0, 0)


@pytest.mark.parametrize(
    "mesh",
    [
        cube(), without(cube(), 0), joined(cube(), cube(3.0)), turned(cube(), 4), turned(cube(), *range(12)), moebius(),
        more(cube(), (0, 1, 3)), joined(cube(), moved(cube(), 1.0, 1.0, 0.0)), soup(cube()),
    ],
)  # fmt: skip
def test_trimesh_agrees(mesh: Mesh) -> None:
    trimesh = pytest.importorskip("trimesh")
    theirs, ours = trimesh.Trimesh(mesh.vertices, mesh.faces, process=True), check_health(mesh)
    assert ours.watertight == (theirs.is_watertight and theirs.is_winding_consistent)
    assert (ours.manifold_edges == 1) == theirs.is_watertight
    assert ours.euler == theirs.euler_number
    assert ours.num_edges == len(theirs.edges_unique)
    if ours.non_manifold_edges == 0:
        assert (ours.flipped_edges == 0) == theirs.is_winding_consistent
        assert ours.components == theirs.body_count
        assert (ours.inside_out > 0) == (ours.watertight and theirs.volume < 0)


def test_a_set_is_the_mean_of_its_shapes() -> None:
    nothing = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))
    reports = [check_health(mesh) for mesh in (cube(), without(cube(), 3), more(cube(), (0, 1, 1)), nothing)]
    found = summarise_health(reports)
    assert (found["num_shapes"], found["watertight"], found["clean"], found["empty"]) == (4, 0.5, 0.25, 0.25)
    assert found["boundary_edges"] == pytest.approx(3 / 18 / 3)
    assert found["degenerate_faces"] == pytest.approx(1 / 13 / 3)
    assert found["components"] == 1
    assert found["euler"] == pytest.approx((2 + 1 + 2) / 3)
    assert json.loads(json.dumps([found, reports[0].as_dict()]))[1]["watertight"] is True
    assert summarise_health([])["watertight"] == 0


@pytest.mark.skipif("TESSERA_REAL_DATA" not in os.environ, reason="names no folder of real data")
def test_real_meshes_as_trimesh_finds_them() -> None:
    trimesh = pytest.importorskip("trimesh")
    files = sorted((Path(os.environ["TESSERA_REAL_DATA"]) / "lowpoly").rglob("*.obj"))[::40]
    assert files
    for path in files:
        scene = trimesh.load(path, force="mesh", process=False)
        vertices, names = np.unique(scene.vertices, axis=0, return_inverse=True)
        faces = names.reshape(-1)[scene.faces]
        faces = faces[(faces != np.roll(faces, 1, 1)).all(1)]
        theirs = trimesh.Trimesh(vertices, faces, process=False)
        ours = check_health(Mesh(np.asarray(scene.vertices, np.float64), np.asarray(scene.faces, np.int64)))
        assert ours.watertight == (theirs.is_watertight and theirs.is_winding_consistent), path
        assert (ours.euler, ours.num_edges) == (theirs.euler_number, len(theirs.edges_unique)), path
