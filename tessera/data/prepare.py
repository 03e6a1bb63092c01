"""The token cache: every sample goes once through a frozen tokenizer, and generators read what came out.

    RUN/cache/tokens-64-1f2e3d4c5b6a/
      00000.npy  00001.npy ...     samples x views x grid, in the smallest integer type that holds the vocabulary
      00000.json ...               what could not be read: sample -> reason
      manifest.json                written last: a cache without one is not finished, and is gone on with

It is keyed by the tokenizer's weights, the resolution, the plan of views and the files themselves, so it is made anew when any of
them changes. Ranks share the work by shards; a shard is written beside its place and renamed, so whatever ends the work, what is
there is whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tessera.batches import from_uint8
from tessera.config import ImageDataConfig, UserError
from tessera.data.captions import names_side
from tessera.data.loader import Feed, end_workers, frame, make_dataloader
from tessera.data.sources import Source, Stored, StoredImages, captions_of
from tessera.files import sync_folder, write_json
from tessera.media.images import UnreadableImage
from tessera.randomness import mix, mix_text

FORMAT = 1
SHARD_SAMPLES = 1024
CHUNK_PICTURES = 64  # go through the tokenizer at once
_VIEW = mix_text("view")

Ids = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """What the tokens of a cache are a function of."""

    tokenizer: str  # hash of its weights
    vocab_size: int
    resolution: int
    views: int

    @classmethod
    def of(cls, config: ImageDataConfig, tokenizer: str, vocab_size: int, resolution: int) -> TokenPlan:
        """Without random crops and mirror images all views of a sample would be the same one."""
        varied = config.crop == "random" or bool(config.flip)
        return cls(tokenizer, vocab_size, resolution, config.views if varied else 1)

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest that holds the vocabulary."""
        return next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if np.iinfo(kind).max >= self.vocab_size - 1)


def cache_folder(feed: Feed, plan: TokenPlan) -> Path:
    """Where the cache of a plan lies: its name is the hash of all that decides its content."""
    data = feed.config
    facts = [
        FORMAT, plan.tokenizer, plan.vocab_size, plan.resolution, plan.views, data.channels, data.background,
        stamp(feed.source, sided=plan.views > 1 and data.flip is True),
        *((data.crop, data.zoom, data.flip, feed.seed) if plan.views > 1 else ()),
    ]  # fmt: skip
    return feed.caches / f"tokens-{plan.resolution}-{mix_text(json.dumps(facts)):016x}"


def stamp(source: Source, *, sided: bool = False) -> str:
    """Changes with the samples, their order or their files; with captions only where a mirror image hangs on them."""
    mixed = 0
    for index in range(len(source)):
        mixed = mix(mixed, mix_text(source.key(index)), int(sided and names_side(captions_of(source, index))))
    if isinstance(source, Stored):
        mixed = mix(mixed, mix_text(source.stamp()))
    return f"{mixed:016x}"


# --- writing


