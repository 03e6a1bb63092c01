"""Batches of pictures, embeddings or both, with captions in the form that the text encoder reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tessera.batches import PairBatch, ReadText
from tessera.config import ImageDataConfig, UserError
from tessera.data.draws import drawn_caption
from tessera.data.embeddings import MOST_NAMED, Absent, Embeddings, Missing, Vector
from tessera.data.loader import Feed, Item, SampleLoader, Samples, prepare, reading_at
from tessera.data.order import Indices
from tessera.data.sources import Source, captions_of, split_indices
from tessera.media.images import Pixels

EMBEDDED = 64  # captions at once


@dataclass(frozen=True, slots=True)
class PairItem:
    """One sample on its way into a batch."""

    key: str
    caption: str | None
    position: int
    image: Pixels | None  # h w c uint8
    embedding: Vector | None
    readable: bool = True
    fault: str = ""


class PairSamples(Samples[PairItem]):
    """Pictures, cut as the data section says, and the embeddings of their keys."""

    def __init__(
        self, source: Source, config: ImageDataConfig, indices: Indices, seed: int, embeddings: Embeddings | None, pictures: bool
    ) -> None:
        super().__init__(source, indices, seed)
        self.config, self.embeddings, self.pictures = config, embeddings, pictures

    def item(self, index: int, position: int, draw: int | None) -> PairItem:
        """One sample. A picture or an embedding that cannot be read makes it unreadable; neither is ever of another sample."""
        found = self._picture(index, position, draw)
        item = PairItem(
            found.key, found.caption, position, found.image if self.pictures else None, None, found.readable, found.fault
        )
        if self.embeddings is None:
            return item
        try:
            return replace(item, embedding=self.embeddings.read(item.key))
        except Absent as absent:
            blank = np.zeros(self.embeddings.width, np.float32)
            return replace(item, embedding=blank, readable=False, fault=f"{item.key}: its embedding is missing: {absent}")

    def _picture(self, index: int, position: int, draw: int | None) -> Item:
        if self.pictures:
            return prepare(self.source, self.config, index, position, draw)
        caption = drawn_caption(captions_of(self.source, index), draw)
        return Item(self.source.key(index), caption, position, np.zeros((0, 0, 0), np.uint8))


class PairLoader(SampleLoader[PairItem, PairBatch]):
    """Batches of what a stage asks for: pictures, at a resolution of its own or that of the data, and embeddings. Samples that
    lack theirs are told, all of them in log.txt, and left out, up to data.corrupt_budget. Previews have pictures in any case.
    Where `embed_captions` is given it is asked here, once, for the captions of validation, whose batches have what it said as
    `wanted`."""

    def __init__(
        self, feed: Feed, read_text: ReadText, embeddings: Embeddings | None = None, *, pictures: bool = True,
        resolution: int | None = None, embed_captions: Callable[[Sequence[str | None]], Tensor] | None = None,
    ) -> None:  # fmt: skip
        config: ImageDataConfig = feed.config
        source = feed.source
        if resolution is not None:
            config = config.at(resolution)
            source = reading_at(source, config)
        sides = split_indices(feed.source, config.validation_fraction)
        if embeddings is not None:
            sides = self._embedded(feed, embeddings, sides)
        samples = PairSamples(source, config, sides[0], feed.seed, embeddings, pictures)
        super().__init__(
            samples, partial(collate_pairs, read_text=read_text), sides[1], config, feed.cut, device=feed.device,
            validation_samples=feed.validation_samples, preview_samples=feed.preview_samples,
        )  # fmt: skip
        self._wanted = None if embed_captions is None else self._captions(embed_captions)

    def validation(self) -> Sequence[PairBatch]:
        """With embeddings of the captions, where they can be made."""
        batches, wanted = super().validation(), self._wanted
        if wanted is None:
            return batches
        return [replace(batch, wanted=torch.stack([wanted[caption] for caption in batch.captions])) for batch in batches]

    def preview(self) -> PairBatch:
        """The same samples as every loader's."""
        learned = self.samples
        assert isinstance(learned, PairSamples)
        shown = PairSamples(learned.source, learned.config, learned.indices, learned.seed, learned.embeddings, pictures=True)
        return self.previewed(shown)

    def _captions(self, embed: Callable[[Sequence[str | None]], Tensor]) -> dict[str | None, Tensor]:
        """Those of validation, each with its vector, on the CPU."""
        picked = self.arranged(self.held_out[: self.validation_samples])
        told = list(dict.fromkeys(drawn_caption(captions_of(self.source, int(index)), None) for index in picked))
        made = [embed(told[first : first + EMBEDDED]).cpu() for first in range(0, len(told), EMBEDDED)]
        return dict(zip(told, torch.cat(made), strict=True)) if made else {}

    @staticmethod
    def _embedded(feed: Feed, embeddings: Embeddings, sides: tuple[Indices, Indices]) -> tuple[Indices, Indices]:
        """The samples of both sides that have an embedding."""
        keys = [feed.source.key(index) for index in range(len(feed.source))]
        missing = Missing.among(embeddings, keys)
        if not missing.reasons:
            return sides
        for reason, without in missing.by_reason().items():
            if len(without) > MOST_NAMED:
                feed.note(f"embeddings: without one, {reason}: {', '.join(without)}")
        missing.refuse(feed.config.corrupt_budget)
        feed.say(f"embeddings: {missing.told()}; left out")
        keep = np.array([key not in missing.reasons for key in keys], np.bool_)
        train, held_out = (side[keep[side]] for side in sides)
        if len(sides[0]) and not len(train):
            raise UserError(
                f"{missing.told()}. None is left to train on, for the others fall into the validation split: bring the "
                f"embeddings of these samples, or lower data.validation_fraction (now {feed.config.validation_fraction:g})"
            )
        return train, held_out


def collate_pairs(items: Sequence[PairItem], read_text: ReadText) -> PairBatch:
    """One batch with its faults."""
    keys, captions = tuple(item.key for item in items), tuple(item.caption for item in items)
    images = [item.image for item in items if item.image is not None]
    embeddings = [item.embedding for item in items if item.embedding is not None]
    return PairBatch(
        images=torch.from_numpy(np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))) if images else None,
        embeddings=torch.from_numpy(np.stack(embeddings)) if embeddings else None,
        text=read_text(captions, keys),
        valid=torch.tensor([item.readable for item in items]),
        positions=torch.tensor([item.position for item in items], dtype=torch.int64),
        keys=keys,
        captions=captions,
        faults=tuple(item.fault for item in items if item.fault),
    )
