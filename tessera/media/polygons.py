"""Polygons of any number of corners in, triangles out: as many corners, less two, in the order of the polygons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_FLAT = 1e-9  # a turn whose sine is below this is straight


def triangulate(vertices: npt.NDArray[np.float64], polygons: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """f 3 from polygons of three corners or more, each wound as its polygon is. A convex one becomes a fan around its first
    corner; one that is concave, or has a straight corner, is cut by its ears in its own plane (Newell's normal)."""
    counts = np.array([len(polygon) for polygon in polygons], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts - 2)])
    triangles = np.empty((int(starts[-1]), 3), dtype=np.int64)
    for num_corners in np.unique(counts).tolist():
        which = np.flatnonzero(counts == num_corners)
        corners = np.array([polygons[index] for index in which.tolist()], dtype=np.int64)  # p k
        steps = np.arange(num_corners - 2)
        fan = np.stack([np.zeros_like(steps), steps + 1, steps + 2], axis=1)
        triangles[starts[which, None] + steps] = corners[:, fan]
        if num_corners > 3:
            for row in np.flatnonzero(~_convex(vertices[corners])):
                start = starts[which[row]]
                ears = _cut_ears(_flattened(vertices[corners[row]]))
                triangles[start : start + num_corners - 2] = corners[row][ears]
    return triangles


def _normals(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Newell: the sum of the cross products of neighbours; twice the area, along the polygon's normal."""
    points = points - points[..., :1, :]  # far from the origin the products would lose the shape
    return np.cross(points, np.roll(points, -1, axis=-2)).sum(axis=-2)


def _convex(points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which of p polygons turn left at each corner, by more than nothing."""
    after = np.roll(points, -1, axis=1) - points
    before = np.roll(after, 1, axis=1)
    normal = _normals(points)
    length = np.linalg.norm(normal, axis=-1, keepdims=True)
    turns = np.einsum("pkc,pc->pk", np.cross(before, after), normal / np.where(length > 0, length, 1))
    sides = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
    return np.all(turns > _FLAT * sides, axis=1)


def _flattened(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """k 2: the polygon without the coordinate in which its normal is largest, so wound that its area is positive."""
    normal = _normals(points)
    axis = int(np.abs(normal).argmax())
    first, second = ((1, 2), (2, 0), (0, 1))[axis]
    return points[:, [first, second] if normal[axis] >= 0 else [second, first]]


def _cut_ears(points: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """k - 2 triangles of a simple polygon, the fullest ear first, so that straight corners seldom leave a flat one. Where no
    ear is left, in a polygon that crosses itself, the rest becomes a fan."""
    ring = list(range(len(points)))
    found: list[tuple[int, int, int]] = []
    scores = [_ear(points, ring, index) for index in ring]
    while len(ring) > 3:
        if max(scores) <= 0:  # a cut changes its two neighbours, and rarely what a straight corner hid
            scores = [_ear(points, ring, index) for index in range(len(ring))]
        corner = int(np.argmax(scores))
        if scores[corner] <= 0:
            break
        found.append((ring[corner - 1], ring[corner], ring[(corner + 1) % len(ring)]))
        del ring[corner], scores[corner]
        for near in (corner - 1, corner % len(ring)):
            scores[near] = _ear(points, ring, near)
    found += [(ring[0], ring[index], ring[index + 1]) for index in range(1, len(ring) - 1)]
    return np.array(found, dtype=np.int64)


def _ear(points: npt.NDArray[np.float64], ring: Sequence[int], corner: int) -> float:
    """How full the triangle at a corner is, its area over its longest side squared; 0 if the corner does not turn left or
    another point of the ring lies in the triangle or on its border."""
    corner %= len(ring)
    trio = [ring[corner - 1], ring[corner], ring[(corner + 1) % len(ring)]]
    a, b, c = points[trio]
    longest = max(float(np.sum((p - q) ** 2)) for p, q in ((a, b), (b, c), (c, a)))
    area = float(_turn(a, b, c))
    if area <= _FLAT * longest:
        return 0.0
    others = points[[index for index in ring if index not in trio]]
    others = others[~(others[:, None] == points[trio]).all(axis=-1).any(axis=-1)]
    border = -_FLAT * longest
    inside = (_turn(a, b, others) >= border) & (_turn(b, c, others) >= border) & (_turn(c, a, others) >= border)
    return 0.0 if inside.any() else area / longest


def _turn(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Twice the signed area of a, b and each p."""
    return (b[0] - a[0]) * (p[..., 1] - a[1]) - (b[1] - a[1]) * (p[..., 0] - a[0])
