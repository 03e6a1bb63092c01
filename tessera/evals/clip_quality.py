"""What a tokenizer keeps of clips, and how steady frames are; on frames that belong to each clip, and on no others."""

from __future__ import annotations

import math
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
TOGETHER = 2**22  # numbers that are compared together: 20 clips of 17 frames of 64 px, or one that is larger
SSIM_WINDOW = 11  # smaller pictures have no SSIM


def kept_of(real: Sequence[Frames], made: Sequence[Frames], device: torch.device) -> dict[str, float | None]:
    """PSNR in decibel of all pixels of a clip, `psnr_first` of its first frame alone, SSIM as a mean over its frames; means over
    clips. Clips of one shape are compared together, on the device."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, clip in enumerate(real):
        alike.setdefault(clip.shape, []).append(row)
    sizes = {shape: max(1, TOGETHER // math.prod(shape)) for shape in alike}
    parts = [rows[first : first + sizes[shape]] for shape, rows in alike.items() for first in range(0, len(rows), sizes[shape])]
    scores = [_scores(np.stack([real[row] for row in part]), np.stack([made[row] for row in part]), device) for part in parts]
    means = [float(np.mean(np.concatenate([score[column] for score in scores]))) for column in (0, 1)]
    similar = [score[2] for score in scores if score[2] is not None]
    return {"psnr": means[0], "psnr_first": means[1], "ssim": float(np.mean(np.concatenate(similar))) if similar else None}


def _scores(real: Frames, made: Frames, device: torch.device) -> tuple[Features, Features, Features | None]:
    """Of clips b t h w 3, one each."""
    x, y = (from_uint8(torch.from_numpy(clips).to(device)).movedim(-1, -3) for clips in (real, made))  # b t 3 h w
    whole, first = psnr(x, y), psnr(x[:, 0], y[:, 0])
    similar = None
    if min(x.shape[-2:]) >= SSIM_WINDOW:
        similar = ssim(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1).cpu().numpy()
    return whole.cpu().numpy(), first.cpu().numpy(), similar


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
