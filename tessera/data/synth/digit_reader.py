"""Reads a digit off a picture of it: gradients, by direction and place, against those of known digits.

Features are soft histograms of gradient directions (Dalal and Triggs 2005), the classifier is kernel ridge regression: one linear
system, no draw of chance, fitted in a second. It is stored as two plain arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tessera.config.errors import UserError
from tessera.data.synth.digit_glyphs import Glyphs, ink

Floats = NDArray[np.float64]

WINDOW = 28 / 64  # side of the part of a picture that holds one digit, over the picture's
SAMPLES = 28  # per axis of that part
CELLS, BINS = 6, 8  # places per axis, and directions, of the histograms
WIDTH, RIDGE = 4.0, 0.1  # of the kernel exp(-WIDTH d^2), and what is added to its diagonal
HEIGHT = 22.0  # of the glyphs that are learnt, in samples
SMOOTH = 0.8  # standard deviation, in samples, of a blur before gradients are taken: noise has steep ones
BLUR = 1.2  # of the second copy that is learnt


@dataclass(frozen=True, slots=True)
class Reader:
    """A fitted classifier of digits."""

    known: NDArray[np.float32]  # n d: features of known digits
    weights: NDArray[np.float32]  # n 10

    def scores(self, crops: Floats) -> Floats:  # t 28 28 -> t 10
        """About 1 for the digit that a crop shows, about 0 for the others."""
        return _kernel(features(crops), self.known.astype(np.float64)) @ self.weights.astype(np.float64)


def fit_reader(glyphs: Glyphs) -> Reader:
    """Learns digits, each sharp and blurred."""
    sharp = crop_glyphs(glyphs)
    known = np.concatenate([features(sharp), features(blur(sharp, BLUR))])
    wanted = np.tile(np.eye(10)[glyphs.labels], (2, 1))
    weights = np.linalg.solve(_kernel(known, known) + RIDGE * np.eye(len(known)), wanted)
    return Reader(known.astype(np.float32), weights.astype(np.float32))


def accuracy(reader: Reader, glyphs: Glyphs) -> float:
    """The share of digits that are read right."""
    return float((reader.scores(crop_glyphs(glyphs)).argmax(axis=1) == glyphs.labels).mean())


def pack_reader(reader: Reader) -> bytes:
    """A safetensors file."""
    return save({"known": reader.known, "weights": reader.weights})


def open_reader(path: Path) -> Reader:
    """What `pack_reader` made."""
    try:
        arrays = load(path.read_bytes())
        known, weights = arrays["known"], arrays["weights"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}); it reads the digits of its folder: make the data again") from None
    if known.ndim != 2 or known.shape[1] != CELLS * CELLS * BINS or weights.shape != (len(known), 10):
        raise UserError(f"{path} holds arrays of {known.shape} and {weights.shape}, of another version; make the data again")
    return Reader(known, weights)


def crop_glyphs(glyphs: Glyphs) -> Floats:
    """n 28 28: glyphs drawn in the middle of a window, as `crop` cuts them out of a clip."""
    start = np.array([(SAMPLES - HEIGHT) / 2])
    drawn = np.concatenate([ink(glyph, start, start, HEIGHT, SAMPLES) for glyph in glyphs.images])
    return crop(drawn, centres(drawn), SAMPLES)


def centres(amounts: Floats) -> Floats:  # t h w -> t 2
    """Centre of mass (x, y) of each picture, in pixels; NaN where there is nothing."""
    columns, rows = amounts.sum(axis=1), amounts.sum(axis=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        x, y = (line @ (np.arange(line.shape[1]) + 0.5) / line.sum(axis=1) for line in (columns, rows))
    return np.stack([x, y], axis=1)


def crop(amounts: Floats, middles: Floats, window: float) -> Floats:
    """t h w -> t 28 28: a part of side `window` (pixels) around each middle (x, y); nothing where it reaches over the edge."""
    columns, rows = (_sampling(middles[:, axis], window, amounts.shape[2 - axis]) for axis in (0, 1))
    return rows @ amounts @ columns.transpose(0, 2, 1)


def _sampling(middles: Floats, window: float, pixels: int) -> Floats:
    """t -> t 28 pixels: the weight of each pixel in each sample: a triangle as wide as the coarser of both steps."""
    step = window / SAMPLES
    places = middles[:, None] + (np.arange(SAMPLES) + 0.5 - SAMPLES / 2) * step
    reach = max(step, 1.0)
    return np.clip(1 - np.abs(places[:, :, None] - (np.arange(pixels) + 0.5)) / reach, 0, None) / reach


def blur(pictures: Floats, deviation: float) -> Floats:
    """t s s, blurred by a Gaussian."""
    away = np.subtract.outer(np.arange(pictures.shape[1]), np.arange(pictures.shape[1])) / deviation
    weights = np.exp(-(away**2) / 2) / (deviation * np.sqrt(2 * np.pi))
    return np.asarray(weights @ pictures @ weights)


def features(crops: Floats) -> Floats:
    """t 28 28 -> t d, of length 1: how much gradient there is in each direction around each place."""
    padded = np.pad(blur(crops, SMOOTH), ((0, 0), (1, 1), (1, 1)))
    dx, dy = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2], padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    angles = np.arctan2(dy, dx) / (2 * np.pi) * BINS
    turned = np.abs((angles[:, None] - np.arange(BINS)[:, None, None] + BINS / 2) % BINS - BINS / 2)  # to each direction
    maps = np.hypot(dx, dy)[:, None] * np.clip(1 - turned, 0, None)  # t bins 28 28
    middles = (np.arange(CELLS) + 0.5) * SAMPLES / CELLS
    cells = np.clip(1 - np.abs(np.arange(SAMPLES) + 0.5 - middles[:, None]) * CELLS / SAMPLES, 0, None)
    pooled = np.sqrt(cells @ maps @ cells.T).reshape(len(crops), -1)
    return np.asarray(pooled / np.maximum(np.sqrt((pooled**2).sum(axis=1, keepdims=True)), 1e-9))


def _kernel(first: Floats, second: Floats) -> Floats:
    return np.asarray(np.exp(-WIDTH * np.clip(2 - 2 * first @ second.T, 0, None)))
