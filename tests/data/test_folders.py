"""Folders as users bring them: what is found, how captions come, what is refused and in which words."""

from __future__ import annotations

import json
import os
import pickle
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tessera.config import UserError
from tessera.data.sources import ImageFolder, Reject, Sample, Source, split_of
from tessera.media.images import UnreadableImage


def put(path: Path, colour: tuple[int, int, int] = (10, 20, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), colour).save(path)
    return path


def keys(source: Source) -> list[str]:
    return [source.key(index) for index in range(len(source))]


def captions(source: Source) -> dict[str, str | None]:
    return {source.key(index): source.caption(index) for index in range(len(source))}


def notes_about(source: ImageFolder, words: str) -> list[str]:
    return [note for note in source.notes if words in note]


# ---- what is found


def test_images_of_every_kind_and_case_in_path_order(tmp_path: Path) -> None:
    names = ["b.png", "a.JPG", "sub/c.webp", "sub/deep/d.gif", "Z.bmp", "e.Jpeg", "sub.png"]
    random.Random(0).shuffle(names)
    for name in names:
        put(tmp_path / name)
    (tmp_path / "readme.md").write_text("no image")
    assert keys(ImageFolder.open(tmp_path)) == ["Z", "a", "b", "e", "sub", "sub/c", "sub/deep/d"]


def test_a_sample(tmp_path: Path) -> None:
    put(tmp_path / "cats/one.png", (1, 2, 3)).with_suffix(".txt").write_text("a dark cat\n")
    source = ImageFolder.open(str(tmp_path))
    sample = source[0]
    assert isinstance(sample, Sample)
    assert (sample.key, sample.caption) == ("cats/one", "a dark cat")
    assert np.array_equal(sample.image, np.full((3, 4, 3), (1, 2, 3), np.uint8))
    assert source.path(0) == tmp_path / "cats/one.png"
    assert source.captions(0) == ("a dark cat",)
    assert source.group(0) == "cats/one"
    assert [each.key for each in source] == ["cats/one"]  # ends, by IndexError
    assert isinstance(source, Source)


