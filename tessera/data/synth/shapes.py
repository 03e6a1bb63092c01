"""Captioned shapes: a seed enters, a folder of pictures with exact captions leaves.

A scene holds one to three flat shapes on a near-white ground. Its caption names every attribute, so that a program can check
a generated picture against the words that asked for it (`shapes_oracle`). Lengths are fractions of the picture's side, y points
down. Some combinations never appear in `train/` and make up all of `heldout/`:

- triples (shape, colour, place), in the scenes of one and of three shapes;
- pairs (shape, colour, relation, other shape), in the scenes of two. "a left of b" is also "b right of a": a training scene is
  free of held-out pairs in both readings, a held-out scene is held out in both.

Sample i is a function of (seed, split, i) alone. Draws are splitmix64 and pixels need only + - * / and comparisons, so the same
seed gives the same pixels on every machine and with every version of NumPy.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tessera.config.errors import UserError
from tessera.data.synth.splits import SPLITS, Split, hold_out, write_set
from tessera.media.images import write_png
from tessera.randomness import Draws

VERSION = 1  # of the drawing and of the draws: equal version and seed mean equal pixels and captions

# The order matters: a smaller vocabulary takes the first few, so the first few are the easiest to tell apart.
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLOURS = {
    "red": (220, 30, 30),
    "green": (0, 165, 60),
    "blue": (30, 60, 225),
    "yellow": (245, 220, 0),
    "purple": (150, 35, 180),
    "cyan": (0, 200, 225),
    "orange": (255, 130, 0),
    "black": (20, 20, 20),
}
PLACES = {
    "top left": (0.22, 0.22),
    "top right": (0.78, 0.22),
    "bottom left": (0.22, 0.78),
    "bottom right": (0.78, 0.78),
    "center": (0.5, 0.5),
}
SIZES = {"small": (0.095, 0.105), "large": (0.15, 0.16)}  # range of the radius; without a size word shapes are large
INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
BACKGROUND = (245, 245, 245)

JITTER = {"small": 0.06, "large": 0.04}  # how far a shape may lie from its place, along each axis
MIN_GAP = 3 / 64  # between the circles around two shapes: 3 pixels at 64, enough to stay apart after a blur
MARGIN = 0.02  # between a shape and the picture's edge
SUPERSAMPLE = 4  # points per pixel and axis
SQRT3 = 1.7320508075688772

Triple = tuple[str, str, str]  # shape, colour, place
Reading = tuple[str, str, str, str]  # shape, colour, relation, shape of the other


@dataclass(frozen=True, slots=True)
class Shape:
    """One object. Read from a caption it has words only, and radius 0."""

    shape: str
    colour: str
    size: str | None = None  # None: the caption does not say
    place: str | None = None
    x: float = 0.0
    y: float = 0.0
    radius: float = 0.0  # of a circle that encloses the shape

    @property
    def words(self) -> tuple[str, str, str | None, str | None]:
        return self.shape, self.colour, self.size, self.place


@dataclass(frozen=True, slots=True)
class Scene:
    shapes: tuple[Shape, ...]
    relation: str | None = None  # of the first of two shapes to the second


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapesOptions:
    """What a set is made of; each `num_` takes the first few words of its list."""

    image_size: int = 64
    max_shapes: int = 3
    num_shapes: int = 5
    num_colours: int = 8
    num_places: int = 5
    sizes: bool = True

    def __post_init__(self) -> None:
        limits = [
            ("image_size", 32, 1024),
            ("max_shapes", 1, 3),
            ("num_shapes", 2, len(SHAPES)),
            ("num_colours", 2, len(COLOURS)),
            ("num_places", 2, len(PLACES)),
        ]
        for name, low, high in limits:
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} is {getattr(self, name)}; expected {low} to {high}")
        if self.max_shapes > max(2, self.num_places):
            raise UserError("max_shapes 3 needs three different places, num_places is 2; use num_places=3 or max_shapes=2")


def caption(scene: Scene) -> str:
    """The words for a scene: "a large red circle in the top left", "a small blue square left of a large green ring"."""
    if scene.relation is not None:
        first, second = scene.shapes
        return f"{_noun(first)} {scene.relation} {_noun(second)}"
    parts = [_noun(shape) + (f" in the {shape.place}" if shape.place else "") for shape in scene.shapes]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _noun(shape: Shape) -> str:
    words = " ".join(filter(None, (shape.size, shape.colour, shape.shape)))
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


_NOUN = rf"an? (?:({'|'.join(SIZES)}) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_PLACED = re.compile(rf"{_NOUN}(?: in the ({'|'.join(PLACES)}))?")
_RELATED = re.compile(rf"{_NOUN} ({'|'.join(INVERSE)}) {_NOUN}")


def parse_caption(text: str) -> Scene | None:
    """The scene that `caption` would describe by exactly this text, without positions; None where there is none."""
    scene = _parse_words(text)
    return scene if scene is not None and caption(scene) == text else None


def _parse_words(text: str) -> Scene | None:
    if related := _RELATED.fullmatch(text):
        size_a, colour_a, shape_a, relation, size_b, colour_b, shape_b = related.groups()
        return Scene((Shape(shape_a, colour_a, size_a), Shape(shape_b, colour_b, size_b)), relation)
    matches = [_PLACED.fullmatch(part) for part in re.split(", | and ", text)]
    shapes = tuple(Shape(m[3], m[2], m[1], m[4]) for m in matches if m)
    places = {shape.place for shape in shapes}
    several = len(shapes) > 1  # then each needs a place of its own
    if len(shapes) != len(matches) or len(shapes) > 3 or (several and (None in places or len(places) < len(shapes))):
        return None
    return Scene(shapes)


@dataclass(frozen=True, slots=True)
class Plan:
    """What scenes may say in each split. `choices` and `pairs` list the allowed words, so that no draw is ever refused."""

    seed: int
    options: ShapesOptions
    held_triples: frozenset[Triple]
    held_readings: frozenset[Reading]
    choices: Mapping[str, Mapping[str, Sequence[tuple[str, str]]]]  # split -> place -> (shape, colour)
    pairs: Mapping[str, Sequence[tuple[Reading, Reading]]]  # split -> both readings of a scene of two


def plan_shapes(seed: int, options: ShapesOptions) -> Plan:
    """Chooses the held-out combinations by seed, and lists what remains for training."""
    shapes, colours = SHAPES[: options.num_shapes], list(COLOURS)[: options.num_colours]
    places = list(PLACES)[: options.num_places]
    triples = list(product(shapes, colours, places))
    held_triples = hold_out([(triple,) for triple in triples], len(triples), Draws(seed, 100))
    choices = {
        split: {
            place: [(s, c) for s, c, p in triples if p == place and ((s, c, p) in held_triples) == (split == "heldout")]
            for place in places
        }
        for split in SPLITS
    }
    scenes = list(_pairs_of(shapes, colours)) if options.max_shapes > 1 else []
    num_readings = len(shapes) ** 2 * len(colours) * len(INVERSE)
    held_readings = hold_out(scenes, num_readings, Draws(seed, 101)) if scenes else frozenset()
    pairs = {
        "train": [pair for pair in scenes if held_readings.isdisjoint(pair)],
        "heldout": [pair for pair in scenes if held_readings.issuperset(pair)],
    }
    return Plan(seed, options, held_triples, held_readings, choices, pairs)


def _pairs_of(shapes: Sequence[str], colours: Sequence[str]) -> Iterable[tuple[Reading, Reading]]:
    """Both readings of every scene of two. Its shapes differ in shape or colour: of two equal ones no relation is wrong."""
    for (a, colour_a), (b, colour_b) in product(product(shapes, colours), repeat=2):
        if (a, colour_a) != (b, colour_b):
            for relation, inverse in INVERSE.items():
                yield (a, colour_a, relation, b), (b, colour_b, inverse, a)


def sample_scene(plan: Plan, split: Split, index: int) -> Scene:
    """Scene `index` of a split: a function of (seed, split, index) under the plan's options."""
    draws = Draws(plan.seed, SPLITS.index(split), index)
    places = [place for place, options in plan.choices[split].items() if options]
    possible = {1: True, 2: bool(plan.pairs[split]), 3: len(places) >= 3}
    count = draws.choose([k for k in range(1, plan.options.max_shapes + 1) if possible[k]])
    if count == 2:
        return _related_scene(plan, split, draws)
    chosen = draws.shuffled(places)[:count]
    nouns = [(*draws.choose(plan.choices[split][place]), _size(plan, draws)) for place in chosen]
    return Scene(_scatter([Shape(*noun, place) for noun, place in zip(nouns, chosen, strict=True)], draws))


