"""Webdataset shards: samples as webdataset groups them, any order, and every kind of damage named."""

from __future__ import annotations

import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.config import ImageDataConfig, UserError
from tessera.data.check import check_folder
from tessera.data.opening import open_source
from tessera.data.shards import TarShards
from tessera.data.sources import split_indices
from tessera.media.images import UnreadableImage
from tests.data.shard_makers import encoded, pack, picture


def opened(path: Path, **config: Any) -> TarShards:
    source = open_source(path, ImageDataConfig(**config))
    assert isinstance(source, TarShards)
    return source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(2):
        members: dict[str, bytes] = {}
        for number in range(3):
            members[f"{number:04d}.png"] = encoded(10 * shard + number)
            members[f"{number:04d}.txt"] = f"caption {shard} {number}".encode()
        pack(tmp_path / f"shard-{shard:02d}.tar", members)
    return tmp_path


def test_samples_of_shards(folder: Path) -> None:
    source = pickle.loads(pickle.dumps(opened(folder)))
    keys = [source.key(index) for index in range(len(source))]
    assert keys == [f"shard-{shard:02d}/{number:04d}" for shard in range(2) for number in range(3)]
    for index in (5, 0, 3, 1):  # any order
        shard, number = divmod(index, 3)
        assert np.array_equal(source.read(index), picture(10 * shard + number))
        assert source.captions(index) == (f"caption {shard} {number}",)
    assert source.name(4) == "shard-01.tar/0001.png"
    report = check_folder(folder)
    assert (report.layout, report.num_samples, report.num_captioned, report.formats) == ("webdataset", 6, 6, {"PNG": 6})


def test_a_single_shard_has_the_same_keys(folder: Path) -> None:
    source = opened(folder / "shard-01.tar")
    assert [source.key(index) for index in range(3)] == [f"shard-01/{number:04d}" for number in range(3)]
    assert np.array_equal(source.read(2), picture(12))
    assert check_folder(folder / "shard-01.tar").num_samples == 3


def test_captions_in_json_lines_and_folders(tmp_path: Path) -> None:
    pack(
        tmp_path / "a.tar",
        {
            "sub/x.json": json.dumps({"caption": ["one", "two"], "who": "ann"}).encode(),
            "sub/x.jpg": encoded(0, "JPEG"),
            "./y.JPG": encoded(1, "JPEG"),
            "y.txt": b"text wins\nsecond line",
            "y.json": json.dumps({"text": "json", "who": "ann"}).encode(),
            "z.png": encoded(2),
            "z.json": b"[1]",
            "w.png": encoded(3),
            "w.txt": b"caf\xe9",
            "w.seg.png": encoded(4),
            "w.cls": b"7",
            "alone.txt": b"no picture",
        },
    )
    source = opened(tmp_path, group_by="who")
    found = {source.key(index): source.captions(index) for index in range(len(source))}
    assert found == {"a/sub/x": ("one", "two"), "a/y": ("text wins", "second line"), "a/z": (), "a/w": ()}
    assert [source.group(index) for index in range(4)] == ["ann", "ann", "a/z", "a/w"]
    assert {reject.path: reject.reason.split(";")[0] for reject in source.rejects} == {
        "a.tar/z.json": "a JSON list",
        "a.tar/w.txt": "not UTF-8 (unexpected end of data at byte 3)",
    }
    notes = "\n".join(source.notes)
    assert "not read: *.seg.png: 1 (a.tar/w.seg.png)" in notes
    assert "not read: *.cls: 1 (a.tar/w.cls)" in notes
    assert "without a picture: 1 (a.tar/alone)" in notes


def test_two_pictures_of_one_key(tmp_path: Path) -> None:
    pack(tmp_path / "a.tar", {"x.png": encoded(0), "x.jpg": encoded(1, "JPEG")})
    source = opened(tmp_path)
    assert len(source) == 1
    assert np.array_equal(source.read(0), picture(0))
    assert source.rejects[0].reason == "another picture for the key x; x.png is used"


def test_split_folders_of_shards(folder: Path) -> None:
    for name, shard in [("train", 0), ("val", 1)]:
        (folder / name).mkdir()
        (folder / f"shard-{shard:02d}.tar").rename(folder / name / "0.tar")
    source = opened(folder)
    train, validation = split_indices(source, 0.5)
    assert {source.key(int(index)).split("/")[0] for index in train} == {"train"}
    assert {source.key(int(index)).split("/")[0] for index in validation} == {"val"}


def test_links_and_damaged_pictures_are_named(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar", {"x.png": encoded(0), "y.png": encoded(1)[:60], "z.png": b""})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    report = check_folder(tmp_path)
    assert report.num_samples == 1
    reasons = {reject.path: reject.reason for reject in report.rejects}
    assert reasons["a.tar/link.png"].startswith("a link")
    assert "damaged" in reasons["a.tar/y.png"]
    assert reasons["a.tar/z.png"] == "the file is empty"


@pytest.mark.parametrize("length", range(100, 6600, 250))
def test_a_shard_that_is_cut_gives_what_comes_before(folder: Path, length: int) -> None:
    path = folder / "shard-01.tar"
    path.write_bytes(path.read_bytes()[:length])
    report = check_folder(folder)
    assert 3 <= report.num_samples <= 6
    assert any("shard-01.tar" in reject.path for reject in report.rejects)


def test_what_is_no_tar_is_named(folder: Path) -> None:
    (folder / "shard-00.tar").write_bytes(b"no tar at all" * 100)
    pack(folder / "shard-02.tar", {"x.png": encoded(0)}, "w:gz")
    (folder / "shard-03.tar").touch()
    source = opened(folder)
    reasons = {reject.path: reject.reason for reject in source.rejects}
    assert len(source) == 3
    assert reasons["shard-00.tar"].startswith("not a tar")
    assert "decompress it" in reasons["shard-02.tar"]
    assert reasons["shard-03.tar"] == "not a tar: empty file"
    for shard in folder.glob("*.tar"):
        shard.write_bytes(b"x")
    with pytest.raises(UserError, match=r"holds \.tar files without images \(shard-00\.tar: not a tar"):
        open_source(folder, ImageDataConfig())


def test_a_shard_that_vanishes(folder: Path) -> None:
    source = opened(folder)
    (folder / "shard-00.tar").unlink()
    with pytest.raises(UnreadableImage, match=r"shard-00\.tar/0000\.png: no such file"):
        source.read(0)


def test_images_beside_shards_come_first(folder: Path) -> None:
    (folder / "a.png").write_bytes(encoded(0))
    source = open_source(folder, ImageDataConfig())
    assert len(source) == 1
    assert any(".tar files beside images, not read" in note for note in source.notes)
