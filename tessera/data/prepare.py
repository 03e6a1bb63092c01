"""The token cache: every sample goes once through a frozen tokenizer, and generators read what came out. docs/data.md shows how.

    RUN/cache/tokens-64-1f2e3d4c5b6a/
      00000.npy  00001.npy ...     samples x views x grid, in the smallest integer type that holds the vocabulary
      00000.lengths.npy ...        of clips: samples x views, how many steps of the grid's first axis belong to each
      00000.sketch.npy ...         with sketches: their ids, as those of the clips
      00000.sketch.lengths.npy ... and how many steps of them are there; 0 where a clip has no sketch
      00000.json ...               what could not be read: sample -> reason
      samples.jsonl                a line a sample, in their order: its key and its captions
      manifest.json                written last: a cache without one is not finished, and is gone on with

It is keyed by the tokenizer's weights, the resolution, the plan of views and the files themselves, so it is made anew when any of
them changes; where only captions have, samples.jsonl alone is. Ranks share the work by shards; a shard is written beside its
place and renamed, so whatever ends the work, what is there is whole. Neither interruptions nor ranks change a byte of the end.
What could not be read is tried again whenever the cache is asked for: a disk that was away for a moment leaves no trace.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tessera.batches import from_uint8, num_latent, num_whole
from tessera.config import ImageDataConfig, UserError, VideoDataConfig
from tessera.data.captions import names_side
from tessera.data.draws import view_draws
from tessera.data.loader import Feed, end_workers, frame, make_dataloader, reading_at
from tessera.data.sources import Source, Stored, captions_of
from tessera.data.token_cache import SHARD_SAMPLES, Ids, lengths_path, open_array, shard_path, sketch_paths
from tessera.files import replace_json, share_file, sweep_halves, sync_folder, write_array
from tessera.media.images import UnreadableImage
from tessera.randomness import mix, mix_text

FORMAT = 1
CHUNK_PICTURES, CHUNK_CLIPS = 64, 16  # go through the tokenizer at once


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """What the tokens of a cache are a function of."""

    tokenizer: str  # hash of its weights
    vocab_size: int
    resolution: int
    views: int
    time_stride: int = 0  # of clips: frames a step of the grid's first axis, the first one of a single frame; 0: pictures
    sketch: str = "none"  # of clips: where their sketches come from

    @classmethod
    def of(cls, config: ImageDataConfig, tokenizer: str, vocab_size: int, resolution: int, time_stride: int = 0) -> TokenPlan:
        """Without random crops, mirror images and windows of clips all views of a sample would be the same one."""
        windows = isinstance(config, VideoDataConfig) and config.start == "random"
        varied = config.crop == "random" or bool(config.flip) or windows
        sketch = config.sketch if isinstance(config, VideoDataConfig) else "none"
        return cls(tokenizer, vocab_size, resolution, config.views if varied else 1, time_stride, sketch)

    @property
    def sketched(self) -> bool:
        """Whether there are sketches."""
        return self.sketch != "none"

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
        *((plan.time_stride, data.frames, data.fps, data.stride, data.start, data.fit) if plan.time_stride else ()),
        *((plan.sketch,) if plan.sketched else ()),
        *(() if data.square else (data.at(plan.resolution).size,)),
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


def write_tokens(feed: Feed, plan: TokenPlan, encode: Callable[[Tensor], Tensor], views: Dataset[Viewed] | None = None) -> Path:
    """Makes what is missing of a cache. `encode` takes pictures b c h w in [-1, 1] on the device, or clips b c t h w, and returns
    ids b ...; `views` are those of clips."""
    folder, main, seen = cache_folder(feed, plan), feed.cut.rank == 0, views or picture_views(feed, plan)
    feed.uses(folder)
    lasts = [shard_path(folder, shard) for shard in range(num_shards(len(feed.source)))]
    drop_shards(feed, lasts, lambda shard: is_spoilt(feed, folder, shard, plan, seen))
    if main:
        if missing_shards(folder, len(feed.source)):
            (folder / "manifest.json").unlink(missing_ok=True)  # it has the faults of shards that are made anew
        borrow(folder, feed, plan)
        sweep_halves(folder)
    feed.wait()
    shards = missing_shards(folder, len(feed.source))
    if not shards and (folder / "manifest.json").is_file():
        if main:
            write_samples(folder, feed.source)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    feed.wait()  # or a rank would count what another has just written
    if shards:
        feed.say(f"cache: {len(feed.source):,} samples to tokens, {plan.views} view{'s'[: plan.views != 1]} each, in {folder}")
    started, done = time.monotonic(), 0
    for shard, made in encode_shards(feed, plan, encode, seen, shards):
        write_shard(folder, shard, made, plan)
        done += len(made.ids)
        speed = done * plan.views / max(time.monotonic() - started, 1e-9)
        feed.show(f"cache: {done:,} samples of this rank  {speed:,.0f} {'clips' if plan.time_stride else 'pictures'}/s")
    feed.wait()
    if main:
        write_samples(folder, feed.source)
        for key, fault in finish(folder, plan, len(feed.source)).items():
            feed.say(f"cache: {key} is left out: {fault}")
    feed.wait()
    return folder


def borrow(folder: Path, feed: Feed, plan: TokenPlan) -> None:
    """Takes what another run has of the same cache: a shard is a function of the cache's name and its number. Not of a dataset in
    Python, whose name tells its keys alone."""
    total = num_shards(len(feed.source)) if isinstance(feed.source, Stored) else 0
    for lender in feed.lenders:
        theirs = lender / folder.name
        taken = sum(borrow_shard(theirs, folder, shard, plan, len(feed.source)) for shard in range(total))
        if taken:
            feed.say(f"cache: {taken} of {total} shards are taken from {theirs}")


def borrow_shard(theirs: Path, folder: Path, shard: int, plan: TokenPlan, num_samples: int) -> bool:
    """Whether it was missing here, and there whole, with nothing that could not be read; else it is made here."""
    mine = [shard_path(folder, shard).with_suffix(".json"), *reversed(shard_files(folder, shard, plan))]  # the ids last
    if all(path.exists() for path in mine):
        return False
    samples = len(shard_samples(shard, num_samples))
    try:
        faults, *arrays = (theirs / path.name for path in mine)
        if read_faults(faults) != {} or any(len(open_array(path)) != samples for path in arrays):
            return False
        folder.mkdir(parents=True, exist_ok=True)
        for path in mine:
            share_file(theirs / path.name, path)
    except (OSError, ValueError, UserError):  # not there, damaged, or gone meanwhile
        return False
    return True


def drop_shards(feed: Feed, lasts: Sequence[Path], spoilt: Callable[[int], bool]) -> None:
    """Takes away what is written last of spoilt shards, `lasts` of all, so that these are made anew. Each rank looks at a share,
    and all meet after each."""
    for first in range(0, len(lasts), feed.cut.world_size):
        feed.check()
        shard = first + feed.cut.rank
        if shard < len(lasts) and spoilt(shard):
            lasts[shard].unlink(missing_ok=True)
        feed.wait()


def is_spoilt(feed: Feed, folder: Path, shard: int, plan: TokenPlan, views: Dataset[Viewed]) -> bool:
    """Whether a part of a shard is lost, or a sample of it that could not be read can be read now."""
    faults = read_faults(shard_path(folder, shard).with_suffix(".json"))
    if faults is None or not all(path.exists() for path in shard_files(folder, shard, plan)):
        return True
    return readable_again(feed.source, views, shard, faults)


def readable_again(source: Source, views: Dataset[Viewed], shard: int, faults: Collection[str]) -> bool:
    """Whether any sample of a shard that could not be read can be read now."""
    tried = shard_samples(shard, len(source)) if faults else ()
    return any(not views[index].fault for index in tried if source.key(index) in faults)


def read_faults(path: Path) -> dict[str, Any] | None:
    """What could not be read of a shard; None where the list of it is lost or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def missing_shards(folder: Path, num_samples: int) -> list[int]:
    """Those without ids, which are written last."""
    return [shard for shard in range(num_shards(num_samples)) if not shard_path(folder, shard).exists()]


