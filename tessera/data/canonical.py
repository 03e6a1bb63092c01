"""The canonical form of a mesh: triangles in any order in; the same shape, welded, cleaned, sorted and in bins, out.

A quantised mesh is an array `corners`, f 3 3: faces x corners x coordinates in the order z, y, x, each a bin in [0, bins).
Vertices compare by (z, y, x); every face is rotated so that its lowest vertex comes first and never sorted inside, so it keeps
its orientation; faces are sorted and distinct, and none repeats a vertex. Bins are uniform over [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.media.meshes import Mesh, Triangles

REACH = 0.95  # of the longest side: what is left of the box is room for a shift
_GRID = 2**20  # coordinates are multiples of 1 / _GRID: exact in float32, and what should be 0 is 0 on every machine

Corners = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What was done to a mesh."""

    num_welded: int = 0
    """Vertices that lay where another one does."""
    num_unused: int = 0
    """Vertices of no face."""
    num_degenerate: int = 0
    """Faces that repeated a vertex."""
    num_duplicate: int = 0
    """Faces with the same vertices as another, in the same cyclic order."""
    num_faces_before: int = 0
    num_faces_after: int = 0

    def then(self, other: Cleaning) -> Cleaning:
        """Both, one after the other."""
        return Cleaning(
            self.num_welded + other.num_welded,
            self.num_unused + other.num_unused,
            self.num_degenerate + other.num_degenerate,
            self.num_duplicate + other.num_duplicate,
            self.num_faces_before,
            other.num_faces_after,
        )


@dataclass(frozen=True, slots=True)
class CleanedMesh(Mesh):
    """One that remembers what was removed of it."""

    cleaning: Cleaning = field(kw_only=True)


def standardise(mesh: Mesh) -> tuple[Mesh, Cleaning]:
    """Cleaned, normalised, and cleaned again: what lies within a millionth of the box is one place. May have no face left."""
    exact, first = clean(mesh)
    if not len(exact.faces):
        return exact, first
    close, second = clean(normalise(exact))
    return close, first.then(second)


def normalise(mesh: Mesh) -> Mesh:
    """Bounding box centred, its longest side from -0.95 to 0.95. Vertices of no face do not count."""
    centre, sides = bounding_box(mesh)
    longest, centred = float(sides.max()), mesh.vertices - centre
    return Mesh(snap(centred / longest * (2 * REACH) if longest > 0 else centred), mesh.faces)


def bounding_box(mesh: Mesh) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Centre and sides, x, y, z, of what its faces use."""
    if not len(mesh.faces):
        raise ValueError("a mesh without faces has no bounding box")
    used = mesh.vertices[np.unique(mesh.faces)]
    low, high = used.min(axis=0), used.max(axis=0)
    return low / 2 + high / 2, high - low


def snap(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """To the grid of normalised meshes."""
    return np.round(points * _GRID) / _GRID + 0.0  # no negative zero


def clean(mesh: Mesh) -> tuple[Mesh, Cleaning]:
    """Equal vertices welded, faces that repeat a vertex or another face removed, the rest in canonical order."""
    keys = mesh.vertices[:, ::-1] + 0.0
    order = np.lexsort(keys.T[::-1])
    new = np.ones(len(keys), np.bool_)
    new[1:] = (np.diff(keys[order], axis=0) != 0).any(axis=1)
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.cumsum(new) - 1
    places = mesh.vertices[order[new]] + 0.0
    faces, num_degenerate, num_duplicate = _in_order(rank[mesh.faces])
    used = np.zeros(len(places), np.bool_)
    used[faces] = True
    report = Cleaning(
        num_welded=len(keys) - len(places),
        num_unused=int((~used).sum()),
        num_degenerate=num_degenerate,
        num_duplicate=num_duplicate,
        num_faces_before=len(mesh.faces),
        num_faces_after=len(faces),
    )
    return Mesh(places[used], (np.cumsum(used) - 1)[faces]), report


def quantise(mesh: Mesh, bins: int) -> Corners:
    """f 3 3: a mesh within [-1, 1] in bins, welded by bin and in canonical order. A face in fewer than three bins goes."""
    points = mesh.vertices[mesh.faces]
    if not (np.abs(points) <= 1).all():
        raise ValueError("a mesh that is quantised must lie within [-1, 1]; normalise it first")
    places = np.minimum(np.floor((points + 1) * (bins / 2)), bins - 1).astype(np.int64)
    faces, _, _ = _in_order(places @ np.array([1, bins, bins * bins]))
    return np.stack([faces // (bins * bins), faces // bins % bins, faces % bins], axis=-1)


def to_mesh(corners: npt.NDArray[np.integer], bins: int) -> Mesh:
    """Bin centres; corners in one bin are one vertex. Vertices are sorted by z, y, x, faces stay in their order."""
    places, faces = np.unique(numbers_of(corners, bins), return_inverse=True)
    found = np.stack([places % bins, places // bins % bins, places // (bins * bins)], axis=-1)
    return Mesh(np.asarray((found + 0.5) * (2 / bins) - 1, np.float64), faces.reshape(-1, 3).astype(np.int64))


def numbers_of(corners: npt.NDArray[np.integer], bins: int) -> npt.NDArray[np.int64]:
    """... 3 -> ...: a number for each place, in the order of vertices."""
    return np.asarray(corners.astype(np.int64) @ np.array([bins * bins, bins, 1]), np.int64)


def _in_order(faces: Triangles) -> tuple[Triangles, int, int]:
    """Faces of vertices that are numbered in order -> the canonical ones, and how many were degenerate and duplicate."""
    whole = faces[(faces != np.roll(faces, 1, axis=1)).all(axis=1)]
    turns = (whole.argmin(axis=1)[:, None] + np.arange(3)) % 3
    turned = np.take_along_axis(whole, turns, axis=1)
    ordered = turned[np.lexsort(turned.T[::-1])]
    new = np.ones(len(ordered), np.bool_)
    new[1:] = (np.diff(ordered, axis=0) != 0).any(axis=1)
    distinct = ordered[new]
    return distinct, len(faces) - len(whole), len(whole) - len(distinct)
