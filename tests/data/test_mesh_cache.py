"""The mesh cache: a function of files and options, made once, by any number of ranks; what cannot be used is told apart."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.config import MeshDataConfig, UserError
from tessera.data import mesh_cache, mesh_sources
from tessera.data.canonical import standardise
from tessera.data.loader import Feed
from tessera.data.mesh_cache import MeshCache, mesh_cache_folder, write_meshes
from tessera.data.mesh_sources import MeshFolder, as_mesh_source
from tessera.data.meshes import MeshLoader
from tessera.data.order import Cut
from tessera.data.sources import Source
from tessera.media.meshes import Reading, TrimeshMissing, UnreadableMesh
from tessera.text.encoders import NoTextReader
from tests.data.mesh_makers import fan, write_fans

WHOLE = Cut(4, None, 0, 1)
SIZES = [5, 9, 30, 4, 12, 70, 8, 8, 6, 11]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them."""
    monkeypatch.setattr(mesh_cache, "SHARD_SAMPLES", 4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_fans(tmp_path / "data", SIZES)
    return tmp_path / "data"


def feed_of(data: Path | Source, caches: Path, said: list[str] | None = None, cut: Cut = WHOLE, **values: Any) -> Feed:
    config = MeshDataConfig(**{"workers": 0, "validation_fraction": 0.2, **values})
    source = MeshFolder.open(data, config) if isinstance(data, Path) else data
    heard = [] if said is None else said
    return Feed(
        source=source, config=config, cut=cut, seed=3, device=torch.device("cpu"), validation_samples=8, preview_samples=4,
        caches=caches, say=heard.append, show=lambda line: None,
    )  # fmt: skip


def folder_of(feed: Feed) -> Path:
    return mesh_cache_folder(feed.caches, feed.source, feed.config)


def test_it_holds_the_standard_meshes_exactly(data: Path, tmp_path: Path) -> None:
    feed = feed_of(data, tmp_path / "cache")
    cache = MeshCache(write_meshes(feed))
    assert (cache.num_samples, cache.faults, cache.too_large) == (10, {}, {})
    assert cache.num_faces.tolist() == SIZES
    for index in range(10):
        wanted, found = standardise(feed.source.read(index))[0], cache.mesh(index)
        assert np.array_equal(found.vertices, wanted.vertices)
        assert np.array_equal(found.faces, wanted.faces)
        assert (found.vertices.dtype, found.faces.dtype) == (np.float64, np.int64)


def test_it_is_made_once_and_anew_when_a_file_or_an_option_changes(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = write_meshes(feed_of(data, tmp_path / "cache", said))
    assert len(said) == 1
    assert write_meshes(feed_of(data, tmp_path / "cache", said, scale=2.0, yaw="any", workers=2)) == first  # come later
    assert len(said) == 1
    names = {
        first,
        *(folder_of(feed_of(data, tmp_path, **each)) for each in ({"up": "z"}, {"bins": 64}, {"max_faces": 9})),
    }
    assert len({name.name for name in names}) == 4
    os.utime(data / "mesh-003.obj", ns=(1, 1))
    assert folder_of(feed_of(data, tmp_path / "cache")) != first
    (data / "mesh-000.txt").write_text("other words\n")
    assert folder_of(feed_of(data, tmp_path / "cache")) == folder_of(feed_of(data, tmp_path / "cache"))


def test_what_was_left_undone_is_gone_on_with(data: Path, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    feed = feed_of(data, tmp_path / "cache")
    folder = folder_of(feed)

    def check() -> None:
        if (folder / "00000-starts.npy").exists():
            raise Interrupted

    with pytest.raises(Interrupted):
        write_meshes(replace(feed, check=check))
    with pytest.raises(UserError, match="no finished mesh cache"):
        MeshCache(folder)
    first = (folder / "00000-vertices.npy").stat().st_mtime_ns
    assert not (folder / "00001-starts.npy").exists()
    assert MeshCache(write_meshes(feed)).num_faces.tolist() == SIZES
    assert (folder / "00000-vertices.npy").stat().st_mtime_ns == first


def test_ranks_share_the_work_and_make_the_same_files(data: Path, tmp_path: Path) -> None:
    alone = write_meshes(feed_of(data, tmp_path / "alone"))
    met = [0]
    both = of_two_ranks(data, tmp_path / "both", lambda: met.append(len(list((tmp_path / "both").rglob("*-starts.npy")))))
    assert max(after - before for before, after in pairwise(met)) <= 2, "they meet after each shard"
    assert bytes_of(both) == bytes_of(alone)


def test_ranks_meet_within_a_shard(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    of_two_ranks(data, tmp_path / "whole", lambda: met.append(0))
    usual = len(met)
    monkeypatch.setattr(mesh_cache, "CHUNK_MESHES", 1)
    of_two_ranks(data, tmp_path / "one by one", lambda: met.append(0))
    assert len(met) - usual == usual + 2 * (4 - 1), "of two shards a rank, four meshes each"


def of_two_ranks(data: Path, caches: Path, meet: Callable[[], None] = lambda: None) -> Path:
    """Makes a cache; `meet` is called whenever both have arrived."""
    barrier = threading.Barrier(2, meet)
    feeds = [
        replace(feed_of(data, caches, cut=Cut(4, None, rank, 2)), wait=lambda: barrier.wait(20) and None) for rank in range(2)
    ]
    threads = [threading.Thread(target=write_meshes, args=(feed,)) for feed in feeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return folder_of(feeds[0])


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that cannot be read now, one by the disk and one for lack of trimesh."""
    names, read = set[str](), mesh_sources.read_mesh

    def reads(path: Path, up: str = "y") -> Reading:
        if path.name in names:
            raise TrimeshMissing("needs trimesh") if path.name == "mesh-006.obj" else UnreadableMesh(path, "no such device")
        return read(path, up)

    monkeypatch.setattr(mesh_sources, "read_mesh", reads)
    return names


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_could_not_be_read_once_is_tried_again(num_ranks: int, away: set[str], data: Path, tmp_path: Path) -> None:
    """And what stays as it is, damaged or too large, keeps its shard."""
    (data / "mesh-000.obj").write_text("this is not a mesh")
    whole = bytes_of(write_meshes(feed_of(data, tmp_path / "whole")))
    away |= {"mesh-002.obj", "mesh-006.obj"}
    feed = feed_of(data, tmp_path / "cache")
    folder = write_meshes(feed)
    left_out, written = bytes_of(folder), (folder / "00000-starts.npy").stat().st_mtime_ns
    assert sorted(MeshCache(folder).faults) == ["mesh-000", "mesh-002", "mesh-006"]
    with pytest.raises(UserError, match=r"3 of 10 meshes cannot be used.*; each start tries them again"):
        MeshLoader(feed, MeshCache(folder), NoTextReader())

    def again() -> None:
        write_meshes(feed) if num_ranks == 1 else of_two_ranks(data, tmp_path / "cache")

    again()
    assert bytes_of(folder) == left_out
    away.remove("mesh-006.obj")
    again()
    assert sorted(MeshCache(folder).faults) == ["mesh-000", "mesh-002"]
    assert (folder / "00000-starts.npy").stat().st_mtime_ns == written, "of this shard nothing can be read yet"
    away.clear()
    again()
    assert bytes_of(folder) == whole


def test_a_kill_while_a_shard_is_made_again_forgets_no_fault(away: set[str], data: Path, tmp_path: Path) -> None:
    whole, feed = bytes_of(write_meshes(feed_of(data, tmp_path / "whole"))), feed_of(data, tmp_path / "cache")
    away |= {"mesh-002.obj", "mesh-006.obj"}
    folder = write_meshes(feed)
    away.clear()

    def die(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_meshes(replace(feed, show=die))
    assert (folder / "00000-starts.npy").exists()
    assert bytes_of(write_meshes(feed)) == whole


@pytest.mark.parametrize("lost", ["00001.json", "00001-faces.npy"])
def test_a_shard_of_which_a_part_is_lost_is_made_anew(lost: str, data: Path, tmp_path: Path) -> None:
    feed = feed_of(data, tmp_path / "cache")
    folder = write_meshes(feed)
    whole = bytes_of(folder)
    (folder / lost).unlink()
    assert bytes_of(write_meshes(feed)) == whole
    if lost.endswith(".json"):
        (folder / lost).write_text("{}")
        assert bytes_of(write_meshes(feed)) == whole


def test_what_cannot_be_used_is_told_apart(data: Path, tmp_path: Path) -> None:
    (data / "mesh-001.obj").write_text("v 0 0 0\nv 1 0 0\nf 1 2 1\n")  # no face is left
    (data / "mesh-002.obj").write_text("this is not a mesh")
    said: list[str] = []
    feed = feed_of(data, tmp_path / "cache", said, max_faces=20, corrupt_budget=0.2)
    cache = MeshCache(write_meshes(feed))
    assert sorted(cache.faults) == ["mesh-001", "mesh-002"]
    assert cache.too_large == {"mesh-005": "mesh-005: 70 faces, more than data.max_faces=20; raise it, or simplify the mesh"}
    assert cache.num_faces.tolist() == [5, 0, 0, 4, 12, 0, 8, 8, 6, 11]
    assert any("mesh-002" in line for line in said)
    assert any("1 of 10 meshes are left out for their faces" in line for line in said)
    made = MeshLoader(feed, cache, NoTextReader())
    used = {feed.source.key(int(index)) for index in (*made.train, *made.held_out)}
    assert len(used) == 7
    assert not used & {"mesh-001", "mesh-002", "mesh-005"}
    with pytest.raises(UserError, match=r"2 of 10 meshes cannot be used, more than data\.corrupt_budget=0\.1"):
        MeshLoader(replace(feed, config=feed.config.model_copy(update={"corrupt_budget": 0.1})), cache, NoTextReader())


def test_nothing_left_is_the_users_error(data: Path, tmp_path: Path) -> None:
    feed = feed_of(data, tmp_path / "cache", max_faces=3)
    with pytest.raises(UserError, match=r"none of the 10 meshes can be used: mesh-000: 5 faces, more than data\.max_faces=3"):
        MeshLoader(feed, MeshCache(write_meshes(feed)), NoTextReader())


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_a_damaged_cache_is_refused(data: Path, tmp_path: Path, damage: str) -> None:
    folder = write_meshes(feed_of(data, tmp_path / "cache"))
    if damage == "manifest":
        (folder / "manifest.json").write_text(json.dumps({"format": 1}))
    else:
        path = folder / "00001-faces.npy"
        content = path.read_bytes()
        path.unlink()
        if damage == "cut":
            path.write_bytes(content[:-8])
    with pytest.raises(UserError, match="made anew"):
        MeshCache(folder)


def test_a_python_dataset_of_meshes(tmp_path: Path) -> None:
    items = [{"key": f"k{number}", "mesh": fan(number), "caption": f"{number} sides"} for number in range(3, 13)]
    items[4]["mesh"] = (fan(7).vertices.tolist(), fan(7).faces.tolist())
    source = as_mesh_source(items)
    feed = feed_of(source, tmp_path / "cache")
    cache = MeshCache(write_meshes(feed))
    assert cache.num_faces.tolist() == list(range(3, 13))
    made = MeshLoader(feed, cache, NoTextReader())
    batch = next(made.batches(0))[0]
    assert all(caption == f"{key[1:]} sides" for key, caption in zip(batch.keys, batch.captions, strict=True))
    assert batch.num_faces.tolist() == [int(key[1:]) for key in batch.keys]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"key": "a", "caption": "b"}, "has no mesh"),
        ({"key": "a", "mesh": (np.zeros((2, 2)), np.zeros((1, 3), int))}, "has no mesh"),
        ({"key": "a", "mesh": (np.zeros((3, 3)), np.zeros((1, 3)))}, "has no mesh"),
        ({"key": "a", "mesh": (np.zeros((3, 3)), np.array([[0, 1, 3]]))}, "a face names vertex 3"),
        ({"key": "a", "mesh": (np.full((3, 3), np.nan), np.array([[0, 1, 2]]))}, "not finite"),
        (
            {"key": "a", "mesh": (np.eye(3) * 1e308, np.array([[0, 1, 2]]))},
            r"a coordinate of size 1e\+308; expected 1e\+60 or less",
        ),
    ],
)
def test_a_wrong_item_is_refused_at_the_door(item: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        as_mesh_source([item])
