"""Handwritten digits: scikit-learn's 1,797 of 8 x 8 enter, the digits of some writers leave, and each can be drawn anywhere.

Fourteen writers filled in the same form one after another, so that a writer is a run of indices. Whoever is drawn in `train/`,
whoever is drawn in `heldout/` and whoever teaches the oracle's reader are different people. The clearest hands are drawn: those
whom readers of the others' digits misread least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tessera.config.errors import UserError

Floats = NDArray[np.float64]
Part = Literal["reader", "train", "heldout"]

SIDE = 8  # of a glyph as it is stored
STARTS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667)  # of each writer's form
NUM_GLYPHS = 1797
WRITERS: dict[Part, tuple[int, ...]] = {"reader": (0, 1, 3, 4, 5, 6, 8, 12, 13), "train": (2, 7, 11), "heldout": (9, 10)}
FAINT, FULL = 0.2, 0.65  # greys between the two are the edge of the ink


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Digits of some writers."""

    images: Floats  # n 8 8, in [0, 1]
    labels: NDArray[np.int64]  # n
    indices: NDArray[np.int64]  # n, in scikit-learn's order

    def of(self, digit: int) -> list[int]:
        """Indices of those that show a digit."""
        return [int(index) for index in self.indices[self.labels == digit]]


def load_glyphs(part: Part) -> Glyphs:
    """The digits of the writers of one part."""
    images, labels = all_glyphs()
    ends = (*STARTS[1:], NUM_GLYPHS)
    indices = np.concatenate([np.arange(STARTS[writer], ends[writer]) for writer in WRITERS[part]])
    return Glyphs(images[indices], labels[indices], indices)


@cache
def all_glyphs() -> tuple[Floats, NDArray[np.int64]]:
    """Images (n 8 8, in [0, 1]) and labels in scikit-learn's order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "the digits come with scikit-learn, which is not installed: pip install 'tessera-gen[eval]'; "
            "only making them needs it, not training or evaluating on them"
        ) from None
    images, labels = load_digits(return_X_y=True)
    if images.shape != (NUM_GLYPHS, SIDE * SIDE):
        raise UserError(
            f"scikit-learn has digits of shape {images.shape}, expected {(NUM_GLYPHS, SIDE * SIDE)}; use 1.5 or later"
        )
    return images.reshape(-1, SIDE, SIDE) / 16.0, labels.astype(np.int64)


def ink(glyph: Floats, x: Floats, y: Floats, height: float, pixels: int) -> Floats:
    """How much ink each pixel has, in [0, 1]: t pixels pixels, of a glyph (8 8) whose box of side `height` starts at (x, y) t.

    Lengths are in pixels. Interpolated by a cubic (Catmull and Rom 1974), so that parts of a pixel count, then made crisp.
    """
    rows, columns = (_cubic(start, height, pixels) for start in (y, x))  # t pixels 8
    return np.clip((rows @ glyph @ columns.transpose(0, 2, 1) - FAINT) / (FULL - FAINT), 0.0, 1.0)


def _cubic(start: Floats, length: float, pixels: int) -> Floats:
    """t -> t pixels 8: the weight of each row of a glyph in each pixel; nothing outside the box but the curve's end."""
    places = (np.arange(pixels) + 0.5 - start[:, None]) / length * SIDE - 0.5
    d = np.abs(places[:, :, None] - np.arange(SIDE))
    near, far = (1.5 * d - 2.5) * d * d + 1.0, ((-0.5 * d + 2.5) * d - 4.0) * d + 2.0
    return np.where(d < 1, near, np.where(d < 2, far, 0.0))
