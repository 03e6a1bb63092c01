"""Webdataset tars of small pictures, for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)


def encoded(number: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(number)).save(stream, kind)
    return stream.getvalue()


def pack(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path
