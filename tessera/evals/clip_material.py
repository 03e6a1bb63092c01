"""What a model of clips is judged by: clips and captions of the training split and of the side that was held out.

The sides are those of pictures (`material`). Clips have frames of one size and lengths of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.config import VideoDataConfig
from tessera.data.clips import prepare_clip
from tessera.data.sources import Source
from tessera.data.synth.digits_oracle import open_oracle
from tessera.evals.clip_oracle import ClipOracle
from tessera.evals.material import find_sides, synth_home
from tessera.media.clips import Frames
from tessera.randomness import mix, permute


@dataclass(frozen=True, slots=True)
class ClipSide:
    """Clips with their captions, in an order that the seed decided."""

    clips: tuple[Frames, ...]  # t h w c each, with one h, w and c
    captions: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if len(self.clips) != len(self.captions):
            raise ValueError(f"got {len(self.clips)} clips and {len(self.captions)} captions; expected one each")
        refuse_odd("clips", self.clips)

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, part: slice) -> ClipSide:
        return ClipSide(self.clips[part], self.captions[part])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Frames of each clip."""
        return tuple(len(clip) for clip in self.clips)


def refuse_odd(name: str, clips: Sequence[Frames]) -> None:
    """All must be uint8, t h w c, of one size, with a frame or more."""
    odd = [clip for clip in clips if clip.ndim != 4 or clip.dtype != np.uint8 or not len(clip)]
    odd += [clip for clip in clips if clip.shape[1:] != clips[0].shape[1:]]
    if odd:
        found = f"{odd[0].dtype} shaped {odd[0].shape}"
        raise ValueError(f"{name}: one is {found}; expected uint8, frames x height x width x channels, frames of one size")


@dataclass(frozen=True, slots=True)
class ClipMaterial:
    """Both sides, and who can judge them."""

    train: ClipSide  # perhaps not all of the training split
    held_out: ClipSide
    num_train: int  # all of it
    origin: str  # where the held-out side comes from, in words
    oracle: ClipOracle | None = None  # of moving digits

    @property
    def captioned(self) -> bool:
        """Whether every held-out clip, and most of the others, have a caption."""
        return all(self.held_out.captions) and sum(map(bool, self.train.captions)) * 2 > len(self.train)


def load_clips(
    config: VideoDataConfig, *, most_train: int, most_held_out: int, seed: int, source: Source | None = None
) -> ClipMaterial:
    """Reads up to so many clips of each side, cut as validation clips are. `source` is the user's own dataset, if any."""
    sides = find_sides(config, source)
    train = read_clips(sides.source, config, sides.train, most_train, mix(seed, 1))
    held_out = read_clips(sides.other, config, sides.held_out, most_held_out, mix(seed, 2))
    home = synth_home(sides.source)
    oracle = open_oracle(home[0]) if home is not None and sides.oracle == "digits" else None
    return ClipMaterial(train, held_out, len(sides.train), sides.origin, oracle)


def read_clips(source: Source, config: VideoDataConfig, indices: npt.NDArray[np.int64], most: int, key: int) -> ClipSide:
    """Up to `most` of the samples, drawn by the key; unreadable ones are left out."""
    chosen = indices[permute(np.arange(min(most, len(indices))), len(indices), key)].tolist()
    items = [item for index in chosen if (item := prepare_clip(source, config, index, 0, None)).readable]
    return ClipSide(tuple(item.frames for item in items), tuple(item.caption for item in items))
