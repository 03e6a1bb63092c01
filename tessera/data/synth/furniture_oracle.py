"""Reads a mesh of furniture back into words and compares it with a caption: triangles enter, right or wrong leaves.

Nothing but the geometry is read: the parts of a mesh, each a box with a round or square outline (`mesh_parts`). Each kind
of furniture claims the parts that have a place in it: what reaches from the floor to the seat is a leg, what stands on its
rear is the back. The kind that leaves fewest questions open is the answer. Neither size nor place nor a quarter turn matters.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tessera.config.errors import UserError
from tessera.data.synth.furniture import parse_caption
from tessera.data.synth.mesh_parts import NEAR, Heap, Part, near, on, on_floor, over, quarter_turn, split_parts
from tessera.media.meshes import Mesh

OTHER = "other"  # a word that no caption uses: what was found is nothing we know
WHOLE = "whole"  # of `parts`: every part has a place

# Where one word ends and the other begins: a ratio of lengths, between what is made under the one and under the other.
LONG_RATIO = 1.36  # of two sides; made: to 1.08, and from 1.7
TALL_TABLE = 0.66  # height over the longer side; made: to 0.49, and from 0.84
TALL_LAMP = 1.3  # pole over shade; made: to 0.87, and from 2.1
WIDE_SHELF = 0.78  # width over height of a side; made: to 0.5, and from 1.2
DOUBLE_BED = 0.63  # width over length; made: to 0.5, and from 0.8
BED_HEIGHT = 0.47  # of the mattress, over its length; made: beds to 0.38, chairs from 0.56
HIGH_BACK = 0.71  # height above the seat over that of the seat; made: to 0.54, and from 0.93
HIGH_HEADBOARD = 0.27  # height above the mattress over the length; made: to 0.19, and from 0.38
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}

Words = dict[str, str]


def read_furniture(mesh: Mesh) -> Words | None:
    """Kind, each attribute of that kind, and `parts` (WHOLE if every part has a place); None for no furniture.

    What cannot be read, for instance because a part is missing, is OTHER.
    """
    parts = split_parts(mesh)
    if parts is None or len(parts) > 40:
        return None
    best: Words | None = None
    for _ in range(4):
        for reader in _READERS:
            found = reader(heap := Heap(parts))
            if found is None:
                continue
            found["parts"] = OTHER if heap.parts else WHOLE
            if best is None or _questions(found) < _questions(best):
                best = found
        if best is not None and not _questions(best):
            break
        parts = [quarter_turn(part) for part in parts]
    return best


def _questions(words: Words) -> int:
    return list(words.values()).count(OTHER)


def score(mesh: Mesh, asked: str | Mapping[str, str]) -> dict[str, bool]:
    """What a mesh got right: kind, parts, each attribute asked for; joint is all of them.

    Of the wrong kind, nothing is right.
    """
    words = parse_caption(asked) if isinstance(asked, str) else asked
    if words is None:
        raise UserError(
            f"{asked!r} is no caption of furniture; expected one like 'a narrow chair with three legs, a high back and armrests'"
        )
    found = read_furniture(mesh) or {}
    same = found.get("kind") == words["kind"]
    right = {name: same and found.get(name) == value for name, value in ({**words, "parts": WHOLE}).items()}
    return right | {"joint": all(right.values())}


def oracle_accuracy(meshes: Iterable[Mesh], captions: Sequence[str]) -> dict[str, float]:
    """The share of meshes that got each attribute right, among those whose caption asks for it."""
    hits: dict[str, list[bool]] = {}
    for mesh, text in zip(meshes, captions, strict=True):
        for name, right in score(mesh, text).items():
            hits.setdefault(name, []).append(right)
    return {name: float(np.mean(values)) for name, values in hits.items()}


def _flat(part: Part) -> bool:
    return bool(part.size[2] < 0.5 * part.size[:2].min())


def _shares(part: Part, whole: Part) -> tuple[float, float]:
    """Width and depth of a part over those of another."""
    return float(part.size[0] / whole.size[0]), float(part.size[1] / whole.size[1])


def _both_sides(parts: Sequence[Part]) -> bool:
    """Whether there is one part on the left and one on the right."""
    return sorted(part.middle[0] > 0 for part in parts) == [False, True]


def _take_legs(heap: Heap, top: Part) -> list[Part]:
    """What is slim and reaches from the floor to the underside of `top`."""
    slim = 0.35 * top.size[:2].max()
    return heap.take(lambda p: on_floor(p) and near(p.high[2], top.low[2]) and over(p, top) and p.size[:2].max() < slim)


def _stable(legs: Sequence[Part], top: Part) -> bool:
    """Whether the middle of the top lies well within the legs: three of four legs are not three legs."""
    spots = np.array([(leg.middle - top.middle)[:2] / (top.size[:2] / 2) for leg in legs])
    spots = spots[np.argsort(np.arctan2(spots[:, 1], spots[:, 0]))]
    after = np.roll(spots, -1, axis=0)
    turns = spots[:, 0] * after[:, 1] - spots[:, 1] * after[:, 0]  # over the length: the distance of each side from the middle
    return bool((turns > 0.15 * np.hypot(*(after - spots).T)).all())


def _read_stand(heap: Heap, top: Part) -> str:
    """Three legs, four, or a pedestal: a column on a foot."""
    legs = _take_legs(heap, top)
    if legs:
        return NUMBERS[len(legs)] if len(legs) in (3, 4) and _stable(legs, top) else OTHER
    slim = 0.35 * top.size[:2].max()
    columns = heap.take(lambda p: near(p.high[2], top.low[2]) and p.size[:2].max() < slim and _central(p, top))
    feet = heap.take(lambda p: on_floor(p) and _flat(p) and any(on(column, p) for column in columns))
    return "pedestal" if len(columns) == len(feet) == 1 and _central(feet[0], top) else OTHER


def _central(part: Part, whole: Part) -> bool:
    return bool((np.abs(part.middle - whole.middle)[:2] <= 0.15 * whole.size[:2]).all())


def _take_couch(heap: Heap) -> tuple[Part, Part] | None:
    """The plate that covers most of the floor, and the one soft thing on it: seat and cushion, or frame and mattress."""
    plate = heap.take_largest()
    if plate is None:
        return None
    soft = heap.take(lambda p: on(p, plate) and _flat(p) and min(_shares(p, plate)) > 0.33)
    return (plate, soft[0]) if len(soft) == 1 else None


def _read_chair(heap: Heap) -> Words | None:
    couch = _take_couch(heap)
    if couch is None or couch[1].high[2] < BED_HEIGHT * couch[0].size[:2].max():
        return None
    seat, _ = couch
    behind = seat.middle[1] + 0.2 * seat.size[1]
    backs = heap.take(lambda p: on(p, seat) and p.middle[1] > behind and _shares(p, seat)[0] > 0.5 and _shares(p, seat)[1] < 0.35)
    posts = heap.take(lambda p: on(p, seat) and max(_shares(p, seat)) < 0.35 and abs(p.middle[0]) > 0.25 * seat.size[0])
    boards = heap.take(lambda p: any(on(p, post) for post in posts) and _shares(p, seat)[1] > 0.3)
    arms = _whether(len(boards), 2) if len(posts) == len(boards) else OTHER
    if arms == "with" and not (_both_sides(posts) and _both_sides(boards)):
        arms = OTHER
    rise = [(back.high[2] - seat.high[2]) / seat.high[2] for back in backs]
    ratio = seat.size[0] / seat.size[1]
    return {
        "kind": "chair",
        "width": "wide" if ratio > LONG_RATIO else "narrow" if ratio > 1 / LONG_RATIO else OTHER,
        "legs": _read_stand(heap, seat),
        "back": "none" if not rise else OTHER if len(rise) > 1 else "high" if rise[0] > HIGH_BACK else "low",
        "armrests": arms,
    }


def _read_bed(heap: Heap) -> Words | None:
    couch = _take_couch(heap)
    if couch is None or couch[1].high[2] > BED_HEIGHT * couch[0].size[:2].max():
        return None
    frame, mattress = couch
    heads = heap.take(
        lambda p: near(p.low[1], frame.high[1]) and _shares(p, frame)[0] > 0.6 and _shares(p, frame)[1] < 0.2
        and p.high[2] > mattress.high[2] + NEAR and p.low[2] < mattress.low[2]
    )  # fmt: skip
    pillows = heap.take(lambda p: on(p, mattress) and p.size[2] < 0.6 * p.size[:2].max() and p.middle[1] > mattress.middle[1])
    legs = _take_legs(heap, frame)
    standing = on_floor(frame) if not legs else len(legs) == 4 and _stable(legs, frame)
    rise = [(head.high[2] - mattress.high[2]) / frame.size[1] for head in heads]
    return {
        "kind": "bed",
        "size": "double" if frame.size[:2].min() > DOUBLE_BED * frame.size[:2].max() else "single",
        "legs": _whether(len(legs), 4) if standing else OTHER,
        "headboard": "none" if not rise else OTHER if len(rise) > 1 else "high" if rise[0] > HIGH_HEADBOARD else "low",
        "pillows": "none" if not pillows else _count(pillows, 1, 2),
    }


def _read_table(heap: Heap) -> Words | None:
    highest = max(part.high[2] for part in heap.parts)
    tops = heap.take(lambda p: p.high[2] == highest and _flat(p) and bool((p.size > 0.85 * heap.size)[:2].all()))
    if len(tops) != 1:
        return None
    (top,) = tops
    legs = _read_stand(heap, top)
    shelves = heap.take(
        lambda p: _flat(p) and not on_floor(p) and p.high[2] < top.low[2] - NEAR and _central(p, top)
        and min(_shares(p, top)) > 0.3
    )  # fmt: skip
    ratio = top.size[:2].max() / top.size[:2].min()
    shape = ("long", "square") if not top.round else (OTHER, "round")
    return {
        "kind": "table",
        "height": "high" if highest > TALL_TABLE * top.size[:2].max() else "low",
        "top": shape[0] if ratio > LONG_RATIO else shape[1],
        "legs": legs,
        "shelf": _whether(len(shelves), 1),
    }


def _read_lamp(heap: Heap) -> Words | None:
    poles = heap.take(lambda p: p.size[2] > 2 * p.size[:2].max() and bool((np.abs(p.middle[:2]) < 2 * NEAR).all()))
    if len(poles) != 1:
        return None
    (pole,) = poles
    bars = heap.take(lambda p: on(p, pole) and p.size[0] > 3 * p.size[1] and p.size[2] < 1.5 * p.size[1])
    carrier = bars[0] if len(bars) == 1 else pole
    shades = heap.take(lambda p: on(p, carrier) and p.size[2] > 0.45 * p.size[:2].max() and p.area > 4 * pole.area)
    if not shades:
        return None
    sound = not bars if len(shades) == 1 else len(bars) == 1 and _both_sides(shades)
    bases = heap.take(lambda p: on_floor(p) and on(pole, p))
    shapes = {_read_shade(shade) for shade in shades}
    return {
        "kind": "lamp",
        "height": "tall" if pole.size[2] > TALL_LAMP * np.mean([shade.size[2] for shade in shades]) else "short",
        "base": _read_base(bases),
        "shades": _count(shades, 1, 2) if sound else OTHER,
        "shade": shapes.pop() if len(shapes) == 1 else OTHER,
    }


def _read_shade(shade: Part) -> str:
    if shade.taper < 0.7:
        return "cone" if shade.round else OTHER
    return OTHER if shade.taper > 1.3 else "drum" if shade.round else "box"


def _read_base(bases: Sequence[Part]) -> str:
    ratios = sorted(float(base.size[0] / base.size[1]) for base in bases)
    if len(ratios) == 1 and 1 / LONG_RATIO < ratios[0] < LONG_RATIO:
        return "round" if bases[0].round else "square"
    return "cross" if len(ratios) == 2 and ratios[0] < 0.5 and ratios[1] > 2 else OTHER


def _read_shelf(heap: Heap) -> Words | None:
    width, depth, height = heap.size
    sides = heap.take(lambda p: p.size[0] < 0.25 * width and p.size[1] > 0.6 * depth and p.size[2] > 0.7 * height)
    if not _both_sides(sides):
        return None
    side, inner = sides[0], abs(sides[0].middle[0] - sides[1].middle[0])
    boards = heap.take(
        lambda p: _flat(p) and p.size[0] > 0.7 * inner and p.size[1] > 0.4 * side.size[1]
        and p.low[2] > side.low[2] - NEAR and p.high[2] < side.high[2] + NEAR
    )  # fmt: skip
    panels = heap.take(
        lambda p: p.size[0] > 0.7 * inner and p.size[2] > 0.7 * side.size[2] and p.size[1] < 0.4 * side.size[1]
        and p.middle[1] > side.middle[1]
    )  # fmt: skip
    feet = heap.take(lambda p: on_floor(p) and any(near(p.high[2], side.low[2]) and over(p, side) for side in sides))
    standing = on_floor(side) if not feet else len(feet) == 4
    return {
        "kind": "shelf",
        "width": "wide" if inner + side.size[0] > WIDE_SHELF * side.size[2] else "narrow",
        "boards": _count(boards, 2, 5),
        "panel": _whether(len(panels), 1),
        "feet": _whether(len(feet), 4) if standing else OTHER,
    }


def _whether(count: int, wanted: int) -> str:
    return {0: "without", wanted: "with"}.get(count, OTHER)


def _count(parts: Sequence[Part], least: int, most: int) -> str:
    return NUMBERS[len(parts)] if least <= len(parts) <= most else OTHER


_READERS: Sequence[Callable[[Heap], Words | None]] = (_read_chair, _read_table, _read_lamp, _read_shelf, _read_bed)
