"""Files of every kind that users have, in one folder each: what `data check` and a source make of them."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.config import ImageDataConfig, UserError
from tessera.data.check import check_folder
from tessera.data.loader import Prepared
from tessera.data.opening import open_source

GREY = np.linspace(0, 255, 20 * 24).astype(np.uint8).reshape(20, 24)
RGB = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], -1)


def save_rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(RGB).save(path, exif=exif)


def save_animated(path: Path) -> None:
    Image.fromarray(RGB).save(path, save_all=True, append_images=[Image.fromarray(RGB[::-1].copy())])


KINDS: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("palette.png", lambda path: Image.fromarray(RGB).quantize(16).save(path), "P", "24x20"),
    ("grey.png", lambda path: Image.fromarray(GREY).save(path), "L", "24x20"),
    ("deep.png", lambda path: Image.fromarray(GREY.astype(np.uint16) * 257).save(path), "I;16", "24x20"),
    ("rotated.jpg", save_rotated, "RGB", "20x24"),
    ("animated.gif", save_animated, "P", "24x20"),
    ("animated.webp", save_animated, "RGB", "24x20"),
    ("bits.png", lambda path: Image.fromarray(GREY > 99).save(path), "1", "24x20"),
    ("cmyk.jpg", lambda path: Image.fromarray(RGB).convert("CMYK").save(path), "CMYK", "24x20"),
    ("glass.webp", lambda path: Image.fromarray(RGB).convert("RGBA").save(path), "RGBA", "24x20"),
    ("名前 é.png", lambda path: Image.fromarray(RGB).save(path), "RGB", "24x20"),
]


@pytest.mark.parametrize(("name", "write", "mode", "size"), KINDS, ids=[kind[0] for kind in KINDS])
def test_every_kind_is_read_checked_and_prepared(
    tmp_path: Path, name: str, write: Callable[[Path], None], mode: str, size: str
) -> None:
    write(tmp_path / name)
    report = check_folder(tmp_path, kind="images")  # animated ones alone would be clips
    assert (report.num_samples, report.num_rejected) == (1, 0)
    assert list(report.sizes) == [size]
    assert next(iter(report.modes))[0] == mode[0]  # PIL may call a grey WebP RGB, and a deep picture I or I;16
    for channels in (1, 3, 4):
        source = open_source(tmp_path, ImageDataConfig(channels=channels))
        item = Prepared(source, ImageDataConfig(channels=channels, resolution=16), np.arange(1), 0)[0]
        assert item.image is not None
        assert item.image.shape == (16, 16, channels)
    assert any("first frame" in note for note in report.notes) == ("animated" in name)


def test_names_that_are_not_unicode_are_prepared(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png"))
    item = Prepared(open_source(tmp_path, ImageDataConfig()), ImageDataConfig(resolution=16, flip=True), np.arange(1), 0)[0]
    assert item.image is not None


def refusing(name: str, plain: Any) -> Any:
    def opened(path: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(path, (str, Path)) and Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *rest, **options)

    return opened


def test_a_folder_that_may_not_be_listed_is_a_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").mkdir()
    Image.fromarray(RGB).save(tmp_path / "secret/a.png")
    Image.fromarray(RGB).save(tmp_path / "b.png")
    monkeypatch.setattr(os, "scandir", refusing("secret", os.scandir))
    report = check_folder(tmp_path)
    assert report.num_samples == 1
    assert [(reject.path, reject.reason) for reject in report.rejects] == [("secret", "cannot be listed: Permission denied")]
    with pytest.raises(UserError, match="cannot be listed: Permission denied"):
        check_folder(tmp_path / "secret")


def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        Image.fromarray(RGB).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a picture")
    monkeypatch.setattr("builtins.open", refusing("a.png", builtins.open))
    plain = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: refusing("b.txt", plain)(path))
    report = check_folder(tmp_path)
    assert (report.num_samples, report.num_captioned) == (1, 0)
    assert {reject.path: reject.reason for reject in report.rejects} == {
        "b.txt": "Permission denied; its image is used without a caption",
        "a.png": "permission denied",
    }


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_metadata_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    Image.fromarray(RGB).save(tmp_path / "a.png")
    (tmp_path / name).write_text("{}")
    plain = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *rest, **options: refusing(name, plain)(path, *rest, **options))
    with pytest.raises(UserError, match=rf"{name} cannot be read: Permission denied"):
        check_folder(tmp_path)


def test_a_path_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path, **options: refusing("locked", plain)(path, **options))
    with pytest.raises(UserError, match="cannot be opened: Permission denied"):
        check_folder(tmp_path / "locked")
    with pytest.raises(UserError, match="cannot be opened: File name too long"):
        check_folder(tmp_path / ("long" * 100))


@pytest.mark.parametrize("name", ["mesh.obj", "clip.mp4", "photo.png", "notes.txt", "data.zip"])
def test_a_file_of_the_wrong_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"is a file; expected a folder of png"):
        check_folder(tmp_path / name)
    if name.endswith((".obj", ".mp4")):
        assert [reject.path for reject in check_folder(tmp_path).rejects] == [name]
    elif not name.endswith(".png"):
        with pytest.raises(UserError, match="holds no images: found 1"):
            check_folder(tmp_path)


@pytest.mark.parametrize("name", ["one.tar", "one.npy"])
def test_a_single_file_that_holds_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x" * 2000)
    with pytest.raises(UserError, match=f"holds .{name[-3:]} files without"):
        check_folder(tmp_path / name)
