"""Small meshes and folders of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tessera.media.mesh_files import encode_obj
from tessera.media.meshes import Mesh


def fan(num_faces: int, height: float = 1.0, twist: float = 0.0) -> Mesh:
    """A tent over a polygon: so many triangles around one tip."""
    angles = np.linspace(0, 2 * np.pi, num_faces, endpoint=False) + twist
    rim = np.stack([np.cos(angles), np.sin(angles), np.zeros(num_faces)], axis=1)
    around = np.arange(num_faces)
    faces = np.stack([around, (around + 1) % num_faces, np.full(num_faces, num_faces)], axis=1)
    return Mesh(np.concatenate([rim, [[0, 0, height]]]), faces)


def write_fans(folder: Path, numbers: list[int]) -> None:
    """mesh-000.obj and so on, with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, number in enumerate(numbers):
        (folder / f"mesh-{place:03d}.obj").write_bytes(encode_obj(fan(number, height=1 + place / 7)))
        (folder / f"mesh-{place:03d}.txt").write_text(f"a tent of {number} sides\na {number}-gon\n")