def write_tokens(feed: Feed, plan: TokenPlan, encode: Callable[[Tensor], Tensor]) -> Path:
    """Makes what is missing of a cache. `encode` takes pictures b c h w in [-1, 1] on the device, and returns ids b ..."""
    folder = cache_folder(feed, plan)
    shards = [shard for shard in range(num_shards(len(feed.source))) if not shard_path(folder, shard).exists()]
    if not shards and (folder / "manifest.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    feed.wait()  # or a rank would count what another has just written
    mine = shards[feed.cut.rank :: feed.cut.world_size]
    feed.say(f"cache: {len(feed.source):,} samples to tokens, {plan.views} views each, in {folder}")
    started, done = time.monotonic(), 0
    for shard, ids, faults in encode_shards(feed, plan, encode, mine):
        write_shard(folder, shard, ids.astype(plan.dtype), faults)
        done += len(ids)
        speed = done * plan.views / max(time.monotonic() - started, 1e-9)
        feed.show(f"cache: {done:,} samples of this rank  {speed:,.0f} pictures/s")
    feed.wait()
    if feed.cut.rank == 0:
        for key, fault in finish(folder, plan, len(feed.source)).items():
            feed.say(f"cache: {key} is left out: {fault}")
    feed.wait()
    return folder


def num_shards(num_samples: int) -> int:
    """Of equal length but for the last."""
    return -(-num_samples // SHARD_SAMPLES)


def shard_samples(shard: int, num_samples: int) -> range:
    """The samples of one shard."""
    return range(shard * SHARD_SAMPLES, min((shard + 1) * SHARD_SAMPLES, num_samples))


def shard_path(folder: Path, shard: int) -> Path:
    """The ids of one shard; its faults lie beside it."""
    return folder / f"{shard:05d}.npy"


def encode_shards(
    feed: Feed, plan: TokenPlan, encode: Callable[[Tensor], Tensor], shards: Sequence[int]
) -> Iterator[tuple[int, Ids, dict[str, str]]]:
    """Of each shard its ids, n views ..., and the faults of what could not be read. One stream of workers serves all shards."""
    per_batch = max(1, CHUNK_PICTURES // plan.views)
    batches = [
        (shard, samples[start : start + per_batch])
        for shard in shards
        for samples in [shard_samples(shard, len(feed.source))]
        for start in range(0, len(samples), per_batch)
    ]
    large = round(plan.resolution * feed.config.zoom)
    source = feed.source.reading_at(large) if isinstance(feed.source, StoredImages) else feed.source
    config = feed.config.model_copy(update={"resolution": plan.resolution})
    views, order = Views(source, config, plan.views, feed.seed), [list(samples) for _, samples in batches]
    stream = iter(make_dataloader(views, order, list, config, feed.device))
    made: list[Ids] = []
    faults: dict[str, str] = {}
    try:
        for (shard, samples), viewed in zip(batches, stream, strict=True):
            feed.check()
            pictures = torch.from_numpy(np.concatenate([item.pictures for item in viewed])).to(feed.device)
            ids = encode(from_uint8(pictures.permute(0, 3, 1, 2))).cpu().numpy()
            made.append(ids.reshape(len(viewed), plan.views, *ids.shape[1:]))
            faults |= {item.key: item.fault for item in viewed if item.fault}
            if samples.stop == shard_samples(shard, len(feed.source)).stop:
                yield shard, np.concatenate(made), faults
                made, faults = [], {}
    finally:
        end_workers(stream)


@dataclass(frozen=True, slots=True)
class Viewed:
    """All views of one sample."""

    key: str
    pictures: npt.NDArray[np.uint8]  # views h w c
    fault: str


class Views(Dataset[Viewed]):
    """Sample -> its views: the first is the centre, as in validation; the others are drawn by seed, view and key."""

    def __init__(self, source: Source, config: ImageDataConfig, views: int, seed: int) -> None:
        self.source, self.config, self.views, self.seed = source, config, views, seed

    def __getitem__(self, index: int) -> Viewed:
        """The file is read once."""
        key, captions = self.source.key(index), captions_of(self.source, index)
        draws = (mix(self.seed, _VIEW, view, mix_text(key)) for view in range(1, self.views))
        try:
            image = self.source.read(index)
        except (UnreadableImage, UserError, OSError) as error:
            blank = np.zeros((self.views, self.config.resolution, self.config.resolution, self.config.channels), np.uint8)
            return Viewed(key, blank, str(error))
        return Viewed(key, np.stack([frame(image, self.config, captions, draw) for draw in (None, *draws)]), "")


def write_shard(folder: Path, shard: int, ids: Ids, faults: dict[str, str]) -> None:
    """Faults first: where the ids are, both are."""
    path = shard_path(folder, shard)
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    write_json(path.with_suffix(".json"), faults)
    with temporary.open("wb") as file:
        np.save(file, ids)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def finish(folder: Path, plan: TokenPlan, num_samples: int) -> dict[str, str]:
    """The manifest: from here on the cache is whole. Returns what could not be read."""
    faults: dict[str, str] = {}
    for shard in range(num_shards(num_samples)):
        faults |= json.loads(shard_path(folder, shard).with_suffix(".json").read_text(encoding="utf8"))
    grid = list(np.load(shard_path(folder, 0), mmap_mode="r").shape[2:])
    facts = {
        "format": FORMAT, "tokenizer": plan.tokenizer, "vocab_size": plan.vocab_size, "resolution": plan.resolution,
        "views": plan.views, "num_samples": num_samples, "grid": grid, "faults": faults,
    }  # fmt: skip
    temporary = folder / f"manifest.tmp-{os.getpid()}"
    write_json(temporary, facts)
    os.replace(temporary, folder / "manifest.json")
    sync_folder(folder)
    return faults


# --- reading


class TokenCache:
    """The ids of a finished cache. Small to pickle: shards are mapped where they are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            facts = json.loads((folder / "manifest.json").read_text(encoding="utf8"))
            self.num_samples, self.views, self.grid = int(facts["num_samples"]), int(facts["views"]), tuple(facts["grid"])
            self.faults: dict[str, str] = dict(facts["faults"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} is no finished token cache ({error}); delete it, and it is made anew") from None
        self._shards: dict[int, Ids] = {}
        for shard in range(num_shards(self.num_samples)):  # their headers only; better here than in a worker
            wanted = (len(shard_samples(shard, self.num_samples)), self.views, *self.grid)
            if (found := self._open(shard).shape) != wanted:
                raise UserError(f"{shard_path(folder, shard)} holds {found}, expected {wanted}; delete it, and it is made anew")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}

    def ids(self, index: int, view: int) -> Ids:
        """One grid."""
        shard, row = divmod(index, SHARD_SAMPLES)
        if shard not in self._shards:
            self._shards[shard] = self._open(shard)
        return np.asarray(self._shards[shard][row, view])

    def _open(self, shard: int) -> Ids:
        path = shard_path(self.folder, shard)
        try:
            found = np.load(path, mmap_mode="r")
            if not isinstance(found, np.ndarray):
                raise ValueError("an archive")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path} cannot be read ({error}); delete it, and it is made anew") from None
        return found
