"""The states that a frozen encoder gives for captions, on the disk: each distinct caption encoded once.

    RUN/cache/text-1f2e3d4c5b6a7988/
      captions.npy                 hashes of the captions, sorted; caption n has place n
      00000.states.npy ...         of 1,024 captions each, one after another without padding: rows x channels, float16
      00000.starts.npy             captions + 1: where the rows of each start
      00000.pooled.npy             captions x channels
      manifest.json                written last: a cache without one is not finished, and is gone on with

In: captions and an `encode` function; this room knows no encoder. Out: the folder; and a reader, pickled as a path, that the
loader's processes open for themselves. Ranks share the work by shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tessera.batches import TextStates
from tessera.config import UserError
from tessera.files import replace_json, sweep_halves, sync_folder, write_array
from tessera.randomness import mix_text

FORMAT = 2
SHARD_CAPTIONS = 1024
CHUNK = 256  # captions encoded at a time, so that the padded states of a large encoder fit into memory
PARTS = ("starts", "pooled", "states")  # the last one says that a shard is there

Encode = Callable[[Sequence[str | None]], TextStates]
Half = npt.NDArray[np.float16]
Shard = tuple[npt.NDArray[np.int64], Half, Half]


def write_text_states(
    folder: Path, captions: Iterable[str | None], encode: Encode, fingerprint: str, *, rank: int = 0, world_size: int = 1,
    wait: Callable[[], None] = lambda: None, check: Callable[[], None] = lambda: None,
) -> Path:  # fmt: skip
    """Encodes each distinct caption once into `folder/text-KEY`; a cache of these captions and this encoder is taken as it is.

    `fingerprint` names the encoder. One run at a time may write into `folder`; of its ranks each takes a share. `wait` returns
    when all are there, `check` raises where the work is to stop; what is written stays, and is gone on with.
    """
    distinct = _distinct(captions)
    hashes = np.array(sorted(distinct), dtype=np.uint64)
    key = hashlib.sha256(f"{FORMAT} {fingerprint} ".encode() + hashes.tobytes()).hexdigest()[:16]
    final = folder / f"text-{key}"
    if is_whole(final):
        return final
    wait()  # or a rank would see what another has just written
    if rank == 0:
        if (final / "manifest.json").exists():  # damaged
            shutil.rmtree(final)
        final.mkdir(parents=True, exist_ok=True)
        sweep_halves(final)
    wait()
    for first in range(0, num_shards(len(hashes)), world_size):
        shard = first + rank
        if shard < num_shards(len(hashes)) and not part_path(final, shard, PARTS[-1]).exists():
            places = range(shard * SHARD_CAPTIONS, min((shard + 1) * SHARD_CAPTIONS, len(hashes)))
            _write_shard(final, shard, [distinct[int(hashes[place])] for place in places], encode, check)
        wait()  # after each, so that none waits for longer than a shard takes
    if rank == 0:
        _finish(final, hashes, encode, fingerprint)
    wait()
    return final


def num_shards(num_captions: int) -> int:
    """Of equal length but for the last."""
    return -(-num_captions // SHARD_CAPTIONS)


def part_path(folder: Path, shard: int, part: str) -> Path:
    """One of the arrays of a shard."""
    return folder / f"{shard:05d}.{part}.npy"


def files_of(folder: Path, num_captions: int) -> Iterator[Path]:
    """All arrays of a cache."""
    yield folder / "captions.npy"
    for shard in range(num_shards(num_captions)):
        yield from (part_path(folder, shard, part) for part in PARTS)


def is_whole(path: Path) -> bool:
    """Whether a folder is a cache that this program wrote to its end, with files of the sizes that it noted."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf8"))
        files = files_of(path, manifest["captions"])
        return manifest["format"] == FORMAT and all(file.stat().st_size == manifest["bytes"][file.name] for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _distinct(captions: Iterable[str | None]) -> dict[int, str]:
    found: dict[int, str] = {}
    for caption in captions:
        if caption and found.setdefault(number := mix_text(caption), caption) != caption:
            raise UserError(f"the captions {caption!r} and {found[number]!r} have the same hash; change a letter of one of them")
    return found


def _write_shard(folder: Path, shard: int, captions: Sequence[str], encode: Encode, check: Callable[[], None]) -> None:
    """In the order of the captions, without padding."""
    lengths, pooled, states = [0], [], []
    for start in range(0, len(captions), CHUNK):
        check()
        found = encode(captions[start : start + CHUNK])
        lengths += found.mask.sum(1).tolist()
        pooled.append(_half(found.pooled, captions[start]))
        states.append(_half(found.states[found.mask], captions[start]))
    write_array(part_path(folder, shard, "starts"), np.cumsum(lengths, dtype=np.int64))
    write_array(part_path(folder, shard, "pooled"), np.concatenate(pooled))
    write_array(part_path(folder, shard, "states"), np.concatenate(states))


def _finish(folder: Path, hashes: npt.NDArray[np.uint64], encode: Encode, fingerprint: str) -> None:
    """The manifest: from here on the cache is whole."""
    write_array(folder / "captions.npy", hashes)
    length, width = encode([""]).states.shape[1:]  # how long and wide states are, even where there is no caption
    sizes = {file.name: file.stat().st_size for file in files_of(folder, len(hashes))}
    facts = {"captions": len(hashes), "length": length, "width": width, "bytes": sizes}
    replace_json(folder / "manifest.json", {"format": FORMAT, "fingerprint": fingerprint, **facts})
    sync_folder(folder)


def _half(tensor: torch.Tensor, first: str) -> Half:
    half = tensor.detach().cpu().half()
    if not half.isfinite().all():
        raise UserError(
            f"the text encoder gives numbers that float16 cannot hold (among {CHUNK} captions from {first[:60]!r} on); "
            "choose another encoder, or bring its states scaled with text={kind: precomputed}"
        )
    return half.numpy()


@dataclass(frozen=True, slots=True)
class _Opened:
    """A cache's arrays, mapped; shards when they are first asked for."""

    path: Path
    captions: npt.NDArray[np.uint64]  # sorted
    length: int
    width: int
    shards: dict[int, Shard] = field(default_factory=dict)

    def rows(self, place: int) -> tuple[Half, Half]:
        """States, m c, and the pooled vector of a caption."""
        shard, row = divmod(place, SHARD_CAPTIONS)
        if shard not in self.shards:
            starts, pooled, states = (np.load(part_path(self.path, shard, part), mmap_mode="r") for part in PARTS)
            self.shards[shard] = starts, pooled, states
        starts, pooled, states = self.shards[shard]
        return states[starts[row] : starts[row + 1]], pooled[row]


@dataclass(frozen=True)
class CachedText:
    """Captions -> states from a folder that `write_text_states` made. Opened at the first call; pickled as its path alone."""

    path: Path

    def __call__(self, captions: Sequence[str | None], keys: Sequence[str]) -> TextStates:
        """b captions -> states b m c, fp16, m the encoder's length; an absent or empty one has no states."""
        cache = self._opened
        states, mask, pooled = _blank(len(captions), cache.length, cache.width)
        for row, caption in enumerate(captions):
            if caption:
                found, pooled[row] = cache.rows(self._find(caption))
                states[row, : len(found)], mask[row, : len(found)] = found, True
        return TextStates(torch.from_numpy(states), torch.from_numpy(mask), torch.from_numpy(pooled))

    def __reduce__(self) -> tuple[type[CachedText], tuple[Path]]:
        return CachedText, (self.path,)  # a map that is pickled becomes a copy of the whole file

    @property
    def width(self) -> int:
        """Channels of the states."""
        return self._opened.width

    def _find(self, caption: str) -> int:
        number = np.uint64(mix_text(caption))
        place = int(np.searchsorted(self._opened.captions, number))
        if place == len(self._opened.captions) or self._opened.captions[place] != number:
            raise UserError(
                f"the caption {caption[:80]!r} is not among the {len(self._opened.captions)} of the text cache {self.path}; "
                "the captions have changed since it was made; run `tessera data prepare RUN`"
            )
        return place

    @cached_property
    def _opened(self) -> _Opened:
        if not is_whole(self.path):
            raise UserError(f"{self.path} is not a whole text cache; run `tessera data prepare RUN` to make it")
        manifest = json.loads((self.path / "manifest.json").read_text(encoding="utf8"))
        return _Opened(self.path, np.load(self.path / "captions.npy", mmap_mode="r"), manifest["length"], manifest["width"])


def _blank(count: int, length: int, width: int) -> tuple[Half, npt.NDArray[np.bool_], Half]:
    """states, mask and pooled of so many captions without text."""
    return np.zeros((count, length, width), np.float16), np.zeros((count, length), np.bool_), np.zeros((count, width), np.float16)
