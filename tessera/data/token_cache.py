"""The token cache as a reader sees it: where its files lie, and what is in them. `prepare` writes it, and has its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.config import UserError
from tessera.files import read_array

SHARD_SAMPLES = 1024

Ids = npt.NDArray[Any]


def shard_path(folder: Path, shard: int) -> Path:
    """The ids of one shard; its faults lie beside it."""
    return folder / f"{shard:05d}.npy"


def lengths_path(folder: Path, shard: int) -> Path:
    """How far the clips of one shard reach."""
    return folder / f"{shard:05d}.lengths.npy"


def sketch_paths(folder: Path, shard: int) -> tuple[Path, Path]:
    """The ids of the sketches of one shard, and how far these reach."""
    return folder / f"{shard:05d}.sketch.npy", folder / f"{shard:05d}.sketch.lengths.npy"


class TokenCache:
    """A finished cache: ids, key and captions of each sample. Small to pickle: files are opened where they are used."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            facts = json.loads((self.folder / "manifest.json").read_text(encoding="utf8"))
            self.num_samples, self.views, self.grid = int(facts["num_samples"]), int(facts["views"]), tuple(facts["grid"])
            self.tokenizer, self.vocab_size = str(facts["tokenizer"]), int(facts["vocab_size"])
            self.resolution, self.time_stride = int(facts["resolution"]), int(facts.get("time_stride", 0))
            self.faults: dict[str, str] = dict(facts["faults"])
            self.sketched = "sketch" in facts
            self._shard_samples = int(facts.get("shard_samples", SHARD_SAMPLES))
            if self._shard_samples < 1:
                raise ValueError(f"shards of {self._shard_samples} samples")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} is no finished token cache ({error}); delete it, and it is made anew") from None
        self._shards: dict[Path, Ids] = {}
        self._samples: list[dict[str, Any]] = []
        for start in range(0, self.num_samples, self._shard_samples):  # their headers only; better here than in a worker
            shard = start // self._shard_samples
            wanted = (min(self._shard_samples, self.num_samples - start), self.views, *self.grid)
            expect(shard_path(self.folder, shard), wanted)
            if self.time_stride:
                expect(lengths_path(self.folder, shard), wanted[:2])
            if self.sketched:
                ids, lengths = sketch_paths(self.folder, shard)
                expect(ids, wanted)
                expect(lengths, wanted[:2])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}, "_samples": []}

    def ids(self, index: int, view: int = 0) -> Ids:
        """One grid. View 0 is the centre; what could not be read, see `faults`, is a blank."""
        shard, row = divmod(index, self._shard_samples)
        return np.asarray(self._mapped(shard_path(self.folder, shard))[row, view])

    def length(self, index: int, view: int = 0) -> int | None:
        """How many steps of the first axis belong to it; None of a picture, all of which does."""
        if not self.time_stride:
            return None
        shard, row = divmod(index, self._shard_samples)
        return int(self._mapped(lengths_path(self.folder, shard))[row, view])

    def sketch(self, index: int, view: int = 0) -> tuple[Ids, int] | None:
        """The ids of the clip's sketch, and how many steps of them are there; None where the cache has no sketches."""
        if not self.sketched:
            return None
        shard, row = divmod(index, self._shard_samples)
        ids, lengths = (self._mapped(path)[row, view] for path in sketch_paths(self.folder, shard))
        return np.asarray(ids), int(lengths)

    def key(self, index: int) -> str:
        """The name of a sample: that of its file, without the ending."""
        return str(self._sample(index)["key"])

    def captions(self, index: int) -> tuple[str, ...]:
        """All captions of a sample."""
        return tuple(self._sample(index)["captions"])

    def _sample(self, index: int) -> dict[str, Any]:
        if not self._samples:
            self._samples = read_samples(self.folder / "samples.jsonl", self.num_samples)
        return self._samples[index]

    def _mapped(self, path: Path) -> Ids:
        if path not in self._shards:
            self._shards[path] = open_array(path)
        return self._shards[path]


def read_samples(path: Path, num_samples: int) -> list[dict[str, Any]]:
    """What `write_samples` wrote."""
    try:
        with path.open(encoding="utf8") as file:
            found = [{"key": str(line["key"]), "captions": list(line["captions"])} for line in map(json.loads, file)]
        if len(found) != num_samples:
            raise ValueError(f"{len(found)} lines for {num_samples} samples")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); `tessera data prepare RUN` writes it anew") from None
    return found


def expect(path: Path, shape: tuple[int, ...]) -> None:
    """An array of that shape lies there."""
    if (found := open_array(path).shape) != shape:
        raise UserError(f"{path} holds {found}, expected {shape}; delete it, and it is made anew")


def open_array(path: Path) -> Ids:
    """Mapped into memory."""
    try:
        return read_array(path, mapped=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it, and it is made anew") from None
