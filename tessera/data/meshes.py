"""Batches of meshes: read from the cache, varied by a draw, in bins and in canonical order, with captions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tessera.batches import MeshBatch, ReadText
from tessera.config import MeshDataConfig, UserError
from tessera.data.canonical import Corners, normalise, quantise, snap
from tessera.data.draws import drawn_caption
from tessera.data.loader import Feed, SampleLoader, Samples
from tessera.data.mesh_cache import MeshCache
from tessera.data.order import Indices, Windows
from tessera.data.quads import join_quads
from tessera.data.sources import Source, captions_of, split_indices
from tessera.media.meshes import Mesh
from tessera.randomness import fraction, mix, permute


@dataclass(frozen=True, slots=True)
class MeshItem:
    """One sample on its way into a batch. What cannot be used is not in the cache, so nothing here has a fault."""

    key: str
    caption: str | None
    position: int
    corners: Corners
    readable: bool = True
    fault: str = ""


class CachedMeshes(Samples[MeshItem]):
    """Samples from the cache."""

    def __init__(
        self, source: Source, config: MeshDataConfig, indices: Indices, seed: int, cache: MeshCache, quads: bool = False
    ) -> None:
        super().__init__(source, indices, seed)
        self.config, self.cache, self.quads = config, cache, quads

    def item(self, index: int, position: int, draw: int | None) -> MeshItem:
        """Varied, then quantised; as it is where nothing is drawn."""
        caption = drawn_caption(captions_of(self.source, index), draw)
        corners = drawn_corners(self.cache.mesh(index), self.config, draw)
        corners = join_quads(corners) if self.quads else corners
        return MeshItem(self.source.key(index), caption, position, corners)


class MeshLoader(SampleLoader[MeshItem, MeshBatch]):
    """Batches of meshes of about one length, counted in triangles; of these or of quads. What could not be used when the cache
    was made is left out."""

    def __init__(self, feed: Feed, cache: MeshCache, read_text: ReadText, *, quads: bool = False) -> None:
        config: MeshDataConfig = feed.config
        refuse_unread(feed.source, config, cache)
        train, held_out = (side[cache.num_faces[side] > 0] for side in split_indices(feed.source, config.validation_fraction))
        samples = CachedMeshes(feed.source, config, train, feed.seed, cache, quads)
        super().__init__(
            samples, partial(collate_meshes, read_text=read_text), held_out, config, feed.cut,
            device=feed.device, validation_samples=feed.validation_samples, preview_samples=feed.preview_samples,
        )  # fmt: skip
        self.stream = Windows(feed.cut, feed.seed, partial(faces_at, samples))

    def arranged(self, picked: Indices) -> Indices:
        """By length, so that validation batches are padded little."""
        return picked[np.argsort(self.samples.cache.num_faces[picked], kind="stable")]  # type: ignore[attr-defined]


def refuse_unread(source: Source, config: MeshDataConfig, cache: MeshCache) -> None:
    """Damaged files stop training past the budget; meshes that are too large do not, unless nothing else is left."""
    if len(cache.faults) > config.corrupt_budget * len(source):
        raise UserError(
            f"{len(cache.faults)} of {len(source)} meshes cannot be used, more than data.corrupt_budget="
            f"{config.corrupt_budget:g} allows: {'; '.join(list(cache.faults.values())[:3])}. `tessera data check` lists every "
            f"such file: repair or remove it, or raise data.corrupt_budget; each start tries them again"
        )
    if not cache.num_faces.any():
        raise UserError(
            f"none of the {len(source)} meshes can be used: {'; '.join(list((cache.too_large or cache.faults).values())[:3])}"
        )


def faces_at(samples: CachedMeshes, positions: Indices) -> Indices:
    """Faces of the samples at these places of the stream."""
    size = samples.order.size
    epochs, places = positions // size, positions % size
    found = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        found[here] = permute(places[here], size, mix(samples.seed, epoch))
    return samples.cache.num_faces[samples.indices[found]]


# --- one mesh


def drawn_corners(mesh: Mesh, config: MeshDataConfig, draw: int | None) -> Corners:
    """A standard mesh in bins, varied where a draw says so; as it is where nothing would be left of it."""
    if draw is not None:
        corners = quantise(varied(mesh, config, draw), config.bins)
        if len(corners):
            return corners
    return quantise(mesh, config.bins)


def varied(mesh: Mesh, config: MeshDataConfig, draw: int) -> Mesh:
    """Axes scaled (alike in log), then turned about the up axis, then fitted into the box again, then moved inside of it."""
    vertices = mesh.vertices
    if config.scale > 1:
        powers = [2 * fraction(mix(draw, 11, axis)) - 1 for axis in range(3)]
        vertices = vertices * config.scale ** np.array(powers)
    if config.yaw == "quarters":
        for _ in range(mix(draw, 12) % 4):
            vertices = np.stack([-vertices[:, 1], vertices[:, 0], vertices[:, 2]], axis=1)
    elif config.yaw == "any":
        angle = 2 * math.pi * fraction(mix(draw, 12))
        cos, sin = math.cos(angle), math.sin(angle)
        vertices = vertices @ np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    fitted = mesh if vertices is mesh.vertices else normalise(Mesh(vertices, mesh.faces))
    if config.shift > 0:
        room = np.minimum(config.shift, 1 - np.abs(fitted.vertices).max(axis=0))
        moves = room * np.array([2 * fraction(mix(draw, 13, axis)) - 1 for axis in range(3)])
        fitted = Mesh(snap(fitted.vertices + moves), fitted.faces)
    return fitted


# --- one batch


def padded_length(num_faces: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, ... 64: powers of two and three halves of them, so that compiled code meets few shapes. From there
    on, where padding costs, quarters of an octave, which are multiples of 16: 80, 96, 112, 128, 160, ..."""
    power = 1 << max(0, num_faces - 1).bit_length()  # the next power of two
    step = max(1, power // 8 if power > 64 else power // 4)
    return max(power // 2 + step, -(-num_faces // step) * step)


def collate_meshes(items: Sequence[MeshItem], read_text: ReadText) -> MeshBatch:
    """One batch, padded with 0; corners become int64 on the device."""
    lengths = [len(item.corners) for item in items]
    corners = np.zeros((len(items), padded_length(max(lengths)), *items[0].corners.shape[1:]), np.int16)
    for row, item in zip(corners, items, strict=True):
        row[: len(item.corners)] = item.corners
    keys, captions = tuple(item.key for item in items), tuple(item.caption for item in items)
    return MeshBatch(
        corners=torch.from_numpy(corners),
        num_faces=torch.tensor(lengths),
        text=read_text(captions, keys),
        valid=torch.ones(len(items), dtype=torch.bool),
        positions=torch.tensor([item.position for item in items]),
        keys=keys,
        captions=captions,
    )
