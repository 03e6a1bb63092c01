"""Integrity of meshes: whether a surface is closed, clean and facing one way. Every edge is judged by the faces that pass it.

Vertices at exactly one place are one vertex, because files split them where colours or normals change. Faces that repeat a
vertex have no edges to speak of: they are counted as degenerate and otherwise left out. All by sorting half-edges, no loops
over faces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.evals.mesh_points import Doubles, face_crosses
from tessera.media.meshes import Mesh

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_FLAT = 1e-10  # a face is flat where its height is below this part of its longest side
_SHARES = (
    "manifold_edges", "boundary_edges", "non_manifold_edges", "flipped_edges", "flipped_faces", "degenerate_faces",
    "duplicate_faces",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeshHealth:
    """Of one mesh. Shares are in [0, 1]; those of a mesh without edges or faces are 0."""

    watertight: bool  # every edge is passed by exactly two faces, in opposite directions; false without faces
    orientable: bool  # faces could be turned so that all agree; a Möbius strip's could not
    manifold_edges: float  # share of edges with exactly two faces, whatever their direction; higher is better
    boundary_edges: float  # with one face; lower is better, as in all shares that follow
    non_manifold_edges: float  # with three or more
    flipped_edges: float  # with two faces that pass it in the same direction
    flipped_faces: float  # share of faces that must be turned so that all of their component agree: the lesser side of each
    degenerate_faces: float  # share of faces that repeat a vertex or have no area
    duplicate_faces: float  # share of faces whose three vertices another face before them has, in any order
    components: int  # parts that hang together by edges
    inside_out: int  # closed components whose volume is negative: turned inside out, or a hollow inside of another
    euler: int  # vertices - edges + faces: 2 for each closed part without handles
    num_vertices: int  # that faces use, after welding
    num_edges: int
    num_faces: int

    def as_dict(self) -> dict[str, float]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Edges:
    """Half-edges of n faces, sorted so that those of one edge lie together."""

    face: Ints  # 3n: of which face
    edge: Ints  # 3n: of which edge, ascending
    up: Flags  # 3n: from the lower vertex to the higher
    counts: Ints  # e: faces of each edge
    ups: Ints  # e: how many of them pass it upwards


def check_health(mesh: Mesh) -> MeshHealth:
    """All of it. An edge's two faces agree where they pass it in opposite directions."""
    welded, faces = _weld(mesh)
    repeats = (faces == np.roll(faces, 1, axis=1)).any(1)
    flat = repeats | _flat(mesh)
    whole = faces[~repeats]
    edges = _sort_edges(whole)
    pairs, same_way = edges.counts == 2, edges.ups != 1
    labels = _components(len(whole), *_links(edges, np.ones(len(pairs), bool)))
    turned, orientable = _turned(edges, len(whole))
    closed = len(whole) > 0 and bool((pairs & ~same_way).all())
    num_vertices, num_edges = len(np.unique(whole)), len(pairs)
    return MeshHealth(
        watertight=closed,
        orientable=orientable,
        manifold_edges=_share(pairs.sum(), num_edges),
        boundary_edges=_share((edges.counts == 1).sum(), num_edges),
        non_manifold_edges=_share((edges.counts > 2).sum(), num_edges),
        flipped_edges=_share((pairs & same_way).sum(), num_edges),
        flipped_faces=_share(turned, len(faces)),
        degenerate_faces=_share(flat.sum(), len(faces)),
        duplicate_faces=_share(len(faces) - len(np.unique(np.sort(faces, axis=1), axis=0)), len(faces)),
        components=len(np.unique(labels)),
        inside_out=_inside_out(welded[whole], labels, edges),
        euler=num_vertices - num_edges + len(whole),
        num_vertices=num_vertices,
        num_edges=num_edges,
        num_faces=len(faces),
    )


def summarise_health(reports: Sequence[MeshHealth]) -> dict[str, float]:
    """Over a set: `watertight`, `clean` and `empty` are shares of shapes, the others means over shapes that have faces, so that a
    large shape counts as much as a small one. An empty shape is neither watertight nor clean."""
    filled = [report for report in reports if report.num_faces]
    clean = [r for r in filled if r.watertight and not r.inside_out and r.degenerate_faces == r.duplicate_faces == 0]
    summary: dict[str, float] = {
        "num_shapes": len(reports),
        "watertight": _share(sum(report.watertight for report in reports), len(reports)),
        "clean": _share(len(clean), len(reports)),
        "empty": _share(len(reports) - len(filled), len(reports)),
    }
    for name in (*_SHARES, "components", "euler"):
        summary[name] = float(np.mean([getattr(report, name) for report in filled])) if filled else 0.0
    summary["inside_out"] = _share(sum(report.inside_out > 0 for report in filled), len(filled))
    return summary


