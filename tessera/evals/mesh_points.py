"""Shapes as points on their surface, and distances between such clouds.

A cloud is a function of its mesh and of the seed, and all shapes share the random numbers: equal meshes are at distance 0. Two
different triangulations of one surface are not: with area A and n points their Chamfer distance is about 2 A / (pi n).
Distances have the unit of the meshes, squared for Chamfer: bring all sides to one scale before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.config import UserError
from tessera.media.meshes import Mesh
from tessera.randomness import mix, mix_array

Doubles: TypeAlias = npt.NDArray[np.float64]
Clouds: TypeAlias = npt.NDArray[np.float32]  # shapes points 3

NUM_POINTS = 2048  # of the published figures
_CPU_GAPS, _GPU_GAPS = 2**18, 2**26  # squared distances at once: what a cache holds, and 256 MiB twice


@dataclass(frozen=True, slots=True)
class Cloud:
    """Points of one surface."""

    points: Doubles  # n 3
    normals: Doubles  # n 3, of the faces they lie on; unit length


@dataclass(frozen=True, slots=True)
class CloudSet:
    """Clouds of many meshes; those without a surface are left out, and `num_empty` says how many."""

    points: Clouds  # s n 3
    kept: npt.NDArray[np.int64]  # s: which of the meshes
    num_empty: int


@dataclass(frozen=True, slots=True)
class Closeness:
    """Of two clouds, both ways."""

    chamfer: float  # >= 0, lower is better
    normal_consistency: float  # in [0, 1], higher is better


def face_crosses(mesh: Mesh) -> Doubles:
    """m 3: normals as long as twice the face's area."""
    first, second, third = (mesh.vertices[mesh.faces[:, corner]] for corner in range(3))
    return np.asarray(np.cross(second - first, third - first), np.float64).reshape(-1, 3)


def has_surface(mesh: Mesh) -> bool:
    """Whether points can be drawn: some area, and every coordinate a number."""
    return _solid(np.linalg.norm(face_crosses(mesh), axis=1))


def sample_points(mesh: Mesh, num: int = NUM_POINTS, seed: int = 0) -> Cloud:
    """Uniform by area: a face by its share, then a place in it (Osada et al. 2002, equation 1). Fewer are the first of more."""
    crosses = face_crosses(mesh)
    doubled = np.linalg.norm(crosses, axis=1)
    if not _solid(doubled):
        raise UserError(
            f"a mesh of {len(mesh.faces)} faces has the area {doubled.sum() / 2}; points need a finite area above 0: "
            "leave it out, or look for collapsed faces and for coordinates that are not numbers"
        )
    points, chosen = _draw(mesh, doubled, num, seed)
    return Cloud(points, crosses[chosen] / doubled[chosen, None])


def sample_set(meshes: Sequence[Mesh], num: int = NUM_POINTS, seed: int = 0) -> CloudSet:
    """Clouds of equal size, of all meshes that have a surface."""
    doubled = [np.linalg.norm(face_crosses(mesh), axis=1) for mesh in meshes]
    kept = [index for index, own in enumerate(doubled) if _solid(own)]
    points = np.zeros((len(kept), num, 3), np.float32)
    for row, index in enumerate(kept):
        points[row] = _draw(meshes[index], doubled[index], num, seed)[0]
    return CloudSet(points, np.array(kept, np.int64), len(meshes) - len(kept))


def _solid(doubled: Doubles) -> bool:
    """By the areas of the faces, twice."""
    return bool(0 < doubled.sum() < np.inf)


def _draw(mesh: Mesh, doubled: Doubles, num: int, seed: int) -> tuple[Doubles, npt.NDArray[np.int64]]:
    """n 3: points, and the faces that they lie on, which are chosen by their areas."""
    ascending, places, weights = _shared_draws(num, seed)
    solid = np.flatnonzero(doubled > 0)
    ends = np.cumsum(doubled[solid])
    before = np.searchsorted(ascending * ends[-1], ends)  # draws below the end of each face: quicker than a face for each draw
    before[-1] = num  # whatever rounding says
    chosen = solid.repeat(np.diff(before, prepend=0))[places]
    corners = mesh.vertices[mesh.faces].reshape(-1, 9).T.take(chosen, axis=1).reshape(3, 3, num)  # corners, coordinates, points
    return (weights[0] * corners[0] + weights[1] * corners[1] + weights[2] * corners[2]).T, chosen


@lru_cache(maxsize=1)
def _shared_draws(num: int, seed: int) -> tuple[Doubles, npt.NDArray[np.int64], Doubles]:
    """The same for all shapes: n in [0, 1) that say the face, ascending, and where among them each point has its own; 3 n, the
    weights of the face's corners."""
    which, root, share = (_uniform(seed, stream, num) for stream in range(3))
    root = np.sqrt(root)
    order = np.argsort(which)
    return which[order], np.argsort(order), np.stack([1 - root, root * (1 - share), root * share])


