"""The renderer against brute force: every pixel centre against every triangle."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tessera.media.meshes import Mesh
from tessera.media.rendering import VIEWS, mesh_views, render, turntable, visible_faces

EMPTY = Mesh(np.empty((0, 3)), np.empty((0, 3), dtype=np.int64))
CUBE = Mesh(
    np.array([[x, y, z] for x in (0.0, 1.0) for y in (0.0, 1.0) for z in (0.0, 1.0)]),
    np.array(
        [[*map(int, face)] for face in ("013", "032", "467", "475", "045", "051", "237", "276", "026", "064", "157", "173")]
    ),
)
WALL = Mesh(np.array([[-1.0, 0, -1], [1, 0, -1], [1, 0, 1], [-1, 0, 1]]), np.array([[0, 1, 2], [0, 2, 3]]))  # seen from the front


def brute_force(screen: np.ndarray, height: int, width: int) -> np.ndarray:
    """Barycentric weights by solving a 3 x 3 system for each triangle and pixel; the nearest triangle wins."""
    ids = np.full((height, width), -1)
    for y in range(height):
        for x in range(width):
            best = -np.inf
            for face, corners in enumerate(screen):
                weights = np.linalg.solve(np.vstack([corners[:, :2].T, np.ones(3)]), [x + 0.5, y + 0.5, 1])
                if weights.min() >= 0 and weights @ corners[:, 2] > best:
                    best, ids[y, x] = weights @ corners[:, 2], face
    return ids


def reddish(picture: np.ndarray) -> np.ndarray:
    return picture[..., 0].astype(int) > picture[..., 2].astype(int) + 20


def bluish(picture: np.ndarray) -> np.ndarray:
    return picture[..., 2].astype(int) > picture[..., 0].astype(int) + 10


def test_a_triangle_covers_the_pixels_whose_centres_are_in_it() -> None:
    screen = np.array([[[2.2, 1.1, 1.0], [13.7, 5.3, 1.0], [4.9, 10.6, 1.0]]])
    got = visible_faces(screen, 12, 16)
    assert np.array_equal(got, brute_force(screen, 12, 16))
    assert (got == 0).sum() == pytest.approx((11.5 * 9.5 - 2.7 * 4.2) / 2, abs=4)  # its area
    assert np.array_equal(visible_faces(screen[:, ::-1], 12, 16), got)  # seen from behind


@pytest.mark.parametrize("seed", range(6))
def test_random_triangles_are_ordered_by_depth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    screen = np.concatenate([rng.uniform(-4, 24, (12, 3, 2)), rng.uniform(0, 1, (12, 3, 1))], axis=-1)  # they cross each other
    got = visible_faces(screen, 18, 20)
    assert np.array_equal(got, brute_force(screen, 18, 20))
    assert len(np.unique(got)) > 4


def test_the_nearer_wins_and_of_equals_the_first() -> None:
    far = np.array([[0.0, 0, 1], [8, 0, 1], [0, 8, 1]])
    near = far + np.array([0, 0, 1])
    assert visible_faces(np.stack([far, near]), 8, 8).max() == 1
    assert visible_faces(np.stack([near, far, near]), 8, 8).max() == 0


def test_flat_and_outlying_triangles_draw_nothing() -> None:
    line, away = [[0.0, 0, 1], [4, 4, 1], [8, 8, 1]], [[90.0, 90, 1], [99, 90, 1], [90, 99, 1]]
    assert visible_faces(np.array([line, away, np.negative(away)]), 8, 8).max() == -1


@pytest.mark.parametrize("perspective", [False, True])
def test_a_wall_is_where_it_should_be(perspective: bool) -> None:
    """The sphere around the wall has a radius of sqrt(2); parallel, the half side is 0.97 * 128 / sqrt(2) = 87.8 pixels. In
    perspective the sphere, not the plane through its middle, fills the picture: that plane is smaller by cos(14 degrees)."""
    shown = (render(WALL, 256, yaw=0, pitch=0, perspective=perspective) != 250).any(axis=2)
    half = 87.8 * (np.cos(np.radians(14)) if perspective else 1)
    (top, bottom), (left, right) = (np.flatnonzero(shown.any(axis=axis))[[0, -1]] for axis in (1, 0))
    assert [top, left] == pytest.approx([128 - half] * 2, abs=1)
    assert [bottom + 1, right + 1] == pytest.approx([128 + half] * 2, abs=1)
    assert shown[top : bottom + 1, left : right + 1].all()


def test_directions() -> None:
    """A spike that points right, one that points up, one that points back: where they stand in views from front, right, top."""
    for axis, (front, side, top) in enumerate([("right", None, "right"), (None, "right", "up"), ("up", "up", None)]):
        tip = np.eye(3)[axis] * 10
        ring = [np.roll([0.0, a, b], axis) for a, b in ((1, 0), (-0.5, 0.9), (-0.5, -0.9))]
        spike = Mesh(np.array([tip, *ring]), np.array([[0, 1, 2], [0, 2, 3], [0, 3, 1], [1, 3, 2]]))
        for (yaw, pitch), expected in (((0, 0), front), ((90, 0), side), ((0, 90), top)):
            shown = (render(spike, 64, yaw=yaw, pitch=pitch) != 250).any(axis=2)
            wide, high = shown.any(axis=0).sum(), shown.any(axis=1).sum()
            if expected == "right":  # the thin end is on the right
                assert wide > 2 * high
                assert shown[:, :32].sum() > shown[:, 32:].sum()
            elif expected == "up":
                assert high > 2 * wide
                assert shown[32:].sum() > shown[:32].sum()
            else:
                assert abs(int(wide) - int(high)) < 4


def test_back_faces_are_tinted() -> None:
    front, behind = render(WALL, 64, yaw=0, pitch=0), render(WALL, 64, yaw=180, pitch=0)
    assert bluish(front).any()
    assert not reddish(front).any()
    assert reddish(behind).any()
    assert not bluish(behind).any()
    assert not any(reddish(view).any() for view in mesh_views(CUBE, 64))
    flipped = Mesh(CUBE.vertices, np.concatenate([CUBE.faces[:-2], CUBE.faces[-2:, ::-1]]))
    assert reddish(render(flipped, 64)).any()


def test_edges_are_dark_and_diagonals_of_flat_sides_faint() -> None:
    picture = render(WALL, 256, yaw=0, pitch=0).astype(int).sum(axis=2)
    plain, diagonal, border = picture[80, 100], picture[127, 128], picture[128].min()
    assert border < diagonal - 60 < plain - 60 - 40


def test_an_empty_mesh_and_a_point_are_background() -> None:
    assert (render(EMPTY, 32) == 250).all()
    assert (render(Mesh(np.ones((3, 3)), np.array([[0, 1, 2]])), 32) == 250).all()
    assert render(EMPTY, 32).dtype == np.uint8


def test_rendering_is_repeated_exactly_and_does_not_depend_on_place_and_scale() -> None:
    first = render(CUBE, 96)
    assert first.shape == (96, 96, 3)
    assert np.array_equal(first, render(CUBE, 96))
    assert np.array_equal(first, render(Mesh(CUBE.vertices * 4 + [8, -16, 32], CUBE.faces), 96))


def test_views() -> None:
    views = mesh_views(CUBE, 48)
    assert len(views) == len(VIEWS) == 4
    assert all(
        np.array_equal(view, render(CUBE, 48, yaw=yaw, pitch=pitch))
        for view, (yaw, pitch) in zip(views, VIEWS.values(), strict=True)
    )


def test_a_turntable_is_a_gif_of_one_turn() -> None:
    content = turntable(CUBE, frames=6, size=64)
    assert content == turntable(CUBE, frames=6, size=64)
    with Image.open(io.BytesIO(content)) as gif:
        assert (gif.format, gif.size, gif.n_frames, gif.info["loop"]) == ("GIF", (64, 64), 6, 0)
        for index in (0, 4):
            gif.seek(index)
            wanted = render(CUBE, 64, yaw=-35 + 60 * index, pitch=20).astype(int)
            assert np.abs(np.asarray(gif.convert("RGB")).astype(int) - wanted).mean() < 2
    with Image.open(io.BytesIO(turntable(EMPTY, frames=4, size=16))) as gif:
        assert gif.size == (16, 16)
