"""What a model of meshes is judged by: standard meshes and captions of the training split and of the side that was held out.

The sides are those of pictures (`material`). A mesh that training would reject is left out, and counted. What a run has in its
cache is read from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera.config import MeshDataConfig
from tessera.data.mesh_cache import MeshCache, find_meshes
from tessera.data.mesh_sources import standard
from tessera.data.sources import Source
from tessera.evals.material import find_sides
from tessera.media.meshes import Mesh, UnreadableMesh
from tessera.randomness import mix, permute


@dataclass(frozen=True, slots=True)
class MeshSide:
    """Meshes with their captions, in an order that the seed decided; cleaned, centred and scaled as training sees them."""

    meshes: tuple[Mesh, ...]
    captions: tuple[str | None, ...]
    num_refused: int = 0  # meshes that were to be among them, and that training would reject

    def __post_init__(self) -> None:
        if len(self.meshes) != len(self.captions):
            raise ValueError(f"got {len(self.meshes)} meshes and {len(self.captions)} captions; expected one each")

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, part: slice) -> MeshSide:
        return MeshSide(self.meshes[part], self.captions[part], self.num_refused)


@dataclass(frozen=True, slots=True)
class MeshMaterial:
    """Both sides, and who can judge them."""

    train: MeshSide  # perhaps not all of the training split
    held_out: MeshSide
    num_train: int  # all of it
    origin: str  # where the held-out side comes from, in words
    bins: int  # in which faces are compared
    oracle: str | None = None  # "furniture"


def load_meshes(
    config: MeshDataConfig, *, most_train: int, most_held_out: int, seed: int, source: Source | None = None,
    caches: Path | None = None,
) -> MeshMaterial:  # fmt: skip
    """Reads up to so many meshes of each side. `source` is the user's own dataset, if any: its keys do not tell whether a cache
    is of the same meshes, so none is used. `caches` is where a run has them."""
    sides = find_sides(config, source)
    cache = find_meshes(caches, sides.source, config) if caches is not None and source is None else None
    train = read_meshes(sides.source, config, cache, sides.train, most_train, mix(seed, 1))
    cache = cache if sides.other is sides.source else None
    held_out = read_meshes(sides.other, config, cache, sides.held_out, most_held_out, mix(seed, 2))
    return MeshMaterial(train, held_out, len(sides.train), sides.origin, config.bins, sides.oracle)


def read_meshes(
    source: Source, config: MeshDataConfig, cache: MeshCache | None, indices: npt.NDArray[np.int64], most: int, key: int
) -> MeshSide:
    """Up to `most` of the samples that can be used, drawn by the key."""
    usable: list[tuple[int, Mesh]] = []
    num_refused = 0
    for index in indices[permute(np.arange(len(indices)), len(indices), key)].tolist():
        if len(usable) == most:
            break
        mesh = read_standard(source, config, cache, index)
        if mesh is None:
            num_refused += 1
        else:
            usable.append((index, mesh))
    meshes, captions = tuple(mesh for _, mesh in usable), tuple(source.caption(index) for index, _ in usable)
    return MeshSide(meshes, captions, num_refused)


def read_standard(source: Source, config: MeshDataConfig, cache: MeshCache | None, index: int) -> Mesh | None:
    """One mesh, from the cache where there is one; None if training would reject it."""
    if cache is not None:
        return cache.mesh(index) if cache.num_faces[index] else None
    try:
        return standard(source.read(index), config)[0]
    except (UnreadableMesh, ValueError, OSError):  # ValueError: `standard` says why training would reject it
        return None
