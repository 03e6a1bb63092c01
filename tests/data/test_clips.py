"""One clip: which frames are taken, how they are cut, how a batch and the views of a clip are made of it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from tessera.config import VideoDataConfig
from tessera.data.clip_sources import ClipFolder, as_clip_source
from tessera.data.clips import ClipItem, ClipViews, collate_clips, framed, prepare_clip
from tessera.data.order import Mixture, Order
from tessera.data.picking import pick_frames
from tessera.media.framing import letterbox
from tests.data.clip_makers import facts_of, noise, save_apng

# ---- which frames


def by_hand(num_frames: int, stride: int, most: int) -> list[list[int]]:
    """All windows of the largest number of frames that fits, by trying every start."""
    windows = [list(range(start, num_frames, stride))[:most] for start in range(num_frames)]
    longest = max(map(len, windows))
    return [window for window in windows if len(window) == longest]


@given(some.integers(2, 60), some.integers(1, 9), some.integers(1, 20), some.integers(0, 2**64 - 1))
def test_every_nth_frame_in_a_window_that_fits(num_frames: int, stride: int, most: int, draw: int) -> None:
    facts, windows = facts_of([0.1] * num_frames), by_hand(num_frames, stride, most)
    config = VideoDataConfig(frames=most, stride=stride)
    assert pick_frames(facts, config, draw) in windows
    assert pick_frames(facts, config, None) == windows[(len(windows) - 1) // 2]
    first = VideoDataConfig(frames=most, stride=stride, start="first")
    assert pick_frames(facts, first, draw) == pick_frames(facts, first, None) == windows[0]


def test_every_start_is_drawn_about_equally_often() -> None:
    config = VideoDataConfig(frames=4, stride=2)
    starts = [pick_frames(facts_of([0.1] * 12), config, draw)[0] for draw in range(6000)]
    counts = np.bincount(starts)
    assert len(counts) == 6  # 0 to 5: 5, 7, 9, 11 is the last window
    assert counts.min() > 850
    assert counts.max() < 1150


def at_rate(shown: list[int], fps: int, start: int, most: int) -> list[int]:
    """In whole milliseconds: the stored frame that starts nearest to each wanted time, the earlier of two."""
    times = [sum(shown[:index]) for index in range(len(shown))]
    end, found, step = sum(shown), [], 0
    while len(found) < most and (wanted := Fraction(times[start]) + Fraction(1000 * step, fps)) < end:
        found.append(min(range(len(times)), key=lambda index: (abs(times[index] - wanted), index)))
        step += 1
    return found


@given(
    some.lists(some.integers(20, 400), min_size=2, max_size=24), some.integers(1, 40), some.integers(1, 12),
    some.integers(0, 2**64 - 1),
)  # fmt: skip
def test_frames_at_a_rate_are_the_nearest_in_time(shown: list[int], fps: int, most: int, draw: int) -> None:
    facts, config = facts_of([pause / 1000 for pause in shown]), VideoDataConfig(frames=most, fps=fps)
    windows = [at_rate(shown, fps, start, most) for start in range(len(shown))]
    fitting = [window for window in windows if len(window) == len(windows[0])]
    picked = pick_frames(facts, config, draw)
    assert picked in fitting
    assert picked == sorted(picked)
    assert pick_frames(facts, config, None) == windows[(len(fitting) - 1) // 2]
    assert pick_frames(facts, VideoDataConfig(frames=most, fps=fps, start="first"), draw) == windows[0]


@pytest.mark.parametrize(
    ("stored", "wanted", "picked"),
    [
        (30, 30, list(range(12))),
        (30, 10, [0, 3, 6, 9]),
        (30000 / 1001, 30000 / 1001, list(range(12))),  # times that no float holds exactly
        (24, 12, [0, 2, 4, 6, 8, 10]),
        (10, 20, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11]),
    ],
)
def test_rates_that_divide_each_other_take_even_steps(stored: float, wanted: float, picked: list[int]) -> None:
    assert pick_frames(facts_of([1 / stored] * 12), VideoDataConfig(frames=64, fps=wanted, start="first"), None) == picked
    window = VideoDataConfig(frames=4, fps=wanted)
    steps = {tuple(np.diff(pick_frames(facts_of([1 / stored] * 40), window, draw))) for draw in range(40)}
    assert steps == {tuple(np.diff(picked[:4]))}


def test_one_frame_is_a_picture_however_long_it_is_shown() -> None:
    assert pick_frames(facts_of([7.0]), VideoDataConfig(fps=24), 3) == [0]


# ---- how frames are cut


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of 9 frames that are twice as wide as high, and larger than they are read."""
    folder = tmp_path_factory.mktemp("wide")
    for number in range(6):
        save_apng(folder / f"{number}.png", noise(number, 9, 16, 32))
    return folder


def options(**data: Any) -> VideoDataConfig:
    return VideoDataConfig(**{"resolution": 16, "frames": 5, "workers": 0, **data})


