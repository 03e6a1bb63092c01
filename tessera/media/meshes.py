"""Placeholder for the reader of mesh files, replaced on merging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]
Triangles = npt.NDArray[np.int64]
MESH_SUFFIXES = (".obj", ".glb", ".gltf", ".ply", ".stl", ".off")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Triangles in space: x right, y back, z up."""

    vertices: Points  # n 3 float64
    faces: Triangles  # m 3 int64, corners counter-clockwise seen from outside
