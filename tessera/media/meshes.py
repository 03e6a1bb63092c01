"""Meshes in memory: triangles in space, x right, y back, z up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Points: TypeAlias = npt.NDArray[np.float64]
Triangles: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Triangles in space: x right, y back, z up."""

    vertices: Points  # n 3 float64
    faces: Triangles  # m 3 int64, corners counter-clockwise seen from outside