def num_shards(num_samples: int) -> int:
    """Of equal length but for the last."""
    return -(-num_samples // SHARD_SAMPLES)


def shard_samples(shard: int, num_samples: int) -> range:
    """The samples of one shard."""
    return range(shard * SHARD_SAMPLES, min((shard + 1) * SHARD_SAMPLES, num_samples))


@dataclass(frozen=True, slots=True)
class Viewed:
    """All views of one sample."""

    key: str
    pictures: npt.NDArray[np.uint8]  # views h w c; of a clip views t h w c
    fault: str
    lengths: npt.NDArray[np.int64] | None = None  # of a clip: views, the frames that belong to each; of a sketch, that are there
    sketch: Viewed | None = None  # of a clip: the same views of its sketch


@dataclass(frozen=True, slots=True)
class Encoded:
    """What goes into one shard."""

    ids: Ids  # n views ...
    lengths: npt.NDArray[np.int64]  # n views, frames; without clips 0
    faults: dict[str, str]  # what could not be read: key -> reason
    sketch: Encoded | None = None

    @classmethod
    def of(cls, viewed: Sequence[Viewed], encode: Callable[[npt.NDArray[np.uint8]], Ids]) -> Encoded:
        """`encode` takes n * views pictures or clips."""
        ids, num_views = encode(np.concatenate([item.pictures for item in viewed])), len(viewed[0].pictures)
        none = np.zeros(num_views, np.int64)
        sketches = [item.sketch for item in viewed if item.sketch is not None]
        return cls(
            ids.reshape(len(viewed), num_views, *ids.shape[1:]),
            np.stack([none if item.lengths is None else item.lengths for item in viewed]),
            {item.key: item.fault for item in viewed if item.fault},
            cls.of(sketches, encode) if sketches else None,
        )

    @classmethod
    def joined(cls, parts: Sequence[Encoded]) -> Encoded:
        """All, one after the other."""
        faults = {key: fault for part in parts for key, fault in part.faults.items()}
        ids, lengths = np.concatenate([part.ids for part in parts]), np.concatenate([part.lengths for part in parts])
        sketches = [part.sketch for part in parts if part.sketch is not None]
        return cls(ids, lengths, faults, cls.joined(sketches) if sketches else None)


def shard_files(folder: Path, shard: int, plan: TokenPlan) -> list[Path]:
    """All arrays of one shard."""
    lengths = [lengths_path(folder, shard)] if plan.time_stride else []
    return [shard_path(folder, shard), *lengths, *(sketch_paths(folder, shard) if plan.sketched else ())]


def encode_shards(
    feed: Feed, plan: TokenPlan, encode: Callable[[Tensor], Tensor], views: Dataset[Viewed], shards: Sequence[int]
) -> Iterator[tuple[int, Encoded]]:
    """The content of this rank's share of some shards. One stream of workers serves all of it. Ranks meet after every batch, so
    that however many one has left, none waits for longer than a batch takes."""
    per_batch = max(1, (CHUNK_CLIPS if plan.time_stride else CHUNK_PICTURES) // plan.views)
    batches = [
        (shard, samples[start : start + per_batch])
        for shard in shards[feed.cut.rank :: feed.cut.world_size]
        for samples in [shard_samples(shard, len(feed.source))]
        for start in range(0, len(samples), per_batch)
    ]
    most = -(-len(shards) // feed.cut.world_size) * -(-SHARD_SAMPLES // per_batch)  # batches that a rank may have
    order = [list(samples) for _, samples in batches]
    stream = iter(make_dataloader(views, order, list, feed.config, feed.device))
    made: list[Encoded] = []

    def ids_of(pictures: npt.NDArray[np.uint8]) -> Ids:
        return encode(from_uint8(torch.from_numpy(pictures).to(feed.device).movedim(-1, 1))).cpu().numpy()

    try:
        for (shard, samples), viewed in zip(batches, stream, strict=True):
            feed.check()
            made.append(Encoded.of(viewed, ids_of))
            if samples.stop == shard_samples(shard, len(feed.source)).stop:
                yield shard, Encoded.joined(made)
                made = []
            feed.wait()
        for _ in range(most - len(batches)):
            feed.wait()
    finally:
        end_workers(stream)


class Views(Dataset[Viewed]):
    """Sample -> its views: the first is the centre, as in validation; the others are drawn by seed, view and key."""

    def __init__(self, source: Source, config: ImageDataConfig, views: int, seed: int) -> None:
        self.source, self.config, self.views, self.seed = source, config, views, seed

    def __getitem__(self, index: int) -> Viewed:
        """The file is read once."""
        key, captions = self.source.key(index), captions_of(self.source, index)
        try:
            image = self.source.read(index)
        except (UnreadableImage, UserError, OSError) as error:
            blank = np.zeros((self.views, *self.config.size, self.config.channels), np.uint8)
            return Viewed(key, blank, str(error))
        draws = view_draws(key, self.views, self.seed)
        return Viewed(key, np.stack([frame(image, self.config, captions, draw) for draw in draws]), "")


def picture_views(feed: Feed, plan: TokenPlan) -> Views:
    """Of pictures at the plan's resolution."""
    config = feed.config.at(plan.resolution)
    return Views(reading_at(feed.source, config), config, plan.views, feed.seed)


def write_shard(folder: Path, shard: int, made: Encoded, plan: TokenPlan) -> None:
    """The ids last: where they are, all is."""
    path = shard_path(folder, shard)
    replace_json(path.with_suffix(".json"), made.faults)
    if plan.time_stride:
        write_array(lengths_path(folder, shard), num_latent(made.lengths, plan.time_stride).astype(np.uint16))
    if made.sketch is not None:
        ids, lengths = sketch_paths(folder, shard)
        write_array(lengths, sketched_steps(made.sketch.lengths, made.lengths, plan.time_stride).astype(np.uint16))
        write_array(ids, made.sketch.ids.astype(plan.dtype))
    write_array(path, made.ids.astype(plan.dtype))


def sketched_steps(
    there: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], time_stride: int
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Steps of sketches of so many frames, of clips of so many. One that is not there as a whole is not there: its ids would tell
    of frames that nobody drew."""
    return np.where(there < lengths, num_whole(there, time_stride), num_latent(lengths, time_stride))


def write_samples(folder: Path, source: Source) -> None:
    """Keys and captions, so that a cache can be read without what it was made of; a file that has them is left as it is."""
    path = folder / "samples.jsonl"

    def lines() -> Iterator[str]:
        for index in range(len(source)):
            yield json.dumps({"key": source.key(index), "captions": captions_of(source, index)}) + "\n"

    if path.is_file():
        with path.open(encoding="utf8", errors="replace") as file:
            if all(found == wanted for found, wanted in zip_longest(file, lines())):
                return
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    with temporary.open("w", encoding="utf8") as file:
        file.writelines(lines())
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
        "views": plan.views, "num_samples": num_samples, "shard_samples": SHARD_SAMPLES, "grid": grid, "faults": faults,
        **({"time_stride": plan.time_stride} if plan.time_stride else {}),
        **({"sketch": plan.sketch} if plan.sketched else {}),
    }  # fmt: skip
    replace_json(folder / "manifest.json", facts)
    sync_folder(folder)
    return faults