def _size(plan: Plan, draws: Draws) -> str | None:
    return draws.choose(list(SIZES)) if plan.options.sizes else None


def _scatter(shapes: Sequence[Shape], draws: Draws) -> tuple[Shape, ...]:
    """Moves each shape off the middle of its place; less and less, until no two come near each other."""
    radii = [draws.between(*SIZES[shape.size or "large"]) for shape in shapes]
    spread = 1.0
    while True:
        placed = []
        for shape, radius in zip(shapes, radii, strict=True):
            x, y = PLACES[shape.place or "center"]
            reach = JITTER[shape.size or "large"] * spread
            x, y = x + draws.between(-reach, reach), y + draws.between(-reach, reach)
            placed.append(Shape(*shape.words, x, y, radius))
        if all(_apart(a, b) for i, a in enumerate(placed) for b in placed[:i]):
            return tuple(placed)
        spread *= 0.75


def _apart(a: Shape, b: Shape) -> bool:
    return (a.x - b.x) ** 2 + (a.y - b.y) ** 2 >= (a.radius + b.radius + MIN_GAP) ** 2


def _related_scene(plan: Plan, split: Split, draws: Draws) -> Scene:
    """Two shapes whose distance along the relation's axis is at least 2.5 times that across it."""
    (shape_a, colour_a, relation, shape_b), (_, colour_b, _, _) = draws.choose(plan.pairs[split])
    sizes = [_size(plan, draws), _size(plan, draws)]
    radii = [draws.between(*SIZES[size or "large"]) for size in sizes]
    distance = draws.between(max(0.3, sum(radii) + MIN_GAP), 0.56)
    edge = MARGIN + max(radii) + distance / 2
    middle, across = draws.between(edge, 1 - edge), draws.between(0.32, 0.68)
    slant = draws.between(-0.2, 0.2) * distance
    if relation in ("right of", "below"):
        distance = -distance
    spots = [(middle - distance / 2, across - slant), (middle + distance / 2, across + slant)]
    if relation in ("above", "below"):
        spots = [(y, x) for x, y in spots]
    first = Shape(shape_a, colour_a, sizes[0], None, *spots[0], radii[0])
    second = Shape(shape_b, colour_b, sizes[1], None, *spots[1], radii[1])
    return Scene((first, second), relation)


