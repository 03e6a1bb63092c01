"""Clips that can be judged by eye: a coloured block that moves over a picture that is brighter above, and the words for it."""

from __future__ import annotations

import numpy as np

from tessera.evals import ClipSide
from tessera.media.clips import Frames

COLOURS = {"red": (220, 30, 30), "green": (0, 165, 60), "blue": (30, 60, 225)}
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SIDE, BLOCK = 16, 5


def block_clip(colour: str, move: str, length: int, rng: np.random.Generator) -> Frames:
    """length 16 16 3; the block starts anywhere and wraps around."""
    place, step = rng.integers(SIDE, size=2), np.array(MOVES[move]) * 3
    clip = np.empty((length, SIDE, SIDE, 3))
    clip[:] = np.linspace(180, 80, SIDE)[:, None, None]  # it shows which way is up
    for time in range(length):
        rows, columns = (np.arange(BLOCK) + at for at in place + time * step)
        clip[time][np.ix_(rows % SIDE, columns % SIDE)] = COLOURS[colour]
    return np.clip(clip + rng.normal(0, 4, clip.shape), 0, 255).astype(np.uint8)


def blocks(num: int, seed: int, least: int = 4, most: int = 9) -> ClipSide:
    """So many, of lengths between the two; each colour and each direction as often as the others."""
    rng = np.random.default_rng(seed)
    kinds = [(colour, move) for colour in COLOURS for move in MOVES]
    drawn = [kinds[index % len(kinds)] for index in rng.permutation(num)]
    clips = tuple(block_clip(*kind, int(rng.integers(least, most + 1)), rng) for kind in drawn)
    return ClipSide(clips, tuple(f"a {colour} block moves {move}" for colour, move in drawn))
