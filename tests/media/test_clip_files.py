"""Clips as files: read back by Pillow and PyAV, and by us."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tessera.media.clip_files import encode_gif, encode_mp4, evenly, frame_sheet, grid_gif
from tessera.media.clips import Clip, inspect_clip, read_clip, read_facts
from tessera.media.images import Blob
from tessera.media.sheets import sheet


def smooth(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A gradient that drifts: more than 256 colours a frame."""
    time, y, x = np.mgrid[:count, :height, :width]
    return np.stack([20 + 3 * y + 4 * time, 230 - 3 * x, 40 + x + 2 * y], axis=-1).clip(0, 255).astype(np.uint8)


def test_a_clip_is_one_short_line() -> None:
    assert repr(Clip(smooth(3), 12.5)) == "Clip(3 x 48 x 64 x 3, 12.5 fps)"


def few(count: int, colours: int, seed: int = 0, side: int = 20) -> np.ndarray:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 256, (count, colours, 3), dtype=np.uint8)
    return np.stack([table[place][rng.integers(0, colours, (side, side + 3))] for place in range(count)])


def by_pillow(content: bytes) -> tuple[np.ndarray, list[int]]:
    """Frames as RGB and milliseconds."""
    frames, shown = [], []
    with Image.open(io.BytesIO(content)) as image:
        for place in range(image.n_frames):
            image.seek(place)
            frames.append(np.array(image.convert("RGB")))
            shown.append(image.info["duration"])
    return np.stack(frames), shown


@pytest.mark.parametrize("colours", [1, 2, 3, 16, 17, 256])
def test_gif_keeps_few_colours_exactly(colours: int) -> None:
    """Each frame has colours of its own: together there are more than one palette holds."""
    frames = few(4, colours)
    got, _ = by_pillow(encode_gif(Clip(frames, 8.0)))
    assert np.array_equal(got, frames)


def test_gif_of_many_colours_is_near() -> None:
    frames = smooth(5)
    got, _ = by_pillow(encode_gif(Clip(frames, 8.0)))
    error = np.abs(got.astype(int) - frames)
    assert error.mean() < 4
    assert error.max() < 40
    assert np.abs(got.astype(int) - frames[..., ::-1]).mean() > 15  # the channels stand in their order


def test_equal_frames_are_all_written() -> None:
    frames = np.repeat(few(2, 9), [4, 3], axis=0)
    got, shown = by_pillow(encode_gif(Clip(frames, 10.0)))
    assert np.array_equal(got, frames)
    assert shown == [100] * 7


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.floats(0.5, 50))
def test_durations_of_a_gif_add_up(count: int, fps: float) -> None:
    content = encode_gif(Clip(np.zeros((count, 1, 1, 3), np.uint8), fps))
    facts = read_facts(Blob("a.gif", content))
    assert facts.num_frames == count
    assert facts.duration == pytest.approx(count / fps, abs=0.0051)
    assert facts.times == pytest.approx(np.arange(count) / fps, abs=0.0051)


def test_gif_is_no_faster_than_players_are() -> None:
    _, shown = by_pillow(encode_gif(Clip(few(3, 4), 120.0)))
    assert shown == [20, 20, 20]


def test_gif_loops_scales_and_repeats_itself() -> None:
    frames = few(3, 7)
    content = encode_gif(Clip(frames, 8.0), scale=3)
    with Image.open(io.BytesIO(content)) as image:
        assert image.info["loop"] == 0
    assert np.array_equal(by_pillow(content)[0], np.kron(frames, np.ones((1, 3, 3, 1), np.uint8)))
    assert content == encode_gif(Clip(frames.copy(), 8.0), scale=3)


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 1, 9, 3), (3, 7, 5, 1), (2, 300, 2, 3), (2, 6, 6, 4)])
def test_gif_of_any_size(shape: tuple[int, ...]) -> None:
    frames = np.random.default_rng(0).integers(0, 4, shape, dtype=np.uint8) * 60
    got, _ = by_pillow(encode_gif(Clip(frames, 8.0)))
    if shape[3] == 4:
        alpha = frames[..., 3:].astype(int)
        frames = ((2 * (alpha * frames[..., :3] + (255 - alpha) * 255) + 255) // 510).astype(np.uint8)
    assert np.array_equal(got, np.broadcast_to(frames, (*shape[:3], 3)))


def test_our_gif_passes_our_inspection() -> None:
    seen = inspect_clip(Blob("a.gif", encode_gif(Clip(smooth(9), 24.0))))
    assert (seen.facts.num_frames, seen.odd) == (9, ())


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 4, 4, 3), np.float32),
        np.zeros((2, 4, 4), np.uint8),
        np.zeros((0, 4, 4, 3), np.uint8),
        np.zeros((2, 4, 4, 2), np.uint8),
    ],
)
def test_what_is_no_clip_is_refused(frames: np.ndarray) -> None:
    for encode in (encode_gif, encode_mp4, lambda clip: grid_gif([[clip]])):
        with pytest.raises(ValueError, match="expected uint8, t h w c"):
            encode(Clip(frames, 8.0))
    for fps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rate above 0"):
            encode_gif(Clip(np.zeros((2, 4, 4, 3), np.uint8), fps))


