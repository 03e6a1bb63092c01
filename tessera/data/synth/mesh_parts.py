"""The parts of a mesh: triangles enter, pieces that share no vertices leave, each with its box and its outline.

Lengths are fractions of the longest side, of which a bin of 128 is 0.0082. The floor is z = 0; in the middle x and y are 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tessera.media.meshes import Mesh, Points, Triangles

NEAR = 0.03  # two faces this close touch
THIN = 0.01  # what is thinner is no body
MAX_OPEN = 0.34  # share of a part's edges that may belong to other than two faces; in a box that lacks two of 12 it is a third


@dataclass(frozen=True)
class Part:
    """One piece: the box around it, and its outline."""

    low: Points  # 3
    high: Points  # 3
    round: bool  # its outline has no corners where the box has them
    taper: float  # width at the top over width at the bottom
    sound: bool  # closed but for a face or two, not flat, and all vertices at the top or at the bottom

    @cached_property
    def size(self) -> Points:
        return self.high - self.low

    @cached_property
    def middle(self) -> Points:
        return (self.low + self.high) / 2

    @cached_property
    def area(self) -> float:
        return float(self.size[0] * self.size[1])


class Heap:
    """Parts that nobody has claimed yet. One that is not sound cannot be claimed."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = list(parts)
        self.low = np.min([part.low for part in self.parts], axis=0)
        self.size = np.max([part.high for part in self.parts], axis=0) - self.low

    def take(self, fits: Callable[[Part], bool]) -> list[Part]:
        """Claims all parts that fit."""
        taken = [part for part in self.parts if part.sound and fits(part)]
        self.parts = [part for part in self.parts if all(part is not other for other in taken)]
        return taken

    def take_largest(self) -> Part | None:
        """Claims the part that covers most of the floor."""
        largest = max((part.area for part in self.parts if part.sound), default=0.0)
        return next(iter(self.take(lambda part: part.area == largest)), None)


def split_parts(mesh: Mesh) -> list[Part] | None:
    """The pieces of a mesh, scaled to a longest side of 1, on the floor z = 0; None where there is no solid."""
    faces = mesh.faces
    if not len(faces) or not np.isfinite(mesh.vertices).all():
        return None
    used = mesh.vertices[np.unique(faces)]
    low, span = used.min(axis=0), np.ptp(used, axis=0)
    if not (span > 0).all():
        return None
    points = (mesh.vertices - low - span * (0.5, 0.5, 0.0)) / span.max()
    points, index = np.unique(points.round(6), axis=0, return_inverse=True)  # a file may repeat a vertex for each face
    faces = index.reshape(-1)[faces]
    faces = faces[(faces != np.roll(faces, 1, axis=1)).all(axis=1)]
    labels = _label_vertices(faces, len(points))[faces[:, 0]]
    pieces = [faces[labels == label] for label in np.unique(labels)]
    return [_measure(points[np.unique(piece)], _open_share(piece) <= MAX_OPEN) for piece in pieces] or None


def _label_vertices(faces: Triangles, count: int) -> npt.NDArray[np.int64]:
    """The least index of each vertex's piece: every vertex takes that of its faces until none changes."""
    labels = np.arange(count)
    while True:
        lower = labels.copy()
        for corner in range(3):
            np.minimum.at(lower, faces[:, corner], labels[faces].min(axis=1))
        if np.array_equal(lower, labels):
            return labels
        labels = lower


def _open_share(faces: Triangles) -> float:
    ends = np.roll(faces, -1, axis=1)
    _, uses = np.unique(np.minimum(faces, ends) * (faces.max() + 1) + np.maximum(faces, ends), return_counts=True)
    return float(np.mean(uses != 2))


def _measure(points: Points, closed: bool) -> Part:
    low, high = points.min(axis=0), points.max(axis=0)
    heights, halfway = points[:, 2], (low[2] + high[2]) / 2
    levels = points[heights <= halfway], points[heights >= halfway]
    low[2], high[2] = (np.median(level[:, 2]) for level in levels)  # so that one vertex that is off moves no floor
    reach = []  # of both ends: half widths, and how far out the corners lie: 2 on a square, 1.41 on an octagon
    for level in levels:
        half = np.maximum(np.ptp(level[:, :2], axis=0) / 2, 1e-9)
        middle = (level[:, :2].min(axis=0) + level[:, :2].max(axis=0)) / 2
        reach.append((half.mean(), (np.abs(level[:, :2] - middle) / half).sum(axis=1).mean()))
    (bottom, corner_low), (top, corner_high) = reach
    levelled = (np.minimum(np.abs(heights - low[2]), np.abs(heights - high[2])) < NEAR).all()
    sound = closed and bool((high - low).min() > THIN) and bool(levelled)
    return Part(low, high, bool((corner_low + corner_high) / 2 < 1.7), float(top / bottom), sound)


def quarter_turn(part: Part) -> Part:
    """Turned about z by 90 degrees: x becomes y, y becomes -x."""
    low, high = part.low, part.high
    turned = np.array([-high[1], low[0], low[2]]), np.array([-low[1], high[0], high[2]])
    return Part(*turned, part.round, part.taper, part.sound)


def near(a: float, b: float) -> bool:
    """Whether two coordinates are as good as equal."""
    return bool(abs(a - b) <= NEAR)


def over(part: Part, below: Part) -> bool:
    """Whether the middle of a part lies over another."""
    return bool(((part.middle > below.low - NEAR) & (part.middle < below.high + NEAR))[:2].all())


def on(part: Part, below: Part) -> bool:
    """Whether a part stands on another."""
    return near(part.low[2], below.high[2]) and over(part, below)


def on_floor(part: Part) -> bool:
    """Whether a part begins at the floor."""
    return bool(part.low[2] <= NEAR)
