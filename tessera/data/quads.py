"""Triangles in bins to quads and back, exactly.

Files of most kinds hold triangles alone, and polygons of the others have become triangles, so quads are found, not read: two
triangles that share a side, lie nearly in one plane and make a convex shape are one. Nearly, because places in bins are rounded.
Their diagonal is kept as corners 0 and 2, so the same two triangles come back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.data.canonical import Corners, numbers_of, quantise
from tessera.media.meshes import Mesh, Quads

Numbers = npt.NDArray[np.int64]

GAP = 1.0  # bins by which the diagonals of a quad may pass each other; in one plane they meet
BEND = 0.9  # cosine of the largest angle between the plane at a corner and that of the diagonals


def join_quads(corners: Corners) -> Corners:
    """f 3 3, canonical -> q 4 3: quads and, with the third corner repeated, the triangles that are left. Longest diagonals first,
    as in a rectangle. A quad starts at the lower end of its diagonal; rows are sorted."""
    bins = int(corners.max(initial=0)) + 1
    ids = numbers_of(corners, bins)
    faces, shapes = _joinable(corners, ids)
    taken, kept = np.zeros(len(corners), np.bool_), []
    for index, (one, other) in enumerate(faces.tolist()):
        if not taken[one] and not taken[other]:
            taken[one] = taken[other] = True
            kept.append(index)
    rows = np.concatenate([shapes[kept], corners[~taken][:, [0, 1, 2, 2]]])
    return rows[np.lexsort(numbers_of(rows, bins).T[::-1])]


def find_quads(mesh: Mesh, bins: int) -> Quads:
    """q 4 vertices, of a mesh whose vertices lie in bins, each in one of its own."""
    centres = np.floor((mesh.vertices[:, ::-1] + 1) * (bins / 2)).astype(np.int64)
    numbers = numbers_of(centres, bins)
    order = np.argsort(numbers)
    return order[np.searchsorted(numbers[order], numbers_of(join_quads(quantise(mesh, bins)), bins))]


def split_quads(quads: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """q 4 3 -> f 3 3: the triangles, in the order of their faces."""
    both = np.stack([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]], axis=1)
    single = (quads[:, 2] == quads[:, 3]).all(-1)
    return both[np.stack([np.ones_like(single), ~single], axis=1)]


def _joinable(corners: Corners, ids: Numbers) -> tuple[Numbers, Corners]:
    """n 2: pairs of triangles that could be one, those of the longest diagonal first, equal ones by their numbers; and n 4 3: the
    quads."""
    here, there = _shared_sides(ids)
    (one, at), (other, back) = np.divmod(here, 3), np.divmod(there, 3)
    around = [(one, (at + 1) % 3), (one, (at + 2) % 3), (one, at), (other, (back + 2) % 3)]  # 0 and 2: ends of the shared side
    shapes = np.stack([corners[place] for place in around], axis=1)
    flat = _nearly_flat(shapes.astype(np.float64))
    lower = ids[one, (at + 1) % 3] < ids[one, at]
    shapes = np.where(lower[:, None, None], shapes, np.roll(shapes, 2, axis=1))
    lengths = np.square(shapes[:, 0] - shapes[:, 2]).sum(-1)
    order = np.lexsort([there, here, -lengths])
    order = order[flat[order]]
    return np.stack([one, other], axis=1)[order], shapes[order]


def _nearly_flat(shapes: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """n 4 3 -> n: convex, and in one plane but for what bins round away."""
    steps = np.roll(shapes, -1, axis=1) - shapes
    turns = np.cross(steps, np.roll(steps, -1, axis=1))  # all along the normal, where every corner turns the same way
    normal = np.cross(shapes[:, 2] - shapes[:, 0], shapes[:, 3] - shapes[:, 1])[:, None]
    along, length = (turns * normal).sum(-1), np.sqrt(np.square(normal).sum(-1))
    convex = (along > 0) & (along >= BEND * length * np.sqrt(np.square(turns).sum(-1)))
    return convex.all(1) & (np.abs((steps[:, :1] * normal).sum(-1)) <= GAP * length)[:, 0]


def _shared_sides(ids: Numbers) -> tuple[Numbers, Numbers]:
    """Sides, as 3 face + corner, that exactly two triangles have, once along and once back: where each has it."""
    after = np.roll(ids, -1, axis=1)
    sides = np.stack([np.minimum(ids, after), np.maximum(ids, after)], axis=-1).reshape(-1, 2)
    order = np.lexsort(sides.T[::-1])
    new = np.ones(len(order) + 1, np.bool_)
    new[1:-1] = (np.diff(sides[order], axis=0) != 0).any(axis=1)
    starts = np.flatnonzero(new)
    first = starts[:-1][np.diff(starts) == 2]
    here, there = order[first], order[first + 1]
    fits = ids.ravel()[here] == after.ravel()[there]
    return here[fits], there[fits]
