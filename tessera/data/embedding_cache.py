"""Embeddings that an encoder computes here: every picture goes once through it, into the run's cache.

    RUN/cache/embeddings-1f2e3d4c5b6a7988/
      00000.npy ...                samples x channels, float32; zeros where a picture could not be read
      00000.json ...               the keys of the rows
      00000.faults.json ...        what could not be read: key -> reason
      manifest.json                written last: a cache without one, or without some files, is gone on with

In: a feed and an `encode` function; this room knows no encoder. Out: the folder, which `FileEmbeddings.listed` reads, as it reads
the user's own. Ranks share the work by shards, as those of the token cache; neither they nor interruptions change a byte.
What could not be read is tried again whenever the cache is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from tessera.config import UserError
from tessera.data.embedding_files import Rows
from tessera.data.embeddings import Absent
from tessera.data.loader import Feed
from tessera.data.prepare import (
    TokenPlan,
    Views,
    drop_shards,
    encode_shards,
    missing_shards,
    num_shards,
    picture_views,
    read_faults,
    readable_again,
    shard_samples,
    stamp,
)  # fmt: skip
from tessera.files import replace_json, sweep_halves, sync_folder, write_array
from tessera.randomness import mix_text

FORMAT = 1


def write_embeddings(feed: Feed, encode: Callable[[Tensor], Tensor], fingerprint: str, resolution: int) -> Path:
    """Makes what is missing of a cache. `encode` takes pictures b c h w in [-1, 1] on the device, the middle of each at a
    resolution, and returns b e; `fingerprint` names it."""
    data, main = feed.config, feed.cut.rank == 0
    facts = [FORMAT, fingerprint, resolution, data.channels, data.background, stamp(feed.source)]
    facts += [] if data.square else [data.at(resolution).size]
    folder = feed.caches / f"embeddings-{mix_text(json.dumps(facts)):016x}"
    plan = TokenPlan(fingerprint, 1, resolution, 1)
    views = picture_views(feed, plan)
    feed.uses(folder)
    lasts = [array_path(folder, shard) for shard in range(num_shards(len(feed.source)))]
    drop_shards(feed, lasts, lambda shard: is_spoilt(feed, folder, shard, views))
    shards = missing_shards(folder, len(feed.source))
    finished = (folder / "manifest.json").is_file()
    feed.wait()  # or a rank would see what another has just written
    if finished and not shards:
        return folder
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        sweep_halves(folder)
    feed.wait()
    feed.say(f"cache: {len(feed.source):,} pictures to embeddings, in {folder}")
    for shard, made in encode_shards(feed, plan, encode, views, shards):
        vectors = made.ids[:, 0].astype(np.float32)
        keys = keys_of(feed, shard)
        if not np.isfinite(vectors).all():
            odd = keys[int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])]
            raise UserError(f"the encoder gives numbers that are not finite, of {odd} first; choose another one")
        vectors[[key in made.faults for key in keys]] = 0
        replace_json(array_path(folder, shard).with_suffix(".faults.json"), made.faults)
        replace_json(array_path(folder, shard).with_suffix(".json"), keys)
        write_array(array_path(folder, shard), vectors)  # last: where it is, all is
    feed.wait()
    if main:
        for key, fault in finish(folder, fingerprint, len(feed.source)).items():
            feed.say(f"cache: {key} has no embedding: {fault}")
    feed.wait()
    return folder


def finish(folder: Path, fingerprint: str, num_samples: int) -> dict[str, str]:
    """The manifest: from here on the cache is whole. Returns what could not be read."""
    faults: dict[str, str] = {}
    for shard in range(num_shards(num_samples)):
        faults |= json.loads(array_path(folder, shard).with_suffix(".faults.json").read_text(encoding="utf8"))
    replace_json(folder / "manifest.json", {"format": FORMAT, "fingerprint": fingerprint, "num_samples": num_samples})
    sync_folder(folder)
    return faults


def is_spoilt(feed: Feed, folder: Path, shard: int, views: Views) -> bool:
    """Whether a part of a shard is lost, or a picture of it that could not be read can be read now."""
    faults = read_faults(array_path(folder, shard).with_suffix(".faults.json"))
    if faults is None or not is_whole(array_path(folder, shard), keys_of(feed, shard)):
        return True
    return readable_again(feed.source, views, shard, faults)


def is_whole(path: Path, keys: list[str]) -> bool:
    """Whether the vectors of these keys are there, and the list that says so; reads the header."""
    try:
        named = json.loads(path.with_suffix(".json").read_text(encoding="utf8"))
        return bool(named == keys) and Rows.open(path).num == len(keys)
    except (Absent, OSError, ValueError, RecursionError):
        return False


def keys_of(feed: Feed, shard: int) -> list[str]:
    """Of its samples."""
    return [feed.source.key(index) for index in shard_samples(shard, len(feed.source))]


def array_path(folder: Path, shard: int) -> Path:
    """The vectors of one shard."""
    return folder / f"{shard:05d}.npy"
