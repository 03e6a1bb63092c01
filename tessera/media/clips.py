"""Clips: several pictures of one size in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Frames: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames, t h w c, and how many of them a second shows."""

    frames: Frames
    fps: float
