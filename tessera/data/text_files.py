"""Text states that the user computed elsewhere: sample keys in, states out of `<key>.npy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from tessera.batches import TextStates
from tessera.config import UserError
from tessera.files import read_array

MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class PrecomputedText:
    """Sample keys -> states from a folder of NumPy files, states x channels or channels alone. `open` checks them first."""

    folder: Path
    length: int
    width: int

    @classmethod
    def open(cls, folder: Path, length: int, width: int, keys: Iterable[str]) -> Self:
        """Refuses a folder without a file for every key, or with one of another width; reads headers only."""
        found, missing = cls(folder, length, width), list[str]()
        for key in keys:
            if found.file(key).is_file():
                found.load(key)
            else:
                missing.append(key)
        if missing:
            some = ", ".join(f"{key}.npy" for key in missing[:MOST_NAMED])
            more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
            raise UserError(
                f"{len(missing)} samples have no text states in {folder}: {some}{more} missing; "
                "expected <sample key>.npy for every sample; write them, or take the samples out of the data"
            )
        return found

    def __call__(self, captions: Sequence[str | None], keys: Sequence[str]) -> TextStates:
        """b keys -> states b m c, fp32; an empty key has no states. Captions are not read."""
        states = torch.zeros(len(keys), self.length, self.width)
        mask = torch.zeros(len(keys), self.length, dtype=torch.bool)
        pooled = torch.zeros(len(keys), self.width)
        for row, key in enumerate(keys):
            if key:
                found = torch.from_numpy(np.array(self.load(key)[: self.length], dtype=np.float32))
                if not found.isfinite().all():
                    raise UserError(f"{self.file(key)} holds numbers that are not finite; write it anew")
                states[row, : len(found)], mask[row, : len(found)] = found, True
                pooled[row] = found.mean(0) if len(found) else 0
        return TextStates(states, mask, pooled)

    def file(self, key: str) -> Path:
        """Where a sample's states lie; not `with_suffix`, because a key may hold dots."""
        return self.folder / f"{key}.npy"

    def load(self, key: str) -> npt.NDArray[Any]:
        """m c, mapped, of any type of floats."""
        path = self.file(key)
        try:
            array = read_array(path, mapped=True)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read as a NumPy array ({error}); expected the text states of sample {key!r}"
            ) from None
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.floating) or array.shape[-1] != self.width:
            found = f"{array.dtype} of shape {array.shape}"
            raise UserError(f"{path} holds {found}; expected floats, states x {self.width}, or {self.width} alone")
        return array.reshape(-1, self.width)
