"""Reads a picture of shapes back into a scene and compares it with a caption: pixels enter, right or wrong leaves.

A pixel is taken as background + amount * (palette colour - background), which holds for antialiased and for blurred edges alike.
Connected regions of amount above a half are objects. An object's amounts give its centre and area, which a blur does not move.
Each shape is then drawn with that centre and area, sharp and blurred, and the drawing nearest to the amounts names the shape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from tessera.config.errors import UserError
from tessera.data.synth.regions import label_regions, over_neighbours
from tessera.data.synth.shapes import (
    BACKGROUND,
    COLOURS,
    INVERSE,
    PLACES,
    SHAPES,
    SUPERSAMPLE,
    Scene,
    Shape,
    count_points,
    parse_caption,
    pixel_span,
)

OTHER = "other"  # a word that no caption uses: what was found is nothing we know

# What each shape covers, over radius^2. The smallest one drawn covers 0.0117 of a picture, the largest 0.062.
AREAS = {"circle": 2.4328, "square": 1.96, "triangle": 1.2990, "cross": 1.92, "ring": 2.1705}
MIN_AREA = 0.005  # smaller regions are specks
MAX_SPAN = 0.45  # a region wider or higher than this is no object, and its picture no scene
SMALL_RADIUS, LARGE_RADIUS = (0.065, 0.1255), (0.1255, 0.21)
PLACE_REACH = 0.13  # per axis; half the way between two places is 0.14
MIN_PURITY = 0.6  # share of an object's pixels that must agree with its colour
MAX_MISFIT = 0.25  # squared error over squared amounts; clean shapes stay below 0.03, noise of 24 dB below 0.1, half a disc 0.27
MAX_SLANT = 0.75  # distance across a relation's axis over distance along it; drawn scenes have 0.4
BLURS = (0.0, 0.9, 1.8)  # standard deviations of the drawings compared, in pixels at size 64

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8] | NDArray[np.floating]


def read_scene(image: Pixels) -> Scene:
    """The objects in a picture (h w 3, uint8 or floats in [-1, 1]), each with size and place, and the relation of two.

    An unreadable attribute is `OTHER`, or None for a place between the places. A picture that is no scene has no shapes.
    """
    view = _explain(_to_float(image))
    labels, count = label_regions(view.amount > 0.5)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    found = [k for k in range(1, count + 1) if sizes[k] >= MIN_AREA * labels.size]
    if any(_span(labels == k) > MAX_SPAN * len(labels) for k in found):
        return Scene(())
    territory = _grow(np.where(np.isin(labels, found), labels, 0), steps=len(labels) // 12)
    shapes = sorted((_read_object(view, labels == k, territory == k) for k in found), key=lambda shape: (shape.y, shape.x))
    return Scene(tuple(shapes), relation_between(*shapes) if len(shapes) == 2 else None)


def score(image: Pixels, asked: str | Scene) -> dict[str, bool]:
    """What a picture got right: count, shape, colour, and size, place, relation where asked; joint is all of them.

    An attribute is right when it is right for every object. With the wrong number of objects nothing is right.
    """
    scene = parse_caption(asked) if isinstance(asked, str) else asked
    if scene is None:
        raise UserError(f"{asked!r} is no caption of shapes; expected one like 'a large red circle in the top left'")
    found = read_scene(image)
    if len(found.shapes) != len(scene.shapes):
        return dict.fromkeys(["count", *_compare(scene.shapes, scene), "joint"], False)
    verdicts = [_compare(order, scene) for order in permutations(found.shapes)]
    best = max(verdicts, key=lambda verdict: (sum(all(hits) for hits in verdict.values()), sum(map(sum, verdict.values()))))
    right = {"count": True} | {name: all(hits) for name, hits in best.items()}
    return right | {"joint": all(right.values())}


def oracle_accuracy(images: Iterable[Pixels], captions: Sequence[str]) -> dict[str, float]:
    """The share of pictures that got each attribute right, among those whose caption asks for it."""
    hits: dict[str, list[bool]] = {}
    for image, text in zip(images, captions, strict=True):
        for name, right in score(image, text).items():
            hits.setdefault(name, []).append(right)
    return {name: float(np.mean(values)) for name, values in hits.items()}


def relation_between(first: Shape, second: Shape) -> str | None:
    """Where the first lies as seen from the second; None on a diagonal."""
    dx, dy = second.x - first.x, second.y - first.y
    if min(abs(dx), abs(dy)) > MAX_SLANT * max(abs(dx), abs(dy)):
        return None
    relation = "left of" if abs(dx) > abs(dy) else "above"
    return relation if max(dx, dy, key=abs) > 0 else INVERSE[relation]


def _compare(found: Sequence[Shape], asked: Scene) -> dict[str, list[bool]]:
    """Per attribute asked for, whether each object has it, the objects being taken in the given order."""
    pairs = list(zip(found, asked.shapes, strict=True))
    verdict = {"shape": [a.shape == b.shape for a, b in pairs], "colour": [a.colour == b.colour for a, b in pairs]}
    verdict["size"] = [a.size == b.size for a, b in pairs if b.size]
    verdict["place"] = [a.place == b.place for a, b in pairs if b.place]
    verdict["relation"] = [relation_between(found[0], found[1]) == asked.relation] if asked.relation else []
    return {name: hits for name, hits in verdict.items() if hits}


@dataclass(frozen=True, slots=True)
class _View:
    """Every pixel as an amount of one palette colour over the background."""

    amounts: Floats  # h w colours, not clipped, so that noise on the ground cancels out
    errors: Floats  # h w colours, what each colour leaves unexplained, squared
    nearest: NDArray[np.intp]  # h w, the colour that leaves least
    amount: Floats  # h w, of that colour


def _to_float(image: Pixels) -> Floats:
    if image.ndim != 3 or image.shape[2] != 3 or image.shape[0] != image.shape[1]:
        raise UserError(f"a picture of shape {image.shape} cannot be read; expected a square one, (h, w, 3)")
    if image.dtype == np.uint8:
        return image.astype(np.float64)
    if not np.issubdtype(image.dtype, np.floating):
        raise UserError(f"pixels of type {image.dtype} cannot be read; expected uint8, or floats in [-1, 1]")
    return np.clip(np.nan_to_num(image.astype(np.float64) * 127.5 + 127.5), 0, 255)


def _explain(pixels: Floats) -> _View:
    offset = pixels - np.array(BACKGROUND, np.float64)
    rays = np.array(list(COLOURS.values()), np.float64) - np.array(BACKGROUND, np.float64)  # colours 3
    lengths = (rays**2).sum(axis=1)
    along = offset @ rays.T  # h w colours
    amounts = along / lengths
    clipped = np.clip(amounts, 0, 1)
    errors = (offset**2).sum(axis=2, keepdims=True) - 2 * clipped * along + clipped**2 * lengths
    nearest = errors.argmin(axis=2)
    return _View(amounts, errors, nearest, np.take_along_axis(clipped, nearest[:, :, None], axis=2)[:, :, 0])


def _grow(labels: NDArray[np.intp], steps: int) -> NDArray[np.intp]:
    """Gives each object the pixels around it, up to `steps` away and half the way to the next object."""
    for _ in range(steps):
        labels = np.where(labels > 0, labels, over_neighbours(labels, np.maximum))
    return labels


def _span(mask: NDArray[np.bool_]) -> int:
    return max(int(np.ptp(np.flatnonzero(mask.any(axis=axis)))) + 1 for axis in (0, 1))


def _read_object(view: _View, core: NDArray[np.bool_], territory: NDArray[np.bool_]) -> Shape:
    colour = int(view.errors[core].sum(axis=0).argmin())
    weights = view.amount[core]
    pure = bool(weights[view.nearest[core] == colour].sum() >= MIN_PURITY * weights.sum())
    amounts = np.where(territory, view.amounts[:, :, colour], 0.0)
    side = len(amounts)
    area = float(max(amounts.sum(), 1.0))
    ticks = (np.arange(side) + 0.5) / side
    x, y = float(amounts.sum(axis=0) @ ticks) / area, float(amounts.sum(axis=1) @ ticks) / area
    shape, radius, misfit = _fit_shape(amounts, x, y, area / side**2)
    return Shape(
        shape if misfit <= MAX_MISFIT else OTHER,
        list(COLOURS)[colour] if pure else OTHER,
        _name_size(radius),
        _name_place(x, y),
        x,
        y,
        radius,
    )


def _fit_shape(amounts: Floats, x: float, y: float, area: float) -> tuple[str, float, float]:
    """The shape whose drawing comes nearest, with its radius and what remains between the two, relative to the amounts."""
    side, reach = len(amounts), 1.6 * (area / min(AREAS.values())) ** 0.5
    rows, columns = pixel_span(y, reach, side), pixel_span(x, reach, side)
    patch = amounts[rows, columns]
    power = max(float((patch**2).sum()), 1.0)
    best = (OTHER, 0.0, float("inf"))
    for shape in SHAPES:
        radius = (area / AREAS[shape]) ** 0.5
        sharp = count_points(Shape(shape, OTHER, None, None, x, y, radius), rows, columns, side) / SUPERSAMPLE**2
        for blur in BLURS:
            drawing = _blur(sharp, blur * side / 64) if blur else sharp
            misfit = float(((patch - drawing) ** 2).sum()) / power
            if misfit < best[2]:
                best = (shape, radius, misfit)
    return best


def _blur(picture: Floats, deviation: float) -> Floats:
    vertical, horizontal = (_blur_matrix(length, deviation) for length in picture.shape)
    return vertical @ picture @ horizontal


def _blur_matrix(length: int, deviation: float) -> Floats:
    distance = np.subtract.outer(np.arange(length), np.arange(length)) / deviation
    reach = np.arange(-8 * int(deviation + 1), 8 * int(deviation + 1) + 1) / deviation
    return np.asarray(np.exp(-(distance**2) / 2) / np.exp(-(reach**2) / 2).sum())


def _name_size(radius: float) -> str:
    sizes = {"small": SMALL_RADIUS, "large": LARGE_RADIUS}
    return next((name for name, (low, high) in sizes.items() if low <= radius < high), OTHER)


def _name_place(x: float, y: float) -> str | None:
    return next((name for name, (px, py) in PLACES.items() if max(abs(x - px), abs(y - py)) <= PLACE_REACH), None)
