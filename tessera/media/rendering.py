"""Meshes to pictures on the CPU: a z-buffer in NumPy, flat shading, thin dark edges. Equal meshes give equal pixels.

The camera goes round the middle of the mesh: yaw 0 looks from the front (from -y), yaw 90 from the right (from +x); a pitch of
90 looks down. A face is blue-grey where its corners run counter-clockwise for the eye, reddish where they do not, so that
flipped faces and holes show.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from tessera.media.images import Pixels
from tessera.media.meshes import Mesh

Floats = npt.NDArray[np.float64]

VIEWS = {"front left": (-35.0, 25.0), "back right": (145.0, 25.0), "side": (90.0, 5.0), "top": (0.0, 90.0)}  # yaw and pitch

_OVERSAMPLE = 2
_FILL = 0.97  # of half the picture: the radius of the sphere around the mesh
_HALF_ANGLE = np.radians(14.0)  # of the perspective camera, to the edge of that sphere
_BACKGROUND, _INK = 250.0, (38.0, 42.0, 56.0)
_FRONT, _BACK = (188.0, 205.0, 230.0), (226.0, 112.0, 96.0)
_LIGHT = np.array([-0.45, 0.65, 0.75]) / np.linalg.norm([-0.45, 0.65, 0.75])  # right, up, towards the eye
_AMBIENT = 0.5
_LINE = 0.55  # half the width of an edge, in pixels of the picture
_CREASE = np.cos(np.radians(5.0))  # faces that meet more evenly than this have a faint edge between them
_FAINT = 0.22
_ON_EDGE = 1e-9  # a pixel on the edge of two triangles belongs to both; the first keeps it


def render(mesh: Mesh, size: int = 256, *, yaw: float = -35.0, pitch: float = 25.0, perspective: bool = True) -> Pixels:
    """A picture of size size 3, white where nothing is. Angles in degrees; without perspective parallel lines stay parallel.
    The sphere around the mesh fills the picture, so a turn changes no scale."""
    side = size * _OVERSAMPLE
    picture = np.full((side, side, 3), _BACKGROUND, dtype=np.float32)
    if len(mesh.faces):
        seen = _seen(mesh, yaw, pitch)  # f 3 3
        screen = _projected(seen, side, perspective)
        ids = visible_faces(screen, side, side)
        shown = ids >= 0
        colours = _colours(seen, screen).astype(np.float32)[ids[shown]]
        picture[shown] = colours + (np.array(_INK, dtype=np.float32) - colours) * _ink(mesh, screen, ids, shown)[:, None]
    rows = picture.reshape(size, _OVERSAMPLE, -1).sum(axis=1).reshape(size, size, _OVERSAMPLE, 3)
    return np.floor(rows.sum(axis=2) / _OVERSAMPLE**2 + 0.5).astype(np.uint8)


def visible_faces(screen: Floats, height: int, width: int) -> npt.NDArray[np.int64]:
    """h w: which of f triangles is seen at the centre of each pixel, -1 where none is. A corner of `screen` (f 3 3) is x to the
    right and y down, in pixels, and a nearness that is linear over the triangle; where two are equally near the first stays."""
    ids = np.full((height, width), -1, dtype=np.int64)
    nearest = np.full((height, width), -np.inf)
    edges, doubled = _edges(screen)
    low = np.maximum(np.ceil(screen[:, :, :2].min(axis=1) - 0.5), 0).astype(np.int64)
    high = np.minimum(np.floor(screen[:, :, :2].max(axis=1) - 0.5) + 1, (width, height)).astype(np.int64)
    drawn = (doubled != 0) & np.all(low < high, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        planes = np.einsum("fec,fe->fc", edges, screen[:, (2, 0, 1), 2]) / doubled[:, None]  # nearness as a x + b y + c
    xs, ys = np.arange(width) + 0.5, np.arange(height)[:, None] + 0.5
    for face in np.flatnonzero(drawn).tolist():
        (left, top), (right, bottom) = low[face].tolist(), high[face].tolist()
        x, y = xs[left:right], ys[top:bottom]
        (a0, b0, c0), (a1, b1, c1), (a2, b2, c2) = edges[face].tolist()
        inside = np.minimum(np.minimum(a0 * x + (b0 * y + c0), a1 * x + (b1 * y + c1)), a2 * x + (b2 * y + c2)) >= -_ON_EDGE
        a, b, c = planes[face].tolist()
        nearness = a * x + (b * y + c)
        window = nearest[top:bottom, left:right]
        inside &= nearness > window
        np.copyto(window, nearness, where=inside)
        np.copyto(ids[top:bottom, left:right], face, where=inside)
    return ids


def mesh_views(mesh: Mesh, size: int = 256) -> list[Pixels]:
    """Four pictures: from the front left, from the back right, from the side and from above."""
    return [render(mesh, size, yaw=yaw, pitch=pitch) for yaw, pitch in VIEWS.values()]


def turntable(mesh: Mesh, frames: int = 24, size: int = 192) -> bytes:
    """An animated GIF of one full turn, two seconds long, that repeats for ever."""
    turns = [Image.fromarray(render(mesh, size, yaw=-35.0 + 360 * index / frames, pitch=20.0)) for index in range(frames)]
    strip = Image.fromarray(np.concatenate([np.asarray(turn) for turn in turns[:: max(frames // 8, 1)]]))
    palette = strip.quantize(255)  # one for all, so that colours do not flicker
    pages = [turn.quantize(palette=palette, dither=Image.Dither.NONE) for turn in turns]
    stream = io.BytesIO()
    pages[0].save(stream, "GIF", save_all=True, append_images=pages[1:], duration=round(2000 / frames), loop=0, optimize=False)
    return stream.getvalue()


def _seen(mesh: Mesh, yaw: float, pitch: float) -> Floats:
    """f 3 3: corners as right, up and towards the eye, the mesh in the unit sphere."""
    corners = mesh.vertices[mesh.faces]
    corners = corners - (corners.min(axis=(0, 1)) + corners.max(axis=(0, 1))) / 2
    radius = float(np.linalg.norm(corners, axis=-1).max())
    turn, tilt = np.radians(yaw), np.radians(pitch)
    right = np.array([np.cos(turn), np.sin(turn), 0.0])
    towards = np.array([np.sin(turn) * np.cos(tilt), -np.cos(turn) * np.cos(tilt), np.sin(tilt)])
    frame = np.stack([right, np.cross(towards, right), towards], axis=1)
    return corners @ frame / (radius or 1.0)


def _projected(seen: Floats, side: int, perspective: bool) -> Floats:
    """Screen corners for `visible_faces`. The nearness of perspective is one over the distance: linear on the screen."""
    scale = _FILL * side / 2
    if not perspective:
        return np.stack([side / 2 + scale * seen[..., 0], side / 2 - scale * seen[..., 1], seen[..., 2]], axis=-1)
    nearness = 1 / (1 / np.sin(_HALF_ANGLE) - seen[..., 2])
    scale /= np.tan(_HALF_ANGLE)
    x, y = seen[..., 0] * nearness, seen[..., 1] * nearness
    return np.stack([side / 2 + scale * x, side / 2 - scale * y, nearness], axis=-1)


def _edges(screen: Floats) -> tuple[Floats, Floats]:
    """f 3 3: a, b, c of a x + b y + c, which at a point is twice the area of the triangle between it and an edge (corner 0 to 1,
    1 to 2, 2 to 0), positive inside; and f: twice the area of the whole."""
    start, end = screen[:, :, :2], np.roll(screen[:, :, :2], -1, axis=1)
    a, b = start[..., 1] - end[..., 1], end[..., 0] - start[..., 0]
    edges = np.stack([a, b, -(a * start[..., 0] + b * start[..., 1])], axis=-1)
    doubled = np.einsum("fc,fc->f", edges[:, 0], np.concatenate([screen[:, 2, :2], np.ones((len(screen), 1))], axis=1))
    return edges * np.where(doubled < 0, -1.0, 1.0)[:, None, None], np.abs(doubled)


def _colours(seen: Floats, screen: Floats) -> Floats:
    """f 3. Lambert's law with the normal turned to the eye; the side of the face decides the tint."""
    first, second = screen[:, 1, :2] - screen[:, 0, :2], screen[:, 2, :2] - screen[:, 0, :2]
    front = first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0] < 0  # y runs down
    normals = _normals(seen) * np.where(front, 1.0, -1.0)[:, None]
    light = _AMBIENT + (1 - _AMBIENT) * np.clip(normals @ _LIGHT, 0, 1)
    return np.where(front[:, None], _FRONT, _BACK) * light[:, None]


