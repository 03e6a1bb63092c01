"""`tessera data check` on folders made here, with every number known beforehand, and on real ones where there are any."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.config import UserError
from tessera.data.check import check_folder
from tessera.data.sources import split_of
from tessera.media.images import encode_png, write_png

REAL_DATA = os.environ.get("TESSERA_REAL_DATA")


def noise(seed: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven good images in three formats, two of them equal; five captions; three files that cannot be decoded; one bad row."""
    for number in range(4):
        write_png(tmp_path / f"{number}.png", noise(number))
    (tmp_path / "copy.png").write_bytes((tmp_path / "2.png").read_bytes())
    Image.fromarray(noise(9, 20, 10)).save(tmp_path / "photo.jpg")
    Image.new("RGB", (8, 6), "red").save(tmp_path / "clip.gif", save_all=True, append_images=[Image.new("RGB", (8, 6), "blue")])
    (tmp_path / "cut.png").write_bytes(encode_png(noise(5, 30, 30))[:900])
    (tmp_path / "empty.png").touch()
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    rows = [{"file_name": f"{number}.png", "text": f"number {number}"} for number in range(4)]
    rows += [{"file_name": "photo.jpg", "text": "a photo"}, {"file_name": "cut.png", "text": "cut"}, {"file_name": "gone.png"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_every_number(folder: Path) -> None:
    report = json.loads(json.dumps(check_folder(folder).to_json()))
    assert report["kind"] == "images"
    assert report["path"] == str(folder)
    assert (report["num_samples"], report["num_captioned"], report["num_rejected"]) == (7, 5, 4)
    reasons = {reject["path"]: reject["reason"] for reject in report["rejects"]}
    assert list(reasons) == ["metadata.jsonl:7", "cut.png", "empty.png", "page.jpg"]
    for words, reason in zip(["no such file", "truncated", "empty", "web page"], reasons.values(), strict=True):
        assert words in reason
    assert report["sizes"] == {"8x6": 6, "10x20": 1}
    assert report["modes"] == {"RGB": 6, "P": 1}
    assert report["formats"] == {"PNG": 5, "GIF": 1, "JPEG": 1}
    assert report["caption_examples"] == ["number 0", "number 2", "a photo"]
    assert report["uncaptioned"] == ["clip.gif", "copy.png"]
    keys = ["0", "1", "2", "3", "clip", "copy", "photo"]
    sides = [split_of(key, 0.05) for key in keys]
    assert report["split"] == {"train": sides.count("train"), "validation": sides.count("validation")}
    assert report["num_exact_duplicates"] == 1
    assert report["duplicates"] == [["2.png", "copy.png"]]
    assert any("first frame" in note and "clip.gif" in note for note in report["notes"])
    assert any("no row" in note for note in report["notes"])


def test_the_same_folder_gives_the_same_report(folder: Path) -> None:
    assert json.dumps(check_folder(folder).to_json()) == json.dumps(check_folder(folder).to_json())


def test_lines_for_people(folder: Path) -> None:
    lines = check_folder(folder).lines()
    assert lines[0] == f"{folder}: 7 images, 5 captions, 4 rejects"
    text = "\n".join(lines)
    for words in [
        "8x6 6, 10x20 1",
        "number 2",
        "2 of 7 images have no caption",
        "2.png, copy.png",
        "near-duplicates: 2 images in 1 group\n",
        "empty.png: the file is empty",
    ]:
        assert words in text
    assert all("\n" not in line for line in lines)


def test_lines_can_always_be_printed(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", noise(0))
    (tmp_path / "a.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png"))
    (tmp_path / "b.png").touch()
    (tmp_path / "b.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/b\xe9.png"))
    "\n".join(check_folder(tmp_path).lines()).encode()


def test_progress_reaches_the_end_in_order(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    check_folder(folder, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 10) for done in range(1, 11)]


def test_many_rejects_are_all_in_json_and_shortened_for_people(tmp_path: Path) -> None:
    write_png(tmp_path / "good.png", noise(0))
    for number in range(600):  # more than one round of threads
        (tmp_path / f"bad{number:03d}.png").touch()
    report = check_folder(tmp_path)
    assert report.num_rejected == len(report.rejects) == 600
    assert report.lines()[-1].strip() == "... and 590 more"


def test_samples_without_a_caption_are_named_and_what_they_would_stop(tmp_path: Path) -> None:
    for number in range(20):
        write_png(tmp_path / f"{number:02d}.png", noise(number))
    for number in range(12):
        (tmp_path / f"{number:02d}.txt").write_text("a caption")
    report = check_folder(tmp_path)
    assert report.uncaptioned == tuple(f"{number:02d}.png" for number in range(12, 20))
    text = "\n".join(report.lines())
    assert "8 of 20 images have no caption (40.0%)\n  without  12.png, 13.png, 14.png, 15.png, 16.png, 17.png and 2 more" in text
    assert "8 of 20 pictures have no caption, and data.uncaptioned_budget=0.1 allows 10%: training on captions would stop" in text
    few = check_folder(tmp_path, sets=["data.uncaptioned_budget=0.4"])
    assert few.uncaptioned
    assert not any("uncaptioned_budget" in note for note in few.notes)


def test_counts_of_captions_agree_where_files_are_rejected(tmp_path: Path) -> None:
    write_png(tmp_path / "good.png", noise(0))
    for number in range(4):
        (tmp_path / f"bad{number}.png").touch()
    text = "\n".join(check_folder(tmp_path).lines())
    assert ": 1 images, 0 captions, 4 rejects" in text
    assert "1 of 1 images have no caption (100.0%)" in text
    assert "counting the 4 that cannot be used, 5 of 5 pictures have no caption, and data.uncaptioned_budget=" in text


def test_rare_sizes_are_summed(tmp_path: Path) -> None:
    for width in range(1, 14):
        for copy in range(2 if width <= 4 else 1):
            write_png(tmp_path / f"{width}-{copy}.png", noise(copy, 2, width))
    sizes = check_folder(tmp_path).sizes
    assert len(sizes) == 11
    assert list(sizes)[:4] == ["1x2", "2x2", "3x2", "4x2"]
    assert sizes["other"] == 3
    assert sum(sizes.values()) == 17


def test_copies_on_both_sides_of_the_split_are_told(tmp_path: Path) -> None:
    for number in range(60):
        write_png(tmp_path / f"{number}.png", noise(0))
    sides = {split_of(str(number), 0.05) for number in range(60)}
    assert sides == {"train", "validation"}
    report = check_folder(tmp_path)
    assert report.num_exact_duplicates == 59
    assert any("both train and validation" in note for note in report.notes)


def test_a_group_keeps_copies_together(tmp_path: Path) -> None:
    for number in range(60):
        write_png(tmp_path / f"{number}.png", noise(0))
    rows = [{"file_name": f"{number}.png", "text": "x", "family": "one"} for number in range(60)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = check_folder(tmp_path, sets=["data.group_by=family"])
    assert sorted(report.split.values()) == [0, 60]
    assert not any("both train" in note for note in report.notes)


def test_a_folder_of_nothing_but_damage_is_a_report_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    report = check_folder(tmp_path)
    assert (report.num_samples, report.num_rejected, report.caption_examples) == (0, 1, ())
    assert report.lines()


def test_wrong_input_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        check_folder(tmp_path / "none")


@pytest.mark.skipif(not REAL_DATA, reason="TESSERA_REAL_DATA names no folder of real data")
def test_real_emoji() -> None:
    report = check_folder(Path(str(REAL_DATA)) / "emoji")
    assert (report.num_samples, report.num_captioned, report.num_rejected) == (1644, 1644, 0)
    assert report.sizes == {"128x128": 1644}
    assert report.modes == {"RGBA": 1644}
    assert sum(report.split.values()) == 1644
    assert report.num_exact_duplicates == 5
    assert 60 <= report.num_near_groups <= 90
    assert 250 <= report.num_near_duplicates <= 350
    named = [{Path(name).stem for name in group} for group in report.near_duplicates]
    for trade in ["cook", "mechanic", "astronaut", "firefighter", "detective", "guard", "superhero", "mage", "vampire"]:
        assert any({trade, f"man_{trade}", f"woman_{trade}"} <= group for group in named), trade
    assert not any({"red_heart", "blue_heart"} <= group for group in named)
    assert report.num_straddling > 0
    assert len(report.notes) == 1


def test_terminals_obey_no_caption_and_no_name(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", noise(0))
    (tmp_path / "a.txt").write_text("red \x1b[31m \u202eback " + "long " * 1000)
    (tmp_path / "b\x1b[2J.png").touch()
    report = check_folder(tmp_path)
    text = "\n".join(report.lines())
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "red \\x1b[31m \\u202eback long" in text
    assert "b\\x1b[2J.png: the file is empty" in text
    assert len(report.caption_examples[0]) < 230


def test_an_image_whose_row_was_rejected_is_counted_apart(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_png(tmp_path / f"{name}.png", noise(ord(name)))
    rows = [{"file_name": "a.png", "text": 7}, {"file_name": "b.png", "text": "b"}, {"text": "no name"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = check_folder(tmp_path)
    assert "image whose row of the metadata was rejected: 1 (a.png)" in report.notes
    assert "image that no row of the metadata names, rejected rows aside: 1 (c.png)" in report.notes
    assert [reject.reason for reject in report.rejects][1] == "file_name is missing; expected the path of an image"
