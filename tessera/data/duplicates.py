"""Pictures that show almost the same: fingerprints in, groups out.

Two pictures are near-duplicates when their edges run in the same places and directions and their hues agree. So a copy that was
resized, recompressed, brightened or slightly cropped is found, and so is a drawing in another skin tone; a heart in another
colour is not. Edges are the signs of the brightness differences between neighbouring cells of a 16 x 16 grid, as a set; sets are
compared by their Jaccard similarity, and candidates found by MinHash (Broder 1997) in bands, so that the time grows with the
number of pictures and not with its square.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from tessera.media.images import Pixels

Bytes = npt.NDArray[np.uint8]

_GRID = 16
_STEP = 3  # of 255: a smaller difference between two cells is no edge
_MIN_SIMILARITY = 0.70  # of two sets of edges; measured on emoji in six skin tones, see docs/data.md
_MAX_HUE_DISTANCE = 0.12
_GREY, _COLOURFUL = 5, 12  # lengths of chroma vectors; the most is about 130
_FEW_EDGES = 8  # fewer are a blank picture, whose colour alone counts
_MAX_COLOUR_STEP = 8  # between the cells of two blank pictures
_NUM_BANDS, _BAND = 16, 4  # a pair of similarity 0.70 shares a band with a probability of 0.988
_MAX_BUCKET = 32  # in a larger one not every pair is compared
_CHUNK = 1 << 14
_BITS: Bytes = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """320 bytes of a picture."""

    edges: Bytes  # 128: a bit each for rising and falling, across and down, in every cell
    colours: Bytes  # 192: 8 x 8 x RGB


def fingerprint(picture: Pixels) -> Fingerprint:
    """Of an RGB picture of any size."""
    image = Image.fromarray(picture)
    cells = image.resize((_GRID + 1, _GRID + 1), Image.Resampling.BILINEAR, reducing_gap=2.0)
    luma = np.asarray(cells, dtype=np.float32) @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    slopes = np.stack([np.diff(luma, axis=1)[:_GRID], np.diff(luma, axis=0)[:, :_GRID]])
    colours = np.asarray(cells.resize((8, 8), Image.Resampling.BILINEAR))
    return Fingerprint(np.packbits(np.stack([slopes > _STEP, slopes < -_STEP]).ravel()), colours.ravel())


def near_groups(prints: Sequence[Fingerprint]) -> list[list[int]]:
    """The positions that belong together, in order, groups of one left out. What is near to something near belongs too."""
    if len(prints) < 2:
        return []
    edges, colours = np.stack([each.edges for each in prints]), np.stack([each.colours for each in prints])
    return similar_sets(edges, lambda pairs: _similar(edges, colours, pairs))


def near_sequences(prints: Sequence[Sequence[Fingerprint]]) -> list[list[int]]:
    """The same of sequences of one length: two are near when their pictures are, each to the one in its place."""
    if len(prints) < 2:
        return []
    edges, colours = (np.stack([[getattr(each, name) for each in row] for row in prints]) for name in ("edges", "colours"))
    places = range(edges.shape[1])
    return similar_sets(
        edges.reshape(len(prints), -1),
        lambda pairs: np.logical_and.reduce([_similar(edges[:, place], colours[:, place], pairs) for place in places]),
    )


def similar_sets(sets: Bytes, similar: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]) -> list[list[int]]:
    """Groups of the sets (n x bytes, a bit a member) that a comparison of pairs (m 2) finds similar, of those that MinHash brings
    before it."""
    signatures = _signatures(sets)
    leaders = _Leaders(len(sets))
    for band in range(_NUM_BANDS):
        found = leaders.all()  # what earlier bands have joined need not be compared again
        for pairs in _chunks(_candidates(signatures[:, band * _BAND : (band + 1) * _BAND])):
            apart = pairs[found[pairs[:, 0]] != found[pairs[:, 1]]]
            leaders.join(apart[similar(apart)].tolist())
    return leaders.groups()


def connected(size: int, pairs: Iterable[Sequence[int]]) -> list[list[int]]:
    """The connected parts of a graph over range(size), groups of one left out."""
    leaders = _Leaders(size)
    leaders.join(pairs)
    return leaders.groups()


class _Leaders:
    """Which members of range(size) belong together (union-find): each has the first of its group as leader."""

    def __init__(self, size: int) -> None:
        self._leader = list(range(size))

    def join(self, pairs: Iterable[Sequence[int]]) -> None:
        for left, right in pairs:
            first, second = sorted((self.of(left), self.of(right)))
            self._leader[second] = first

    def of(self, member: int) -> int:
        leader = self._leader
        while leader[member] != member:
            leader[member] = leader[leader[member]]
            member = leader[member]
        return member

    def all(self) -> npt.NDArray[np.int64]:
        return np.fromiter((self.of(member) for member in range(len(self._leader))), np.int64, len(self._leader))

    def groups(self) -> list[list[int]]:
        groups = defaultdict[int, list[int]](list)
        for member in range(len(self._leader)):
            groups[self.of(member)].append(member)
        return [group for group in groups.values() if len(group) > 1]


def _signatures(edges: Bytes) -> npt.NDArray[np.uint16]:
    """n x (bands * rows): the least rank of each set under as many shufflings of the 1,024 edges."""
    num_edges = edges.shape[1] * 8
    noise = [hashlib.shake_128(bytes([number])).digest(4 * num_edges) for number in range(_NUM_BANDS * _BAND)]
    ranks = np.stack([np.frombuffer(each, "<u4").argsort(kind="stable") for each in noise], axis=1).astype(np.uint16)
    signatures = np.full((len(edges), ranks.shape[1]), num_edges, dtype=np.uint16)  # of an empty set
    for signature, row in zip(signatures, edges, strict=True):
        present = ranks[np.unpackbits(row).view(np.bool_)]
        if len(present):
            present.min(axis=0, out=signature)
    return signatures


def _candidates(signatures: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Pairs whose signatures are the same in one band."""
    keys = np.ascontiguousarray(signatures).view(np.uint64)[:, 0]
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]]))
    ends = np.append(starts[1:], len(order))
    found = [_pairs(order[start:end]) for start, end in zip(starts, ends, strict=True) if end - start > 1]
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *found])


