"""A very small cascade for tests, and pictures in three tars whose embeddings lie beside them: each is a function of its key."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.shard_makers import pack

WIDTH, PER_SHARD = 6, 10
KEYS = [f"{shard:05d}/{shard:05d}{number:04d}" for shard in range(3) for number in range(PER_SHARD)]
STEPS = 4
SETS = {
    "data.resolution": "16",
    "data.validation_fraction": "0.2",
    "data.flip": "true",
    "text": "{kind: bytes, length: 24, width: 16, depth: 1, heads: 2}",
    "embedder.batch_size": "7",
    "embedder.optim": "{lr: 1.0e-3, warmup_steps: 0, schedule: constant}",
    "embedder.loss.group": "8",  # ranks cut it
    "embedder.model": "{width: 8, widths: [8, 8]}",
    "prior.batch_size": "7",
    "prior.optim": "{lr: 1.0e-3, warmup_steps: 0, schedule: constant}",
    "prior.model": "{width: 16, depth: 1, heads: 2}",
    "base.batch_size": "7",
    "base.optim": "{lr: 1.0e-3, warmup_steps: 0, schedule: constant}",
    "base.model": "{widths: [8, 8], blocks: [1, 1], attention: [false, true], cross: [false, true], head_width: 8}",
    "upsampler1.batch_size": "7",
    "upsampler1.optim": "{lr: 1.0e-3, warmup_steps: 0, schedule: constant}",
    "upsampler1.crop": "16",
    "upsampler1.model": "{widths: [8, 8], blocks: [1, 1], attention: [false, false], cross: [false, false], head_width: 8}",
    "sample": "{steps: 2, chunk: 4, prior: {steps: 2}, upsampler: {steps: 2}}",
    "engine.device": "cpu",
    "engine.log_every_steps": "1",
    "engine.validate_every_steps": "2",
    "engine.preview_every_steps": "4",
    "engine.save_every_steps": "2",
}


def settings(changes: Mapping[str, str | int] | None = None) -> list[str]:
    """`KEY=VALUE` of a small cascade; a section replaces its parts."""
    own = {name: str(value) for name, value in (changes or {}).items()}
    kept = {name: value for name, value in SETS.items() if not name.startswith(tuple(f"{section}." for section in own))}
    return [f"{name}={value}" for name, value in (kept | own).items()]


def arguments(data: Path, run: Path, changes: Mapping[str, str | int] | None = None) -> list[str]:
    """`train dalle2` of all stages."""
    command = ["train", "dalle2", "--preset", "tiny", "--data", str(data), "--run", str(run), "--steps", str(STEPS)]
    return [*command, "--set", *settings(changes)]


# --- pictures with embeddings


def vector(key: str) -> np.ndarray:
    """Of length 1, and a function of the key alone."""
    drawn = np.random.default_rng(int(key.rpartition("/")[2])).normal(size=WIDTH)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def coloured(key: str) -> bytes:
    """A picture of one colour, of which the key follows, too."""
    number = KEYS.index(key)
    stream = io.BytesIO()
    Image.new("RGB", (32, 32), (8 * number, 250 - 8 * number, 100)).save(stream, "PNG")
    return stream.getvalue()


def saved(array: np.ndarray) -> bytes:
    """As a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_tars(folder: Path, array_of: Callable[[str], bytes | None] | None = None) -> Path:
    """Three tars; in them, if asked, the array of each key, or none where there is none."""
    for shard in range(3):
        members = {}
        for key in KEYS[shard * PER_SHARD : (shard + 1) * PER_SHARD]:
            name = key.rpartition("/")[2]
            members[f"{name}.png"], members[f"{name}.txt"] = coloured(key), f"colour {KEYS.index(key)}".encode()
            if array_of is not None and (array := array_of(key)) is not None:
                members[f"{name}.img_emb.npy"] = array
        pack(folder / f"{shard:05d}.tar", members)
    return folder


def write_rows(folder: Path) -> Path:
    """One array for each tar."""
    folder.mkdir()
    for shard in range(3):
        np.save(folder / f"img_emb_{shard:04d}.npy", np.stack([vector(key) for key in KEYS[shard * PER_SHARD :][:PER_SHARD]]))
    return folder
