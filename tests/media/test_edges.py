"""Outlines: against the same rule written pixel by pixel, and what they are of shapes that can be told by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera.media.edges import STEP, edges

SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])


def gradient(picture: Any, y: int, x: int) -> tuple[int, int, int]:
    """Strength, and the absolute differences along x and y, of the channel that is strongest."""
    height, width, channels = picture.shape
    rows, columns = (np.clip([at - 1, at, at + 1], 0, size - 1) for at, size in ((y, height), (x, width)))
    found = []
    for channel in range(channels):
        around = picture[np.ix_(rows, columns)][:, :, channel].astype(int)
        along, down = int((around * SOBEL).sum()), int((around * SOBEL.T).sum())
        found.append((along**2 + down**2, abs(along), abs(down)))
    return max(found, key=lambda each: each[0])


def traced(picture: Any) -> Any:
    """h w bool: where strokes are."""
    height, width = picture.shape[:2]
    strokes = np.zeros((height, width), bool)
    for y in range(height):
        for x in range(width):
            strength, along, down = gradient(picture, y, x)
            step = (0, 1) if along >= down else (1, 0)
            sides = [(y + sign * step[0], x + sign * step[1]) for sign in (-1, 1)]
            inside = [gradient(picture, *side)[0] for side in sides if 0 <= side[0] < height and 0 <= side[1] < width]
            strokes[y, x] = strength >= (4 * STEP) ** 2 and all(strength >= other for other in inside)
    return strokes


@pytest.mark.parametrize("channels", [1, 3])
def test_strokes_are_those_of_the_rule(channels: int) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (4, 9, 12, channels), dtype=np.uint8)
    frames[1] = frames[1] // 6  # few are strong enough
    frames[2] = frames[2, :, :1] // 2  # rows alike: ties of strength
    frames[3] = frames[3] // 128 * 255  # ties of direction
    drawn = edges(frames)
    assert (drawn.shape, drawn.dtype, set(np.unique(drawn))) == (frames.shape, np.uint8, {0, 255})
    for picture, sketch in zip(frames, drawn, strict=True):
        assert np.array_equal(sketch == 0, np.repeat(traced(picture)[:, :, None], channels, axis=2))
        assert np.array_equal(edges(picture[None, :, ::-1])[0], sketch[:, ::-1])


def test_a_border_between_flat_areas_is_a_line() -> None:
    """Also between colours that are equally bright; flat frames and slow changes are blank."""
    frames = np.full((1, 16, 16, 3), (200, 60, 0), np.uint8)
    frames[:, :, 8:] = (100, 110, 60)
    drawn = edges(frames)[0, :, :, 0]
    assert np.array_equal(np.flatnonzero((drawn == 0).all(axis=0)), [7, 8])
    assert (drawn == 0).sum() == 2 * 16
    ramp = np.broadcast_to(np.arange(0, 128, 8, dtype=np.uint8)[None, None, :, None], (1, 16, 16, 1))
    assert (edges(ramp) == 255).all()
    for difference, is_stroke in ((STEP - 1, False), (STEP, True)):
        frames = np.full((1, 8, 8, 1), 50, np.uint8)
        frames[:, 4:] += difference
        assert (edges(frames) == 0).any() == is_stroke
