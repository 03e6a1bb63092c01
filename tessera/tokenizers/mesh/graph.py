"""What a mesh says by itself: shared vertices, faces that share a side, angles, areas, normals; and means over what is shared.

Meshes enter as bins, b f c 3 in the order (z, y, x), with c = 3 corners a face or 4, padded to f faces. Everything has static
shapes and nothing waits for the device: what is equal gets one of f c slots of its mesh by sorting, O(f log f), and slots of all
meshes are numbered through, so that sums are one `index_add`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Graph:
    """Which corners are one vertex, and which sides are one edge. Slots are numbered over the whole batch, 0 to b f c - 1."""

    mask: Tensor  # b f bool: faces in front of their mesh's end
    vertices: Tensor  # b f c: slot of each corner's vertex
    occupied: Tensor  # (b f c) bool: slots that are vertices; the others hold nothing, or the padding
    shares: Tensor  # (b f c) 1: one over the number of corners of a slot, so that a sum becomes a mean
    edges: Tensor  # b f c: slot of the side from each corner to the next; sides of no length and of the padding are alone
    own: Tensor  # b f 1: how often a face meets itself at its sides: c times, more if a side goes back where it came from
    degrees: Tensor  # b f 1: how often it meets others, at least 1; once for each shared side, all those of a crowded edge


@torch.no_grad()
def build_graph(corners: Tensor, num_faces: Tensor, bins: int) -> Graph:
    """corners b f c 3, num_faces b."""
    b, f, c, _ = corners.shape
    mask = face_mask(num_faces, f)
    inside = mask[..., None].expand(b, f, c).flatten(1)
    places = torch.arange(f * c, device=corners.device)
    z, y, x = corners.flatten(1, 2).unbind(-1)
    ids = number_equal(torch.where(inside, (z * bins + y) * bins + x, bins**3))
    here = rearrange(ids, "b (f c) -> b f c", c=c)
    there = here.roll(-1, dims=-1)
    keys = torch.minimum(here, there) * (f * c) + torch.maximum(here, there)
    keys = torch.where(inside & (here != there).flatten(1), keys.flatten(1), (f * c) ** 2 + places)
    first = f * c * torch.arange(b, device=corners.device)[:, None]
    vertices, edges = (ids + first).view(b, f, c), (number_equal(keys) + first).view(b, f, c)
    num_vertices = torch.where(inside, ids + 1, 0).amax(1, keepdim=True)
    crowd = sum_at(torch.ones_like(mask, dtype=torch.float32)[..., None], edges)
    own = (edges[..., None] == edges[..., None, :]).sum((-2, -1))[..., None].float()
    return Graph(
        mask=mask,
        vertices=vertices,
        occupied=(places < num_vertices).flatten(),
        shares=1 / sum_at(torch.ones_like(mask, dtype=torch.float32)[..., None], vertices).clamp(min=1),
        edges=edges,
        own=own,
        degrees=(take_at(crowd, edges) - own).clamp(min=1),
    )


def face_mask(num_faces: Tensor, most: int) -> Tensor:
    """b -> b f bool: which of `most` faces there are."""
    return torch.arange(most, device=num_faces.device) < num_faces[:, None]


def number_equal(keys: Tensor) -> Tensor:
    """b n -> b n: equal keys of a row get one number; numbers follow the order of the keys, from 0, without gaps."""
    ordered, order = keys.sort(dim=1)
    ranks = F.pad((ordered[:, 1:] != ordered[:, :-1]).long(), (1, 0)).cumsum(1)
    return torch.empty_like(keys).scatter_(1, order, ranks)


def equal_ids(ids: Tensor, mask: Tensor, most: int) -> Tensor:
    """ids b f c q from 0 to most - 1, mask b f -> b f c: slots of each mesh; corners share one if all their q ids are equal.
    Those behind a mesh's end share one of their own."""
    flat = torch.where(mask[..., None, None], ids.long() + 1, 0).flatten(1, 2)
    return number_rows(flat, most + 1).view(ids.shape[:-1])


def number_rows(rows: Tensor, most: int) -> Tensor:
    """b n q from 0 to most - 1 -> b n: equal rows of a mesh get one number, as in `number_equal`."""
    numbers = torch.zeros_like(rows[..., 0])
    for column in rows.unbind(-1):
        numbers = number_equal(numbers * most + column)
    return numbers


