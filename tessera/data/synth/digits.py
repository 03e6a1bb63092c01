"""Captioned moving digits: a seed enters, a folder of clips with exact captions leaves.

A clip shows one or two handwritten digits on a dark ground, each on a straight way at an even pace, inside the picture from the
first frame to the last. Its caption names digit, direction, speed and colour of each, so that a program can check a generated
clip against the words that asked for it (`digits_oracle`). One combination of the four in eight never appears in `train/`; these
make up all of `heldout/`. The digits there are of other writers than those in `train/` (`digit_glyphs`).

Two digits have different colours, start apart, and are kept apart where that can be; where they meet, the one that the caption
names last covers the other. Lengths are fractions of the picture's side, y points down, and a speed is the way made over the
whole clip. Sample i is a function of (seed, split, i) alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tessera.config.errors import UserError
from tessera.data.synth.digit_glyphs import WRITERS, all_glyphs, ink, load_glyphs
from tessera.data.synth.digit_reader import Reader, accuracy, fit_reader, pack_reader
from tessera.data.synth.splits import SPLITS, Split, hold_out, write_set
from tessera.media.clips import Frames
from tessera.randomness import Draws

VERSION = 1  # of the drawing and of the draws: equal version and seed mean equal frames and captions
READER_FILE = "digits.safetensors"  # beside synth.json: what the oracle reads digits by

# The order matters: a smaller vocabulary takes the first few.
DIGITS = tuple("0123456789")
HALF = 0.7071067811865476
DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "up left": (-HALF, -HALF),
    "up right": (HALF, -HALF),
    "down left": (-HALF, HALF),
    "down right": (HALF, HALF),
}
SPEEDS = {"slowly": (0.13, 0.17), "fast": (0.38, 0.44)}  # the way from the first frame to the last
COLOURS = {
    "red": (235, 45, 45),
    "green": (40, 200, 70),
    "blue": (60, 90, 255),
    "yellow": (250, 220, 40),
    "magenta": (230, 50, 210),
    "cyan": (50, 215, 230),
}
BACKGROUND = (16, 16, 24)

HEIGHTS = (0.32, 0.36)  # of a digit's box
NARROW = 0.8  # of that box is wide enough for the ink
MARGIN = 0.03  # between a digit's box and the picture's edge
GAP = 0.03  # between two digits that are kept apart
TRIES = 24  # places drawn for two digits, until they are apart or the best is taken
LEVELS = 16  # of ink: two digits have 16 * 16 colours between them, as many as a gif can hold
FPS = 10

Cell = tuple[str, str, str, str]  # digit, direction, speed, colour


@dataclass(frozen=True, slots=True)
class Mover:
    """One digit. Read from a caption it has words only, and height 0."""

    digit: str
    direction: str
    speed: str
    colour: str
    glyph: int = -1  # which handwritten digit, in scikit-learn's order
    x: float = 0.0  # of its box in the first frame: the left edge
    y: float = 0.0  # and the upper edge
    height: float = 0.0
    way: float = 0.0  # from the first frame to the last

    @property
    def words(self) -> Cell:
        """What a caption says of it."""
        return self.digit, self.direction, self.speed, self.colour


@dataclass(frozen=True, slots=True)
class Scene:
    """What a clip shows."""

    movers: tuple[Mover, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsOptions:
    """What a set is made of; `num_` takes the first few words of its list."""

    image_size: int = 64
    frames: int = 17
    max_digits: int = 2
    num_kinds: int = 10
    num_directions: int = 4
    num_colours: int = 6

    def __post_init__(self) -> None:
        limits = [
            ("image_size", 32, 256),
            ("frames", 5, 129),
            ("max_digits", 1, 2),
            ("num_kinds", 2, len(DIGITS)),
            ("num_directions", 2, len(DIRECTIONS)),
            ("num_colours", 2, len(COLOURS)),
        ]
        for name, low, high in limits:
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} is {getattr(self, name)}; expected {low} to {high}")


def caption(scene: Scene) -> str:
    """The words for a scene: "a red 7 moves left slowly and a green 3 moves up fast"."""
    return " and ".join(f"a {m.colour} {m.digit} moves {m.direction} {m.speed}" for m in scene.movers)


_MOVER = re.compile(rf"a ({'|'.join(COLOURS)}) ([0-9]) moves ({'|'.join(DIRECTIONS)}) ({'|'.join(SPEEDS)})")


def parse_caption(text: str) -> Scene | None:
    """The scene that `caption` would describe by exactly this text, without places; None where there is none."""
    matches = [_MOVER.fullmatch(part) for part in text.split(" and ")]
    movers = tuple(Mover(m[2], m[3], m[4], m[1]) for m in matches if m)
    scene = Scene(movers)
    sound = len(movers) == len(matches) <= 2 and len({mover.colour for mover in movers}) == len(movers)
    return scene if sound and caption(scene) == text else None


@dataclass(frozen=True, slots=True)
class Plan:
    """What scenes may say in each split, and whose digits they show."""

    seed: int
    options: DigitsOptions
    held: frozenset[Cell]
    choices: Mapping[str, Mapping[str, Sequence[Cell]]]  # split -> colour -> what may be said of a digit of that colour
    glyphs: Mapping[str, Mapping[str, Sequence[int]]]  # split -> digit -> glyphs


def plan_digits(seed: int, options: DigitsOptions) -> Plan:
    """Chooses the held-out combinations by seed, and lists what remains for training."""
    digits, directions = DIGITS[: options.num_kinds], list(DIRECTIONS)[: options.num_directions]
    colours = list(COLOURS)[: options.num_colours]
    cells: list[Cell] = list(product(digits, directions, SPEEDS, colours))
    held = hold_out([(cell,) for cell in cells], len(cells), Draws(seed, 100))
    choices: dict[str, dict[str, list[Cell]]] = {split: {} for split in SPLITS}
    for cell in cells:
        choices["heldout" if cell in held else "train"].setdefault(cell[3], []).append(cell)
    written = {"train": load_glyphs("train"), "heldout": load_glyphs("heldout")}
    glyphs = {split: {digit: written[split].of(int(digit)) for digit in digits} for split in SPLITS}
    return Plan(seed, options, held, choices, glyphs)


def sample_scene(plan: Plan, split: Split, index: int) -> Scene:
    """Scene `index` of a split: a function of (seed, split, index) under the plan's options."""
    draws = Draws(plan.seed, SPLITS.index(split), index)
    colours = list(plan.choices[split])
    count = 1 + draws.below(min(plan.options.max_digits, len(colours)))
    movers = []
    for colour in draws.shuffled(colours)[:count]:
        words = draws.choose(plan.choices[split][colour])
        glyph = draws.choose(plan.glyphs[split][words[0]])
        movers.append(Mover(*words, glyph, 0.0, 0.0, draws.between(*HEIGHTS), draws.between(*SPEEDS[words[2]])))
    return Scene(_place(movers, draws))