def prepared(folder: Path, config: VideoDataConfig, index: int, draw: int | None) -> ClipItem:
    return prepare_clip(ClipFolder.open(folder, config), config, index, 0, draw)


def test_all_frames_of_a_clip_are_cut_and_mirrored_alike(wide: Path) -> None:
    config, seen = options(crop="random", flip=True), set()
    for draw in range(40):
        item = prepared(wide, config, 2, draw)
        stored = noise(2, 9, 16, 32)
        fits = [
            (start, left, mirrored)
            for start in range(5)
            for left in range(17)
            for mirrored in (False, True)
            if np.array_equal(stored[start : start + 5, :, left : left + 16][:, :, :: -1 if mirrored else 1], item.frames)
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len({start for start, _, _ in seen}) == 5
    assert len({left for _, left, _ in seen}) > 8
    assert {mirrored for _, _, mirrored in seen} == {False, True}


@pytest.mark.parametrize("fit", ["crop", "letterbox"])
@pytest.mark.parametrize(
    ("flip", "caption", "share"), [(True, "a dog runs", 0.5), (True, "a dog runs left", 0), ("always", "a dog runs left", 0.5)]
)
def test_clips_whose_captions_name_a_side_are_not_mirrored(fit: str, flip: Any, caption: str, share: float) -> None:
    config, frames = options(fit=fit, flip=flip), noise(0, 3, 16, 16)
    made = [framed(frames, config, (caption,), draw) for draw in range(200)]
    mirrored = [np.array_equal(clip, frames[:, :, ::-1]) for clip in made]
    assert all(flipped or np.array_equal(clip, frames) for clip, flipped in zip(made, mirrored, strict=True))
    assert abs(sum(mirrored) / 200 - share) < 0.15


def test_without_a_draw_it_is_the_middle(wide: Path) -> None:
    item = prepared(wide, options(crop="random", flip=True), 1, None)
    assert np.array_equal(item.frames, noise(1, 9, 16, 32)[2:7, :, 8:24])


def test_letterbox_keeps_the_whole_frame_between_bars_of_the_background(wide: Path) -> None:
    config = options(fit="letterbox", background=(10, 200, 30), resolution=32)
    item = prepared(wide, config, 0, None)
    assert item.frames.shape == (5, 32, 32, 3)
    assert np.array_equal(item.frames[:, 8:24], noise(0, 9, 16, 32)[2:7])
    assert (item.frames[:, :8] == (10, 200, 30)).all()
    assert (item.frames[:, 24:] == (10, 200, 30)).all()
    flipped = options(fit="letterbox", background=(10, 200, 30), resolution=32, flip="always")
    whole = [prepared(wide, flipped, 0, draw).frames[:, 8:24] for draw in range(12)]
    stored = noise(0, 9, 16, 32)
    for frames in whole:
        assert any(np.array_equal(frames, stored[at : at + 5, :, ::turn]) for at in range(5) for turn in (1, -1))


@pytest.mark.parametrize("fit", ["crop", "letterbox"])
def test_large_frames_are_scaled_down_evenly(tmp_path: Path, fit: Any) -> None:
    ramp = np.linspace(0, 255, 200).astype(np.uint8)
    frames = np.broadcast_to(ramp[None, None, :, None], (3, 100, 200, 3))
    np.save(tmp_path / "a.npy", frames)
    item = prepared(tmp_path, options(fit=fit), 0, None)
    assert item.frames.shape == (3, 16, 16, 3)
    shown = item.frames[1, 8, :, 0].astype(int)
    ends = (64, 191) if fit == "crop" else (0, 255)  # the middle half of the ramp, or all of it
    assert np.allclose(shown, np.linspace(*ends, 33)[1::2], atol=6)


@pytest.mark.parametrize(("height", "width"), [(16, 32), (32, 16), (7, 100), (100, 7), (24, 24), (1, 300)])
def test_letterbox_shrinks_as_another_library_does(height: int, width: int) -> None:
    picture = noise(3, 1, height, width)[0]
    boxed = letterbox(picture, 16, (0, 0, 255))
    tall, broad = max(1, round(16 * height / max(height, width))), max(1, round(16 * width / max(height, width)))
    canvas = Image.new("RGB", (16, 16), (0, 0, 255))
    canvas.paste(Image.fromarray(picture).resize((broad, tall), Image.Resampling.BICUBIC), ((16 - broad) // 2, (16 - tall) // 2))
    assert np.array_equal(boxed, np.asarray(canvas))


def test_letterbox_of_grey_has_bars_of_grey() -> None:
    boxed = letterbox(noise(0, 1, 8, 16, 1)[0], 16, (255, 0, 0))
    assert boxed.shape == (16, 16, 1)
    assert boxed[0, 0, 0] == 76  # Rec. 601: 0.299 * 255


def test_frames_that_come_several_times_are_the_same(tmp_path: Path) -> None:
    save_apng(tmp_path / "a.png", noise(0, 4), pause_ms=200)  # 5 a second
    frames = prepared(tmp_path, options(fps=10, frames=8), 0, None).frames
    assert np.array_equal(frames, noise(0, 4)[[0, 0, 1, 1, 2, 2, 3, 3]])


def test_only_picked_frames_are_asked_for() -> None:
    class Watched:
        def __init__(self) -> None:
            self.frames, self.asked = noise(0, 100), list[int]()

        def facts(self) -> Any:
            return facts_of([0.1] * 100)

        def read(self, pick: Any) -> Any:
            self.asked += pick(self.facts())
            return as_clip_source([{"key": "a", "clip": self.frames}]).read(0).read(lambda _: self.asked)

    class One:
        clip = Watched()

        def __len__(self) -> int:
            return 1

        def key(self, index: int) -> str:
            return "a"

        group = key

        def caption(self, index: int) -> str | None:
            return None

        def read(self, index: int) -> Any:
            return self.clip

    source = One()
    item = prepare_clip(source, options(stride=3), 0, 0, 12345)
    assert len(source.clip.asked) == 5
    assert set(np.diff(source.clip.asked)) == {3}
    assert np.array_equal(item.frames, source.clip.frames[source.clip.asked])


# ---- batches and views


def test_short_clips_are_filled_up_with_their_last_frame_and_masked() -> None:
    items = [ClipItem(str(length), None, length, noise(length, length)) for length in (1, 3, 5)]
    batch = collate_clips(items, 5)
    assert tuple(batch.frames.shape) == (3, 3, 5, 16, 16)
    assert batch.lengths.tolist() == [1, 3, 5]
    assert batch.mask.tolist() == [[True] + 4 * [False], 3 * [True] + 2 * [False], 5 * [True]]
    for row, item in zip(batch.frames.numpy(), items, strict=True):
        for place in range(5):
            assert np.array_equal(row[:, place].transpose(1, 2, 0), item.frames[min(place, len(item.frames) - 1)])


@pytest.mark.parametrize("num_frames", [9, 40])  # read at once; read view by view
def test_views_are_what_the_loader_would_make_of_their_draws(tmp_path: Path, num_frames: int) -> None:
    save_apng(tmp_path / "a.png", noise(0, num_frames, 16, 24))
    save_apng(tmp_path / "b.png", noise(1, 3, 16, 24))
    config = options(crop="random", flip=True)
    source = ClipFolder.open(tmp_path, config)
    views = ClipViews(source, config, 6, seed=0)
    long, short = views[0], views[1]
    assert long.pictures.shape == short.pictures.shape == (6, 5, 16, 16, 3)
    assert (long.lengths.tolist(), short.lengths.tolist()) == ([5] * 6, [3] * 6)
    for index, seen in enumerate((long, short)):
        first = prepare_clip(source, config, index, 0).frames
        assert np.array_equal(seen.pictures[0, : len(first)], first)
    assert np.array_equal(short.pictures[:, 3], short.pictures[:, 2])
    assert np.array_equal(short.pictures[:, 4], short.pictures[:, 2])
    assert len({view.tobytes() for view in long.pictures}) > 4
    again = ClipViews(source, config, 6, seed=0)[0]
    assert np.array_equal(again.pictures, long.pictures)
    assert not np.array_equal(ClipViews(source, config, 6, seed=1)[0].pictures, long.pictures)
    stored = noise(0, num_frames, 16, 24)
    for view in long.pictures:
        cuts = [stored[at : at + 5, :, left : left + 16] for at in range(num_frames - 4) for left in range(9)]
        assert any(np.array_equal(view, each) or np.array_equal(view, each[:, :, ::-1]) for each in cuts)


def test_a_view_of_what_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_bytes(b"GIF89a nothing")
    config = options()
    seen = ClipViews(ClipFolder.open(tmp_path, config), config, 2, 0)[0]
    assert "a.gif" in seen.fault
    assert seen.pictures.shape == (2, 5, 16, 16, 3)
    assert seen.lengths.tolist() == [1, 1]


# ---- two streams in one


@given(some.fractions(0, Fraction(49, 50), max_denominator=50), some.integers(0, 10**12))
def test_a_mixture_has_its_share_everywhere(share: Fraction, first: int) -> None:
    mixture = Mixture(share)
    taken = [mixture.locate(position) for position in range(first, first + 60)]
    before = first * share.numerator // share.denominator
    for second, start in ((True, before), (False, first - before)):
        places = [place for is_second, place in taken if is_second == second]
        assert places == list(range(start, start + len(places)))  # its own stream without a gap
    assert abs(sum(second for second, _ in taken) - 60 * share) < 1


def test_a_share_is_what_the_user_wrote() -> None:
    assert Mixture.of(0.1).share == Fraction(1, 10)  # not the nearest double
    assert sum(Mixture.of(0.2).locate(position)[0] for position in range(10**9, 10**9 + 100)) == 20
    assert Order(3, 0).locate(4)[0] == 1