def _weld(mesh: Mesh) -> tuple[Doubles, Ints]:
    """Distinct places, and the faces that name them."""
    if not len(mesh.faces):
        return np.zeros((0, 3)), np.zeros((0, 3), np.int64)
    places, names = np.unique(mesh.vertices + 0.0, axis=0, return_inverse=True)  # + 0.0: -0 is 0
    return places, names.reshape(-1)[mesh.faces].astype(np.int64)


def _flat(mesh: Mesh) -> Flags:
    corners = mesh.vertices[mesh.faces].reshape(-1, 3, 3)
    longest = np.square(corners - np.roll(corners, 1, axis=1)).sum(2).max(1, initial=0.0)
    return np.linalg.norm(face_crosses(mesh), axis=1) <= _FLAT * longest


def _sort_edges(faces: Ints) -> _Edges:
    start, end = faces.reshape(-1), np.roll(faces, -1, axis=1).reshape(-1)
    owner = np.repeat(np.arange(len(faces)), 3)
    low, high = np.minimum(start, end), np.maximum(start, end)
    order = np.lexsort((high, low))
    low, high, up = low[order], high[order], (start < end)[order]
    first = np.ones(len(low), bool)
    first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    edge = np.cumsum(first) - 1
    num = int(first.sum())
    return _Edges(owner[order], edge, up, np.bincount(edge, minlength=num), np.bincount(edge[up], minlength=num))


def _links(edges: _Edges, chosen: Flags) -> tuple[Ints, Ints]:
    """Faces that follow each other on the chosen edges."""
    beside = (edges.edge[1:] == edges.edge[:-1]) & chosen[edges.edge[1:]]
    return edges.face[:-1][beside], edges.face[1:][beside]


def _turned(edges: _Edges, num: int) -> tuple[int, bool]:
    """How many faces must be turned at least, and whether all parts can be made to agree; those that cannot count no faces.

    Each face stands twice in a graph, as it is (f) and turned (f + num). Two faces of an edge are linked as they stand if they
    agree, else each with the other turned. Where f and f + num meet, nothing can agree; else a part and its mirror image split
    the faces of a component in those that stay and those that turn.
    """
    agreeing, opposed = (edges.counts == 2) & (edges.ups == 1), (edges.counts == 2) & (edges.ups != 1)
    (a, b), (c, d) = _links(edges, agreeing), _links(edges, opposed)
    labels = _components(2 * num, np.concatenate([a, a + num, c, c + num]), np.concatenate([b, b + num, d + num, d]))
    plain, turned = labels[:num], labels[num:]
    torn = plain == turned
    part = np.minimum(plain, turned)  # one name for a part and its mirror image
    sizes, stays = np.bincount(part[~torn], minlength=num), np.bincount(part[~torn & (plain <= turned)], minlength=num)
    return int(np.minimum(stays, sizes - stays).sum()), not bool(torn.any())


def _inside_out(corners: Doubles, labels: Ints, edges: _Edges) -> int:
    """f 3 3. A closed part's volume is the sum of its faces' determinants over six; about the part's own corner, for rounding."""
    proper = (edges.counts == 2) & (edges.ups == 1)
    closed = np.ones(len(labels), bool)
    closed[labels[edges.face[~proper[edges.edge]]]] = False  # by the label of a part, which is its lowest face
    moved = corners - corners[labels][:, :1]
    volumes = np.bincount(labels, weights=np.linalg.det(moved), minlength=len(labels))
    scale = np.bincount(labels, weights=np.abs(moved).max((1, 2), initial=0.0) ** 3, minlength=len(labels))
    return int((closed & (volumes < -_FLAT * scale)).sum())


def _components(num: int, left: Ints, right: Ints) -> Ints:
    """num: each node's lowest fellow. Roots hang below lower neighbours, then all jump to their roots, until nothing moves."""
    labels = np.arange(num)
    while True:
        a, b = labels[left], labels[right]
        if (a == b).all():
            return labels
        np.minimum.at(labels, np.maximum(a, b), np.minimum(a, b))
        while True:
            jumped = labels[labels]
            if (jumped == labels).all():
                break
            labels = jumped


def _share(part: float, whole: int) -> float:
    return float(part) / whole if whole else 0.0