def compare(a: Cloud, b: Cloud, *, device: torch.device | str = "cpu") -> Closeness:
    """Chamfer as in `pairwise_chamfer`; normal consistency: the mean of |cos| between the normals of a point and of its nearest
    one on the other side (Mescheder et al. 2019). A flipped face changes neither: `mesh_health` counts those."""
    there, back = nearest_point(a.points, b.points, device=device), nearest_point(b.points, a.points, device=device)
    out, home = (np.square(x.points - y.points[i]).sum(1) for x, y, i in ((a, b, there), (b, a, back)))
    cosines = (np.abs((x.normals * y.normals[i]).sum(1)).mean() for x, y, i in ((a, b, there), (b, a, back)))
    return Closeness(
        chamfer=float(out.mean() + home.mean()),
        normal_consistency=min(1.0, float(sum(cosines) / 2)),  # above 1 by rounding only
    )


def nearest_point(queries: Doubles, bank: Doubles, *, device: torch.device | str = "cpu") -> npt.NDArray[np.int64]:
    """For each query the index of the nearest point of the bank; of equals the first."""
    place = torch.device(device)
    columns = torch.from_numpy(np.ascontiguousarray(bank.T)).to(place)[None]  # 1 3 m
    rows = max(1, _budget(place) // len(bank))
    parts = torch.from_numpy(np.ascontiguousarray(queries.T)).to(place).split(rows, 1)
    return torch.cat([_gaps(part, columns)[0].argmin(1) for part in parts]).cpu().numpy()


def pairwise_chamfer(a: Clouds, b: Clouds | None = None, *, device: torch.device | str = "cpu") -> Doubles:
    """s n 3, t m 3 -> s t: mean over a of min |a - b|^2, plus mean over b of min |a - b|^2.

    The sum of the two means of squared distances, as in PointFlow and the figures that compare with it; others take roots, halves
    or sums. Without b of a against itself, each pair once. By differences, not by |a|^2 + |b|^2 - 2ab: equal clouds are at 0
    exactly. 2,048 points take 7 to 55 ms a pair on one CPU core, 256 points 0.7.
    """
    place = torch.device(device)
    budget = _budget(place)
    left = _columns(a, place)
    right = left if b is None else _columns(b, place)
    found = torch.zeros(len(left), len(right), dtype=torch.float64, device=place)
    at_once = max(1, budget // max(1, left.shape[2] * right.shape[2]))
    for row, cloud in enumerate(left):
        for start in range(row + 1 if b is None else 0, len(right), at_once):
            there, back = _nearest_squares(cloud, right[start : start + at_once], budget)
            found[row, start : start + at_once] = there.double().mean(1) + back.double().mean(1)
    return (found + found.T if b is None else found).cpu().numpy()


def _budget(place: torch.device) -> int:
    return _CPU_GAPS if place.type == "cpu" else _GPU_GAPS


def _nearest_squares(cloud: Tensor, others: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """3 n, k 3 m -> k n, k m: squared distances from each point to the nearest of the other side."""
    rows = max(1, budget // (others.shape[0] * others.shape[2]))
    there, back = [], torch.full((others.shape[0], others.shape[2]), torch.inf, device=others.device)
    for part in cloud.split(rows, 1):
        gaps = _gaps(part, others)
        there.append(gaps.amin(2))
        back = torch.minimum(back, gaps.amin(1))
    return torch.cat(there, 1), back


def _gaps(cloud: Tensor, others: Tensor) -> Tensor:
    """3 n, k 3 m -> k n m, squared distances."""
    gaps = (cloud[0][None, :, None] - others[:, 0, None, :]).square_()
    for axis in (1, 2):
        difference = cloud[axis][None, :, None] - others[:, axis, None, :]
        gaps.addcmul_(difference, difference)
    return gaps


def _columns(clouds: Clouds, place: torch.device) -> Tensor:
    """s n 3 -> s 3 n"""
    if clouds.ndim != 3 or clouds.shape[2] != 3 or clouds.shape[1] == 0:
        raise ValueError(f"clouds are shaped {clouds.shape}; expected shapes x points x 3, with a point or more")
    return torch.from_numpy(np.ascontiguousarray(clouds.transpose(0, 2, 1), np.float32)).to(place)


def _uniform(seed: int, stream: int, num: int) -> Doubles:
    """In [0, 1)."""
    return (mix_array(mix(seed, stream), np.arange(num)) >> np.uint64(11)).astype(np.float64) / 2**53
