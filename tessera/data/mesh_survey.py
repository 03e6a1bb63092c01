"""Every mesh of a source read, cleaned and measured, once; what leaves is small. And the shapes that are almost the same.

Two meshes are near-duplicates when their surfaces pass through the same cells of a coarse grid, whatever their triangles: so a
copy that was moved, scaled, renumbered, cut into other triangles or slightly bent is found; a turned or mirrored one is not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.config import MeshDataConfig
from tessera.data.canonical import Cleaning, Corners, bounding_box, quantise
from tessera.data.duplicates import connected, overlap, similar_sets
from tessera.data.mesh_sources import MeshFolder, TooManyFaces, refusal, standard
from tessera.media.meshes import Mesh, UnreadableMesh

_CHUNK = 256  # meshes in flight
_CELLS = 23  # of the grid a side; odd, so that the middle plane of a symmetric shape lies inside of a layer
_MIN_SIMILARITY = 0.85  # of two sets of cells; measured on the low-poly pack, see docs/data.md


@dataclass(frozen=True, slots=True)
class SeenMesh:
    """What is kept of a mesh that can be used."""

    objects: int  # merged into one
    polygons: int  # of more than three corners, triangulated
    centre: tuple[float, ...]  # of its bounding box as it was read, x, y, z; it is moved to 0
    sides: tuple[float, ...]  # of that box; the longest is scaled
    cleaning: Cleaning
    num_faces: int  # in bins: what training sees without augmentation
    num_flat: int  # of those, the ones without area: three places on a line
    digest: bytes  # of the canonical mesh in bins
    cells: npt.NDArray[np.uint8]  # a bit a cell


@dataclass(frozen=True, slots=True)
class RefusedMesh:
    """Why a mesh cannot be used."""

    reason: str
    too_large: bool  # whole, and refused for its faces alone


def survey_meshes(source: MeshFolder, config: MeshDataConfig) -> Iterator[SeenMesh | RefusedMesh]:
    """In the source's order."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for start in range(0, len(source), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(source)))
            yield from pool.map(lambda index: _look(source, config, index), chunk)


def near_meshes(source: MeshFolder, config: MeshDataConfig) -> list[list[int]]:
    """The samples whose shapes are almost the same, in groups. Reads all of them."""
    seen = {index: each for index, each in enumerate(survey_meshes(source, config)) if isinstance(each, SeenMesh)}
    places = list(seen)
    return [[places[member] for member in group] for group in near_shapes(list(seen.values()))]


def near_shapes(seen: Sequence[SeenMesh]) -> list[list[int]]:
    """The positions that belong together, in order, groups of one left out. What is near to something near belongs too."""
    if len(seen) < 2:
        return []
    cells = np.stack([each.cells for each in seen])
    first: dict[bytes, int] = {}
    equal = [(first.setdefault(each.digest, place), place) for place, each in enumerate(seen)]
    near = similar_sets(cells, lambda pairs: _similar(cells, pairs))
    return connected(len(seen), [*equal, *((group[0], other) for group in near for other in group[1:])])


def digest_of(corners: Corners) -> bytes:
    """Equal for equal canonical meshes."""
    return hashlib.sha256(corners.astype("<i2").tobytes()).digest()


def num_flat(corners: Corners) -> int:
    """How many faces have no area, exactly."""
    first, second, third = (corners[:, corner] for corner in range(3))
    return int((np.cross(second - first, third - first) == 0).all(axis=1).sum())


def cells_of(mesh: Mesh) -> npt.NDArray[np.uint8]:
    """Which cells of the grid the surface of a mesh within [-1, 1] passes through, as bits: those of points in every triangle
    that lie a third of a cell apart, so only cells that it cuts by a corner are missed."""
    corners = ((mesh.vertices[mesh.faces] + 1) * (_CELLS / 2)).astype(np.float32)  # f 3 3, in cells
    longest = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=2).max(axis=1)
    counts = 2 ** np.ceil(np.log2(np.maximum(1, 3 * longest))).astype(np.int64)  # few different ones
    occupied = np.zeros(_CELLS**3, np.bool_)
    for count in np.unique(counts):
        along, across = np.mgrid[0 : count + 1, 0 : count + 1].reshape(2, -1)
        weights = np.stack([along, across, count - along - across], axis=1)[along + across <= count] / count
        points = np.tensordot(weights.astype(np.float32), corners[counts == count], axes=(1, 1))
        z, y, x = (np.minimum(points[..., axis].astype(np.int64), _CELLS - 1) for axis in (2, 1, 0))
        occupied[(z * _CELLS + y) * _CELLS + x] = True
    return np.packbits(occupied)


def _similar(cells: npt.NDArray[np.uint8], pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    shared, either = overlap(cells, pairs)
    return shared >= _MIN_SIMILARITY * either


def _look(source: MeshFolder, config: MeshDataConfig, index: int) -> SeenMesh | RefusedMesh:
    try:
        reading = source.reading(index)
        mesh, cleaning = standard(reading.mesh, config)
    except (UnreadableMesh, OSError, ValueError) as error:
        return RefusedMesh(refusal(error), isinstance(error, TooManyFaces))
    corners = quantise(mesh, config.bins)
    centre, sides = (tuple(map(float, part)) for part in bounding_box(reading.mesh))
    faces, flat, digest = len(corners), num_flat(corners), digest_of(corners)
    return SeenMesh(reading.objects, reading.polygons, centre, sides, cleaning, faces, flat, digest, cells_of(mesh))