def test_channels_and_background_reach_the_reader(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert ImageFolder.open(tmp_path, background=(1, 2, 3)).read(0)[0, 0].tolist() == [1, 2, 3]
    assert ImageFolder.open(tmp_path, channels=4).read(0)[0, 0].tolist() == [255, 0, 0, 0]
    assert ImageFolder.open(tmp_path, channels=1, background=(9, 9, 9)).read(0)[0, 0].tolist() == [9]


def test_min_side_reaches_the_reader(tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "a.jpg")
    assert ImageFolder.open(tmp_path, min_side=100).read(0).shape == (120, 160, 3)


def test_files_that_share_a_stem_keep_their_extension(tmp_path: Path) -> None:
    for name in ["a.png", "a.jpg", "b.png", "a.png.png", "sub/a.png"]:
        put(tmp_path / name)
    (tmp_path / "a.txt").write_text("both")
    source = ImageFolder.open(tmp_path)
    assert keys(source) == ["a.jpg", "a.png", "a.png.png", "b", "sub/a"]
    assert captions(source) == {"a.jpg": "both", "a.png": "both", "a.png.png": None, "b": None, "sub/a": None}


@given(st.sets(st.tuples(st.sampled_from(["a", "a.png", "b", "s/a"]), st.sampled_from([".png", ".jpg", ".png.png"])), min_size=1))
@settings(max_examples=30, deadline=None)
def test_keys_are_unique(tmp_path_factory: pytest.TempPathFactory, names: set[tuple[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("keys")
    for stem, suffix in names:
        path = folder / (stem + suffix)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = keys(ImageFolder.open(folder))
    assert len(set(found)) == len(found) == len({stem + suffix for stem, suffix in names})


def test_hidden_files_and_folders_are_ignored(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    put(tmp_path / ".trash/b.png")
    put(tmp_path / "c.png").rename(tmp_path / "._c.png")
    assert keys(ImageFolder.open(tmp_path)) == ["a"]


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    put(tmp_path / "a.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png"))
    source = pickle.loads(pickle.dumps(ImageFolder.open(tmp_path)))
    assert source[0].image.shape == (3, 4, 3)
    assert split_of(source.group(0), 0.5) in ("train", "validation")


def test_links_to_files_and_folders(tmp_path: Path) -> None:
    put(tmp_path / "data/real/a.png")
    put(tmp_path / "elsewhere/b.png")
    (tmp_path / "data/link.png").symlink_to(tmp_path / "elsewhere/b.png")
    (tmp_path / "data/far").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "data/again").symlink_to(tmp_path / "data/real", target_is_directory=True)  # sorts before real/
    (tmp_path / "data/gone.png").symlink_to(tmp_path / "nowhere.png")
    source = ImageFolder.open(tmp_path / "data")
    assert keys(source) == ["far/b", "link", "real/a"]
    assert notes_about(source, "read already") == ["link to a folder that is read already, not followed: 1 (again)"]
    assert source.rejects == (Reject("gone.png", "a broken link, or not a regular file"),)


def test_loops_of_links_end(tmp_path: Path) -> None:
    put(tmp_path / "a/b/c.png")
    (tmp_path / "a/b/up").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "a/top").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    source = ImageFolder.open(tmp_path)
    assert keys(source) == ["a/b/c"]
    assert [reject.path for reject in source.rejects] == ["self"]


def test_a_synthetic_set_gives_its_training_part(tmp_path: Path) -> None:
    put(tmp_path / "train/a.png")
    put(tmp_path / "heldout/b.png")
    (tmp_path / "synth.json").write_text("{}")
    source = ImageFolder.open(tmp_path)
    assert keys(source) == ["a"]
    assert notes_about(source, "synth.json")
    (tmp_path / "synth.json").unlink()
    assert keys(ImageFolder.open(tmp_path)) == ["heldout/b", "train/a"]


def test_opening_decodes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    source = ImageFolder.open(tmp_path)
    with pytest.raises(UnreadableImage, match="empty"):
        source.read(0)


# ---- captions beside the files


def test_caption_files(tmp_path: Path) -> None:
    for name, suffix, content in [
        ("a", ".txt", b"\xef\xbb\xbf  with a mark \r\n"),
        ("b", ".caption", "Ünïcode 猫".encode()),
        ("c", ".TXT", b"upper case"),
        ("d", ".txt", b" \n\t"),
        ("e", ".txt", b"caf\xe9"),
        ("f", ".txt", b"two\nlines"),
    ]:
        put(tmp_path / f"{name}.png").with_suffix(suffix).write_bytes(content)
    put(tmp_path / "g.png").with_suffix(".txt").write_text("from txt")
    (tmp_path / "g.caption").write_text("from caption")
    put(tmp_path / "h.png")
    (tmp_path / "orphan.txt").write_text("no picture")
    source = ImageFolder.open(tmp_path)
    assert captions(source) == {
        "a": "with a mark", "b": "Ünïcode 猫", "c": "upper case", "d": None, "e": None, "f": "two",
        "g": "from txt", "h": None,
    }  # fmt: skip
    assert (source.captions(5), source.captions(7)) == (("two", "lines"), ())
    assert [reject.path for reject in source.rejects] == ["e.txt"]
    assert "not UTF-8" in source.rejects[0].reason
    assert notes_about(source, "empty caption file") == ["empty caption file: 1 (d.txt)"]
    assert notes_about(source, "two caption files")
    assert notes_about(source, "caption file without an image") == ["caption file without an image: 1 (orphan.txt)"]


def test_a_shared_caption_file_is_rejected_once(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    put(tmp_path / "a.jpg").with_suffix(".txt").write_bytes(b"\xff")
    assert len(ImageFolder.open(tmp_path).rejects) == 1


# ---- metadata


def jsonl(path: Path, *rows: Any) -> None:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8")


def test_jsonl_rows_each_with_their_fault(tmp_path: Path) -> None:
    for name in ["a.png", "b.png", "c.png", "sub/d.png", "e.png", "f.png"]:
        put(tmp_path / name)
    jsonl(
        tmp_path / "metadata.jsonl",
        {"file_name": "a.png", "text": " first \n", "group": 7},
        {"file_name": "b.png", "caption": "second"},
        "",
        {"file_name": "./sub/d.png", "prompt": "third"},
        {"file_name": "gone.png", "text": "missing"},
        {"file_name": "a.png", "text": "again"},
        "{not json",
        ["a.png"],
        {"text": "no name"},
        {"file_name": "../x.png", "text": "outside"},
        {"file_name": "c.png", "text": 5},
        {"file_name": "notes.md", "text": "x"},
        {"file_name": "e.png", "text": None},
    )
    source = ImageFolder.open(tmp_path)
    assert captions(source) == {"a": "first", "b": "second", "c": None, "e": None, "f": None, "sub/d": "third"}
    reasons = {reject.path: reject.reason for reject in source.rejects}
    assert list(reasons) == [f"metadata.jsonl:{line}" for line in (5, 7, 8, 9, 10, 11, 12)]
    expected = ["gone.png: no such file", "not JSON", "a JSON list", "file_name is missing", "outside"]
    for reason, words in zip(reasons.values(), [*expected, "text is 5", "not an image"], strict=True):
        assert words in reason
    assert source.captions(0) == ("first", "again")
    assert notes_about(source, "another row") == [
        "another row for the same image, whose caption is one more: 1 (metadata.jsonl:6)"
    ]
    assert notes_about(source, "no row") == ["image that no row of the metadata names, rejected rows aside: 1 (f.png)"]
    assert notes_about(source, "was rejected") == ["image whose row of the metadata was rejected: 1 (c.png)"]
    assert notes_about(source, "without a caption") == ["metadata row without a caption: 1 (metadata.jsonl:13)"]


def test_jsonl_that_is_not_text(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    put(tmp_path / "b.png")
    good, bad = b'{"file_name": "a.png", "text": "line\xe2\x80\xa8separator"}', b'{"file_name": "b.png", "text": "\xe9"}'
    half = b'{"file_name": "b.png", "text": "\\ud83d"}'
    (tmp_path / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\r\n" + bad + b"\n" + half)
    source = ImageFolder.open(tmp_path)
    assert captions(source) == {"a": "line\u2028separator", "b": None}
    assert source.rejects[0].reason == "not UTF-8"
    assert "surrogate" in source.rejects[1].reason


def test_csv_rows(tmp_path: Path) -> None:
    for name in "abcd":
        put(tmp_path / f"{name}.png")
    (tmp_path / "metadata.csv").write_text(
        '\ufefffile_name,text,style\na.png,"red, round",x\nb.png,red, round,x\n\nc.png,"two\nlines",y\nd.png,,y\n',
        encoding="utf-8",
    )
    source = ImageFolder.open(tmp_path, group_by="style")
    assert captions(source) == {"a": "red, round", "b": None, "c": "two\nlines", "d": None}
    assert [reject.path for reject in source.rejects] == ["metadata.csv:3"]
    assert "needs quotes" in source.rejects[0].reason
    assert [source.group(index) for index in range(4)] == ["x", "b", "y", "y"]
    assert notes_about(source, "group of its own")


def test_metadata_in_a_subfolder_speak_for_it(tmp_path: Path) -> None:
    put(tmp_path / "sub/a.png")
    put(tmp_path / "sub/b.png")
    put(tmp_path / "other/c.png").with_suffix(".txt").write_text("beside")
    jsonl(tmp_path / "sub/metadata.jsonl", {"file_name": "a.png", "text": "inside"})
    source = ImageFolder.open(tmp_path)
    assert captions(source) == {"other/c": "beside", "sub/a": "inside", "sub/b": None}
    assert notes_about(source, "no row") == ["image that no row of the metadata names: 1 (sub/b.png)"]


def test_metadata_win_over_caption_files(tmp_path: Path) -> None:
    for name in "ab":
        put(tmp_path / f"{name}.png").with_suffix(".txt").write_text("beside")
    jsonl(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": "row"}, {"file_name": "b.png"})
    source = ImageFolder.open(tmp_path)
    assert captions(source) == {"a": "row", "b": "beside"}
    assert notes_about(source, "caption file not used")


def test_names_written_by_other_systems(tmp_path: Path) -> None:
    put(tmp_path / "sub" / unicodedata.normalize("NFD", "café.png"))
    jsonl(tmp_path / "metadata.jsonl", {"file_name": "sub\\" + unicodedata.normalize("NFC", "café.png"), "text": "coffee"})
    assert ImageFolder.open(tmp_path).caption(0) == "coffee"


def test_groups_come_from_a_column(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path / f"{name}.png")
    jsonl(
        tmp_path / "metadata.jsonl",
        *({"file_name": f"{name}.png", "text": name, "artist": number} for name, number in [("a", 1), ("b", 1)]),
    )
    source = ImageFolder.open(tmp_path, group_by="artist")
    assert [source.group(index) for index in range(3)] == ["1", "1", "c"]
    with pytest.raises(UserError, match=r"'artists'.*they have artist, file_name, text.*did you mean 'artist'"):
        ImageFolder.open(tmp_path, group_by="artists")
    (tmp_path / "metadata.jsonl").unlink()
    with pytest.raises(UserError, match=r"expected a metadata\.jsonl or metadata\.csv"):
        ImageFolder.open(tmp_path, group_by="artist")


# ---- input that is wrong altogether


def test_wrong_places(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match=r"photo does not exist.*did you mean .*photos\?"):
        ImageFolder.open(tmp_path / "photo")
    with pytest.raises(UserError, match="nowhere/at/all does not exist"):
        ImageFolder.open(tmp_path / "nowhere/at/all")
    with pytest.raises(UserError, match="holds no images: it is empty; expected"):
        ImageFolder.open(tmp_path / "photos")
    (tmp_path / "photos.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"is a file.*unpack"):
        ImageFolder.open(tmp_path / "photos.zip")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([f"{number}.obj" for number in range(12)], "found 12 .obj files: that looks like meshes"),
        (["a.mp4", "a.txt"], "that looks like videos"),
        (["data.tar.gz"], "found 1 .gz file: that looks like archives; unpack them first"),
        (["a.HEIC", "b.heic"], "found 2 .heic files: that looks like images of another format; convert"),
        (["LICENSE", "a.md"], "extensionless"),
    ],
)
def test_a_folder_without_images_says_what_it_holds(tmp_path: Path, names: list[str], words: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        ImageFolder.open(tmp_path)
    assert words in str(caught.value)
    assert "expected a folder of png" in str(caught.value)


def test_metadata_that_contradict_or_are_no_table(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("image;text\na.png;x\n")
    with pytest.raises(UserError, match="has the columns image;text; expected, separated by commas, file_name"):
        ImageFolder.open(tmp_path)
    (tmp_path / "metadata.csv").write_bytes("file_name,text\na.png,café\n".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        ImageFolder.open(tmp_path)
    (tmp_path / "metadata.csv").write_text("")
    with pytest.raises(UserError, match=r"\(none\)"):
        ImageFolder.open(tmp_path)
    (tmp_path / "metadata.jsonl").write_text("{}")
    with pytest.raises(UserError, match="both"):
        ImageFolder.open(tmp_path)
