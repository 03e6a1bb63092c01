"""Reads a clip of moving digits back into words and compares it with a caption: frames enter, right or wrong leaves.

A pixel is taken as background + amount * (palette colour - background), which holds for soft and for blurred edges alike; its
neighbourhood decides which colour. What has one colour and hangs together is one object. Its centres of mass over the frames are
its track, whose slope names direction and speed; the digit is voted on by all frames that show it (`digit_reader`). Nothing is
needed but the folder that `write_digits` made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tessera.config.errors import UserError
from tessera.data.synth.digit_reader import WINDOW, Reader, centres, crop, open_reader
from tessera.data.synth.digits import BACKGROUND, COLOURS, DIRECTIONS, READER_FILE, Mover, Scene, parse_caption
from tessera.data.synth.regions import label_regions, over_neighbours

OTHER = "other"  # a word that no caption uses: what was found is nothing we know
ATTRIBUTES = ("digit", "direction", "speed", "colour")

SOLID = 0.4  # amount from which a pixel belongs to an object
MIN_AREA = 0.006  # of a picture: smaller regions are specks; the thinnest 1 has 0.015
MAX_SPAN = 0.6  # an object wider or higher than this is no digit, and its clip no scene
BRIDGE = 2 / 64  # gaps up to about twice this do not divide an object
SEEN_SHARE = 0.25  # of the frames: what is there for less is a flash
KEPT_SHARE = 0.9  # of the frames: what is there for less comes or goes
STEADY_SHARE = 0.6  # of those frames that must agree on the digit
SLOW, FAST = (0.075, 0.255), (0.255, 0.65)  # way over the whole clip; made: 0.13 to 0.17, and 0.38 to 0.44

Floats = NDArray[np.float64]
Clip = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Seen:
    """One object of a clip. What cannot be read is OTHER."""

    digit: str
    direction: str
    speed: str
    colour: str
    kept: bool  # whether it is there from the first frame to the last
    track: Floats  # t 2: centres (x, y) over the side; NaN where it is not seen


@dataclass(frozen=True, slots=True)
class DigitsOracle:
    """What judges the clips of one folder."""

    reader: Reader
    frames: int  # of a whole clip: speeds are ways over that many

    def read(self, clip: Clip) -> tuple[Seen, ...]:
        """The objects in a clip (t h w 3), by colour. A clip that is no scene has none.

        A picture is a clip of one frame: it has neither direction nor speed.
        """
        amounts = _amounts(_checked(clip))
        found: list[Seen] = []
        for colour, amount in amounts.items():
            count, territory = _find_objects(amount)
            if count == 1 and _span(territory) > MAX_SPAN * clip.shape[1]:
                return ()
            if count == 1:
                found.append(self._read_object(colour, np.where(territory, amount, 0.0)))
            elif count:  # no caption asks for two of one colour, so nothing tells them apart
                lost = np.full((len(clip), 2), np.nan)
                found += [Seen(OTHER, OTHER, OTHER, colour, False, lost)] * count
        return tuple(found)

    def judge(self, clip: Clip, asked: str | Scene) -> dict[str, bool]:
        """What a clip got right: count, digit, direction, speed, colour; joint is all of them.

        An attribute is right when it is right for every object. With the wrong number of objects nothing is right; of the right
        number, the count is right if each is there from the first frame to the last.
        """
        scene = parse_caption(asked) if isinstance(asked, str) else asked
        if scene is None:
            raise UserError(f"{asked!r} is no caption of moving digits; expected one like 'a red 7 moves left slowly'")
        found = self.read(clip)
        if len(found) != len(scene.movers):
            return dict.fromkeys(("count", *ATTRIBUTES, "joint"), False)
        verdicts = [_compare(order, scene.movers) for order in permutations(found)]
        best = max(verdicts, key=lambda hits: (sum(map(all, hits.values())), sum(map(sum, hits.values()))))
        right = {"count": all(seen.kept for seen in found)} | {name: all(hits) for name, hits in best.items()}
        return right | {"joint": all(right.values())}

    def _read_object(self, colour: str, amount: Floats) -> Seen:
        side, present = amount.shape[1], amount.any(axis=(1, 2))
        middles = np.where(present[:, None], centres(amount), np.nan)
        votes = self.reader.scores(crop(amount[present], middles[present], WINDOW * side))
        digit = int(votes.sum(axis=0).argmax())
        steady = (votes.argmax(axis=1) == digit).mean() >= STEADY_SHARE
        way = _slope(middles / side) * (self.frames - 1)
        return Seen(
            str(digit) if steady else OTHER, _name_direction(way), _name_speed(way), colour,
            bool(present.mean() >= KEPT_SHARE), middles / side,
        )  # fmt: skip


def open_oracle(folder: Path) -> DigitsOracle:
    """The oracle of a folder that `write_digits` made."""
    path = folder / "synth.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        kind, frames = about["kind"], int(about["frames"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not tell about moving digits ({error!r}); `tessera data synth digits` makes such data"
        ) from None
    if kind != "digits" or frames < 2:
        raise UserError(f"{path} tells about {kind}, {frames} frames; expected digits, 2 frames or more")
    return DigitsOracle(open_reader(folder / READER_FILE), frames)


def oracle_accuracy(oracle: DigitsOracle, clips: Iterable[Clip], captions: Sequence[str]) -> dict[str, float]:
    """The share of clips that got each attribute right."""
    hits: dict[str, list[bool]] = {}
    for clip, text in zip(clips, captions, strict=True):
        for name, right in oracle.judge(clip, text).items():
            hits.setdefault(name, []).append(right)
    return {name: float(np.mean(values)) for name, values in hits.items()}


def _compare(found: Sequence[Seen], asked: Sequence[Mover]) -> dict[str, list[bool]]:
    """Per attribute whether each object has it, the objects being taken in the given order."""
    return {name: [getattr(a, name) == getattr(b, name) for a, b in zip(found, asked, strict=True)] for name in ATTRIBUTES}


def _checked(clip: Clip) -> Floats:
    if clip.ndim != 4 or clip.shape[1] != clip.shape[2] or clip.shape[3] != 3 or not len(clip):
        raise UserError(f"a clip of shape {clip.shape} cannot be read; expected square frames, t h w 3")
    if clip.dtype != np.uint8:
        raise UserError(f"a clip of {clip.dtype} cannot be read; expected uint8")
    return clip.astype(np.float64)


def _amounts(pixels: Floats) -> dict[str, Floats]:
    """For each colour that there is enough of: how much of it every pixel has, t h w; every pixel has one colour only."""
    offset = pixels - np.array(BACKGROUND, np.float64)
    rays = np.array(list(COLOURS.values()), np.float64) - np.array(BACKGROUND, np.float64)  # colours 3
    lengths = (rays**2).sum(axis=1)
    along = offset @ rays.T  # t h w colours
    amounts = np.clip(along / lengths, 0, 1)
    errors = amounts**2 * lengths - 2 * amounts * along  # less the pixel's own square, which is the same for all
    nearest = _around(errors).argmin(axis=3)
    least = MIN_AREA * pixels.shape[1] * pixels.shape[2]
    shares = {colour: np.where(nearest == k, amounts[..., k], 0.0) for k, colour in enumerate(COLOURS)}
    return {colour: share for colour, share in shares.items() if ((share > SOLID).sum(axis=(1, 2)) >= least).any()}


def _around(values: Floats) -> Floats:
    """Sums over 3 x 3 pixels: one pixel's noise does not change its colour."""
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return np.asarray(rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:])


