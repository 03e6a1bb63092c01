"""What a tokenizer keeps of clips, and how steady frames are; on frames that belong to each clip, and on no others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tessera.batches import from_uint8
from tessera.evals.clip_nets import spread
from tessera.evals.copies import pixel_vectors
from tessera.evals.distances import Features
from tessera.media.clips import Frames
from tessera.nn.similarity import psnr, ssim

COPY_FRAMES = 4  # of a clip by which copies are found in pixels
SSIM_WINDOW = 11  # smaller pictures have no SSIM


def kept_of(real: Sequence[Frames], made: Sequence[Frames]) -> dict[str, float | None]:
    """PSNR in decibel of all pixels of a clip, `psnr_first` of its first frame alone, SSIM as a mean over its frames; means over
    clips."""
    rows = [_scores(*pair) for pair in zip(real, made, strict=True)]
    means = [float(np.mean(column)) for column in zip(*(row[:2] for row in rows), strict=True)]
    similar = [row[2] for row in rows if row[2] is not None]
    return {"psnr": means[0], "psnr_first": means[1], "ssim": float(np.mean(similar)) if similar else None}


def _scores(real: Frames, made: Frames) -> tuple[float, float, float | None]:
    x, y = (from_uint8(torch.from_numpy(np.ascontiguousarray(clip)).permute(0, 3, 1, 2)) for clip in (real, made))
    similar = float(ssim(x, y).mean()) if min(x.shape[2:]) >= SSIM_WINDOW else None
    return float(psnr(x[None], y[None])), float(psnr(x[:1], y[:1])), similar


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
