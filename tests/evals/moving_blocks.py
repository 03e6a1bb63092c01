"""Clips that can be judged by eye: a coloured block that moves over a grey picture, with noise, and the words for it."""

from __future__ import annotations

import numpy as np

from tessera.evals import ClipSide
from tessera.media.clips import Frames

COLOURS = {"red": (220, 30, 30), "green": (0, 165, 60), "blue": (30, 60, 225)}
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SIDE, BLOCK = 16, 5


def block_clip(colour: str, move: str, length: int, rng: np.random.Generator) -> Frames:
    """length 16 16 3; the block starts anywhere and wraps around."""
    place, step = rng.integers(SIDE, size=2), np.array(MOVES[move]) * 2
    clip = np.full((length, SIDE, SIDE, 3), 128, np.float64)
    for time in range(length):
        rows, columns = (np.arange(BLOCK) + at for at in place + time * step)
        clip[time][np.ix_(rows % SIDE, columns % SIDE)] = COLOURS[colour]
    return np.clip(clip + rng.normal(0, 4, clip.shape), 0, 255).astype(np.uint8)


def blocks(num: int, seed: int, least: int = 4, most: int = 9) -> ClipSide:
    """So many, of lengths between the two."""
    rng = np.random.default_rng(seed)
    drawn = [(str(rng.choice(list(COLOURS))), str(rng.choice(list(MOVES))), int(rng.integers(least, most + 1))) for _ in range(num)]
    clips = tuple(block_clip(*facts, rng) for facts in drawn)
    return ClipSide(clips, tuple(f"a {colour} block moves {move}" for colour, move, _ in drawn))