def _place(movers: Sequence[Mover], draws: Draws) -> tuple[Mover, ...]:
    """Puts each where its way stays inside; of two, so that they come as little near to each other as some draws allow."""
    best, most = (), -np.inf
    for _ in range(TRIES):
        placed = tuple(_put(mover, draws) for mover in movers)
        apart = _distance(placed[0], placed[1]) if len(placed) == 2 else np.inf
        if apart > most:
            best, most = placed, apart
        if most >= GAP:
            break
    return best


def _put(mover: Mover, draws: Draws) -> Mover:
    spots = []
    for part in DIRECTIONS[mover.direction]:
        low, high = MARGIN, 1 - MARGIN - mover.height
        spots.append(draws.between(low - min(part * mover.way, 0.0), high - max(part * mover.way, 0.0)))
    return Mover(*mover.words, mover.glyph, spots[0], spots[1], mover.height, mover.way)


def _distance(a: Mover, b: Mover) -> float:
    """How near two boxes of ink come; below 0 they overlap, and those that do so in the first frame are furthest below."""
    reach = (a.height + b.height) / 2
    nearest = np.inf
    for step in range(17):
        (ax, ay), (bx, by) = _middle(a, step / 16), _middle(b, step / 16)
        apart = max(abs(ax - bx) - NARROW * reach, abs(ay - by) - reach)
        nearest = min(nearest, apart if step or apart > 0 else apart - 1)
    return nearest


def _middle(mover: Mover, time: float) -> tuple[float, float]:
    """Where the middle of its box is, at a time from 0 to 1."""
    dx, dy = DIRECTIONS[mover.direction]
    return mover.x + mover.height / 2 + time * dx * mover.way, mover.y + mover.height / 2 + time * dy * mover.way