def _pairs(bucket: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """All pairs; of many members each with the first and with the one before it."""
    if len(bucket) <= _MAX_BUCKET:
        first, second = np.triu_indices(len(bucket), 1)
        return np.stack([bucket[first], bucket[second]], axis=1)
    rest = bucket[1:]
    leaders = np.stack([np.full_like(rest, bucket[0]), rest], axis=1)
    return np.concatenate([leaders, np.stack([bucket[:-1], rest], axis=1)])


def _chunks(pairs: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, len(pairs), _CHUNK):
        yield pairs[start : start + _CHUNK]


def overlap(sets: Bytes, pairs: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Of each pair: how many members both have, and how many either has."""
    left, right = sets[pairs[:, 0]], sets[pairs[:, 1]]
    return _BITS[left & right].sum(axis=1, dtype=np.int32), _BITS[left | right].sum(axis=1, dtype=np.int32)


def _similar(edges: Bytes, colours: Bytes, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    shared, either = overlap(edges, pairs)
    first, second = (colours[pairs[:, side]].astype(np.float32).reshape(-1, 64, 3) for side in (0, 1))
    alike = (shared >= _MIN_SIMILARITY * either) & (_hue_distance(first, second) <= _MAX_HUE_DISTANCE)
    same_colour = np.abs(first - second).max(axis=(1, 2)) <= _MAX_COLOUR_STEP
    return np.where(either < _FEW_EDGES, same_colour, alike)


def _hue_distance(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """1 - cosine of the angle between two chroma vectors, averaged over the cells where one is colourful, by how much. There
    grey is as far from a colour as red is from green; a pale colour is not."""
    one, other = _chroma(first), _chroma(second)
    lengths, others = np.linalg.norm(one, axis=2), np.linalg.norm(other, axis=2)
    cosines = (one * other).sum(axis=2) / np.maximum(lengths * others, 1)
    cosines[np.minimum(lengths, others) < _GREY] = 0
    strongest = np.maximum(lengths, others)
    weights = np.where(strongest > _COLOURFUL, strongest, 0)
    return ((1 - cosines) * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)


def _chroma(colours: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Blue and red minus luma (Rec. 601), scaled."""
    luma = colours @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    return np.stack([0.564 * (colours[..., 2] - luma), 0.713 * (colours[..., 0] - luma)], axis=-1)