def _normals(corners: Floats) -> Floats:
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    return normals / np.where(length > 0, length, 1)


def _ink(mesh: Mesh, screen: Floats, ids: npt.NDArray[np.int64], shown: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """How much of each shown pixel is line, 0 to 1: by its distance to the edges of the face that it shows."""
    edges, _ = _edges(screen)
    length = np.linalg.norm(edges[..., :2], axis=-1, keepdims=True)
    edges = (edges / np.where(length > 0, length, 1)).astype(np.float32)
    y, x = (place.astype(np.float32) + np.float32(0.5) for place in np.nonzero(shown))
    face = ids[shown]
    reach = np.float32(_LINE * _OVERSAMPLE + 0.5)
    strengths = _strengths(mesh).astype(np.float32)
    ink = np.zeros(len(face), dtype=np.float32)
    for edge in range(3):
        a, b, c = (np.take(edges[:, edge, term], face) for term in range(3))
        ink = np.maximum(ink, np.clip(reach - (a * x + b * y + c), 0, 1) * np.take(strengths[:, edge], face))
    return ink


def _strengths(mesh: Mesh) -> Floats:
    """f 3: faint where an edge lies between two even faces, full elsewhere. Vertices at one place are one here."""
    _, places = np.unique(mesh.vertices, axis=0, return_inverse=True)
    corners = places.reshape(-1)[mesh.faces]
    pairs = np.sort(np.stack([corners, np.roll(corners, -1, axis=1)], axis=-1), axis=-1).reshape(-1, 2)
    _, first, which, counts = np.unique(pairs, axis=0, return_index=True, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    normals = np.repeat(_normals(mesh.vertices[mesh.faces]), 3, axis=0)  # of the face of each edge
    total = np.stack([np.bincount(which, weights=normals[:, axis]) for axis in range(3)], axis=1)
    with_first = np.einsum("ec,ec->e", total - normals[first], normals[first])  # the other face's normal, where there are two
    faint = (counts == 2) & (with_first > _CREASE)
    return np.where(faint, _FAINT, 1.0)[which].reshape(-1, 3)
