"""Clips of a bar that moves, and how to train on them in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tessera.media.clip_files import encode_gif
from tessera.media.clips import Clip, Frames

CLIPS = {
    "engine.device": "cpu",
    "engine.log_every_steps": "1",
    "engine.validate_every_steps": "3",
    "engine.preview_every_steps": "3",
    "engine.preview_samples": "2",
    "engine.save_every_steps": "3",
    "data.resolution": "16",
    "data.frames": "9",
    "data.validation_fraction": "0.2",
    "text": "{kind: bytes, length: 24, width: 16, depth: 1, heads: 2}",
    "tokenizer.batch_size": "4",
    "tokenizer.model": "{widths: [8, 8, 8], blocks: [0, 0, 0], time_downsamples: 1}",
    "tokenizer.optim": "{lr: 1.0e-2, warmup_steps: 0}",
    "base.batch_size": "4",
    "base.optim": "{lr: 3.0e-2, warmup_steps: 0}",
    "base.ema_decay": "0.5",
    "sample.chunk": "2",
}


def bar(place: int, frames: int, step: int) -> Frames:
    """A white bar that moves."""
    clip = np.zeros((frames, 16, 16, 3), np.uint8)
    for index in range(frames):
        clip[index, :, (place + step * index) % 16] = 255
    return clip


def write_bars(folder: Path) -> None:
    """Sixteen of them with captions, some shorter."""
    folder.mkdir()
    for index in range(16):
        words, step = (("left", -1), ("right", 1))[index % 2]
        (folder / f"{index}.gif").write_bytes(encode_gif(Clip(bar(index, 9 if index % 3 else 4, step), 10.0)))
        (folder / f"{index}.txt").write_text(words)


def same(first: list[Clip], second: list[Clip]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(a.frames, b.frames) and a.fps == b.fps for a, b in zip(first, second, strict=True)
    )
