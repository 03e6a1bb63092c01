"""What a model is judged by: pictures and captions of the training split and of the side that was held out.

For data that `tessera data synth` made, the held-out side is heldout/, whose combinations never appear in training; otherwise
it is the validation split.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera.config import ImageDataConfig, MeshDataConfig, UserError
from tessera.data.loader import prepare
from tessera.data.opening import open_source
from tessera.data.sources import Source, Stored, split_indices
from tessera.evals.nets import Pictures
from tessera.randomness import mix, permute


@dataclass(frozen=True, slots=True)
class Side:
    """Pictures of one size with their captions, in an order that the seed decided."""

    pictures: Pictures  # n h w c
    captions: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if self.pictures.ndim != 4 or len(self.pictures) != len(self.captions):
            raise ValueError(f"got pictures shaped {self.pictures.shape} and {len(self.captions)} captions; expected one each")

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, part: slice) -> Side:
        return Side(self.pictures[part], self.captions[part])


@dataclass(frozen=True, slots=True)
class Material:
    """Both sides, and who can judge them."""

    train: Side  # perhaps not all of the training split
    held_out: Side
    num_train: int  # all of it
    origin: str  # where the held-out side comes from, in words
    oracle: str | None = None  # "shapes"

    @property
    def captioned(self) -> bool:
        """Whether every held-out picture, and most of the others, have a caption."""
        return all(self.held_out.captions) and sum(map(bool, self.train.captions)) * 2 > len(self.train)


def load_material(
    config: ImageDataConfig, *, most_train: int, most_held_out: int, seed: int, source: Source | None = None
) -> Material:
    """Reads up to so many pictures of each side, cut as validation pictures are. `source` is the user's own dataset, if any."""
    sides = find_sides(config, source)
    train = read_side(sides.source, config, sides.train, most_train, mix(seed, 1))
    held_out = read_side(sides.other, config, sides.held_out, most_held_out, mix(seed, 2))
    return Material(train, held_out, len(sides.train), sides.origin, sides.oracle)


@dataclass(frozen=True, slots=True)
class Sides:
    """Where training samples and held-out ones lie, of any medium."""

    source: Source
    train: npt.NDArray[np.int64]
    other: Source  # of the held-out ones
    held_out: npt.NDArray[np.int64]
    origin: str
    oracle: str | None  # the kind of synthetic data


def find_sides(config: ImageDataConfig | MeshDataConfig, source: Source | None) -> Sides:
    """heldout/ of synthetic data, else the validation split; nothing of either is the user's error."""
    if source is None:
        if config.path is None:
            raise UserError(
                "no data: an export does not know where they lie, nor does a run on a Python dataset; --set data.path=PATH"
            )
        source = open_source(config.path, config)
    train, validation = split_indices(source, config.validation_fraction)
    if (home := synth_home(source)) is not None:
        other = open_source(home[0] / "heldout", config)
        origin = "heldout/, combinations that training never showed"
        return Sides(source, train, other, np.arange(len(other)), origin, home[1])
    if not len(validation):
        raise UserError(
            "the validation split is empty: there is nothing to judge by; raise data.validation_fraction, or bring more files"
        )
    return Sides(source, train, source, validation, "the validation split", None)


def synth_home(source: Source) -> tuple[Path, str] | None:
    """The folder with synth.json and heldout/ that a source lies in, and the kind of data; None for all other data."""
    if not isinstance(source, Stored):
        return None
    for folder in (source.root, source.root.parent):
        if (folder / "synth.json").is_file() and (folder / "heldout").is_dir():
            try:
                about = json.loads((folder / "synth.json").read_text(encoding="utf-8"))
                return folder, str(about["kind"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{folder / 'synth.json'} cannot be read ({error}); make the data again, or remove it") from None
    return None


def read_side(source: Source, config: ImageDataConfig, indices: npt.NDArray[np.int64], most: int, key: int) -> Side:
    """Up to `most` of the samples, drawn by the key; unreadable ones are left out."""
    chosen: Sequence[int] = [int(i) for i in indices[permute(np.arange(min(most, len(indices))), len(indices), key)]]
    items = [item for index in chosen if (item := prepare(source, config, index, 0)).readable]
    if not items:
        shape = (0, *config.size, config.channels)
        return Side(np.zeros(shape, np.uint8), ())
    return Side(np.stack([item.image for item in items]), tuple(item.caption for item in items))