def told_apart(ids: Tensor, there: Tensor, most: int) -> Tensor:
    """ids b n q from 0 to most - 1, there b n bool -> ids of which no two are equal, among those of a mesh that are there. What
    differs in its last id alone is taken in order, and each goes at least one above the one before it; what would then be too
    high stays just below the next. Where nothing was equal all stays; more than `most` of one beginning stay equal in part."""
    firsts, last = ids[..., :-1].long(), ids[..., -1].long()
    begins = number_rows(firsts, most) if firsts.shape[-1] else torch.zeros_like(last)
    begins = torch.where(there, begins, ids.shape[1])
    order = (begins * most + last).argsort(dim=1, stable=True)
    begin, wanted = begins.gather(1, order), last.gather(1, order)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(order)
    start, end = (torch.searchsorted(begin, begin, right=right) for right in (False, True))
    rank, size = places - start, end - start
    far = most + ids.shape[1]  # further apart than any two within one beginning
    free = (wanted - rank + begin * far).cummax(dim=1).values - begin * far + rank
    free = torch.minimum(free, most - size + rank).clamp(min=0)
    return torch.cat([firsts, torch.empty_like(last).scatter_(1, order, free)[..., None]], -1)


def sum_at(values: Tensor, slots: Tensor) -> Tensor:
    """b f d, slots b f c -> (b f c) d: each face's values added to all its slots. fp32, whatever autocast says."""
    sums = values.new_zeros(slots.numel(), values.shape[-1], dtype=torch.float32)
    flat = values.float().flatten(0, 1)
    for corner in slots.flatten(0, 1).unbind(-1):
        sums.index_add_(0, corner, flat)
    return sums


def take_at(sums: Tensor, slots: Tensor) -> Tensor:
    """(b f c) d, slots b f c -> b f d: the sum of what lies at a face's slots."""
    first, *others = (sums.index_select(0, corner) for corner in slots.flatten(0, 1).unbind(-1))  # its gradient is an index_add
    return sum(others, first).view(*slots.shape[:2], -1)


def neighbour_mean(values: Tensor, edges: Tensor, own: Tensor, degrees: Tensor) -> Tensor:
    """b f d -> b f d: the mean over the faces across a face's sides, without itself; 0 where there are none."""
    met = take_at(sum_at(values, edges), edges)
    return ((met - own * values.float()) / degrees).to(values.dtype)


def vertex_mean(values: Tensor, graph: Graph) -> Tensor:
    """b f c d, one vector a corner -> (b f c) d, one a slot: the mean over the corners that are one vertex, in fp32."""
    flat = values.float().flatten(0, 2)
    sums = torch.zeros_like(flat).index_add(0, graph.vertices.flatten(), flat)
    return sums * graph.shares


def at_corners(values: Tensor, graph: Graph) -> Tensor:
    """(b f c) ..., one a slot -> b f c ..., one a corner."""
    return values.index_select(0, graph.vertices.flatten()).view(*graph.vertices.shape, *values.shape[1:])


# ---- geometry


@dataclass(frozen=True, slots=True)
class Geometry:
    """A face's own numbers, from its corners in units of bins; of no area: angles 0 or pi, log area 0, normal 0."""

    angles: Tensor  # b f c: interior angles in radians, above pi at the inward corner of a quad
    log_areas: Tensor  # b f: log(1 + 2 area); twice the area of a triangle is at least 1, or 0
    normals: Tensor  # b f 3 in the order (x, y, z), of length 1; outward where corners run counter-clockwise


@torch.no_grad()
def measure_faces(corners: Tensor) -> Geometry:
    """corners b f c 3, bins of (z, y, x). The last corner of a triangle among quads repeats its third."""
    points = corners.flip(-1).float()  # (x, y, z): turning the order round would mirror the normals
    after, before = (points.roll(shift, dims=2) for shift in (-1, 1))
    if corners.shape[2] == 4:  # the third and the last corner of a triangle look past each other
        single = (points[:, :, 2] == points[:, :, 3]).all(-1)[..., None]
        after[:, :, 2] = torch.where(single, points[:, :, 0], after[:, :, 2])
        before[:, :, 3] = torch.where(single, points[:, :, 1], before[:, :, 3])
    spokes = points[:, :, 1:] - points[:, :, :1]
    vectors = torch.linalg.cross(spokes[:, :, :-1], spokes[:, :, 1:]).sum(2)  # of twice the area's length (Newell)
    lengths = vectors.norm(dim=-1, keepdim=True)
    normals = vectors / lengths.clamp(min=1e-6)
    ahead, back = after - points, before - points
    sines = (torch.linalg.cross(ahead, back) * normals[:, :, None]).sum(-1)
    angles = torch.atan2(sines, (ahead * back).sum(-1))
    return Geometry(torch.where(angles < 0, angles + 2 * math.pi, angles), lengths[..., 0].log1p(), normals)


def geometry_features(corners: Tensor, bins: int) -> Tensor:
    """b f c 3 -> b f (c + 4): angles, log area and normal as they are, scaled to about [-1, 1]; no bins of their own."""
    faces = measure_faces(corners)
    angles, areas = faces.angles / math.pi, faces.log_areas / math.log1p(bins**2)
    return torch.cat([angles, areas[..., None], faces.normals], dim=-1)
