"""Batches of clips: how picked frames are cut and stacked, by seed, epoch and key. A worker holds one clip at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.utils.data import Dataset

from tessera.batches import VideoBatch
from tessera.config import UserError, VideoDataConfig
from tessera.data.clip_sources import UNREADABLE, Sketched, StoredClip
from tessera.data.draws import drawn_caption, mirrors, view_draws
from tessera.data.loader import Feed, SampleLoader, frame
from tessera.data.mixing import MixedSamples
from tessera.data.order import Cut, Indices
from tessera.data.picking import pick_frames, single_frame
from tessera.data.prepare import Viewed
from tessera.data.sources import Source, captions_of, split_indices
from tessera.media.clips import ClipFacts, Frames
from tessera.media.edges import edges
from tessera.media.framing import filled, letterbox

# --- one clip


def framed(frames: Frames, config: VideoDataConfig, captions: Sequence[str], draw: int | None) -> Frames:
    """All frames of a clip cut alike: one draw decides the square and the mirror."""
    if config.fit == "crop":
        return np.stack([frame(picture, config, captions, draw) for picture in frames])
    boxed = np.stack([letterbox(picture, config.resolution, config.background) for picture in frames])
    return boxed[:, :, ::-1] if mirrors(config.flip, captions, draw) else boxed


def cut_clip(clip: StoredClip, pick: Callable[[ClipFacts], list[int]], cut: Callable[[Frames], Frames]) -> Frames:
    """The picked frames, cut; one that comes several times is decoded and cut once."""
    wanted: list[int] = []

    def once(facts: ClipFacts) -> list[int]:
        wanted[:] = pick(facts)
        return sorted(set(wanted))

    frames = cut(clip.read(once).frames)
    return frames[np.searchsorted(np.unique(wanted), wanted)]


@dataclass(frozen=True, slots=True)
class ClipItem:
    """One prepared clip on its way into a batch."""

    key: str
    caption: str | None
    position: int
    frames: Frames  # t h w c, as many as it has; a black one where there is none
    readable: bool = True
    fault: str = ""  # path and reason of the sample that belongs here, where it could not be read


def prepare_clip(
    source: Source, config: VideoDataConfig, index: int, position: int, draw: int | None = None, *, single: bool = False
) -> ClipItem:
    """Reads and cuts one clip, or any single frame of it; without a draw it is the middle of the clip and of its frames."""
    captions = captions_of(source, index)
    key, caption = source.key(index), drawn_caption(captions, draw)

    def pick(facts: ClipFacts) -> list[int]:
        return single_frame(facts, draw) if single and draw is not None else pick_frames(facts, config, draw)

    try:
        frames = cut_clip(source.read(index), pick, lambda frames: framed(frames, config, captions, draw))
    except UNREADABLE as error:
        return ClipItem(key, caption, position, _blank(config), readable=False, fault=_fault(key, error))
    return ClipItem(key, caption, position, frames)


def _blank(config: VideoDataConfig) -> Frames:
    return np.zeros((1, config.resolution, config.resolution, config.channels), np.uint8)


def _fault(key: str, error: Exception) -> str:
    return f"{key}: {error}" if isinstance(error, OSError) else str(error)


# --- batches


def collate_clips(items: Sequence[ClipItem], num_frames: int) -> VideoBatch:
    """One batch with its faults, every clip filled up to one number of frames."""
    frames = np.stack([filled(item.frames, num_frames).transpose(3, 0, 1, 2) for item in items])
    return VideoBatch(
        frames=torch.from_numpy(frames),
        lengths=torch.tensor([len(item.frames) for item in items]),
        valid=torch.tensor([item.readable for item in items]),
        positions=torch.tensor([item.position for item in items]),
        keys=tuple(item.key for item in items),
        captions=tuple(item.caption for item in items),
        faults=tuple(item.fault for item in items if item.fault),
    )


class PreparedClips(MixedSamples[ClipItem]):
    """Clips, read and cut; of a position that is a picture any one frame."""

    def __init__(self, source: Source, config: VideoDataConfig, indices: Indices, seed: int) -> None:
        super().__init__(source, indices, seed, config.image_share)
        self.config = config

    def item(self, index: int, position: int, draw: int | None) -> ClipItem:
        """One clip."""
        return prepare_clip(self.source, self.config, index, position, draw, single=self.single(position, draw))


class ClipLoader(SampleLoader[ClipItem, VideoBatch]):
    """Batches of clips."""

    def __init__(
        self, source: Source, config: VideoDataConfig, cut: Cut, *, seed: int, device: torch.device,
        validation_samples: int, preview_samples: int,
    ) -> None:  # fmt: skip
        train, held_out = split_indices(source, config.validation_fraction)
        super().__init__(
            PreparedClips(source, config, train, seed), partial(collate_clips, num_frames=config.frames), held_out, config, cut,
            device=device, validation_samples=validation_samples, preview_samples=preview_samples,
        )  # fmt: skip

    @classmethod
    def of(cls, feed: Feed) -> ClipLoader:
        """For a stage that learns from clips."""
        return cls(
            feed.source, feed.config, feed.cut, seed=feed.seed, device=feed.device,
            validation_samples=feed.validation_samples, preview_samples=feed.preview_samples,
        )  # fmt: skip


# --- views, for the token cache


class ClipViews(Dataset[Viewed]):
    """Sample -> its views: the first is the middle of clip and frames (or the beginning), as in validation; the others are drawn
    by seed, view and key. Sketches are seen as their clips are."""

    def __init__(self, source: Source, config: VideoDataConfig, views: int, seed: int) -> None:
        if config.sketch == "files" and not isinstance(source, Sketched):
            raise UserError(f"data.sketch=files, and a {type(source).__name__} has no sketches; expected a method sketch(index)")
        self.source, self.config, self.views, self.seed = source, config, views, seed

    def __getitem__(self, index: int) -> Viewed:
        """Windows that share many frames are read at once."""
        key = self.source.key(index)
        draws = view_draws(key, self.views, self.seed)
        try:
            clip = self.source.read(index)
            facts = clip.facts()
            picks = [pick_frames(facts, self.config, draw) for draw in draws]
            cut = list(self._views(clip, index, picks, draws))
            sketches = self._sketches(index, picks, draws, cut)
        except UNREADABLE as error:
            nothing = [_blank(self.config)] * self.views
            return self._viewed(key, nothing, None if self.config.sketch == "none" else nothing, _fault(key, error))
        return self._viewed(key, cut, sketches)

    def _viewed(self, key: str, cut: Sequence[Frames], sketches: Sequence[Frames] | None, fault: str = "") -> Viewed:
        pictures = np.stack([filled(frames if len(frames) else _blank(self.config), self.config.frames) for frames in cut])
        sketch = None if sketches is None else self._viewed(key, sketches, None)
        return Viewed(key, pictures, fault, np.array([len(frames) for frames in cut], np.int64), sketch)

    def _sketches(
        self, index: int, picks: Sequence[list[int]], draws: Sequence[int | None], cut: Sequence[Frames]
    ) -> list[Frames] | None:
        """Of each view the first frames, as many as the sketch has."""
        if self.config.sketch == "none":
            return None
        if self.config.sketch == "edges":
            return [edges(frames) for frames in cut]
        assert isinstance(self.source, Sketched)
        sketch = self.source.sketch(index)
        if sketch is None:
            return [_blank(self.config)[:0]] * self.views
        count = sketch.facts().num_frames
        return list(self._views(sketch, index, [[place for place in picked if place < count] for picked in picks], draws))

    def _views(
        self, clip: StoredClip, index: int, picks: Sequence[list[int]], draws: Sequence[int | None]
    ) -> Iterator[Frames]:  # fmt: skip
        captions = captions_of(self.source, index)
        every = sorted(set(itertools.chain.from_iterable(picks)))
        together = _exactly(clip, every) if 0 < len(every) <= 2 * self.config.frames else None  # bounded memory
        for picked, draw in zip(picks, draws, strict=True):
            used = sorted(set(picked))
            if not used:
                yield _blank(self.config)[:0]
                continue
            stored = _exactly(clip, used) if together is None else together[np.searchsorted(every, used)]
            yield framed(stored, self.config, captions, draw)[np.searchsorted(used, picked)]


def _exactly(clip: StoredClip, wanted: list[int]) -> Frames:
    return clip.read(lambda _: wanted).frames
