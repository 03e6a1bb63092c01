"""Sketches of clips: found beside them, picked, cut and turned to tokens as they are, and counted where they are there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.batches import TokenBatch
from tessera.config import UserError, VideoDataConfig
from tessera.data.check import check_folder, main_kind
from tessera.data.clip_check import ClipReport
from tessera.data.clip_sources import as_clip_source
from tessera.data.clips import ClipViews
from tessera.data.folders import list_folder
from tessera.data.loader import Feed
from tessera.data.opening import open_source
from tessera.data.order import Cut
from tessera.data.prepare import TokenPlan, cache_folder, sketched_steps, write_tokens
from tessera.data.sketches import sketch_at
from tessera.data.sources import Source, Stored
from tessera.data.token_cache import TokenCache
from tessera.data.tokens import TokenLoader
from tessera.media.edges import edges
from tessera.recipes.clips.config import MaskedClipsConfig
from tessera.text.encoders import NoTextReader
from tests.data.clip_makers import noise, save_apng, save_frames, save_gif

VARIED: dict[str, Any] = {"crop": "random", "zoom": 1.5, "flip": "always", "views": 5}
STRIDE = 2


def encode(clips: Tensor) -> Tensor:
    """A stand-in for a tokenizer, b c t h w -> b k h w: greys of 4 x 4 patches, of the first frame, then of every second one."""
    grey = torch.nn.functional.avg_pool3d(clips.mean(1, keepdim=True), (1, 4, 4))[:, 0, ::STRIDE]
    return (grey * 127.5 + 127.5).long()


def feed_of(source: Path | Source, caches: Path, **data: Any) -> Feed:
    config = VideoDataConfig(**{"resolution": 16, "frames": 5, "workers": 0, "validation_fraction": 0.0, **data})
    return Feed(
        source=open_source(source, config) if isinstance(source, Path) else source, config=config, cut=Cut(4, None, 0, 1), seed=7,
        device=torch.device("cpu"), validation_samples=4, preview_samples=4, caches=caches, say=lambda line: None,
        show=lambda line: None,
    )  # fmt: skip


def plan_of(feed: Feed) -> TokenPlan:
    return TokenPlan.of(feed.config, "hash", 256, 16, STRIDE)


def cached(feed: Feed) -> TokenCache:
    plan = plan_of(feed)
    return TokenCache(write_tokens(feed, plan, encode, ClipViews(feed.source, feed.config, plan.views, feed.seed)))


def sketches_of(feed: Feed, index: int, views: int = 1) -> tuple[Any, list[int]]:
    """Frames of all views, and how many of each are there."""
    seen = ClipViews(feed.source, feed.config, views, feed.seed)[index].sketch
    assert seen is not None
    assert seen.lengths is not None
    return seen.pictures, seen.lengths.tolist()


# ---- what belongs to what


@pytest.mark.parametrize(
    ("path", "sketch"),
    [
        ("a.gif", None), ("a/b.sketch.mp4", "a/b.sketch.mp4"), ("a.sketch/0001.png", "a.sketch"), ("sketch.gif", None),
        ("sketch/a.gif", None), ("a/b.sketch/c/1.png", "a/b.sketch"), ("a.sketch.v2.gif", None), ("a.sketched.gif", None),
    ],
)  # fmt: skip
def test_names_tell_sketches(path: str, sketch: str | None) -> None:
    assert sketch_at(path) == sketch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Clips of 9 frames, each with its own kind of sketch; `none` has no sketch, and `orphan` no clip."""
    path = tmp_path / "clips"
    for number, name in enumerate(("a", "b", "folder", "nested/array", "none", "picture", "short")):
        save_apng(path / f"{name}.png", noise(number, 9))
    save_apng(path / "a.sketch.PNG", noise(10, 9))
    save_gif(path / "b.sketch.gif", noise(11, 9) // 128 * 255)
    save_frames(path / "folder.sketch", noise(12, 9), "{:03d}.png")
    np.save(path / "nested/array.sketch.npy", noise(13, 9, channels=1))
    save_apng(path / "picture.sketch.png", noise(14, 1))
    save_apng(path / "short.sketch.png", noise(15, 4))
    save_apng(path / "orphan.sketch.png", noise(16, 2))
    return path


def test_sketches_are_found_beside_clips_and_are_no_samples(folder: Path, tmp_path: Path) -> None:
    keys = ["a", "b", "folder", "nested/array", "none", "picture", "short"]
    plain = open_source(folder, VideoDataConfig())
    assert [plain.key(index) for index in range(len(plain))] == keys
    assert sum("sketch" in path.name for path in plain.files()) == 0
    assert any("not read (data.sketch=files: it is): 6" in note for note in plain.notes)
    feed = feed_of(folder, tmp_path, sketch="files", start="first")
    assert isinstance(feed.source, type(plain))
    assert any("sketch without a clip: 1 (orphan.sketch.png)" in note for note in feed.source.notes)
    assert [feed.source.key(index) for index in range(len(feed.source))] == keys
    seen = {key: sketches_of(feed, index) for index, key in enumerate(keys)}
    assert {key: lengths for key, (_, lengths) in seen.items()} == {
        "a": [5], "b": [5], "folder": [5], "nested/array": [5], "none": [0], "picture": [1], "short": [4],
    }  # fmt: skip
    for key, number in (("a", 10), ("folder", 12)):
        assert np.array_equal(seen[key][0][0], noise(number, 9)[:5])
    assert np.array_equal(seen["b"][0][0], noise(11, 9)[:5] // 128 * 255)
    assert np.array_equal(seen["nested/array"][0][0], np.repeat(noise(13, 9, channels=1)[:5], 3, axis=3))
    assert np.array_equal(seen["picture"][0][0, :1], noise(14, 1))


def test_another_sketch_of_the_same_clip_is_told(folder: Path) -> None:
    save_gif(folder / "a.sketch.gif", noise(0, 9) // 128 * 255)
    notes = open_source(folder, VideoDataConfig(sketch="files")).notes
    assert any("another sketch of the same clip, not read: 1 (a.sketch.gif)" in note for note in notes)


def test_a_row_that_names_a_sketch_is_told_so(folder: Path) -> None:
    named = ["a.png", "b.sketch.gif", "folder.sketch", "folder.sketch/003.png", "nested/array.sketch.npy", "c.sketch.gif"]
    (folder / "metadata.csv").write_text("file_name,text\n" + "".join(f"{name},a clip\n" for name in named))
    for sketch in ("none", "files"):
        source = open_source(folder, VideoDataConfig(sketch=sketch))
        assert isinstance(source, Stored)
        assert [(reject.path, reject.reason) for reject in source.rejects] == [
            *((f"metadata.csv:{line}", f"{named[line - 2]} is a sketch of a clip, not a sample; leave the row out")
              for line in (3, 4, 5, 6)),
            ("metadata.csv:7", "c.sketch.gif: no such file"),
        ]  # fmt: skip


# ---- the same frames, cut the same way


@pytest.mark.parametrize(
    "data",
    [
        {}, {"start": "first", "stride": 2}, {"fps": 7.3}, {**VARIED}, {**VARIED, "fps": 17.0},
        {"fit": "letterbox", "flip": "always", "background": (9, 99, 0)}, {"channels": 1, **VARIED},
    ],
)  # fmt: skip
def test_a_sketch_that_is_the_clip_has_its_tokens(tmp_path: Path, data: dict[str, Any]) -> None:
    """For every view, at whatever pace the sketch's own file is shown."""
    for number, (frames, width) in enumerate(((9, 28), (3, 16), (14, 40))):
        save_apng(tmp_path / "in" / f"{number}.png", noise(number, frames, 20, width), pause_ms=70)
        save_apng(tmp_path / "in" / f"{number}.sketch.png", noise(number, frames, 20, width), pause_ms=200)
    feed = feed_of(tmp_path / "in", tmp_path, **{"sketch": "files", "views": 5, **data})
    cache = cached(feed)
    assert (cache.sketched, cache.views) == (True, 1 if "start" in data else 5)
    for index, view in itertools.product(range(3), range(cache.views)):
        found = cache.sketch(index, view)
        assert found is not None
        assert np.array_equal(found[0], cache.ids(index, view))
        assert found[1] == cache.length(index, view)
    if cache.views > 1:
        assert len({cache.ids(2, view).tobytes() for view in range(5)}) > 1


def test_outlines_are_those_of_what_is_seen(tmp_path: Path) -> None:
    save_apng(tmp_path / "in/a.png", noise(0, 9, 20, 28) // 3)
    feed = feed_of(tmp_path / "in", tmp_path, sketch="edges", **VARIED)
    seen = ClipViews(feed.source, feed.config, 5, feed.seed)[0]
    drawn, lengths = sketches_of(feed, 0, 5)
    assert lengths == [5] * 5
    for view in range(5):
        assert np.array_equal(drawn[view], edges(seen.pictures[view]))


# ---- what is there


def test_steps_that_are_not_there_as_a_whole_are_not_there() -> None:
    """Brute force: a step counts when each of its frames is drawn, or lies behind the clip's end."""
    for stride, length in itertools.product((1, 2, 4), range(1, 14)):
        steps = [[0], *(list(range(start, start + stride)) for start in range(1, length, stride))]
        for there in range(length + 1):
            whole = [all(frame < there or frame >= length for frame in step) for step in steps]
            wanted = whole.index(False) if False in whole else len(whole)
            assert sketched_steps(np.array(there), np.array(length), stride) == wanted, (stride, length, there)


def test_a_window_behind_the_end_of_a_sketch_has_none(tmp_path: Path) -> None:
    """By frame numbers: of a window that starts at k those frames are there that the sketch has from k on."""
    save_apng(tmp_path / "in/a.png", noise(0, 20))
    save_apng(tmp_path / "in/a.sketch.png", noise(0, 8))
    feed = feed_of(tmp_path / "in", tmp_path, sketch="files", views=12)
    seen = ClipViews(feed.source, feed.config, 12, feed.seed)[0]
    drawn, lengths = sketches_of(feed, 0, 12)
    stored, found = noise(0, 20), set[int]()
    for view in range(12):
        start = next(at for at in range(20) if np.array_equal(stored[at], seen.pictures[view, 0]))
        assert lengths[view] == min(5, max(0, 8 - start))
        assert np.array_equal(drawn[view, : lengths[view]], stored[start : start + lengths[view]])
        found.add(lengths[view])
    assert {0, 5} <= found
    assert len(found) > 2


def test_batches_have_sketches_and_how_far_they_reach(folder: Path, tmp_path: Path) -> None:
    feed = feed_of(folder, tmp_path, sketch="files", start="first")
    cache = cached(feed)
    assert sorted(path.name for path in cache.folder.glob("*.npy")) == [
        "00000.lengths.npy", "00000.npy", "00000.sketch.lengths.npy", "00000.sketch.npy",
    ]  # fmt: skip
    loader = TokenLoader(feed, cache, NoTextReader())
    lengths: dict[str, int] = {}
    for batch in itertools.chain.from_iterable(itertools.islice(loader.batches(0), 4)):
        assert isinstance(batch, TokenBatch)
        moved = batch.to(torch.device("cpu"))
        assert moved.sketch is not None
        assert moved.sketch_lengths is not None
        assert (moved.sketch.shape, moved.sketch.dtype) == (moved.ids.shape, torch.int64)
        lengths |= dict(zip(batch.keys, moved.sketch_lengths.tolist(), strict=True))
    assert lengths == {"a": 3, "b": 3, "folder": 3, "nested/array": 3, "none": 0, "picture": 1, "short": 2}
    pictures = TokenLoader(feed_of(folder, tmp_path, sketch="files", start="first", image_share=0.5), cache, NoTextReader())
    first = next(pictures.batches(0))[0]
    assert first.lengths is not None
    assert first.sketch_lengths is not None
    assert first.lengths.tolist() == [3, 1, 3, 1]
    assert (first.sketch_lengths <= first.lengths).all()


# ---- the cache


def clips_of_one_s_own() -> list[dict[str, Any]]:
    return [{"key": key, "clip": np.zeros((3, 8, 8, 3), np.uint8), "caption": "x"} for key in "abc"]


@pytest.mark.parametrize(
    ("data", "name"),
    [({}, "0102f076db7d3be2"), ({"crop": "random", "zoom": 1.5, "flip": True, "fps": 4.0}, "ba3c57e7342a3301")],
)
def test_caches_without_sketches_keep_their_names(tmp_path: Path, data: dict[str, Any], name: str) -> None:
    source, named = as_clip_source(clips_of_one_s_own()), set[str]()
    for sketch in ("none", "edges", "files"):
        feed = feed_of(source, tmp_path, sketch=sketch, **data)
        named.add(cache_folder(feed, plan_of(feed)).name)
    feed = feed_of(source, tmp_path, **data)
    assert cache_folder(feed, plan_of(feed)).name == f"tokens-16-{name}"
    assert len(named) == 3


def test_a_changed_sketch_makes_another_cache(folder: Path, tmp_path: Path) -> None:
    def names() -> list[Path]:
        feeds = [feed_of(folder, tmp_path, sketch=sketch) for sketch in ("none", "files")]
        return [cache_folder(feed, plan_of(feed)) for feed in feeds]

    before = names()
    save_apng(folder / "a.sketch.PNG", noise(30, 8))
    after = names()
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)
    (folder / "b.sketch.gif").unlink()
    assert names()[1] not in (before[1], after[1])


def test_a_lost_sketch_shard_is_made_again(folder: Path, tmp_path: Path) -> None:
    feed = feed_of(folder, tmp_path, sketch="files")
    where = cached(feed).folder
    before = {path.name: path.read_bytes() for path in where.iterdir()}
    (where / "00000.sketch.npy").unlink()
    with pytest.raises(UserError, match=r"00000\.sketch\.npy cannot be read"):
        TokenCache(where)
    cached(feed)
    assert {path.name: path.read_bytes() for path in where.iterdir()} == before


def test_a_sketch_that_cannot_be_read_leaves_its_clip_out(folder: Path, tmp_path: Path) -> None:
    (folder / "a.sketch.PNG").write_bytes(b"no picture")
    np.save(folder / "nested/array.sketch.npy", np.zeros((9, 8), np.uint8))
    (folder / "folder.sketch/004.png").unlink()
    save_apng(folder / "twice.png", noise(17, 9))
    save_frames(folder / "twice.sketch", noise(18, 9), "{:03d}.png")
    save_frames(folder / "twice.sketch", noise(19, 1), "{}.png", first=4)
    feed = feed_of(folder, tmp_path, sketch="files", corrupt_budget=1.0)
    cache = cached(feed)
    assert set(cache.faults) == {"a", "folder", "nested/array", "twice"}
    assert "twice.sketch: 4.png has the number of another picture" in cache.faults["twice"]
    assert "folder.sketch: numbers are missing between its pictures: 1; expected one for every" in cache.faults["folder"]
    assert "a.sketch.PNG" in cache.faults["a"]
    assert "uint8 shaped (9, 8)" in cache.faults["nested/array"]
    assert len(TokenLoader(feed, cache, NoTextReader()).train) == 4


# ---- the check


def test_the_check_tells_of_sketches(folder: Path) -> None:
    (folder / "b.sketch.gif").write_bytes(b"GIF89a and nothing else")
    save_apng(folder / "a.sketch.PNG", noise(0, 9, 8, 16))
    for number in (2, 4, 5):
        (folder / f"folder.sketch/{number:03d}.png").unlink()
    for sets in ((), ("data.sketch=files",)):
        report = check_folder(folder, kind="clips", sets=sets)
        assert isinstance(report, ClipReport)
        assert (report.num_samples, report.num_sketches, report.num_first_sketches) == (7, 6, 1)
        odd = {each.path: each.reason for each in report.odd_sketches}
        assert list(odd) == ["a.png", "b.png", "folder.png", "short.png"]
        assert "leaves the clip out: " in odd["folder.png"]
        assert "folder.sketch: numbers are missing between its pictures: 3" in odd["folder.png"]
        assert "another shape, so it is cut at other places: 16 x 8 for 16 x 16" in odd["a.png"]
        assert "its sketch cannot be read, so data.sketch=files leaves the clip out: " in odd["b.png"]
        assert "its sketch has 4 frames for 9; those behind have none" in odd["short.png"]
        text = "\n".join(report.lines())
        assert "  sketches of 6 clips; of the first frame alone 1" in text
        assert "  sketch   short.png: its sketch has 4 frames" in text


def test_sketches_do_not_tell_what_a_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"")
    save_frames(tmp_path / "a.sketch", noise(0, 6), "{:03d}.png")
    assert main_kind(list_folder(tmp_path)) == "clips"


# ---- datasets of one's own, and what is refused


def test_datasets_may_bring_sketches(tmp_path: Path) -> None:
    items = clips_of_one_s_own()
    items[1]["sketch"] = noise(1, 2, 8, 8)
    feed = feed_of(as_clip_source(items), tmp_path, sketch="files", start="first", resolution=16)
    assert [sketches_of(feed, index)[1] for index in range(3)] == [[0], [2], [0]]
    items[2]["sketch"] = np.zeros((2, 8, 8), np.uint8)
    with pytest.raises(UserError, match=r"sample 2 of the dataset has a sketch that is a ndarray of uint8 shaped \(2, 8, 8\)"):
        as_clip_source(items)


class Bare:
    """A source that knows of no sketches."""

    def __len__(self) -> int:
        return 1

    def key(self, index: int) -> str:
        return "a"

    group = caption = read = key


def test_what_cannot_be(tmp_path: Path) -> None:
    save_apng(tmp_path / "clips/a.png", noise(0, 3))
    np.save(tmp_path / "stack.npy", noise(0, 6).reshape(2, 3, 16, 16, 3))
    files = VideoDataConfig(sketch="files")
    for path in (tmp_path / "clips", tmp_path / "stack.npy"):
        with pytest.raises(UserError, match=r"no clip of .* has a sketch; expected NAME\.sketch\.gif"):
            open_source(path, files)
    with pytest.raises(UserError, match="a Bare has no sketches"):
        ClipViews(Bare(), files, 1, 0)
    with pytest.raises(ValueError, match="a masked generator learns nothing from sketches"):
        MaskedClipsConfig(data=VideoDataConfig(sketch="edges"))
