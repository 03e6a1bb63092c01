"""`tessera data check` of clips: the report's numbers, what a folder is taken for, real clips."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tessera.cli.app import app
from tessera.config import UserError
from tessera.data.check import check_folder, main_kind
from tessera.data.clip_check import ClipReport, length_histogram
from tessera.data.folders import list_folder
from tessera.media.clip_files import encode_mp4
from tessera.media.clips import Clip, inspect_clip, read_clip
from tests.data.clip_makers import noise, save_apng, save_frames, save_gif


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight usable samples, two rejects."""
    path = tmp_path_factory.mktemp("mixed")
    save_gif(path / "a.gif", noise(0, 5), pause_ms=100)
    save_gif(path / "b.gif", noise(1, 20), pause_ms=40)
    (path / "b2.gif").write_bytes((path / "b.gif").read_bytes())
    save_apng(path / "c.png", noise(2, 9, 24, 32, 4), pause_ms=50)
    save_apng(path / "still.png", noise(3, 1))
    save_frames(path / "walk", noise(4, 6))
    np.save(path / "array.npy", noise(5, 3))
    (path / "film.mp4").write_bytes(encode_mp4(Clip(noise(6, 12, 24, 32), 24.0)))
    (path / "broken.gif").write_bytes(b"GIF89a")
    (path / "empty.webp").write_bytes(b"")
    for name in ("a", "b", "walk"):
        (path / f"{name}.txt").write_text("it moves left" if name == "a" else "a clip\nthe same clip")
    return path


def report_of(path: Path, **options: Any) -> ClipReport:
    report = check_folder(path, **options)
    assert isinstance(report, ClipReport)
    return report


def test_the_numbers_of_a_report(folder: Path) -> None:
    ticks: list[tuple[int, int]] = []
    report = report_of(folder, sets=["data.frames=8"], progress=lambda done, total: ticks.append((done, total)))
    assert ticks == [(done, 10) for done in range(1, 11)]
    assert (report.kind, report.layout, report.num_samples, report.num_stills) == ("clips", "folder", 8, 1)
    assert (report.num_captioned, report.num_captions, report.num_rejected) == (3, 5, 2)
    assert {reject.path for reject in report.rejects} == {"broken.gif", "empty.webp"}
    by_path = {file.path: file for file in report.files}
    assert {path: file.num_frames for path, file in by_path.items()} == {
        "a.gif": 5, "array.npy": 3, "b.gif": 20, "b2.gif": 20, "c.png": 9, "film.mp4": 12, "still.png": 1, "walk": 6,
    }  # fmt: skip
    assert (report.shortest, report.fewest_frames) == ("array.npy", 3)
    assert (report.longest, report.most_frames, report.most_seconds) == ("b2.gif", 20, 0.8)
    assert report.num_short == 3
    assert (report.frames, report.num_alpha, report.num_naming_sides) == (8, 1, 1)
    assert by_path["b.gif"].fps == 25.0
    assert report.formats == {"GIF": 3, "PNG": 2, "mp4": 1, "NPY": 1, "folder": 1}
    assert report.codecs == {"GIF": 3, "PNG": 3, "NPY": 1, "h264": 1}
    assert report.sizes == {"16x16": 6, "32x24": 2}
    assert report.fps == {"10": 3, "25": 2, "20": 1, "24": 1}
    assert report.lengths == {"2-4": 1, "5-8": 2, "9-16": 2, "17-32": 2}
    assert (report.median_frames, report.least_seconds) == (9, 0.3)
    film = by_path["film.mp4"]
    assert (film.format, film.codec, film.width, film.height, film.fps, film.seconds) == ("mp4", "h264", 32, 24, 24.0, 0.5)
    assert (report.num_exact_duplicates, report.duplicates) == (1, (("b.gif", "b2.gif"),))
    assert json.loads(json.dumps(report.to_json()))["files"][0]["path"] == "a.gif"


def test_fewer_frames_are_short_by_rate(folder: Path) -> None:
    assert report_of(folder, sets=["data.frames=8", "data.stride=2"]).num_short == 5  # 9 frames are 5, 12 are 6
    assert report_of(folder, sets=["data.frames=8", "data.fps=5"]).num_short == 7


def test_lines_for_people(folder: Path) -> None:
    text = "\n".join(report_of(folder).lines())
    assert "8 clips, 3 captions, 2 rejects" in text
    assert "most 20 (b2.gif)" in text
    assert "captions of 1 clips say left or right" in text
    assert "where a clip has several, each epoch draws one" in text
    assert "reject   empty.webp: " in text


