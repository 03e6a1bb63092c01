"""Meshes in memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]
Triangles = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Triangles in space: x right, y back, z up."""

    vertices: Points  # n 3
    faces: Triangles  # m 3, corners counter-clockwise seen from outside
