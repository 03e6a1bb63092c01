"""The mesh cache: every file is read, cleaned and normalised once, and training reads what came out.

    RUN/cache/meshes-1f2e3d4c5b6a7988/
      00000-vertices.npy  00000-faces.npy     of up to 1,024 meshes, one after another: n 3 float32, which is exact, and m 3 int32
      00000-starts.npy                        samples + 1 x 2: where a mesh's vertices and faces start; written last of the three
      00000.json                              what cannot be used: sample -> reason, unreadable and too large apart
      manifest.json                           written last: a cache without one is not finished, and is gone on with

It is keyed by the files themselves and the options that decide what can be used. Ranks share the work by shards; every file is
written beside its place and renamed, so whatever ends the work, what is there is whole. What could not be read is tried again
whenever the cache is asked for: a disk that was away, or trimesh that was not installed, leaves no trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from tessera.config import MeshDataConfig, UserError
from tessera.data.loader import Feed, end_workers, make_dataloader
from tessera.data.mesh_sources import TooManyFaces, refusal, standard
from tessera.data.prepare import drop_shards, read_faults, stamp
from tessera.data.sources import Source
from tessera.files import replace_json, sweep_halves, sync_folder, write_array
from tessera.media.meshes import Mesh, UnreadableMesh
from tessera.randomness import mix_text

FORMAT = 1
SHARD_SAMPLES = 1024
CHUNK_MESHES = 32  # that a worker reads before it hands them over
_PARTS = ("vertices", "faces", "starts")
_NONE = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))


def mesh_cache_folder(caches: Path, source: Source, config: MeshDataConfig) -> Path:
    """Where the cache of a source lies: its name is the hash of all that decides its content."""
    facts = [FORMAT, config.up, config.bins, config.max_faces, stamp(source)]
    return caches / f"meshes-{mix_text(json.dumps(facts)):016x}"


# --- writing


def write_meshes(feed: Feed) -> Path:
    """Makes what is missing of a cache."""
    folder, num_samples = mesh_cache_folder(feed.caches, feed.source, feed.config), len(feed.source)
    feed.uses(folder)
    lasts = [part_path(folder, shard, "starts") for shard in range(-(-num_samples // SHARD_SAMPLES))]
    drop_shards(feed, lasts, lambda shard: is_spoilt(feed, folder, shard))
    shards = [shard for shard, last in enumerate(lasts) if not last.exists()]
    if not shards and (folder / "manifest.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if feed.cut.rank == 0:
        (folder / "manifest.json").unlink(missing_ok=True)  # it has the faults of shards that are made anew
        sweep_halves(folder)
    feed.wait()  # or a rank would count what another has just written
    feed.say(f"cache: {num_samples:,} meshes are read and cleaned, in {folder}")
    started, done = time.monotonic(), 0
    for shard, meshes in _read_shards(feed, shards):
        _write_shard(folder, shard, meshes)
        done += len(meshes)
        feed.show(f"cache: {done:,} meshes of this rank  {done / max(time.monotonic() - started, 1e-9):,.0f} meshes/s")
    feed.wait()
    if feed.cut.rank == 0:
        _finish(feed, folder)
    feed.wait()
    return folder


def is_spoilt(feed: Feed, folder: Path, shard: int) -> bool:
    """Whether a part of a shard is lost, or a mesh of it that could not be read can be read now."""
    listed, meshes = read_faults(folder / f"{shard:05d}.json") or {}, StandardMeshes(feed.source, feed.config)
    if not {"faults", "too_large"} <= listed.keys() or not all(part_path(folder, shard, part).exists() for part in _PARTS):
        return True
    faults = listed["faults"]
    tried = range(shard * SHARD_SAMPLES, min((shard + 1) * SHARD_SAMPLES, len(feed.source))) if faults else ()
    return any(not meshes[index].fault for index in tried if feed.source.key(index) in faults)


def part_path(folder: Path, shard: int, part: str) -> Path:
    """One of the arrays of a shard."""
    return folder / f"{shard:05d}-{part}.npy"


@dataclass(frozen=True, slots=True)
class ReadMesh:
    """One sample on its way into the cache; without faces where it cannot be used."""

    key: str
    mesh: Mesh
    fault: str = ""
    too_large: str = ""


class StandardMeshes(Dataset[ReadMesh]):
    """Sample -> its standard mesh. Runs in the workers."""

    def __init__(self, source: Source, config: MeshDataConfig) -> None:
        self.source, self.config = source, config

    def __getitem__(self, index: int) -> ReadMesh:
        """Whatever is wrong with it is told, not raised."""
        key = self.source.key(index)
        try:
            return ReadMesh(key, standard(self.source.read(index), self.config)[0])
        except TooManyFaces as error:
            return ReadMesh(key, _NONE, too_large=f"{key}: {error}")
        except (UnreadableMesh, UserError, OSError, ValueError) as error:
            return ReadMesh(key, _NONE, fault=f"{key}: {refusal(error)}")


def _read_shards(feed: Feed, shards: Sequence[int]) -> Iterator[tuple[int, list[ReadMesh]]]:
    """Of this rank's share of some shards, for which one stream of workers serves. Ranks meet after every batch, so that however
    many one has left, none waits for longer than a batch takes."""
    mine, num_batches = shards[feed.cut.rank :: feed.cut.world_size], -(-SHARD_SAMPLES // CHUNK_MESHES)
    ranges = {shard: range(shard * SHARD_SAMPLES, min((shard + 1) * SHARD_SAMPLES, len(feed.source))) for shard in mine}
    batches = [
        (shard, samples[start : start + CHUNK_MESHES])
        for shard, samples in ranges.items()
        for start in range(0, len(samples), CHUNK_MESHES)
    ]
    order = [list(samples) for _, samples in batches]
    stream = iter(make_dataloader(StandardMeshes(feed.source, feed.config), order, list, feed.config, feed.device))
    made: list[ReadMesh] = []
    try:
        for (shard, samples), meshes in zip(batches, stream, strict=True):
            feed.check()
            made += meshes
            if samples.stop == ranges[shard].stop:
                yield shard, made
                made = []
            feed.wait()
        for _ in range(-(-len(shards) // feed.cut.world_size) * num_batches - len(batches)):
            feed.wait()
    finally:
        end_workers(stream)


def _write_shard(folder: Path, shard: int, meshes: Sequence[ReadMesh]) -> None:
    """Starts last: where they are, all is."""
    counts = [(len(each.mesh.vertices), len(each.mesh.faces)) for each in meshes]
    facts = {
        "faults": {each.key: each.fault for each in meshes if each.fault},
        "too_large": {each.key: each.too_large for each in meshes if each.too_large},
    }
    replace_json(folder / f"{shard:05d}.json", facts)
    write_array(part_path(folder, shard, "vertices"), np.concatenate([each.mesh.vertices for each in meshes]).astype(np.float32))
    write_array(part_path(folder, shard, "faces"), np.concatenate([each.mesh.faces for each in meshes]).astype(np.int32))
    write_array(part_path(folder, shard, "starts"), np.cumsum([(0, 0), *counts], axis=0, dtype=np.int64))


def _finish(feed: Feed, folder: Path) -> None:
    """The manifest: from here on the cache is whole. Says what cannot be used."""
    faults, too_large, num_samples = dict[str, str](), dict[str, str](), len(feed.source)
    for shard in range(-(-num_samples // SHARD_SAMPLES)):
        facts = json.loads((folder / f"{shard:05d}.json").read_text(encoding="utf8"))
        faults |= facts["faults"]
        too_large |= facts["too_large"]
    manifest = {"format": FORMAT, "num_samples": num_samples, "faults": faults, "too_large": too_large}
    replace_json(folder / "manifest.json", manifest)
    sync_folder(folder)
    for fault in faults.values():
        feed.say(f"cache: left out: {fault}")
    if too_large:
        told = "; ".join(list(too_large.values())[:3])
        feed.say(f"cache: {len(too_large):,} of {num_samples:,} meshes are left out for their faces: {told}")


# --- reading


def find_meshes(caches: Path, source: Source, config: MeshDataConfig) -> MeshCache | None:
    """The finished cache of a source, if there is one."""
    folder = mesh_cache_folder(caches, source, config)
    return MeshCache(folder) if (folder / "manifest.json").is_file() else None


class MeshCache:
    """The meshes of a finished cache. Small to pickle: its arrays are mapped where they are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            facts = json.loads((folder / "manifest.json").read_text(encoding="utf8"))
            self.num_samples = int(facts["num_samples"])
            self.faults, self.too_large = dict[str, str](facts["faults"]), dict[str, str](facts["too_large"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} is no finished mesh cache ({error}); delete it, and it is made anew") from None
        self._shards: dict[int, tuple[npt.NDArray[Any], ...]] = {}
        starts = [self._open(shard)[2] for shard in range(-(-self.num_samples // SHARD_SAMPLES))]  # better here than in a worker
        self.num_faces = np.concatenate([np.diff(each[:, 1]) for each in starts])  # by sample; 0 of what cannot be used
        if len(self.num_faces) != self.num_samples:
            raise UserError(f"{folder} holds {len(self.num_faces)} meshes of {self.num_samples}; delete it, and it is made anew")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}

    def mesh(self, index: int) -> Mesh:
        """One standard mesh."""
        shard, row = divmod(index, SHARD_SAMPLES)
        if shard not in self._shards:
            self._shards[shard] = self._open(shard)
        vertices, faces, starts = self._shards[shard]
        (vertex, face), (last_vertex, last_face) = starts[row : row + 2]
        return Mesh(vertices[vertex:last_vertex].astype(np.float64), faces[face:last_face].astype(np.int64))

    def _open(self, shard: int) -> tuple[npt.NDArray[Any], ...]:
        paths = [part_path(self.folder, shard, part) for part in _PARTS]
        try:
            vertices, faces, starts = (np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
            if (len(vertices), len(faces)) != tuple(starts[-1]):
                raise ValueError(f"{len(vertices)} vertices and {len(faces)} faces, expected {tuple(starts[-1].tolist())}")
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise UserError(
                f"shard {shard} of {self.folder} is damaged ({error}); delete the folder, and it is made anew"
            ) from None
        return vertices, faces, starts