def test_the_command(folder: Path) -> None:
    result = CliRunner().invoke(app, ["data", "check", str(folder)])
    assert result.exit_code == 0
    assert f"tessera train phenaki --data {folder}" in result.output
    told = CliRunner().invoke(app, ["data", "check", str(folder), "--kind", "images", "--json"])
    assert json.loads(told.output)["kind"] == "images"


def test_clips_that_are_odd_are_told(tmp_path: Path) -> None:
    save_apng(tmp_path / "a.apng", noise(0, 4))
    content = (tmp_path / "a.apng").read_bytes()
    (tmp_path / "cut.apng").write_bytes(content[: len(content) * 3 // 4])
    report = report_of(tmp_path)
    odd = {each.path for each in report.odd} | {each.path for each in report.rejects}
    assert odd == {"cut.apng"}


def test_two_pictures_of_one_number_are_two_frames(tmp_path: Path) -> None:
    """The check sees what training reads."""
    for name, frame in zip(("1.png", "01.png", "2.png", "5.png"), noise(0, 4), strict=True):
        Image.fromarray(frame).save(tmp_path / name)
    clip, found = read_clip(tmp_path, lambda facts: range(facts.num_frames)), inspect_clip(tmp_path)
    assert len(clip.frames) == found.facts.num_frames == 4
    assert found.odd == ("2 numbers are missing between the first and the last picture",)


def test_an_unknown_kind(folder: Path) -> None:
    with pytest.raises(UserError, match="expected images, clips or meshes"):
        check_folder(folder, kind="films")


# ---- what a folder is taken for


def kind_of(path: Path) -> str:
    return main_kind(list_folder(path))


def test_videos_are_clips_and_a_few_among_pictures_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"")
    assert kind_of(tmp_path) == "clips"
    save_apng(tmp_path / "0.png", noise(0, 1))
    assert kind_of(tmp_path) == "clips", "half: as images the videos would not be read, as clips the pictures are"
    for number in range(1, 3):
        save_apng(tmp_path / f"{number}.png", noise(number, 1))
    assert kind_of(tmp_path) == "images"


def test_one_caption_of_an_array_hints_at_a_clip(tmp_path: Path) -> None:
    """Four axes may be pictures or frames; captions tell, and only the user can say it."""
    np.save(tmp_path / "a.npy", noise(0, 5))
    (tmp_path / "a.txt").write_text("it moves")
    with pytest.raises(UserError, match="one clip of 5 frames: data check --kind clips"):
        check_folder(tmp_path)
    assert check_folder(tmp_path, kind="clips").num_captions == 1


def test_animations_are_clips_where_most_move(tmp_path: Path) -> None:
    for number in range(5):
        save_gif(tmp_path / f"{number}.gif", noise(number, 3 if number < 3 else 1))
    assert kind_of(tmp_path) == "clips"
    for number in range(3):
        save_apng(tmp_path / f"{number}.png", noise(number, 1))
    assert kind_of(tmp_path) == "images"


def test_folders_of_frames_are_clips_and_class_folders_are_not(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        save_frames(tmp_path / "classes" / name, noise(0, 3), "{:04d}.png")
        save_frames(tmp_path / "clips" / name, noise(0, 3), "{:04d}.png")
        (tmp_path / f"clips/{name}.txt").write_text("it moves")
    assert kind_of(tmp_path / "classes") == "images"
    assert kind_of(tmp_path / "clips") == "clips"


def test_stacks_by_their_axes(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 8, 8, 3), np.uint8))
    assert kind_of(tmp_path) == kind_of(tmp_path / "a.npy") == "images"
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 8, 8, 3), np.uint8))
    assert kind_of(tmp_path) == kind_of(tmp_path / "a.npy") == "clips"


def test_textures_make_no_clips_of_meshes(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.obj").write_text("v 0 0 0")
    save_gif(tmp_path / "a.gif", noise(0, 2))
    assert kind_of(tmp_path) == "meshes"


def test_ranges_of_lengths() -> None:
    assert length_histogram([2, 4, 5, 8, 9, 5000]) == {"2-4": 2, "5-8": 2, "9-16": 1, "over 4096": 1}


# ---- real clips


@pytest.mark.skipif("TESSERA_REAL_DATA" not in os.environ, reason="TESSERA_REAL_DATA names no folder of real data")
def test_sprites() -> None:
    report = report_of(Path(os.environ["TESSERA_REAL_DATA"]) / "sprites")
    assert (report.num_samples, report.num_captioned, report.num_rejected) == (1500, 1500, 0)
    assert (report.fewest_frames, report.most_frames, report.num_stills) == (5, 13, 0)
    assert report.sizes == {"64x64": 1500}
    assert report.fps == {"10": 1500}