def _find_objects(amount: Floats) -> tuple[int, NDArray[np.bool_]]:
    """How many objects of a colour most frames show that show any (0 for none, or a flash), and where they are, t h w.

    Solid regions are grown, which joins near ones and takes in soft edges. Frames are labelled as one tall picture.
    """
    t, h, w = amount.shape
    solid, gap = amount > SOLID, max(1, round(BRIDGE * h))
    tall = np.pad(solid, ((0, 0), (gap + 1, gap + 1), (0, 0))).reshape(-1, w).astype(np.intp)
    for _ in range(gap):
        tall = over_neighbours(tall, np.maximum)
    labels, count = label_regions(tall > 0)
    labels = labels.reshape(t, -1, w)[:, gap + 1 : gap + 1 + h]
    large = np.bincount(labels[solid], minlength=count + 1) >= MIN_AREA * h * w
    numbers = np.array([len(np.unique(frame[large[frame]])) for frame in labels])
    shown = numbers[numbers > 0]
    return int(np.median(shown)) if len(shown) >= SEEN_SHARE * t else 0, large[labels]


def _span(territory: NDArray[np.bool_]) -> float:
    """Width or height of an object with its soft edges, whichever is more; the median over the frames that show it."""
    shown = territory[territory.any(axis=(1, 2))]
    return float(np.median([max(np.ptp(np.flatnonzero(frame.any(axis=axis))) + 1 for axis in (0, 1)) for frame in shown]))


def _slope(track: Floats) -> Floats:
    """The motion of one frame (x, y): the median over all pairs of frames (Theil 1950), so that a few bad ones do not matter."""
    frames = np.flatnonzero(np.isfinite(track[:, 0]))
    if len(frames) < 2:
        return np.zeros(2)
    first, second = np.triu_indices(len(frames), 1)
    steps = (track[frames[second]] - track[frames[first]]) / (frames[second] - frames[first])[:, None]
    return np.asarray(np.median(steps, axis=0))


def _name_direction(way: Floats) -> str:
    length = float(np.hypot(*way))
    if length < SLOW[0]:
        return OTHER
    return max(DIRECTIONS, key=lambda name: float(way @ np.array(DIRECTIONS[name])))


def _name_speed(way: Floats) -> str:
    length = float(np.hypot(*way))
    return next((name for name, (low, high) in (("slowly", SLOW), ("fast", FAST)) if low <= length < high), OTHER)
