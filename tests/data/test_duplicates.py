"""Near-duplicates: edits of a picture fall into its group, other pictures do not, and groups keep to one side of the split."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tessera.config import ImageDataConfig
from tessera.data.check import check_folder
from tessera.data.duplicates import connected, fingerprint, near_groups
from tessera.data.opening import open_source
from tessera.data.sources import split_indices
from tessera.media.images import write_png


def scene(seed: int, size: int = 96) -> np.ndarray:
    """A few overlapping shapes on a coloured ground."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (size, size), tuple(rng.integers(0, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(7):
        x, y = rng.integers(-10, size - 10, 2).tolist()
        width, height = rng.integers(12, 60, 2).tolist()
        shape = [draw.ellipse, draw.rectangle][int(rng.integers(2))]
        shape((x, y, x + width, y + height), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return np.asarray(image)


def recompressed(picture: np.ndarray) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=35)
    return np.asarray(Image.open(stream))


EDITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "recompressed": recompressed,
    "half as large": lambda picture: np.asarray(Image.fromarray(picture).resize((48, 48), Image.Resampling.LANCZOS)),
    "three times as large": lambda picture: np.asarray(Image.fromarray(picture).resize((288, 288), Image.Resampling.BICUBIC)),
    "darker": lambda picture: (picture * 0.75).astype(np.uint8),
    "cropped": lambda picture: np.ascontiguousarray(picture[1:-1, 1:-1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_near_and_other_pictures_are_not(edit: str) -> None:
    scenes = [scene(seed) for seed in range(60)]
    groups = near_groups([fingerprint(picture) for picture in [*scenes, *map(EDITS[edit], scenes)]])
    assert all(first % 60 == second % 60 for group in groups for first, second in itertools.combinations(group, 2))
    assert len(groups) >= 57


def test_hue_counts_and_shade_does_not() -> None:
    def heart(colour: tuple[int, int, int]) -> np.ndarray:
        image = Image.new("RGB", (64, 64), "white")
        ImageDraw.Draw(image).polygon([(32, 60), (4, 24), (18, 6), (32, 20), (46, 6), (60, 24)], fill=colour)
        return np.asarray(image)

    skins = [(252, 194, 27), (247, 222, 206), (213, 171, 136), (155, 100, 60), (89, 61, 40)]
    others = [(40, 60, 220), (30, 160, 40), (128, 128, 128)]
    groups = near_groups([fingerprint(heart(colour)) for colour in [*skins, *others]])
    assert groups == [list(range(5))]


def test_blank_pictures_are_near_when_their_colour_is() -> None:
    plain = [np.full((20, 30, 3), value, np.uint8) for value in (0, 3, 100, 104, 250)]
    assert near_groups([fingerprint(picture) for picture in plain]) == [[0, 1], [2, 3]]


def test_thin_and_tiny_pictures_have_a_fingerprint() -> None:
    for shape in [(1, 1, 3), (1, 900, 3), (700, 1, 3), (2, 3, 3)]:
        assert fingerprint(np.zeros(shape, np.uint8)).edges.shape == (128,)


def test_nothing_and_one() -> None:
    assert near_groups([]) == near_groups([fingerprint(scene(0))]) == []


def test_connected_parts() -> None:
    assert connected(7, [(0, 3), (5, 3), (1, 2), (6, 6)]) == [[0, 3, 5], [1, 2]]


def test_many_equal_pictures_cost_no_square() -> None:
    prints = [fingerprint(scene(seed)) for seed in range(20)]
    many = [prints[number % 20] for number in range(6000)]
    start = time.perf_counter()
    groups = near_groups(many)
    assert [len(group) for group in groups] == [300] * 20
    assert time.perf_counter() - start < 30  # every pair of every bucket would be 14 million comparisons


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """40 scenes in four edits each: some of them on both sides of the split."""
    for seed in range(40):
        for number, edit in enumerate(["recompressed", "darker", "half as large"]):
            write_png(tmp_path / f"{seed:02d}-{number}.png", EDITS[edit](scene(seed)))
        write_png(tmp_path / f"{seed:02d}.png", scene(seed))
    (tmp_path / "broken.png").touch()
    return tmp_path


def test_the_report_names_torn_groups_and_the_remedy(torn: Path) -> None:
    report = check_folder(torn)
    assert 38 <= report.num_near_groups <= 40
    assert report.num_near_duplicates > 150
    assert report.num_straddling > 0
    assert len(report.near_duplicates) == report.num_near_groups
    assert any("data.group_near_duplicates=true" in note and f": {report.num_straddling};" in note for note in report.notes)
    assert any(line.startswith("  near-duplicates: ") for line in report.lines())


def test_the_remedy_keeps_groups_on_one_side(torn: Path) -> None:
    source = open_source(torn, ImageDataConfig(group_near_duplicates=True))
    held_out = set(split_indices(source, 0.2)[1].tolist())
    names = [source.name(index) for index in range(len(source))]
    for group in check_folder(torn).near_duplicates:
        assert len({names.index(name) in held_out for name in group}) == 1
    assert 0 < len(held_out) < 80
    assert any("groups, the largest of 4 of 161 samples" in note for note in source.notes)
    again = open_source(torn, ImageDataConfig(group_near_duplicates=True))
    assert [again.group(index) for index in range(len(again))] == [source.group(index) for index in range(len(source))]


def test_one_group_is_told_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_png(tmp_path / f"{name}.png", scene(0))
    source = open_source(tmp_path, ImageDataConfig(group_near_duplicates=True))
    assert any(note.endswith(": 1 group, the largest of 2 of 2 samples") for note in source.notes)


def test_columns_and_near_duplicates_join(tmp_path: Path) -> None:
    for name, seed in [("a", 0), ("b", 0), ("c", 1), ("d", 2)]:
        write_png(tmp_path / f"{name}.png", scene(seed))
    (tmp_path / "metadata.csv").write_text("file_name,text,who\na.png,x,ann\nb.png,x,bob\nc.png,x,bob\nd.png,x,eve\n")
    source = open_source(tmp_path, ImageDataConfig(group_by="who", group_near_duplicates=True))
    assert [source.group(index) for index in range(4)] == ["ann", "ann", "ann", "eve"]


def test_split_folders_that_share_pictures_get_another_remedy(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        write_png(tmp_path / name / "a.png", scene(0))
    assert any("remove them from one of the two folders" in note for note in check_folder(tmp_path).notes)
