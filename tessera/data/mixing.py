"""Clips and single pictures in one stream, in a stated proportion."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from tessera.config import UserError
from tessera.data.clip_sources import single_pictures
from tessera.data.loader import Readable, Samples
from tessera.data.order import Indices, Mixture, Order
from tessera.data.sources import Source
from tessera.randomness import mix, mix_text

_STILLS = mix_text("stills")  # keeps the order of pictures apart from that of clips

I = TypeVar("I", bound=Readable)  # noqa: E741 (an item)


class MixedSamples(Samples[I]):
    """With a share that many of the positions are single pictures: picture files in an order of their own, the other positions
    clips in theirs; or, where there are no picture files, a part of the position's clip (`single`). None mixes nothing."""

    def __init__(self, source: Source, indices: Indices, seed: int, image_share: float | None) -> None:
        super().__init__(source, indices, seed)
        self.mixture = None if image_share is None else Mixture.of(image_share)
        is_single = np.zeros(len(indices), np.bool_) if self.mixture is None else single_pictures(source, indices)
        self.clips, self.stills = indices[~is_single], indices[is_single]
        if len(indices) and not len(self.clips):
            raise UserError(
                f"data.image_share={image_share:g} mixes pictures with clips, and all {len(indices):,} training samples are "
                "single pictures; leave it out, or add clips"
            )
        self.clip_order, self.still_order = Order(len(self.clips), seed), Order(len(self.stills), mix(seed, _STILLS))

    def __getitem__(self, position: int) -> I:
        """The clip or picture of a position."""
        if self.mixture is None or not len(self.stills):
            return super().__getitem__(position)
        is_picture, place = self.mixture.locate(position)
        pool, order = (self.stills, self.still_order) if is_picture else (self.clips, self.clip_order)
        return self.taken(pool, *order.locate(place), position)

    def single(self, position: int, draw: int | None) -> bool:
        """Whether a position's clip stands for a picture; validation sees all samples as they are."""
        return draw is not None and self.mixture is not None and not len(self.stills) and self.mixture.locate(position)[0]
