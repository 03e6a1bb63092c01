"""What lies beside the pictures and is not read is said in the notes; system files are passed over."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tessera.config import UserError
from tessera.data.check import check_folder
from tessera.data.sources import as_source
from tessera.media.images import write_png


def picture(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def test_other_formats_are_counted_by_family(tmp_path: Path) -> None:
    for name in "ac":
        write_png(tmp_path / f"{name}.png", picture())
    for name in ["1.tif", "2.TIF", "1.heic", "1.mp4", "b.jpg.zip", "noext", "guide.md", ".DS_Store", "Thumbs.db"]:
        (tmp_path / name).write_bytes(b"x")
    assert set(check_folder(tmp_path).notes[:5]) == {
        "1 .heic, 2 .tif files not read: images of another format; convert them to png or jpg",
        "1 .mp4 file not read: videos",
        "1 .zip file not read: archives; unpack them first",
        "1 file not read: no extension; name pictures .png or .jpg",
        "1 .md file not read: neither pictures nor captions",
    }


@pytest.mark.parametrize("name", ["metadata.json", "captions.json", "captions.jsonl", "labels.csv", "a.json"])
def test_texts_that_are_not_read_are_named(tmp_path: Path, name: str) -> None:
    write_png(tmp_path / "a.png", picture())
    (tmp_path / name).write_text(json.dumps({"a.png": "a cat"}))
    assert any("not read" in note and f"1 ({name})" in note for note in check_folder(tmp_path).notes)


def test_a_table_is_found_whatever_its_case(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", picture())
    (tmp_path / "Metadata.JSONL").write_text(json.dumps({"file_name": "a.png", "text": "a cat"}))
    report = check_folder(tmp_path)
    assert report.caption_examples == ("a cat",)
    assert not any("not read" in note for note in report.notes)


def test_captions_of_several_stacks(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", picture()[None])
    (tmp_path / "a.txt").write_text("a cat\n")
    (tmp_path / "captions.txt").write_text("a cat\na dog\n")
    notes = [note for note in check_folder(tmp_path).notes if ".txt" in note]
    assert len(notes) == 1
    assert "no stack takes" in notes[0]
    assert "1 (captions.txt)" in notes[0]


def test_a_text_beside_tars(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", picture())
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "a.png")
    (tmp_path / "a.png").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a cat\n")
    assert any("beside the tars, not read" in note and "metadata.csv" in note for note in check_folder(tmp_path).notes)


def notes_of(root: Path, *names: str) -> str:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_png(root / name, picture(number))
    return "\n".join(check_folder(root).notes)


def test_half_a_split_is_not_taken_as_one(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    notes = notes_of(tmp_path, "train/1.png", "train/2.png")
    assert "not taken as one" in notes
    assert "2 (train/, val/)" in notes
    assert "1 (val/)" in notes_of(tmp_path / "only", "val/1.png")


def test_an_empty_validation_side_is_said(tmp_path: Path) -> None:
    assert "train 1, validation 0: training would have no validation and no best" in notes_of(tmp_path / "one", "a.png")
    assert "validation 0" not in notes_of(tmp_path / "split", "train/a.png", "val/b.png")


def test_more_unreadable_files_than_training_allows(tmp_path: Path) -> None:
    (tmp_path / "bad.png").touch()
    assert "1 of 2 pictures cannot be read, and data.corrupt_budget=0.01 allows 1%" in notes_of(tmp_path, "a.png")


def test_why_folders_are_no_classes(tmp_path: Path) -> None:
    assert "outside of the folders" in notes_of(tmp_path / "stray", "cat/1.png", "dog/2.png", "stray.png")
    assert "deeper than one folder" in notes_of(tmp_path / "deep", "cat/1.png", "dog/old/2.png")
    assert "split, so no folder's name is a caption" in notes_of(tmp_path / "named", "cat/1.png", "train/2.png")
    assert "class" not in notes_of(tmp_path / "single", "cat/1.png", "stray.png")


def test_no_pictures_in_a_stack_or_a_dataset(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((0, 4, 4, 3), dtype=np.uint8))
    with pytest.raises(UserError, match="has no pictures: uint8"):
        check_folder(tmp_path)
    with pytest.raises(UserError, match="has no samples"):
        as_source([])


def test_papers_that_come_with_data_are_passed_over(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", np.zeros((8, 8, 3), dtype=np.uint8))
    for name in ("LICENSE", "LICENSE-images", "README.md", "readme.txt", "NOTICE"):
        (tmp_path / name).write_text("words")
    notes = check_folder(tmp_path).notes
    assert not [note for note in notes if "not read" in note]
