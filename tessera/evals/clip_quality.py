"""What a tokenizer keeps of clips, and how steady frames are; on frames that belong to each clip, and on no others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tessera.batches import from_uint8
from tessera.evals.clip_nets import spread
from tessera.evals.copies import pixel_vectors
from tessera.evals.distances import Features
from tessera.media.clips import Frames
from tessera.nn.similarity import decibel, ssim

COPY_FRAMES = 4  # of a clip by which copies are found in pixels
TOGETHER = 2**22  # numbers that are compared together: 341 frames of 64 px, 21 of 256
SSIM_WINDOW = 11  # smaller pictures have no SSIM


def kept_of(real: Sequence[Frames], made: Sequence[Frames], device: torch.device) -> dict[str, float | None]:
    """PSNR in decibel of all pixels of a clip, `psnr_first` of its first frame alone, SSIM as a mean over its frames; means over
    clips. Frames of one size are compared together, on the device."""
    alike: dict[tuple[int, ...], list[tuple[Frames, Frames]]] = {}
    for pair in zip(real, made, strict=True):
        alike.setdefault(pair[0].shape[1:], []).append(pair)
    scores = [_scores(pairs, device) for pairs in alike.values()]
    errors, similar = ([clip for group in groups for clip in group] for groups in zip(*scores, strict=True))
    found = {"psnr": [error.mean() for error in errors], "psnr_first": [error[0] for error in errors]}
    means = {name: float(decibel(torch.stack(values)).mean()) for name, values in found.items()}
    known = [clip.mean() for clip in similar if clip is not None]
    return {**means, "ssim": float(torch.stack(known).mean()) if known else None}


def _scores(pairs: Sequence[tuple[Frames, Frames]], device: torch.device) -> tuple[list[Tensor], list[Tensor] | list[None]]:
    """Of each clip the squared error and the similarity of its frames; None of frames that are too small."""
    lengths = [len(clip) for clip, _ in pairs]
    sides = [np.concatenate([pair[side] for pair in pairs]) for side in (0, 1)]
    step, small = max(1, TOGETHER // sides[0][0].size), min(sides[0].shape[1:3]) < SSIM_WINDOW
    errors, similar = list[Tensor](), list[Tensor]()
    for first in range(0, len(sides[0]), step):
        x, y = (from_uint8(torch.from_numpy(side[first : first + step]).to(device)).movedim(-1, 1) for side in sides)
        errors.append((x - y).square().flatten(1).mean(1).cpu())
        similar += [] if small else [ssim(x, y).cpu()]
    return list(torch.cat(errors).split(lengths)), [None] * len(pairs) if small else list(torch.cat(similar).split(lengths))


def still(clips: Sequence[Frames]) -> list[Frames]:
    """First frames that stand still: what a model without motion would show."""
    return [np.repeat(clip[:1], len(clip), axis=0) for clip in clips]


def steadiness(clips: Sequence[Frames]) -> dict[str, float | None]:
    """Means over pixels, frames, then clips, of pixels in [0, 1]: `flicker` |x[t-1] - 2 x[t] + x[t+1]|, of clips of three frames
    or more; `motion` |x[t+1] - x[t]|, of two or more. Even motion of smooth pictures flickers little, noise a lot."""
    pixels = (clip.astype(np.float32) / 255 for clip in clips)
    firsts = [np.diff(clip, axis=0) for clip in pixels]
    motion = [float(np.abs(change).mean()) for change in firsts if len(change)]
    flicker = [float(np.abs(np.diff(change, axis=0)).mean()) for change in firsts if len(change) > 1]
    return {"flicker": float(np.mean(flicker)) if flicker else None, "motion": float(np.mean(motion)) if motion else None}


def clip_vectors(clips: Sequence[Frames]) -> Features:
    """n clips -> n d: four frames of each, downscaled; a distance is the root mean squared difference of pixels."""
    frames = np.concatenate([spread(clip, COPY_FRAMES) for clip in clips])
    vectors = pixel_vectors(frames).reshape(len(clips), -1)
    return (vectors / np.sqrt(COPY_FRAMES)).astype(np.float32)
