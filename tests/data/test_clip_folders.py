"""Folders of clips: what is a clip, which captions it has, what is rejected and what the notes say."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from tessera.config import ImageDataConfig, MeshDataConfig, UserError, VideoDataConfig
from tessera.data.check import check_folder
from tessera.data.clip_sources import ClipFolder, ClipStacks, StoredClips, as_clip_source, single_pictures
from tessera.data.clips import prepare_clip
from tessera.data.frame_folders import common_prefix
from tessera.data.opening import open_source
from tessera.data.sources import ImageFolder, split_indices
from tessera.media.clip_facts import ClipFacts, UnreadableClip
from tessera.media.clip_files import encode_mp4
from tessera.media.clips import Clip
from tests.data.clip_makers import noise, save_apng, save_frames, save_gif


def opened(path: Path, **data: Any) -> StoredClips:
    return open_source(path, VideoDataConfig(**data))


def described(source: StoredClips) -> dict[str, tuple[str, ...]]:
    return {source.key(index): source.captions(index) for index in range(len(source))}


def every(facts: ClipFacts) -> range:
    return range(facts.num_frames)


def frames_of(source: StoredClips, key: str) -> Any:
    index = next(index for index in range(len(source)) if source.key(index) == key)
    return source.read(index).read(every).frames


def said(source: StoredClips, *parts: str) -> bool:
    return any(all(part in note for part in parts) for note in source.notes)


# ---- conventions


def test_files_of_every_kind_with_captions_beside_them(tmp_path: Path) -> None:
    save_gif(tmp_path / "a.gif", noise(0, 4))
    save_apng(tmp_path / "b.apng", noise(1, 3))
    save_apng(tmp_path / "deep/c.png", noise(2, 5))
    save_apng(tmp_path / "still.PNG", noise(3, 1))
    save_frames(tmp_path / "walk", noise(4, 6))
    np.save(tmp_path / "array.npy", noise(5, 7))
    for name, text in {"a": "one", "b": "two\nzwei", "deep/c": "three", "walk": "six", "array": "seven"}.items():
        (tmp_path / f"{name}.{'caption' if name == 'b' else 'txt'}").write_text(text)
    source = opened(tmp_path)
    assert isinstance(source, ClipFolder)
    assert (source.kind, source.layout, source.rejects, source.notes[1:]) == ("clips", "folder", (), ())  # one: several lines
    assert described(source) == {
        "a": ("one",), "array": ("seven",), "b": ("two", "zwei"), "deep/c": ("three",), "still": (), "walk": ("six",),
    }  # fmt: skip
    lengths = {source.key(index): source.read(index).facts().num_frames for index in range(len(source))}
    assert lengths == {"a": 4, "array": 7, "b": 3, "deep/c": 5, "still": 1, "walk": 6}
    for key, seed in {"b": 1, "deep/c": 2, "still": 3, "walk": 4, "array": 5}.items():
        assert np.array_equal(frames_of(source, key), noise(seed, lengths[key]))
    single = single_pictures(source, np.arange(len(source)))
    assert [source.key(index) for index in np.flatnonzero(single)] == ["still"]


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
def test_tables_name_files_and_folders_of_frames(tmp_path: Path, name: str) -> None:
    save_gif(tmp_path / "clips/a.gif", noise(0, 3))
    save_frames(tmp_path / "clips/b.01", noise(1, 3), "{}.png")
    texts = {"clips/a.gif": "a cat", "clips/b.01": "a dog"}
    rows = [{"file_name": file, "text": text, "who": "ann"} for file, text in texts.items()]
    if name.endswith("jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    elif name.endswith("csv"):
        (tmp_path / name).write_text("file_name,text,who\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    source = opened(tmp_path, group_by="who")
    assert described(source) == {"clips/a": ("a cat",), "clips/b.01": ("a dog",)}
    assert {source.group(index) for index in range(2)} == {"ann"}
    assert source.rejects == ()


def test_class_folders_and_split_folders(tmp_path: Path) -> None:
    for side, numbers in {"train": range(3), "val": range(2)}.items():
        for kind in ("walks", "10_jumps_high"):
            for number in numbers:
                save_gif(tmp_path / side / kind / f"{number}.gif", noise(number, 3))
                save_frames(tmp_path / side / kind / f"f{number}", noise(number, 3), "{:03d}.png")  # deeper than a class folder
    source = opened(tmp_path)
    train, held_out = split_indices(source, 0.5)
    assert (len(train), len(held_out)) == (12, 8)
    assert set(described(source).values()) == {("walks",), ("jumps high",)}
    assert "train/walks/f0" in described(source)
    assert len(split_indices(opened(tmp_path, split="hash"), 0.5)[0]) not in (0, 12, 20)


def test_groups_are_refused_where_folders_are_the_split(tmp_path: Path) -> None:
    for name in ("train/a.gif", "val/b.gif"):
        save_gif(tmp_path / name, noise(0, 2))
    with pytest.raises(UserError, match=r"data.group_near_duplicates has no effect .* divide all clips anew"):
        opened(tmp_path, group_near_duplicates=True)


def test_a_caption_that_names_a_side_is_told_with_flips(tmp_path: Path) -> None:
    save_gif(tmp_path / "a.gif", noise(0, 2))
    (tmp_path / "a.txt").write_text("it moves left")
    assert said(opened(tmp_path, flip=True), "names left or right", ": 1")


# ---- folders of frames


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["1.png", "2.png"], ""),
        (["frame_9.jpg", "frame_10.jpeg", "frame_11.JPG"], "frame_"),
        (["clip2_007.png", "clip2_008.png"], "clip2_"),
        (["1.png", "3.png"], None),  # a gap
        (["1.png", "01.png"], None),  # a number twice
        (["1.png", "2.jpg"], None),
        (["1.gif", "2.gif"], None),  # clips themselves, perhaps
        (["a1.png", "b2.png"], None),
        (["1.png", "2.png", "cover.png"], None),
        (["1.png"], None),
    ],
)
def test_names_that_are_numbered_on(names: list[str], prefix: str | None) -> None:
    assert common_prefix(names) == prefix


@given(some.sets(some.integers(0, 12), min_size=1), some.integers(1, 4))
def test_numbers_must_run_on(numbers: set[int], width: int) -> None:
    names = [f"img{number:0{width}d}.png" for number in numbers]
    runs = len(numbers) > 1 and sorted(numbers) == list(range(min(numbers), max(numbers) + 1))
    assert (common_prefix(names) == "img") == runs


def test_class_folders_of_numbered_pictures_are_no_clips(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        save_frames(tmp_path / name, noise(0, 3), "{}.png")
    source = opened(tmp_path)
    assert described(source) == {f"{name}/{number}": (name,) for name in ("cat", "dog") for number in (1, 2, 3)}
    assert said(source, "folder of numbered pictures", ": 2 (cat/, dog/)")
    assert list(described(opened(tmp_path, class_folders=False))) == ["cat", "dog"]


@pytest.mark.parametrize("evidence", ["caption", "row", "name"])
def test_what_says_that_a_folder_is_a_clip_says_it_of_those_beside_it(tmp_path: Path, evidence: str) -> None:
    for name in ("cat", "dog"):
        save_frames(tmp_path / name, noise(0, 3), "Frame{}.png" if evidence == "name" and name == "cat" else "{}.png")
    if evidence == "caption":
        (tmp_path / "cat.txt").write_text("a cat walks")
    elif evidence == "row":
        (tmp_path / "metadata.csv").write_text("file_name,text\ncat/,a cat walks\n")
    source = opened(tmp_path)
    assert described(source) == {"cat": () if evidence == "name" else ("a cat walks",), "dog": ()}
    assert not said(source, "folder of numbered pictures")


def test_pictures_with_captions_of_their_own_are_pictures(tmp_path: Path) -> None:
    save_frames(tmp_path / "x/with", noise(0, 2), "frame{}.png")
    (tmp_path / "x/with/frame1.txt").write_text("one")
    save_frames(tmp_path / "x/rows", noise(0, 2), "frame{}.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\nx/rows/frame2.png,two\n")
    save_frames(tmp_path / "x/above/below", noise(0, 2), "frame{}.png")
    save_frames(tmp_path / "x/above", noise(0, 2), "frame{}.png")
    assert list(described(opened(tmp_path))) == [
        "x/above/below", "x/above/frame1", "x/above/frame2", "x/rows/frame1", "x/rows/frame2", "x/with/frame1", "x/with/frame2",
    ]  # fmt: skip


def test_split_folders_and_the_root_are_no_clips(tmp_path: Path) -> None:
    for name in ("train", "val"):
        save_frames(tmp_path / name, noise(0, 3))
    assert len(opened(tmp_path, class_folders=False)) == 6
    assert len(opened(tmp_path / "train", class_folders=False)) == 3


def test_a_folder_and_a_file_of_one_name_have_their_own_keys(tmp_path: Path) -> None:
    save_frames(tmp_path / "a", noise(0, 3))
    save_gif(tmp_path / "a.gif", noise(0, 3))
    assert list(described(opened(tmp_path))) == ["a", "a.gif"]


def test_the_stamp_changes_with_a_frame(tmp_path: Path) -> None:
    save_frames(tmp_path / "a", noise(0, 3))
    source = opened(tmp_path)
    before = source.stamp()
    assert source.stamp() == before
    os.utime(tmp_path / "a/frame_0002.png", (1, 1))
    assert source.stamp() != before


# ---- arrays


def test_stacks_are_mapped_and_captioned_line_by_line(tmp_path: Path) -> None:
    stack = np.stack([noise(seed, 6) for seed in range(3)])
    np.save(tmp_path / "clips.npy", stack)
    (tmp_path / "captions.txt").write_text("one\n\nthree\n")
    for source in (opened(tmp_path), opened(tmp_path / "clips.npy")):
        assert isinstance(source, ClipStacks)
        assert (source.kind, source.layout, len(source)) == ("clips", "arrays", 3)
        assert described(source) == {"clips/000000": ("one",), "clips/000001": (), "clips/000002": ("three",)}
        assert np.array_equal(source.read(2).read(lambda _: [1, 4]).frames, stack[2, [1, 4]])


def test_grey_and_transparent_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "grey.npy", noise(0, 3, channels=1))
    clear = noise(1, 3, channels=4)
    clear[..., 3] = 0
    np.save(tmp_path / "clear.npy", clear)
    source = opened(tmp_path, background=(1, 2, 3))
    assert np.array_equal(frames_of(source, "grey"), np.repeat(noise(0, 3, channels=1), 3, axis=3))
    assert (frames_of(source, "clear") == (1, 2, 3)).all()


def test_arrays_that_are_no_clips_are_rejects(tmp_path: Path) -> None:
    np.save(tmp_path / "good.npy", noise(0, 3))
    np.save(tmp_path / "float.npy", noise(0, 3).astype(np.float32))
    np.save(tmp_path / "flat.npy", np.zeros((3, 8, 8), np.uint8))
    np.save(tmp_path / "stack.npy", np.zeros((2, 3, 8, 8, 3), np.uint8))
    (tmp_path / "no.npy").write_bytes(b"nothing")
    source = opened(tmp_path)
    assert list(described(source)) == ["good"]
    assert {reject.path for reject in source.rejects} == {"flat.npy", "float.npy", "no.npy"}
    assert any("float32 shaped (3, 16, 16, 3); expected uint8" in reject.reason for reject in source.rejects)
    assert said(source, "stack of clips beside clips, not read", "stack.npy")


def test_a_number_of_lines_other_than_that_of_clips(tmp_path: Path) -> None:
    np.save(tmp_path / "clips.npy", np.zeros((2, 3, 8, 8, 3), np.uint8))
    (tmp_path / "clips.txt").write_text("one\n")
    with pytest.raises(UserError, match=r"has 1 lines, and clips.npy has 2 clips; expected a line a clip"):
        opened(tmp_path)


# ---- what is wrong


def test_a_folder_without_clips_says_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "mesh.obj").write_text("v 0 0 0")
    with pytest.raises(UserError, match=r"holds no clips: found 1 .obj file: that looks like meshes; expected a folder of gif"):
        opened(tmp_path)


def test_what_lies_beside_clips_is_told(tmp_path: Path) -> None:
    save_gif(tmp_path / "a.gif", noise(0, 2))
    (tmp_path / "b.txt").write_text("nobody's")
    (tmp_path / "list.csv").write_text("x")
    (tmp_path / "pack.tar").write_bytes(b"")
    source = opened(tmp_path)
    assert said(source, "caption file without a clip: 1 (b.txt)")
    assert said(source, "text or table not read", "list.csv")
    assert said(source, "1 .tar file not read: tars; unpack them first")


def hide_av(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_av(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "av":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_av)


def test_videos_without_pyav_stop_at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(64))
    hide_av(monkeypatch)
    with pytest.raises(UserError, match=r"PyAV, which is not installed: pip install"):
        opened(tmp_path)


def test_a_video_under_another_name_without_pyav_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gif").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(64))
    hide_av(monkeypatch)
    config = VideoDataConfig()
    item = prepare_clip(opened(tmp_path), config, 0, 0)
    assert not item.readable
    assert "PyAV" in item.fault
    assert "PyAV" in check_folder(tmp_path, kind="clips").rejects[0].reason


def test_a_window_of_a_video_at_another_rate(tmp_path: Path) -> None:
    pytest.importorskip("av")
    levels = np.arange(40, dtype=np.uint8) * 6
    frames = np.broadcast_to(levels[:, None, None, None], (40, 32, 32, 3))
    (tmp_path / "a.mp4").write_bytes(encode_mp4(Clip(np.ascontiguousarray(frames), 20.0)))
    config = VideoDataConfig(resolution=32, frames=5, fps=10)
    item = prepare_clip(opened(tmp_path), config, 0, 0, draw=4)
    shown = item.frames.mean(axis=(1, 2, 3)) / 6
    assert item.frames.shape == (5, 32, 32, 3)
    assert np.allclose(np.diff(shown), 2, atol=0.4)  # every second frame
    first = prepare_clip(opened(tmp_path), VideoDataConfig(resolution=32, frames=5, fps=10, start="first"), 0, 0).frames
    assert np.allclose(first.mean(axis=(1, 2, 3)) / 6, [0, 2, 4, 6, 8], atol=0.4)


def test_videos_beside_pictures_stay_unread_where_pictures_are_asked_for(tmp_path: Path) -> None:
    save_apng(tmp_path / "a.png", noise(0, 1))
    (tmp_path / "b.mp4").write_bytes(b"no video")
    source = open_source(tmp_path, ImageDataConfig())
    assert isinstance(source, ImageFolder)
    assert any("1 .mp4 file not read: videos" in note for note in source.notes)


def test_what_cannot_be_read_raises_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_bytes(b"")
    (tmp_path / "b.mp4").write_bytes(b"not a video")
    save_frames(tmp_path / "c", noise(0, 3))
    (tmp_path / "c/frame_0002.png").write_bytes(b"broken")
    save_gif(tmp_path / "d.gif", noise(1, 3))
    source = opened(tmp_path)
    for index in range(3):
        with pytest.raises(UnreadableClip, match=source.name(index)):
            source.read(index).read(every)
    assert source.read(3).facts().num_frames == 3
    assert not single_pictures(source, np.arange(4)).any()


def test_a_mesh_config_still_opens_meshes(tmp_path: Path) -> None:
    (tmp_path / "a.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n")
    save_gif(tmp_path / "b.gif", noise(0, 2))
    assert open_source(tmp_path, MeshDataConfig()).kind == "meshes"


# ---- near-duplicates


def moving(seed: int, num_frames: int, side: int) -> Any:
    """A bright box that moves over smooth noise."""
    rng = np.random.default_rng(seed)
    ground = np.asarray(Image.fromarray(rng.integers(0, 200, (6, 6, 3), dtype=np.uint8)).resize((side, side)))
    frames = np.repeat(ground[None], num_frames, axis=0)
    for place, frame in enumerate(frames):
        at = round(place / max(1, num_frames - 1) * side * 0.6)
        frame[at : at + side // 3, side // 3 : side // 2] = 255
    return frames


def test_copies_of_another_size_and_rate_share_a_group(tmp_path: Path) -> None:
    save_apng(tmp_path / "a.png", moving(0, 9, 64))
    save_apng(tmp_path / "copy.png", moving(0, 9, 48), pause_ms=50)
    save_apng(tmp_path / "back.png", moving(0, 9, 64)[::-1])  # the same middle, the ends swapped
    save_apng(tmp_path / "other.png", moving(1, 9, 64))
    source = opened(tmp_path, group_near_duplicates=True)
    groups = {source.key(index): source.group(index) for index in range(4)}
    assert groups["a"] == groups["copy"]
    assert len(set(groups.values())) == 3
    assert said(source, "near-duplicates share a group", "3 groups")


# ---- datasets


def test_a_dataset_of_arrays_or_clips_is_a_source() -> None:
    items = [{"key": "a", "clip": noise(0, 5), "caption": "one"}, {"key": "b", "clip": Clip(noise(1, 4, channels=4), 25.0)}]
    source = as_clip_source(items, channels=1)
    assert [source.caption(index) for index in range(2)] == ["one", None]
    assert source.read(0).read(every).frames.shape == (5, 16, 16, 1)
    facts = source.read(1).facts()
    assert (facts.num_frames, facts.fps, facts.has_alpha) == (4, 25.0, True)
    assert as_clip_source(source) is source


@pytest.mark.parametrize("clip", [None, noise(0, 3)[0], noise(0, 3) / 255, np.zeros((0, 8, 8, 3), np.uint8), "a.gif"])
def test_a_dataset_of_something_else_is_the_users_error(clip: Any) -> None:
    with pytest.raises(UserError, match="sample 0 of the dataset has a clip that is a"):
        as_clip_source([{"key": "a", "clip": clip}])


@pytest.mark.parametrize("fps", [0, -1.0, float("nan"), float("inf"), "24", None])
def test_a_clip_of_no_rate_is_the_users_error(fps: Any) -> None:
    with pytest.raises(UserError, match=r"sample 0 of the dataset has a clip of .* frames a second; expected a number above 0"):
        as_clip_source([{"key": "a", "clip": Clip(noise(0, 3), fps)}])


def test_an_empty_dataset_is_the_users_error() -> None:
    with pytest.raises(UserError, match="has no samples"):
        as_clip_source([])