def draw(scene: Scene, options: DigitsOptions) -> Frames:
    """The frames of a scene, t h w 3; later digits cover earlier ones."""
    indices, colours = draw_indexed(scene, options)
    return colours[indices]


def draw_indexed(scene: Scene, options: DigitsOptions) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The frames as t h w indices of up to 256 colours (n 3), so that a gif holds them exactly."""
    indices = np.zeros((options.frames, options.image_size, options.image_size), np.uint8)
    colours = np.array([BACKGROUND], np.int64)
    for mover in scene.movers:
        levels = _levels(mover, options)
        indices = indices * np.uint8(LEVELS) + levels if len(colours) > 1 else levels
        colours = _covered(colours, COLOURS[mover.colour])
    used = np.bincount(indices.ravel(), minlength=256) > 0
    return (np.cumsum(used) - 1).astype(np.uint8)[indices], colours[used[: len(colours)]].astype(np.uint8)


def _levels(mover: Mover, options: DigitsOptions) -> NDArray[np.uint8]:
    """How much of its ink each pixel has, t h w, from 0 to LEVELS - 1."""
    if mover.height <= 0:
        raise UserError(f"a {mover.colour} {mover.digit} of height {mover.height} cannot be drawn; set glyph, x, y, height, way")
    time, (dx, dy) = np.arange(options.frames) / (options.frames - 1) * mover.way, DIRECTIONS[mover.direction]
    side = options.image_size
    x, y = (mover.x + dx * time) * side, (mover.y + dy * time) * side
    amount = ink(all_glyphs()[0][mover.glyph], x, y, mover.height * side, side)
    return np.floor(amount * (LEVELS - 1) + 0.5).astype(np.uint8)


def _covered(colours: NDArray[np.int64], ink_colour: tuple[int, int, int]) -> NDArray[np.int64]:
    """n 3 -> n * LEVELS 3: each colour under each level of ink."""
    levels, full = np.arange(LEVELS)[None, :, None], LEVELS - 1
    return ((colours[:, None] * (full - levels) + np.array(ink_colour) * levels + full // 2) // full).reshape(-1, 3)


def to_gif(indices: NDArray[np.uint8], colours: NDArray[np.uint8]) -> bytes:
    """A gif of `draw_indexed`, which decodes to the same colours; it runs for ever."""
    pictures = [Image.fromarray(frame) for frame in indices]
    for picture in pictures:
        picture.putpalette(colours.tobytes())
    stream = io.BytesIO()
    pictures[0].save(
        stream, "GIF", save_all=True, append_images=pictures[1:], duration=1000 // FPS, loop=0, optimize=False, disposal=0
    )
    return stream.getvalue()


@cache
def oracle_reader() -> Reader:
    """The reader of digits that goes with every set; fitted once, to writers who are never drawn."""
    return fit_reader(load_glyphs("reader"))


def write_digits(
    out: Path, n: int, seed: int, *, image_size: int = 64, frames: int = 17, max_digits: int = 2, num_kinds: int = 10,
    num_directions: int = 4, num_colours: int = 6,
) -> dict[str, object]:  # fmt: skip
    """Writes train/ (n clips), heldout/ (an eighth as many), the oracle's reader and synth.json, whose content it returns."""
    options = DigitsOptions(
        image_size=image_size, frames=frames, max_digits=max_digits, num_kinds=num_kinds, num_directions=num_directions,
        num_colours=num_colours,
    )  # fmt: skip
    plan, reader = plan_digits(seed, options), oracle_reader()
    about = {
        "kind": "digits", "version": VERSION, "seed": seed, "n": n, **asdict(options), "fps": FPS,
        "writers": {part: list(writers) for part, writers in WRITERS.items()},
        "reader_accuracy": {split: accuracy(reader, load_glyphs(split)) for split in ("train", "heldout")},
        "heldout": sorted(map(list, plan.held)),
    }  # fmt: skip

    def write_sample(path: Path, split: Split, index: int) -> str:
        scene = sample_scene(plan, split, index)
        path.write_bytes(to_gif(*draw_indexed(scene, options)))
        return caption(scene)

    write_set(out, n, about, ".gif", write_sample, {READER_FILE: pack_reader(reader)}, text_files=True)
    return about
