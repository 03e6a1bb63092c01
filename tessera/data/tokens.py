"""Batches of cached tokens, with the captions in the form that the text encoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tessera.batches import ReadText, TokenBatch
from tessera.config import UserError, VideoDataConfig
from tessera.data.draws import drawn_caption
from tessera.data.loader import Feed, SampleLoader
from tessera.data.mixing import MixedSamples
from tessera.data.order import Indices
from tessera.data.sources import Source, captions_of, split_indices
from tessera.data.token_cache import Ids, TokenCache
from tessera.randomness import mix


@dataclass(frozen=True, slots=True)
class TokenItem:
    """One sample on its way into a batch. What could not be read is not in the cache, so nothing here has a fault."""

    key: str
    caption: str | None
    position: int
    ids: Ids
    low: Ids | None
    length: int | None = None  # of a clip: how many steps of the first axis belong to it
    sketch: tuple[Ids, int] | None = None  # of a clip: the ids of its sketch, and how many steps of them are there
    readable: bool = True
    fault: str = ""


class CachedTokens(MixedSamples[TokenItem]):
    """Samples from the cache; `low` is the cache of the same samples on a coarser grid. Of a clip in a picture's position the
    first frame is taken."""

    def __init__(
        self, source: Source, indices: Indices, seed: int, cache: TokenCache, low: TokenCache | None,
        image_share: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(source, indices, seed, image_share)
        self.cache, self.low = cache, low

    def item(self, index: int, position: int, draw: int | None) -> TokenItem:
        """The view and the caption are drawn together; both grids are of the same view."""
        view = 0 if draw is None else mix(draw, 6) % self.cache.views
        caption = drawn_caption(captions_of(self.source, index), draw)
        low = None if self.low is None else self.low.ids(index, view)
        ids, length = self.cache.ids(index, view), 1 if self.single(position, draw) else self.cache.length(index, view)
        sketch = self.cache.sketch(index, view)
        return TokenItem(self.source.key(index), caption, position, ids, low, length, sketch)


class TokenLoader(SampleLoader[TokenItem, TokenBatch]):
    """Batches of tokens. Samples that could not be read when the cache was made are left out."""

    def __init__(self, feed: Feed, cache: TokenCache, read_text: ReadText, low: TokenCache | None = None) -> None:
        unread = {**cache.faults, **(low.faults if low is not None else {})}
        if len(unread) > feed.config.corrupt_budget * len(feed.source):
            raise UserError(
                f"{len(unread)} of {len(feed.source)} samples cannot be read, more than data.corrupt_budget="
                f"{feed.config.corrupt_budget:g} allows: {'; '.join(list(unread.values())[:3])}. `tessera data check` lists "
                f"every such file: repair or remove it, or raise data.corrupt_budget; each start tries them again"
            )
        sides = split_indices(feed.source, feed.config.validation_fraction)
        if unread:
            feed.say(f"cache: {len(unread):,} of {len(feed.source):,} samples are left out, and tried again at the next start")
            keep = np.fromiter((feed.source.key(index) not in unread for index in range(len(feed.source))), np.bool_)
            sides = (sides[0][keep[sides[0]]], sides[1][keep[sides[1]]])
        share = feed.config.image_share if isinstance(feed.config, VideoDataConfig) else None
        super().__init__(
            CachedTokens(feed.source, sides[0], feed.seed, cache, low, share), partial(collate_tokens, read_text=read_text),
            sides[1], feed.config, feed.cut, device=feed.device, validation_samples=feed.validation_samples,
            preview_samples=feed.preview_samples,
        )  # fmt: skip


def collate_tokens(items: Sequence[TokenItem], read_text: ReadText) -> TokenBatch:
    """One batch; ids become int64 on the device."""
    keys, captions = tuple(item.key for item in items), tuple(item.caption for item in items)
    low = None if items[0].low is None else stack([item.low for item in items if item.low is not None])
    lengths = [item.length for item in items if item.length is not None]
    sketches = [(item.sketch[0], min(item.sketch[1], item.length or 0)) for item in items if item.sketch is not None]
    return TokenBatch(
        ids=stack([item.ids for item in items]),
        text=read_text(captions, keys),
        valid=torch.ones(len(items), dtype=torch.bool),
        positions=torch.tensor([item.position for item in items]),
        keys=keys,
        captions=captions,
        low=low,
        lengths=torch.tensor(lengths) if lengths else None,
        sketch=stack([ids for ids, _ in sketches]) if sketches else None,
        sketch_lengths=torch.tensor([length for _, length in sketches]) if sketches else None,
    )


def stack(grids: Sequence[Ids]) -> torch.Tensor:
    """b ... int32: half the bytes of int64, and a type that every torch operation knows."""
    return torch.from_numpy(np.stack(grids).astype(np.int32))
