"""Frames that a request gives: which of them are kept, and as which latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.batches import num_frames, num_latent
from tessera.config import UserError
from tessera.contracts import Chunk, Scene
from tessera.recipes.generator import encode_exactly
from tessera.tokenizers.video.model import VideoTokenizer


def given_latents(chunk: Chunk, tokenizer: VideoTokenizer) -> Tensor | None:
    """Latents of given frames, b k h w; one more than the largest id where none are given. All rows have the same."""
    if chunk.frames is None or chunk.given is None:
        return None
    ids, known = latents_of(chunk.frames[:1], chunk.given, tokenizer, "keyframe")
    ids = ids.masked_fill(~known.view(1, -1, *[1] * (ids.ndim - 2)), tokenizer.vocab_size)
    return ids.expand(len(chunk.seeds), *ids.shape[1:])


def latents_of(frames: Tensor, given: Tensor, tokenizer: VideoTokenizer, name: str) -> tuple[Tensor, Tensor]:
    """Of frames b c t h w, some of them given (t bool), the latents up to the last one that is there, b k h w, and which are
    there, k bool: those whose last frame is given. `name` is what messages call a given frame."""
    stride = tokenizer.time_stride
    refuse_between_places(given, stride, name)
    ends = (torch.arange(num_latent(len(given), stride)) * stride).clamp(max=len(given) - 1)
    known = kept_frames(given, stride)[ends]
    known = known[: int(known.nonzero().max()) + 1]
    return encode_exactly(tokenizer, hold(frames, given, num_frames(len(known), stride))), known


def kept_frames(given: Tensor, time_stride: int) -> Tensor:
    """t bool: given frames that are kept as they are: those of latents whose last frame is given."""
    ends = torch.arange(len(given), device=given.device).add(time_stride - 1) // time_stride * time_stride
    return given & given[ends.clamp(max=len(given) - 1)]


def refuse_between_places(given: Tensor, time_stride: int, name: str = "keyframe") -> None:
    """A frame in the middle of a latent cannot be given alone; the last ones of a beginning are left to the generator."""
    places = set(given.nonzero().flatten().tolist())
    beginning = next(place for place in range(len(given) + 1) if place not in places)
    kept = set(kept_frames(given, time_stride).nonzero().flatten().tolist())
    if lost := sorted(place for place in places - kept if place >= beginning):
        below = lost[0] // time_stride * time_stride
        raise UserError(
            f"a {name} at frame {lost[0]}: a token holds {time_stride} frames, so single ones can be given at multiples of "
            f"{time_stride}; use {below} or {below + time_stride}"
        )
    if not kept:
        raise UserError(f"none of the given frames {sorted(places)} can be kept; give frame 0, or multiples of {time_stride}")


def refuse_beyond_cut(given: Tensor, take: Sequence[Scene]) -> None:
    """Given frames belong to the scenes before the first hard cut."""
    last, frames = int(given.nonzero().max()), sum(scene.frames for scene in take)
    if last >= frames:
        raise UserError(f"frame {last} is given, and a hard cut comes before it: frames can be given up to {frames - 1}")


def hold(frames: Tensor, given: Tensor, length: int) -> Tensor:
    """b c t h w, the first `length` frames, each that is not given replaced by the next given one, or by the last."""
    places = torch.arange(len(given), device=frames.device)
    after = torch.where(given, places, len(given)).flip(0).cummin(0).values.flip(0)
    before = torch.where(given, places, -1).cummax(0).values
    source = torch.where(after < len(given), after, before)
    return frames.index_select(2, source[torch.arange(length, device=frames.device).clamp(max=len(given) - 1)])
