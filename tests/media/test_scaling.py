"""Resizing and cutting, against a bicubic filter written out in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from tessera.media.images import fit, read_image, resize, write_png


def pictures(longest: int) -> Any:
    sides = st.integers(1, longest)
    return st.tuples(sides, sides).flatmap(lambda size: hnp.arrays(np.uint8, (*size, 3)))


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return (
        np.stack([x * 255 / (width - 1), y * 255 / (height - 1), (x + y) * 255 / (width + height - 2)], -1)
        .round()
        .astype(np.uint8)
    )


def bicubic_weights(size: int, start: float, stop: float, out: int) -> np.ndarray:
    """Keys' cubic (a = -1/2), widened by the scale when shrinking, normalised at the borders: out x size."""
    scale = (stop - start) / out
    widening = max(scale, 1.0)
    centres = start + (np.arange(out)[:, None] + 0.5) * scale
    x = np.abs((np.arange(size)[None] + 0.5 - centres) / widening)
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    reach = 2 * widening  # PIL takes whole pixels around the reach
    first, last = np.floor(centres - reach + 0.5).clip(0), np.floor(centres + reach + 0.5).clip(None, size)
    pixels = np.arange(size)[None]
    weights = np.where((pixels >= first) & (pixels < last), weights, 0.0)
    return weights / weights.sum(1, keepdims=True)


def bicubic(array: np.ndarray, height: int, width: int, box: tuple[float, float, float, float]) -> np.ndarray:
    left, top, right, bottom = box
    vertical = bicubic_weights(array.shape[0], top, bottom, height)
    horizontal = bicubic_weights(array.shape[1], left, right, width)
    return np.einsum("ha,wb,abc->hwc", vertical, horizontal, array.astype(np.float64)).clip(0, 255)


@settings(max_examples=40, deadline=None)
@given(picture=pictures(24), height=st.integers(1, 24), width=st.integers(1, 24))
def test_resize_is_antialiased_bicubic(picture: np.ndarray, height: int, width: int) -> None:
    picture = picture // 2 + 64  # leaves room for the overshoot, which PIL clips between its two passes
    got = resize(picture, height, width)
    assert got.shape == (height, width, 3)
    assert got.dtype == np.uint8
    expected = bicubic(picture, height, width, (0.0, 0.0, float(picture.shape[1]), float(picture.shape[0])))
    assert np.abs(got - expected).max() <= 1.3  # it rounds after each pass


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_shrinking_by_a_whole_factor_averages_areas(factor: int) -> None:
    picture = smooth(16 * factor, 12 * factor)
    areas = picture.reshape(16, factor, 12, factor, 3).mean((1, 3))
    assert np.abs(resize(picture, 16, 12)[2:-2, 2:-2] - areas[2:-2, 2:-2]).max() <= 1


def test_shrinking_a_fine_pattern_gives_its_mean_not_an_alias() -> None:
    stripes = np.zeros((64, 64, 1), np.uint8)
    stripes[:, ::2] = 200
    assert np.abs(resize(stripes, 16, 16)[:, 2:-2].astype(int) - 100).max() <= 2


def test_a_flat_picture_stays_flat() -> None:
    for size in [(1, 1), (7, 31), (64, 50)]:
        assert np.array_equal(resize(np.full((20, 33, 4), 137, np.uint8), *size), np.full((*size, 4), 137, np.uint8))


def test_hidden_colours_do_not_bleed() -> None:
    rgba = np.zeros((32, 32, 4), np.uint8)
    rgba[:, 16:] = (0, 0, 255, 255)
    rgba[:, :16, 0] = 255  # red, invisible
    small = resize(rgba, 7, 7)
    assert small[small[..., 3] > 0][:, 0].max() == 0


