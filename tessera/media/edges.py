"""Frames in, their outlines out: black strokes on white, as somebody might trace them; by NumPy alone, so equal everywhere."""

from __future__ import annotations

import numpy as np

from tessera.media.clips import Frames

STEP = 32  # of 255: a border between flat areas that differ by so much, in any channel, is a stroke


def edges(frames: Frames) -> Frames:
    """t h w c -> the same shape: 0 on strokes, 255 elsewhere. A stroke is where the Sobel gradient of the channel that changes
    most is as strong as that of a `STEP`, and no weaker than at its two neighbours across the stroke. Sharp borders give two
    pixels, blurred ones one. A mirrored frame has the mirrored strokes, and the border of the picture is none."""
    padded = np.pad(frames.astype(np.int32), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    down = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    along = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]
    x, y = down[:, :, 2:] - down[:, :, :-2], along[:, 2:] - along[:, :-2]  # 4 times the difference of flat areas
    strength = x**2 + y**2
    most = strength.argmax(axis=3)[..., None]
    x, y, strength = (np.take_along_axis(values, most, axis=3)[..., 0] for values in (abs(x), abs(y), strength))
    around = np.pad(strength, ((0, 0), (1, 1), (1, 1)))
    beside = np.maximum(around[:, 1:-1, :-2], around[:, 1:-1, 2:])
    above = np.maximum(around[:, :-2, 1:-1], around[:, 2:, 1:-1])
    strokes = (strength >= (4 * STEP) ** 2) & (strength >= np.where(x >= y, beside, above))
    return np.repeat(np.where(strokes, 0, 255).astype(np.uint8)[..., None], frames.shape[3], axis=3)
