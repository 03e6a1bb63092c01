"""The states that a frozen encoder gives for captions, on the disk: each distinct caption encoded once.

In: captions and an `encode` function; this room knows no encoder. Out: a folder, written beside its final name and renamed, so
that one under a final name is whole; and a reader, pickled as a path, that the loader's processes open for themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from tessera.batches import TextStates
from tessera.config import UserError
from tessera.files import sync_folder, write_json
from tessera.randomness import mix_text

FORMAT = 1
CHUNK = 256  # captions encoded at a time, so that the states of a large encoder fit into memory
FILES = ("states.npy", "starts.npy", "pooled.npy", "captions.npy")

Encode = Callable[[Sequence[str | None]], TextStates]
Half = npt.NDArray[np.float16]


def write_text_states(folder: Path, captions: Iterable[str | None], encode: Encode, fingerprint: str) -> Path:
    """Encodes each distinct caption once into `folder/text-KEY`; a cache of these captions and this encoder is taken as it is.

    `fingerprint` names the encoder. One process at a time may write into `folder`.
    """
    distinct = _distinct(captions)
    hashes = np.array(sorted(distinct), dtype=np.uint64)
    key = hashlib.sha256(f"{FORMAT} {fingerprint} ".encode() + hashes.tobytes()).hexdigest()[:16]
    final = folder / f"text-{key}"
    if is_whole(final):
        return final
    for left in [*folder.glob(f".{final.name}.tmp-*"), *([final] if final.exists() else [])]:  # of a kill, or damaged
        shutil.rmtree(left)
    temporary = folder / f".{final.name}.tmp-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        facts = _write_states(temporary, [distinct[int(number)] for number in hashes], encode)
        _save(temporary / "captions.npy", hashes)
        sizes = {name: (temporary / name).stat().st_size for name in FILES}
        write_json(temporary / "manifest.json", {"format": FORMAT, "fingerprint": fingerprint, **facts, "bytes": sizes})
        sync_folder(temporary)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder)
    return final


def is_whole(path: Path) -> bool:
    """Whether a folder is a cache that this program wrote to its end, with files of the sizes that it noted."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf8"))
        return manifest["format"] == FORMAT and all((path / name).stat().st_size == manifest["bytes"][name] for name in FILES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _distinct(captions: Iterable[str | None]) -> dict[int, str]:
    found: dict[int, str] = {}
    for caption in captions:
        if caption and found.setdefault(number := mix_text(caption), caption) != caption:
            raise UserError(f"the captions {caption!r} and {found[number]!r} have the same hash; change a letter of one of them")
    return found


def _write_states(folder: Path, captions: Sequence[str], encode: Encode) -> dict[str, int]:
    """states, starts and pooled, in the order of the captions, without padding; the numbers for the manifest."""
    empty = encode([""]).states  # says how long and wide the states are, even where there is no caption
    length, width = empty.shape[1:]
    lengths, pooled = [0], [np.zeros((0, width), np.float16)]
    with (folder / "states.npy").open("wb") as file:
        _write_header(file, 0, width)
        for start in range(0, len(captions), CHUNK):
            found = encode(captions[start : start + CHUNK])
            lengths += found.mask.sum(1).tolist()
            pooled.append(_half(found.pooled, captions[start]))
            file.write(_half(found.states[found.mask], captions[start]).tobytes())
        file.seek(0)
        _write_header(file, sum(lengths), width)
        file.flush()
        os.fsync(file.fileno())
    _save(folder / "starts.npy", np.cumsum(lengths, dtype=np.int64))
    _save(folder / "pooled.npy", np.concatenate(pooled))
    return {"captions": len(captions), "rows": sum(lengths), "length": length, "width": width}


def _write_header(file: BinaryIO, rows: int, width: int) -> None:
    """NumPy leaves room for the number of rows to grow, so the header can be written again in its place."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": (rows, width)})


def _half(tensor: torch.Tensor, first: str) -> Half:
    half = tensor.detach().cpu().half()
    if not half.isfinite().all():
        raise UserError(
            f"the text encoder gives numbers that float16 cannot hold (among {CHUNK} captions from {first[:60]!r} on); "
            "choose another encoder, or bring its states scaled with text={kind: precomputed}"
        )
    return half.numpy()


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class _Opened:
    """A cache's arrays, mapped."""

    states: Half  # rows c
    starts: npt.NDArray[np.int64]
    pooled: Half
    captions: npt.NDArray[np.uint64]  # sorted
    length: int
    width: int


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
                place = self._find(caption)
                found = cache.states[cache.starts[place] : cache.starts[place + 1]]
                states[row, : len(found)], mask[row, : len(found)], pooled[row] = found, True, cache.pooled[place]
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
        states, starts, pooled, captions = (np.load(self.path / name, mmap_mode="r", allow_pickle=False) for name in FILES)
        return _Opened(states, starts, pooled, captions, manifest["length"], manifest["width"])


def _blank(count: int, length: int, width: int) -> tuple[Half, npt.NDArray[np.bool_], Half]:
    """states, mask and pooled of so many captions without text."""
    return np.zeros((count, length, width), np.float16), np.zeros((count, length), np.bool_), np.zeros((count, width), np.float16)