@pytest.mark.parametrize("fps", [8.0, 24.0, 29.97, 30000 / 1001])
def test_mp4_by_pyav(fps: float) -> None:
    av = pytest.importorskip("av")
    frames = smooth(17)
    content = encode_mp4(Clip(frames, fps))
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == pytest.approx(fps, rel=1e-5)
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        got = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        assert float(stream.duration * stream.time_base) == pytest.approx(17 / fps, rel=1e-3)
    assert got.shape == frames.shape
    assert np.abs(got.astype(int) - frames).mean() < 3
    assert np.abs(got.astype(int) - frames).max() < 16
    clip = read_clip(Blob("a.mp4", content), lambda facts: range(facts.num_frames))
    assert np.array_equal(clip.frames, got)
    assert clip.fps == pytest.approx(fps, rel=1e-4)


def test_mp4_colours() -> None:
    """Pure ones, a frame each: neither swapped, nor washed out by a wrong range, nor tinted by a wrong matrix."""
    pytest.importorskip("av")
    colours = np.array(
        [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (200, 100, 50)], np.uint8
    )
    frames = np.broadcast_to(colours[:, None, None], (7, 32, 32, 3))
    got = read_clip(Blob("a.mp4", encode_mp4(Clip(frames, 8.0))), lambda facts: range(facts.num_frames)).frames
    assert np.abs(got.astype(int) - frames).max() <= 6


def test_mp4_pads_odd_sides_with_their_edge_and_scales() -> None:
    pytest.importorskip("av")
    frames = np.full((3, 7, 5, 1), 200, np.uint8)
    got = read_clip(Blob("a.mp4", encode_mp4(Clip(frames, 8.0))), lambda _: [0, 1, 2]).frames
    assert got.shape == (3, 8, 6, 3)
    assert np.abs(got.astype(int) - 200).max() <= 3  # no black line
    facts = read_facts(Blob("a.mp4", encode_mp4(Clip(frames, 8.0), scale=4)))
    assert (facts.height, facts.width) == (28, 20)


def test_evenly() -> None:
    assert evenly(17, 5) == [0, 4, 8, 12, 16]
    assert evenly(3, 8) == [0, 1, 2]
    assert evenly(1, 8) == evenly(1, 1) == [0]
    assert evenly(9, 1) == [4]
    assert evenly(100, 2) == [0, 99]


def test_frame_sheet_shows_the_chosen_frames_and_the_caption() -> None:
    first, second = smooth(17, 32, 40), few(3, 5)
    page = frame_sheet([Clip(first, 8.0), Clip(second, 8.0)], ["a cat walks", "b"], most=5)
    for place, frame in enumerate(first[[0, 4, 8, 12, 16]]):
        assert np.array_equal(page[2:34, 2 + 42 * place : 42 + 42 * place], frame)
    caption = len(sheet([[first[0]]], captions=["a"], gap=0)) - 32
    top = 36 + caption + 2
    for place, frame in enumerate(second):
        assert np.array_equal(page[top : top + 20, 2 + 25 * place : 25 + 25 * place], frame)
    assert (page[top : top + 20, 2 + 25 * 3 :] == 255).all()  # a shorter clip leaves paper, not black
    assert (page[36 : 36 + caption] < 128).any()  # ink
    with pytest.raises(ValueError, match="a caption a clip"):
        frame_sheet([Clip(first, 8.0)], [])


def test_grid_gif_shows_clips_side_by_side_in_time() -> None:
    slow, fast = Clip(few(3, 5, seed=1), 5.0), Clip(few(4, 5, seed=2), 10.0)
    got, shown = by_pillow(grid_gif([[slow, fast]], captions=["slow", "fast"]))
    assert shown == [100] * 6
    for step in range(6):
        assert np.array_equal(got[step, 2:22, 2:25], slow.frames[step // 2])
        assert np.array_equal(got[step, 2:22, 27:50], fast.frames[min(step, 3)])  # holds its last frame
    named, _ = by_pillow(grid_gif([[slow], [fast]], row_names=["a", "b"], scale=2))
    assert np.array_equal(named[0], sheet([[slow.frames[0]], [fast.frames[0]]], row_names=["a", "b"], scale=2))
    with pytest.raises(ValueError, match="no clips"):
        grid_gif([])
