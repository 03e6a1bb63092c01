"""What a mesh says by itself: neighbours, vertices and geometry, against brute force and by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.batches import MeshBatch, Text
from tessera.tokenizers.mesh.graph import (
    at_corners,
    build_graph,
    geometry_features,
    measure_faces,
    neighbour_mean,
    told_apart,
    vertex_mean,
)
from tests.tokenizers.graph_meshes import (
    BINS,
    CPU,
    box,
    pad,
    soup,
    table,
)

# ---- the batch


def test_a_batch_moves_and_widens_its_bins() -> None:
    host = MeshBatch(
        torch.tensor([[[[31, 0, 7]] * 3]], dtype=torch.int16), torch.tensor([1]), Text(torch.ones(1, 2, dtype=torch.long)),
        torch.tensor([True]), torch.tensor([5]), ("a",), ("a box",), ("b: broken",),
    )  # fmt: skip
    moved = host.to(CPU)
    assert moved.corners.dtype == torch.int64
    assert moved.corners[0, 0].tolist() == [[31, 0, 7]] * 3
    assert host.corners.dtype == torch.int16
    assert (moved.keys, moved.captions, moved.faults) == (("a",), ("a box",), ("b: broken",))
    assert moved.num_faces.tolist() == [1]
    assert moved.text.mask.all()


# ---- the graph, against brute force


def sides_of(face: Tensor) -> list[frozenset[tuple[int, ...]]]:
    """Unordered pairs of points; sides of no length are none."""
    points = [tuple(point.tolist()) for point in face]
    pairs = zip(points, points[1:] + points[:1], strict=True)
    return [frozenset(pair) for pair in pairs if pair[0] != pair[1]]


def adjacency(mesh: Tensor) -> Tensor:
    """How many sides two faces share, by comparing all with all; 0 on the diagonal."""
    sides = [sides_of(face) for face in mesh]
    counts = [[sum(a == b for a in left for b in right) for right in sides] for left in sides]
    return torch.tensor(counts, dtype=torch.float32).fill_diagonal_(0)


@pytest.mark.parametrize("corners", [3, 4])
def test_neighbours_are_those_that_share_a_side(corners: int) -> None:
    twice = torch.cat([box((1, 1, 1), (5, 5, 5), corners)] * 2)  # every edge has four faces
    alone = torch.tensor([[[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 0]]])[:, :corners]
    meshes = [table(corners), soup(40, corners), soup(70, corners, bins=2, seed=1), twice, alone]
    assert adjacency(soup(70, corners, bins=2, seed=1)).sum(1).max() > corners  # edges of more than two faces are among them
    corner_bins, num_faces = pad(meshes, 80, junk=True)
    graph = build_graph(corner_bins, num_faces, BINS)
    values = torch.randn(len(meshes), 80, 5, generator=torch.Generator().manual_seed(3))
    found = neighbour_mean(values, graph.edges, graph.own, graph.degrees)
    for index, mesh in enumerate(meshes):
        shared = adjacency(mesh)
        expected = shared @ values[index, : len(mesh)] / shared.sum(1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(found[index, : len(mesh)], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(graph.degrees[index, : len(mesh), 0], shared.sum(1).clamp(min=1))
    assert graph.mask.sum(1).tolist() == [len(mesh) for mesh in meshes]


def test_a_closed_mesh_has_a_neighbour_across_every_side() -> None:
    graph = build_graph(*pad([table()]), BINS)
    assert (graph.degrees == 3).all()
    assert (adjacency(table()) > 0).sum(1).tolist() == [3] * 60


@pytest.mark.parametrize("corners", [3, 4])
def test_equal_corners_are_one_vertex_and_agree_on_the_mean(corners: int) -> None:
    meshes = [table(corners), soup(40, corners), soup(9, corners)]
    corner_bins, num_faces = pad(meshes, 60, junk=True)
    graph = build_graph(corner_bins, num_faces, BINS)
    values = torch.randn(3, 60, corners, 4, generator=torch.Generator().manual_seed(3))
    found, slots = at_corners(vertex_mean(values, graph), graph), set()
    for index, mesh in enumerate(meshes):
        points, inverse = np.unique(mesh.reshape(-1, 3).numpy(), axis=0, return_inverse=True)
        flat = values[index, : len(mesh)].reshape(-1, 4)
        expected = torch.stack([flat[torch.from_numpy(inverse == one)].mean(0) for one in range(len(points))])[inverse]
        torch.testing.assert_close(found[index, : len(mesh)].reshape(-1, 4), expected, rtol=1e-5, atol=1e-5)
        slots |= set(graph.vertices[index, : len(mesh)].flatten().tolist())
    assert slots == set(graph.occupied.nonzero().flatten().tolist())


# ---- geometry, by hand


def test_triangles_against_the_law_of_cosines_and_heron() -> None:
    mesh = soup(50, bins=BINS, seed=4)
    faces = measure_faces(mesh[None])
    for face, angles, log_area, normal in zip(mesh, faces.angles[0], faces.log_areas[0], faces.normals[0], strict=True):
        a, b, c = points = face.numpy()[:, ::-1].astype(np.float64)  # (x, y, z)
        ab, bc, ca = (np.linalg.norm(p - q) for p, q in ((a, b), (b, c), (c, a)))
        cosines = [(ab**2 + ca**2 - bc**2) / (2 * ab * ca), (ab**2 + bc**2 - ca**2) / (2 * ab * bc)]
        expected = [math.acos(np.clip(cosine, -1, 1)) for cosine in cosines]
        np.testing.assert_allclose(angles, [*expected, math.pi - sum(expected)], atol=1e-3)
        half = (ab + bc + ca) / 2
        area = math.sqrt(max(0, half * (half - ab) * (half - bc) * (half - ca)))
        assert log_area.item() == pytest.approx(math.log(1 + 2 * area), abs=1e-4)
        assert np.abs((points - a) @ normal.numpy()).max() < 1e-4
        assert normal.norm().item() == pytest.approx(1, abs=1e-5)
        assert np.linalg.det(np.stack([b - a, c - a, normal.numpy()])) > 0  # a right-handed frame


@pytest.mark.parametrize("corners", [3, 4])
def test_normals_of_a_box_point_outwards(corners: int) -> None:
    mesh = box((2, 4, 6), (20, 14, 10), corners)
    faces = measure_faces(mesh[None])
    outwards = mesh.float().mean(1) - mesh.float().mean((0, 1))
    assert ((faces.normals[0] * outwards.flip(-1)).sum(-1) > 0).all()
    areas = ((faces.log_areas[0].exp() - 1) / 2).sum().item()
    assert areas == pytest.approx(2 * (18 * 10 + 18 * 4 + 10 * 4), rel=1e-5)
    assert faces.angles[0].sum(-1) == pytest.approx(torch.full((len(mesh),), (corners - 2) * math.pi))


def test_a_quad_may_turn_inwards_or_be_a_triangle() -> None:
    arrow = torch.tensor([[0, 0, 0], [0, 4, 0], [0, 1, 1], [0, 0, 4]])  # (z, y, x), clockwise seen from above
    triangle = torch.tensor([[0, 0, 0], [0, 0, 3], [0, 4, 0], [0, 4, 0]])
    faces = measure_faces(torch.stack([arrow, triangle])[None])
    tip = math.atan2(1, 3)
    assert faces.angles[0, 0].tolist() == pytest.approx([math.pi / 2, tip, 1.5 * math.pi - 2 * tip, tip], rel=1e-5)
    assert faces.normals[0].tolist() == [[0, 0, -1], [0, 0, 1]]
    assert (faces.log_areas[0].exp() - 1).tolist() == pytest.approx([8, 12])
    expected = [math.pi / 2, math.atan2(4, 3), math.atan2(3, 4), math.atan2(3, 4)]
    assert faces.angles[0, 1].tolist() == pytest.approx(expected)


def test_faces_of_no_area_are_finite() -> None:
    point, line = torch.full((3, 3), 7), torch.tensor([[0, 0, 0], [0, 0, 2], [0, 0, 5]])
    faces = measure_faces(torch.stack([point, line])[None])
    assert faces.normals.abs().max() == 0
    assert faces.log_areas.abs().max() == 0
    assert faces.angles[0].tolist() == [[0, 0, 0], pytest.approx([0, math.pi, 0])]
    assert geometry_features(torch.stack([point, line])[None], BINS).isfinite().all()


def test_features_have_about_unit_size() -> None:
    large = torch.tensor([[[[0, 0, 0], [0, 0, BINS - 1], [0, BINS - 1, 0]]]])
    features = geometry_features(large, BINS)
    assert features.shape == (1, 1, 7)
    assert features[0, 0].tolist() == pytest.approx([0.5, 0.25, 0.25, 1.0, 0, 0, 1], abs=0.01)


# ---- ids that name vertices


def told_apart_by_hand(ids: list[list[int]], most: int) -> list[list[int]]:
    """One mesh: each last id goes above the one before it, and below those that must still fit."""
    made = [list(row) for row in ids]
    for begin in {tuple(row[:-1]) for row in ids}:
        places = sorted((place for place, row in enumerate(ids) if tuple(row[:-1]) == begin), key=lambda place: ids[place][-1])
        lowest = -1
        for rank, place in enumerate(places):
            lowest = max(ids[place][-1], lowest + 1)
            made[place][-1] = max(min(lowest, most - len(places) + rank), 0)
    return made


@pytest.mark.parametrize("most", [2, 5, 40])
@pytest.mark.parametrize("num_links", [1, 2, 3])
def test_ids_are_told_apart_as_by_hand(num_links: int, most: int) -> None:
    random = torch.Generator().manual_seed(most)
    moved, crowded = 0, 0
    for num in (0, 1, 2, 7, 12, 30):
        ids = torch.randint(most, (4, num, num_links), generator=random)
        there = torch.rand(4, num, generator=random) < 0.8
        found = told_apart(ids, there, most)
        assert torch.equal(found[..., :-1], ids[..., :-1])
        for row, mine, inside in zip(found, ids, there, strict=True):
            wanted = told_apart_by_hand(mine[inside].tolist(), most)
            assert row[inside].tolist() == wanted
            different = {tuple(each) for each in wanted}
            sizes = Counter(each[:-1] for each in map(tuple, wanted))
            assert len(different) == sum(min(size, most) for size in sizes.values()), "as many as there are ids for"
            moved += wanted != mine[inside].tolist()
            crowded += max(sizes.values(), default=0) > most
        assert ((found >= 0) & (found < most)).all(), "also of what is not there"
    assert moved or most**num_links > 1000
    assert crowded or num_links > 1 or most == 40
