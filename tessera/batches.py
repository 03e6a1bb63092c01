"""What travels from the loader to a loss: typed batches, one class per modality.

Pixels are uint8 on the host and float in [-1, 1] on the device: `to` moves first and converts there, so that a quarter
of the bytes cross the bus. Axis letters: b batch, c channels, h w picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Batch(Protocol):
    """What the engine needs to know of any batch; everything else is between the loader and the loss."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The samples' names, for messages."""

    @property
    def positions(self) -> Tensor:
        """b int64 on the host: place in the endless stream of samples; noise is a function of it."""

    @property
    def faults(self) -> tuple[str, ...]:
        """A message for every sample that could not be read: another one is in its place, or it has no weight."""

    def to(self, device: torch.device) -> Self:
        """The same batch on a device, ready for a loss."""

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory, so that `to` need not wait."""


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Pictures of one size, with their captions."""

    images: Tensor  # b c h w: uint8 on the host, float in [-1, 1] once moved
    valid: Tensor  # b bool: False where a sample only fills up the last batch of a validation pass, or could not be read
    positions: Tensor  # b int64, stays on the host
    keys: tuple[str, ...]
    captions: tuple[str | None, ...]
    faults: tuple[str, ...] = ()  # path and reason of each sample that could not be read

    def to(self, device: torch.device) -> ImageBatch:
        """Moves without waiting and turns uint8 into [-1, 1]."""
        images = self.images.to(device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = from_uint8(images)
        return replace(self, images=images, valid=self.valid.to(device, non_blocking=True))

    def pin_memory(self) -> ImageBatch:
        """Called by the loader's pinning thread."""
        return replace(self, images=self.images.pin_memory(), valid=self.valid.pin_memory())

    @classmethod
    def stack(
        cls, images: Sequence[Tensor], keys: Sequence[str], captions: Sequence[str | None], positions: Sequence[int]
    ) -> ImageBatch:
        """One batch from single pictures (c h w, uint8)."""
        return cls(
            images=torch.stack(list(images)),
            valid=torch.ones(len(images), dtype=torch.bool),
            positions=torch.tensor(list(positions), dtype=torch.int64),
            keys=tuple(keys),
            captions=tuple(captions),
        )


@dataclass(frozen=True, slots=True)
class VideoBatch:
    """Clips of one size, filled up to one number of frames, with their captions. A picture is a clip of one frame."""

    frames: Tensor  # b c t h w: uint8 on the host, float in [-1, 1] once moved; behind a clip's end its last frame again
    lengths: Tensor  # b int64: frames that belong to each clip, 1 or more; what lies behind them counts nowhere
    valid: Tensor  # b bool: False where a sample only fills up the last batch of a validation pass, or could not be read
    positions: Tensor  # b int64, stays on the host
    keys: tuple[str, ...]
    captions: tuple[str | None, ...]
    faults: tuple[str, ...] = ()  # path and reason of each sample that could not be read

    @property
    def mask(self) -> Tensor:
        """b t bool: the frames that belong to each clip."""
        return torch.arange(self.frames.shape[2], device=self.lengths.device) < self.lengths[:, None]

    def to(self, device: torch.device) -> VideoBatch:
        """Moves without waiting and turns uint8 into [-1, 1]."""
        frames, lengths, valid = (part.to(device, non_blocking=True) for part in (self.frames, self.lengths, self.valid))
        return replace(self, frames=from_uint8(frames) if frames.dtype == torch.uint8 else frames, lengths=lengths, valid=valid)

    def pin_memory(self) -> VideoBatch:
        """Called by the loader's pinning thread."""
        frames, lengths, valid = (part.pin_memory() for part in (self.frames, self.lengths, self.valid))
        return replace(self, frames=frames, lengths=lengths, valid=valid)


@dataclass(frozen=True, slots=True)
class Text:
    """Captions on their way to an encoder that the stage trains."""

    ids: Tensor  # b m int64, 0 behind a caption's end

    @property
    def mask(self) -> Tensor:
        """b m bool: what belongs to the caption."""
        return self.ids > 0

    def to(self, device: torch.device) -> Text:
        """Moves without waiting."""
        return Text(self.ids.to(device, non_blocking=True))

    def pin_memory(self) -> Text:
        """Called by the loader's pinning thread."""
        return Text(self.ids.pin_memory())


@dataclass(frozen=True, slots=True)
class TextStates:
    """Encoded captions: what every encoder puts out, and every generator takes."""

    states: Tensor  # b m c
    mask: Tensor  # b m bool: which states belong to the caption; none of an empty one
    pooled: Tensor  # b c; 0 of an empty one

    @classmethod
    def none(cls, num: int, width: int) -> TextStates:
        """No captions: one state each that nothing sees."""
        return cls(torch.zeros(num, 1, width), torch.zeros(num, 1, dtype=torch.bool), torch.zeros(num, width))

    def without(self, dropped: Tensor) -> TextStates:
        """The same with some captions (b bool) taken away, as if they were empty."""
        return replace(self, mask=self.mask & ~dropped[:, None], pooled=self.pooled * ~dropped[:, None])

    def picked(self, rows: Tensor) -> TextStates:
        """Some of them, by number."""
        return TextStates(self.states[rows], self.mask[rows], self.pooled[rows])

    def joined(self, other: TextStates) -> TextStates:
        """One after the other, as one batch; the shorter is filled up with states that nothing sees."""
        length = max(self.mask.shape[1], other.mask.shape[1])
        first, second = self.lengthened(length), other.lengthened(length)
        parts = ((getattr(first, name), getattr(second, name)) for name in ("states", "mask", "pooled"))
        return TextStates(*(torch.cat(part) for part in parts))

    def lengthened(self, length: int) -> TextStates:
        """With states at its end that nothing sees."""
        more = length - self.mask.shape[1]
        pad = torch.nn.functional.pad
        return TextStates(pad(self.states, (0, 0, 0, more)), pad(self.mask, (0, more)), self.pooled)

    def to(self, device: torch.device) -> TextStates:
        """Moves without waiting; states travel in the type they are stored in, and become fp32."""
        states, mask, pooled = (part.to(device, non_blocking=True) for part in (self.states, self.mask, self.pooled))
        return TextStates(states.float(), mask, pooled.float())

    def pin_memory(self) -> TextStates:
        """Called by the loader's pinning thread."""
        return TextStates(self.states.pin_memory(), self.mask.pin_memory(), self.pooled.pin_memory())


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Captions with pictures of one size, with embeddings of pictures, or with both."""

    images: Tensor | None  # b c h w: uint8 on the host, float in [-1, 1] once moved
    embeddings: Tensor | None  # b e, as they were stored
    text: Text | TextStates  # for an encoder that the stage trains, or from a frozen one
    valid: Tensor  # b bool: False where a sample only fills up the last batch of a validation pass, or could not be read
    positions: Tensor  # b int64, stays on the host
    keys: tuple[str, ...]
    captions: tuple[str | None, ...]
    faults: tuple[str, ...] = ()
    wanted: Tensor | None = None  # b e, in validation alone: embeddings of the captions, where a frozen model makes those, too

    def to(self, device: torch.device) -> PairBatch:
        """Moves without waiting and turns uint8 into [-1, 1]."""
        images, embeddings, wanted = (
            None if part is None else part.to(device, non_blocking=True) for part in (self.images, self.embeddings, self.wanted)
        )
        if images is not None and images.dtype == torch.uint8:
            images = from_uint8(images)
        valid = self.valid.to(device, non_blocking=True)
        return replace(self, images=images, embeddings=embeddings, wanted=wanted, text=self.text.to(device), valid=valid)

    def pin_memory(self) -> PairBatch:
        """Called by the loader's pinning thread."""
        images, embeddings = (None if part is None else part.pin_memory() for part in (self.images, self.embeddings))
        valid = self.valid.pin_memory()
        return replace(self, images=images, embeddings=embeddings, text=self.text.pin_memory(), valid=valid)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Token grids of one shape, with their captions."""

    ids: Tensor  # b ... int64: h w of a picture, t h w of a clip
    text: Text | TextStates  # for an encoder that the stage trains, or from a frozen one
    valid: Tensor  # b bool: False where a sample only fills up the last batch of a validation pass
    positions: Tensor  # b int64, stays on the host
    keys: tuple[str, ...]
    captions: tuple[str | None, ...]
    low: Tensor | None = None  # b ... int64: the same samples on a coarser grid, for super-resolution
    lengths: Tensor | None = None  # b int64: how far along the first axis each sample reaches; None: all of them to its end
    sketch: Tensor | None = None  # b t h w int64: the clips' sketches, by the same tokenizer; behind their ends anything
    sketch_lengths: Tensor | None = None  # b int64 with `sketch`: how many latent frames of it are there; 0: it has none
    faults: tuple[str, ...] = ()

    def to(self, device: torch.device) -> TokenBatch:
        """Moves without waiting; ids travel in the type they are stored in."""
        ids, valid = (part.to(device, non_blocking=True) for part in (self.ids, self.valid))
        others = self._others(lambda part: part.to(device, non_blocking=True).long())
        return replace(self, ids=ids.long(), text=self.text.to(device), valid=valid, **others)

    def pin_memory(self) -> TokenBatch:
        """Called by the loader's pinning thread."""
        ids, valid = self.ids.pin_memory(), self.valid.pin_memory()
        return replace(self, ids=ids, text=self.text.pin_memory(), valid=valid, **self._others(Tensor.pin_memory))

    def _others(self, move: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("low", "lengths", "sketch", "sketch_lengths")}
        return {name: None if part is None else move(part) for name, part in found.items()}


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Groups of tokens one after another, as many as each sample has, with captions."""

    ids: Tensor  # b n t int64: t tokens a group; 0 behind a sample's end
    lengths: Tensor  # b int64: groups of each sample
    text: Text | TextStates
    valid: Tensor  # b bool: False where a sample only fills up the last batch of a validation pass
    positions: Tensor  # b int64, stays on the host
    keys: tuple[str, ...]
    captions: tuple[str | None, ...]
    faults: tuple[str, ...] = ()

    def to(self, device: torch.device) -> SequenceBatch:
        """Moves without waiting; ids travel in the type they are stored in."""
        ids, lengths, valid = (part.to(device, non_blocking=True) for part in (self.ids, self.lengths, self.valid))
        return replace(self, ids=ids.long(), lengths=lengths, text=self.text.to(device), valid=valid)

    def pin_memory(self) -> SequenceBatch:
        """Called by the loader's pinning thread."""
        ids, lengths, valid = (part.pin_memory() for part in (self.ids, self.lengths, self.valid))
        return replace(self, ids=ids, lengths=lengths, text=self.text.pin_memory(), valid=valid)


@dataclass(frozen=True, slots=True)
class MeshBatch:
    """Quantised meshes, padded to one number of faces, with their captions."""

    corners: Tensor  # b f c 3 int16 on the host, int64 on the device: faces x corners x bins of (z, y, x); 0 behind a mesh's end
    num_faces: Tensor  # b int64
    text: Text | TextStates  # for an encoder that the stage trains, or from a frozen one
    valid: Tensor  # b bool: False where a sample only fills up the last batch of a validation pass, or could not be read
    positions: Tensor  # b int64, stays on the host
    keys: tuple[str, ...]
    captions: tuple[str | None, ...]
    faults: tuple[str, ...] = ()

    def to(self, device: torch.device) -> MeshBatch:
        """Moves without waiting; bins travel in the type they are stored in."""
        corners = self.corners.to(device, non_blocking=True).long()
        num_faces, valid = (part.to(device, non_blocking=True) for part in (self.num_faces, self.valid))
        return replace(self, corners=corners, num_faces=num_faces, text=self.text.to(device), valid=valid)

    def pin_memory(self) -> MeshBatch:
        """Called by the loader's pinning thread."""
        corners, num_faces, valid = (part.pin_memory() for part in (self.corners, self.num_faces, self.valid))
        return replace(self, corners=corners, num_faces=num_faces, text=self.text.pin_memory(), valid=valid)


ReadText = Callable[[Sequence[str | None], Sequence[str]], Text | TextStates]
"""Captions and sample keys of a batch -> what its `text` is. Runs in the loader's processes, so it must be picklable."""


Count = TypeVar("Count", int, Tensor, npt.NDArray[np.int64])


def num_latent(frames: Count, time_stride: int) -> Count:
    """Steps of a clip's token grid that so many frames reach, 1 + ceil((L - 1) / s): the first holds the first frame alone."""
    return 1 + (frames + time_stride - 2) // time_stride


def num_whole(frames: Count, time_stride: int) -> Count:
    """Steps of which all frames are among the first so many, 1 + floor((L - 1) / s); 0 of none."""
    return 1 + (frames - 1) // time_stride


def num_frames(latents: Count, time_stride: int) -> Count:
    """Frames of so many steps, 1 + s (k - 1)."""
    return 1 + time_stride * (latents - 1)


def from_uint8(images: Tensor) -> Tensor:
    """Bytes to floats in [-1, 1]: the way in."""
    return images.float().div_(127.5).sub_(1)


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] floats to bytes, clamped and rounded: the way out."""
    return images.float().clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
