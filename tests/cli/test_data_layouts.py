"""Every layout of data trains and resumes from the command line, and odd file names never end in a traceback."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Run = Callable[..., Any]


def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)


def as_tars(root: Path) -> Path:
    for number, picture in enumerate(pictures()):
        Image.fromarray(picture).save(root / f"{number:02d}.png")
        (root / f"{number:02d}.txt").write_text("a\nb")
        with tarfile.open(root / f"{number % 2}.tar", "a") as tar:
            for name in (f"{number:02d}.png", f"{number:02d}.txt"):
                tar.add(root / name, name)
                (root / name).unlink()
    return root


def as_arrays(root: Path) -> Path:
    np.save(root / "images.npy", pictures())
    (root / "captions.txt").write_text("a picture\n" * 24)
    return root / "images.npy"


def as_split_folders(root: Path) -> Path:
    for number, picture in enumerate(pictures()):
        folder = root / ("val" if number < 4 else "train") / ("even" if number % 2 == 0 else "odd")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number:02d}.png")
    return root


@pytest.mark.parametrize("write", [as_tars, as_arrays, as_split_folders])
def test_every_layout_trains_and_resumes(tessera: Run, tmp_path: Path, tiny: list[str], write: Callable[[Path], Path]) -> None:
    root = tmp_path / "data"
    root.mkdir()
    path = write(root)
    found = json.loads(tessera("data", "check", path, "--json").out)
    assert (found["num_samples"], found["num_captioned"], found["num_rejected"]) == (24, 24, 0)
    flags = ["data.flip=true", "data.crop=random", "data.workers=2", "engine.save_every_steps=2"]
    assert tessera("train", "muse", "--data", path, "--run", "run", "--steps", 2, *tiny, *flags).code == 0
    assert tessera("resume", "run", "--set", "tokenizer.steps=4").code == 0
    assert (tmp_path / "run/tokenizer/checkpoints/latest").read_text() == "step-000004\n"
    assert (tmp_path / "run/base/checkpoints/latest").read_text() == "step-000002\n"
    assert "24 images, 24 captions, 0 rejects" in (tmp_path / "run/log.txt").read_text()


def test_near_duplicates_are_grouped_when_asked(tessera: Run, tmp_path: Path, tiny: list[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, picture in enumerate(pictures()):
        for copy in range(2):
            Image.fromarray(picture).save(folder / f"{number:02d}-{copy}.png")
    flags = ["--stage", "tokenizer", "--steps", 1, *tiny, "data.group_near_duplicates=true"]
    ended = tessera("train", "muse", "--data", folder, "--run", "run", *flags)
    assert ended.code == 0
    assert "24 groups, the largest of 2 of 48 samples" in (tmp_path / "run/log.txt").read_text()


def test_names_that_are_not_unicode(tessera: Run, tmp_path: Path, tiny: list[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, picture in enumerate(pictures()):
        Image.fromarray(picture).save(folder / "a.png")
        (folder / "a.png").rename(os.fsdecode(os.fsencode(folder) + b"/caf\xe9%d.png" % number))
    (folder / "b.txt").write_text("no picture")
    (folder / "b.txt").rename(os.fsdecode(os.fsencode(folder) + b"/b\xe9.txt"))
    found = json.loads(tessera("data", "check", folder, "--json").out)
    assert found["notes"][0] == "caption file without an image: 1 (b\udce9.txt)"
    assert tessera("train", "muse", "--data", folder, "--run", "run", "--steps", 1, *tiny, "data.uncaptioned_budget=1").code == 0
    assert "b\\udce9.txt" in (tmp_path / "run/log.txt").read_text()
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9ta")
    folder.rename(odd)
    assert tessera("data", "check", odd).code == 0
    ended = tessera("train", "muse", "--data", odd, *tiny)
    assert ended.code == 2
    assert "is not Unicode" in ended.err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_check_of_pictures_none_of_which_opens(tessera: Run, tmp_path: Path, flags: list[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.png").touch()
    ended = tessera("data", "check", folder, *flags)
    assert ended.code == 2
    assert "none of the pictures" in ended.err
    assert "the file is empty" in ended.out
    assert "next:" not in ended.out
