"""Contact sheets: every picture is found, unchanged, where it should stand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.media.sheets import sheet


def noise(channels: int, seed: int, height: int = 10, width: int = 14) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_pictures_stand_in_their_cells() -> None:
    rows = [[noise(3, 3 * y + x) for x in range(3)] for y in range(2)]
    got = sheet(rows, gap=2)
    assert got.shape == (2 * 12 + 2, 3 * 16 + 2, 3)
    for y in range(2):
        for x in range(3):
            top, left = 2 + 12 * y, 2 + 16 * x
            assert np.array_equal(got[top : top + 10, left : left + 14], rows[y][x])


def test_scale_repeats_pixels_and_grey_has_three_equal_channels() -> None:
    grey = noise(1, 0)
    got = sheet([[grey]], gap=0, scale=3)
    assert np.array_equal(got, np.kron(grey, np.ones((3, 3, 3), np.uint8)))


def test_transparency_shows_a_checkerboard() -> None:
    picture = noise(4, 0, 16, 16)
    picture[..., 3] = 0
    got = sheet([[picture]], gap=0)
    assert got[0, 0].tolist() == got[8, 8].tolist() == [255] * 3
    assert got[0, 8].tolist() == got[8, 0].tolist() == [204] * 3
    picture[..., 3] = 255
    assert np.array_equal(sheet([[picture]], gap=0), picture[..., :3])


def test_a_short_row_leaves_paper() -> None:
    got = sheet([[noise(3, 0), noise(3, 1)], [noise(4, 2)]], gap=1)
    assert got[12:22, 16:30].min() == 255


def test_names_and_captions_add_room_and_ink_outside_the_pictures() -> None:
    rows = [[np.full((40, 80, 3), 255, np.uint8)] * 2] * 2
    bare, drawn = sheet(rows), sheet(rows, row_names=["raw", "ema"], captions=["a red circle left of a blue square", ""])
    assert drawn.shape[0] > bare.shape[0]
    left = drawn.shape[1] - bare.shape[1]
    assert left > 0
    assert drawn[: bare.shape[0], :left].min() < 128
    assert drawn[: bare.shape[0], left:].min() == 255
    assert drawn[bare.shape[0] :].min() < 128


def test_captions_keep_to_their_column() -> None:
    rows = [[np.full((20, 30, 3), 255, np.uint8)] * 2]
    long = sheet(rows, captions=["incomprehensibilities " * 20, ""], gap=2)
    assert long[:, 34:].min() == 255


@settings(max_examples=40, deadline=None)
@given(name=st.text(), caption=st.text(), width=st.integers(1, 40))
def test_any_text_is_drawn_or_replaced(name: str, caption: str, width: int) -> None:
    got = sheet([[noise(3, 0, 8, width)]], row_names=[name], captions=[caption])
    assert got.dtype == np.uint8


def test_equal_input_gives_equal_sheets() -> None:
    assert np.array_equal(*(sheet([[noise(3, 0)]], row_names=["x"], captions=["猫 \U0001f600 é"]) for _ in range(2)))


@pytest.mark.parametrize("rows", [[], [[]], [[noise(3, 0), noise(3, 0, 11)]], [[noise(2, 0)]], [[np.zeros((4, 4), np.uint8)]]])
def test_unequal_or_no_pictures_are_refused(rows: list[list[np.ndarray]]) -> None:
    with pytest.raises(ValueError, match="expected at least one"):
        sheet(rows)


def test_names_must_match_the_rows() -> None:
    with pytest.raises(ValueError, match="one a row"):
        sheet([[noise(3, 0)]], row_names=["a", "b"])
    with pytest.raises(ValueError, match="one a column"):
        sheet([[noise(3, 0)]], captions=["a", "b"])


def test_a_caption_of_any_length() -> None:
    picture = np.zeros((16, 16, 3), dtype=np.uint8)
    longest = [sheet([[picture]], captions=[letter * 1_000_001]) for letter in ("x", "x ")]
    assert all(made.shape[1] < 200 for made in longest)