def draw(scene: Scene, image_size: int) -> NDArray[np.uint8]:  # h w 3
    """The picture of a scene, antialiased; later shapes cover earlier ones."""
    canvas = np.full((image_size, image_size, 3), BACKGROUND, np.uint8)
    full = SUPERSAMPLE**2
    for shape in scene.shapes:
        if shape.radius <= 0:
            raise UserError(f"a {shape.colour} {shape.shape} of radius {shape.radius} cannot be drawn; set its x, y, radius")
        rows, columns = (pixel_span(middle, shape.radius, image_size) for middle in (shape.y, shape.x))
        count = count_points(shape, rows, columns, image_size)[:, :, None]
        under, ink = canvas[rows, columns].astype(np.int32), np.array(COLOURS[shape.colour], np.int32)
        canvas[rows, columns] = (under * (full - count) + ink * count + full // 2) // full
    return canvas


def pixel_span(middle: float, reach: float, image_size: int) -> slice:
    """The pixels of one axis that [middle - reach, middle + reach] touches."""
    low, high = (middle - reach) * image_size, (middle + reach) * image_size
    return slice(min(max(int(low), 0), image_size), min(max(int(high) + 1, 0), image_size))


def count_points(shape: Shape, rows: slice, columns: slice, image_size: int) -> NDArray[np.int32]:  # h w
    """How many of each pixel's SUPERSAMPLE^2 points lie inside the shape."""
    u = _point_positions(columns, shape.x, shape.radius, image_size)[None, :]
    v = _point_positions(rows, shape.y, shape.radius, image_size)[:, None]
    inside = _inside(shape.shape, u, v).view(np.int8)
    wide = reduce(np.add, [inside[:, k::SUPERSAMPLE] for k in range(SUPERSAMPLE)])
    return reduce(np.add, [wide[k::SUPERSAMPLE] for k in range(SUPERSAMPLE)]).astype(np.int32)


def _point_positions(span: slice, middle: float, radius: float, image_size: int) -> NDArray[np.float64]:
    points = np.arange(span.start * SUPERSAMPLE, span.stop * SUPERSAMPLE) + 0.5
    return (points / (image_size * SUPERSAMPLE) - middle) / radius


def _inside(shape: str, u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which points belong to a shape of radius 1 around the origin. All stay within the unit circle."""
    if shape == "circle":
        return u * u + v * v <= 0.88**2
    if shape == "ring":
        squared = u * u + v * v
        return (squared <= 0.97**2) & (squared >= 0.25)
    if shape == "triangle":  # equilateral, one corner up
        return (v <= 0.5) & (np.abs(u) * SQRT3 <= v + 1)
    u, v = np.abs(u), np.abs(v)
    if shape == "square":
        return (u <= 0.7) & (v <= 0.7)
    return ((u <= 0.95) & (v <= 0.3)) | ((u <= 0.3) & (v <= 0.95))  # cross


def write_shapes(
    out: Path,
    n: int,
    seed: int,
    *,
    image_size: int = 64,
    max_shapes: int = 3,
    num_shapes: int = 5,
    num_colours: int = 8,
    num_places: int = 5,
    sizes: bool = True,
) -> dict[str, object]:
    """Writes train/ (n pictures), heldout/ (an eighth as many) and synth.json, whose content it returns."""
    options = ShapesOptions(
        image_size=image_size,
        max_shapes=max_shapes,
        num_shapes=num_shapes,
        num_colours=num_colours,
        num_places=num_places,
        sizes=sizes,
    )
    plan = plan_shapes(seed, options)
    heldout = {"triples": sorted(plan.held_triples), "pairs": sorted(plan.held_readings)}
    about = {"kind": "shapes", "version": VERSION, "seed": seed, "n": n, **asdict(options), "heldout": heldout}

    def write_sample(path: Path, split: Split, index: int) -> str:
        scene = sample_scene(plan, split, index)
        write_png(path, draw(scene, image_size))
        return caption(scene)

    write_set(out, n, about, ".png", write_sample)
    return about