@settings(max_examples=40, deadline=None)
@given(picture=pictures(12), data=st.data())
def test_fit_leaves_pixels_alone_when_the_size_is_right(picture: np.ndarray, data: Any) -> None:
    side = min(picture.shape[:2])
    crop_x, crop_y = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    got = fit(picture, side, crop_x=crop_x, crop_y=crop_y)
    places = [
        picture[y : y + side, x : x + side]
        for y in range(picture.shape[0] - side + 1)
        for x in range(picture.shape[1] - side + 1)
    ]
    assert any(np.array_equal(got, place) for place in places)
    if picture.shape[0] == picture.shape[1]:
        assert np.array_equal(got, picture)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_fit_at_the_ends_and_in_the_middle(channels: int) -> None:
    wide = noise(8, 20, channels)
    assert np.array_equal(fit(wide, 8, crop_x=0.0), wide[:, :8])
    assert np.array_equal(fit(wide, 8, crop_x=1.0), wide[:, 12:])
    assert np.array_equal(fit(wide, 8), wide[:, 6:14])
    tall = wide.swapaxes(0, 1)
    assert np.array_equal(fit(tall, 8, crop_y=1.0, crop_x=0.3), tall[12:])
    assert np.array_equal(fit(wide, 4, crop_x=0.25, crop_y=1.0, zoom=2.0), wide[4:, 4:8])


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(5, 40),
    width=st.integers(5, 40),
    size=st.one_of(st.integers(3, 40), st.tuples(st.integers(3, 40), st.integers(3, 40))),
    crop_x=st.floats(0, 1),
    crop_y=st.floats(0, 1),
    zoom=st.floats(1, 3),
)
def test_fit_is_one_resampling_of_the_window(
    height: int, width: int, size: int | tuple[int, int], crop_x: float, crop_y: float, zoom: float
) -> None:
    picture = smooth(height, width) // 2 + 64
    got = fit(picture, size, crop_x=crop_x, crop_y=crop_y, zoom=zoom)
    rows, columns = (size, size) if isinstance(size, int) else size
    pixel = min(height / rows, width / columns) / zoom  # as large in both directions: nothing is stretched
    tall, broad = rows * pixel, columns * pixel
    left, top = crop_x * (width - broad), crop_y * (height - tall)
    assert got.shape == (rows, columns, 3)
    if abs(pixel - 1) > 1e-9:
        expected = bicubic(picture, rows, columns, (left, top, left + broad, top + tall))
        assert np.abs(got - expected).max() <= 1.3


@pytest.mark.parametrize("size", [(24, 36), (36, 24), (30, 30), (12, 40)])
def test_a_circle_stays_a_circle(size: tuple[int, int]) -> None:
    y, x = np.mgrid[:120, :200]
    disc = np.where((y - 59.5) ** 2 + (x - 99.5) ** 2 < 25**2, 255, 0).astype(np.uint8)[:, :, None]
    got = fit(disc, size)[:, :, 0].astype(float) / 255
    pixel = min(120 / size[0], 200 / size[1])
    assert got.sum() == pytest.approx(np.pi * (25 / pixel) ** 2, rel=0.02)
    from_middle = [np.square(np.arange(n) - (n - 1) / 2) * got.sum(1 - axis) for axis, n in enumerate(size)]
    spread = [np.sqrt(squares.sum() / got.sum()) for squares in from_middle]
    assert spread == pytest.approx([25 / pixel / 2] * 2, rel=0.02)  # of a disc: half its radius, in both directions


def test_fit_cuts_a_window_of_the_right_size_out_unchanged() -> None:
    picture = noise(12, 20)
    assert np.array_equal(fit(picture, (12, 15), crop_x=1.0), picture[:, 5:])
    assert np.array_equal(fit(picture, (6, 10), crop_x=1.0, crop_y=0.0, zoom=2.0), picture[:6, 10:])
    assert np.array_equal(fit(picture, (6, 20)), picture[3:9])


@pytest.mark.parametrize("wrong", [{"zoom": 0.5}, {"crop_x": -0.1}, {"crop_y": 1.5}, {"zoom": float("nan")}])
def test_fit_refuses_windows_outside_the_picture(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected zoom of 1 or more"):
        fit(noise(8, 8), 4, **wrong)


def test_a_large_jpeg_is_decoded_no_larger_than_needed(tmp_path: Path) -> None:
    picture = smooth(640, 800)
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=95)
    small = read_image(tmp_path / "a.jpg", min_side=128)
    assert small.shape == (160, 200, 3)
    assert np.abs(fit(small, 64).astype(int) - fit(picture, 64)).max() <= 4
    assert read_image(tmp_path / "a.jpg", min_side=321).shape == (640, 800, 3)
    assert read_image(tmp_path / "a.jpg", min_side=5000).shape == (640, 800, 3)
    write_png(tmp_path / "a.png", picture)
    assert read_image(tmp_path / "a.png", min_side=128).shape == (640, 800, 3)
