"""Words enter, a mesh of closed parts leaves: boxes, octagonal prisms and frusta, each outward counter-clockwise.

Training sees a mesh scaled to its longest side, in 128 bins per axis, its vertices welded by bin. So that welding joins no two
parts, parts touch or overlap but share no vertices: every length that keeps vertices apart is drawn in bins (`Sizes.bins`), with
the longest side taken as 120 of them. The floor is z = 0, the front looks along -y.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tessera.media.meshes import Mesh
from tessera.randomness import Draws

BINS = 120  # along the longest side: 0.95 of 128, a little less
CUT = 0.41421356237309503  # sqrt(2) - 1: where a regular octagon's corners cut the square around it

SQUARE = ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0))  # counter-clockwise seen from above
OCTAGON = ((-CUT, -1.0), (CUT, -1.0), (1.0, -CUT), (1.0, CUT), (CUT, 1.0), (-CUT, 1.0), (-1.0, CUT), (-1.0, -CUT))

Span = tuple[float, float]
Outline = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A mesh that grows part by part."""

    vertices: list[tuple[float, float, float]] = field(default_factory=list)
    faces: list[tuple[int, int, int]] = field(default_factory=list)

    def box(self, x: Span, y: Span, z: Span) -> None:
        """12 triangles."""
        self.solid(SQUARE, x, y, z)

    def solid(self, outline: Outline, x: Span, y: Span, z: Span, top: float = 1.0) -> None:
        """An outline stretched over x and y and raised along z; at the top it is `top` times as wide."""
        start, count = len(self.vertices), len(outline)
        (x0, x1), (y0, y1) = x, y
        for height, scale in ((z[0], 1.0), (z[1], top)):
            for u, v in outline:
                self.vertices.append(
                    ((x0 + x1) / 2 + u * scale * (x1 - x0) / 2, (y0 + y1) / 2 + v * scale * (y1 - y0) / 2, height)
                )
        for k in range(count):
            low, after = start + k, start + (k + 1) % count
            self.faces.extend([(low, after, after + count), (low, after + count, low + count)])
        for k in range(1, count - 1):
            self.faces.extend([(start, start + k + 1, start + k), (start + count, start + count + k, start + count + k + 1)])

    def mesh(self) -> Mesh:
        """What has grown so far."""
        return Mesh(np.array(self.vertices, np.float64), np.array(self.faces, np.int64))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Draws lengths, given how long the longest side is about to be."""

    draws: Draws
    longest: float

    def bins(self, low: float, high: float) -> float:
        """A length of so many bins."""
        return self.draws.between(low, high) * self.longest / BINS


def build_furniture(words: Mapping[str, str], draws: Draws) -> Mesh:
    """The mesh of one combination of words, its free lengths drawn."""
    parts = Parts()
    _BUILDERS[words["kind"]](words, draws, parts)
    return parts.mesh()


def _around(middle: float, width: float) -> Span:
    return middle - width / 2, middle + width / 2


def _stand(parts: Parts, sizes: Sizes, kind: str, width: float, depth: float, reach: float, height: float) -> Span:
    """Three legs (one behind), four, or a pedestal, up to `height`; how far from the middle its parts go, in x and y."""
    if kind == "pedestal":
        thick, foot, size = sizes.bins(8, 10), sizes.bins(4.5, 6), sizes.draws.between(0.5, 0.65)
        parts.box(_around(0, width * size), _around(0, depth * size), (0, foot))
        parts.box(_around(0, thick), _around(0, thick), (foot, height))
        return width * size / 2, depth * size / 2
    thick, inset = sizes.bins(5.5, 8), sizes.bins(3.5, 6)
    x, y = reach * width / 2 - inset - thick / 2, reach * depth / 2 - inset - thick / 2
    for cx, cy in ((-x, -y), (x, -y)) + (((0.0, y),) if kind == "three" else ((-x, y), (x, y))):
        parts.box(_around(cx, thick), _around(cy, thick), (0, height))
    return x, y


def _build_chair(words: Mapping[str, str], draws: Draws, parts: Parts) -> None:
    depth, seat, arm = draws.between(0.42, 0.48), draws.between(0.48, 0.54), draws.between(0.17, 0.23)
    width = depth * (draws.between(0.92, 1.08) if words["width"] == "narrow" else draws.between(1.7, 1.95))
    rise = {"none": 0.0, "low": draws.between(0.2, 0.26), "high": draws.between(0.5, 0.62)}[words["back"]]
    arms = words["armrests"] == "with"
    sizes = Sizes(draws, max(width, seat + max(rise, 0.07, arm * 1.3 if arms else 0.0)))
    plate, edge = sizes.bins(5, 7), sizes.bins(3.5, 4.5)
    _stand(parts, sizes, words["legs"], width, depth, 1.0, seat - plate)
    parts.box(_around(0, width), _around(0, depth), (seat - plate, seat))
    side, rear = width / 2 - edge, depth / 2 - edge  # where the cushion ends
    if rise:
        thick = sizes.bins(4.5, 6)
        parts.box((-side, side), (rear - thick, rear), (seat, seat + rise))
        rear -= thick + sizes.bins(3.5, 4.5)
    if arms:
        post, board = sizes.bins(4, 5), sizes.bins(4, 5.5)
        long, middle = (-depth / 2 + sizes.bins(0, 4), rear), (rear - depth / 2) / 2
        for x in (-(side - post / 2), side - post / 2):
            parts.box(_around(x, post), _around(middle, sizes.bins(5, 8)), (seat, seat + arm))
            parts.box(_around(x, post + sizes.bins(1, 4)), long, (seat + arm, seat + arm + board))
        side -= post + sizes.bins(0.5, 1.5)
    parts.box((-side, side), (-depth / 2 + edge, rear), (seat, seat + sizes.bins(5, 7)))


def _build_table(words: Mapping[str, str], draws: Draws, parts: Parts) -> None:
    long = words["top"] == "long"
    width, depth = 1.0, 1 / draws.between(1.9, 2.3) if long else draws.between(0.93, 1.07)
    height = draws.between(0.38, 0.46) if words["height"] == "low" else draws.between(0.9, 1.15)
    sizes = Sizes(draws, max(width, depth, height))
    plate = sizes.bins(5, 7.5)
    reach = 0.8 if words["top"] == "round" else 1.0  # an octagon has no corners to stand under
    far_x, far_y = _stand(parts, sizes, words["legs"], width, depth, reach, height - plate)
    parts.solid(OCTAGON if words["top"] == "round" else SQUARE, _around(0, width), _around(0, depth), (height - plate, height))
    if words["shelf"] == "with":
        low = height * draws.between(0.25, 0.42)
        parts.box((-far_x, far_x), (-far_y, far_y), (low, low + sizes.bins(4.5, 6)))


def _build_lamp(words: Mapping[str, str], draws: Draws, parts: Parts) -> None:
    tall, two, cross = words["height"] == "tall", words["shades"] == "two", words["base"] == "cross"
    shade, pole = draws.between(0.3, 0.36), (draws.between(0.75, 0.95) if tall else draws.between(0.17, 0.26))
    wide, foot = draws.between(0.34, 0.42), draws.between(0.34, 0.44)
    distance = wide + draws.between(0.1, 0.2)  # between the shades
    sizes = Sizes(draws, max(shade + pole + 0.1, wide + distance if two else wide, foot))
    base, thick = sizes.bins(5, 8), sizes.bins(5, 7)
    if cross:
        arm = sizes.bins(6, 9)
        parts.box(_around(0, foot), _around(0, arm), (0, base))
        parts.box(_around(0, arm), _around(0, foot), (0, base))
    else:
        parts.solid(OCTAGON if words["base"] == "round" else SQUARE, _around(0, foot), _around(0, foot), (0, base))
    pole += base
    parts.box(_around(0, thick), _around(0, thick), (base, pole))
    if two:
        bar = sizes.bins(4.5, 6)
        parts.box(_around(0, distance + sizes.bins(8, 16)), _around(0, sizes.bins(7, 9)), (pole, pole + bar))
        pole += bar
    outline = SQUARE if words["shade"] == "box" else OCTAGON
    top = draws.between(0.38, 0.5) if words["shade"] == "cone" else 1.0
    for x in (-distance / 2, distance / 2) if two else (0.0,):
        parts.solid(outline, _around(x, wide), _around(0, wide), (pole, pole + shade), top)


def _build_shelf(words: Mapping[str, str], draws: Draws, parts: Parts) -> None:
    height, wide = 1.0, words["width"] == "wide"
    width = draws.between(1.2, 1.5) if wide else draws.between(0.38, 0.5)
    sizes = Sizes(draws, max(width, height) * 1.05)
    depth, side, plate = sizes.bins(28, 36), sizes.bins(5, 7), sizes.bins(4.5, 6)
    floor = 0.0
    if words["feet"] == "with":
        floor, thick, inset = sizes.bins(7, 11), sizes.bins(6, 8), sizes.bins(3.5, 5)
        for x in (-(width - side) / 2, (width - side) / 2):
            for y in (inset + thick / 2, depth - inset - thick / 2):
                parts.box(_around(x, thick), _around(y, thick), (0, floor))
    for x in (-(width - side) / 2, (width - side) / 2):
        parts.box(_around(x, side), (0, depth), (floor, floor + height))
    inner, edge, count = width / 2 - side, sizes.bins(3.5, 5), ("two", "three", "four", "five").index(words["boards"]) + 2
    low, high = floor + edge, floor + height - edge - plate
    for k in range(count):
        z = low + (high - low) * k / (count - 1)
        parts.box((-inner, inner), (edge, depth - edge), (z, z + plate))
    if words["panel"] == "with":
        margin = sizes.bins(3.5, 5)
        parts.box((-width / 2 + margin, width / 2 - margin), (depth, depth + sizes.bins(4, 5)),
                  (floor + margin, floor + height - margin))  # fmt: skip


def _build_bed(words: Mapping[str, str], draws: Draws, parts: Parts) -> None:
    length, width = 1.0, draws.between(0.42, 0.5) if words["size"] == "single" else draws.between(0.8, 0.92)
    sizes = Sizes(draws, length * 1.05)
    floor, edge = 0.0, sizes.bins(3.5, 5)
    if words["legs"] == "with":
        floor, thick = draws.between(0.1, 0.15), sizes.bins(6, 9)
        x, y = width / 2 - edge - thick / 2, length / 2 - edge - thick / 2
        for cx, cy in ((-x, -y), (x, -y), (-x, y), (x, y)):
            parts.box(_around(cx, thick), _around(cy, thick), (0, floor))
    frame = floor + draws.between(0.09, 0.13)
    soft = frame + draws.between(0.07, 0.1)
    parts.box(_around(0, width), _around(0, length), (floor, frame))
    inset = sizes.bins(3.5, 6)
    parts.box(_around(0, width - 2 * inset), _around(0, length - 2 * inset), (frame, soft))
    if words["headboard"] != "none":
        rise = draws.between(0.13, 0.19) if words["headboard"] == "low" else draws.between(0.38, 0.5)
        parts.box(_around(0, width - 2 * edge), (length / 2, length / 2 + sizes.bins(4.5, 6.5)), (floor + edge, soft + rise))
    count = ("none", "one", "two").index(words["pillows"])
    room = width - 2 * inset - 2 * sizes.bins(3.5, 4.5)  # for the pillows, across the bed
    gap, thick, far = sizes.bins(3.5, 5), sizes.bins(4.5, 6.5), length / 2 - inset - sizes.bins(3.5, 5)
    for x in ((), (0.0,), (-(room + gap) / 4, (room + gap) / 4))[count]:
        across = (room - gap) / 2 if count == 2 else room * 0.7
        parts.box(_around(x, across), (far - 0.2, far), (soft, soft + thick))


_BUILDERS: Mapping[str, Callable[[Mapping[str, str], Draws, Parts], None]] = {
    "chair": _build_chair,
    "table": _build_table,
    "lamp": _build_lamp,
    "shelf": _build_shelf,
    "bed": _build_bed,
}
