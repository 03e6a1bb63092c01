"""Small clips and folders of them. Every frame says which it is: its pixels are a function of clip, frame and place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from tessera.media.clip_facts import ClipFacts

Frames = npt.NDArray[np.uint8]


def noise(seed: int, num_frames: int, height: int = 16, width: int = 16, channels: int = 3) -> Frames:
    """Frames of which no two are alike."""
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, channels), dtype=np.uint8)


def save_apng(path: Path, frames: Frames, pause_ms: int = 100) -> None:
    """Lossless; as a still picture where there is one frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [Image.fromarray(frame) for frame in frames]
    if len(pictures) == 1:
        pictures[0].save(path, format="PNG")
    else:
        pictures[0].save(path, format="PNG", save_all=True, append_images=pictures[1:], duration=pause_ms, disposal=0, blend=0)


def save_gif(path: Path, frames: Frames, pause_ms: int = 100) -> None:
    """Of at most 256 colours a frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [Image.fromarray(frame) for frame in frames]
    pictures[0].save(path, format="GIF", save_all=True, append_images=pictures[1:], duration=pause_ms)


def save_frames(folder: Path, frames: Frames, name: str = "frame_{:04d}.png", first: int = 1) -> None:
    """A folder of numbered pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames, start=first):
        Image.fromarray(frame).save(folder / name.format(number))


def facts_of(shown: list[float]) -> ClipFacts:
    """Of frames that are shown so many seconds each."""
    ends = np.cumsum(shown)
    times = np.concatenate([[0.0], ends[:-1]])
    return ClipFacts(len(shown), 8, 8, times, float(ends[-1]), "GIF", "GIF", "P", has_alpha=False)
