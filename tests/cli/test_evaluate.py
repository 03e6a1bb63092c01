"""`tessera evaluate`: its report on stdout, its progress on stderr, its files where they belong."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.small import generated, pictures, workshop

__all__ = ["generated", "pictures", "workshop"]

Run = Callable[..., Any]
QUICK = ("--n", 3, "--set", "evaluate.fit_steps=2", "evaluate.resamples=2")


@pytest.fixture
def model(tessera: Run, tmp_path: Path, generated: Path) -> Path:
    """An export in the current folder."""
    assert tessera("export", generated, "--out", "model").code == 0
    return tmp_path / "model"


def test_progress_is_told_and_keeps_out_of_the_json(tessera: Run, tmp_path: Path, model: Path, pictures: Path) -> None:
    ended = tessera("evaluate", "model", "--json", *QUICK, f"data.path={pictures}")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["n"] == 3
    assert "drawing 3 pictures from their captions" in ended.err.splitlines()


def test_an_export_stays_as_it_was_written(tessera: Run, tmp_path: Path, model: Path, pictures: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    for number in ("001", "002"):
        ended = tessera("evaluate", "model", *QUICK, f"data.path={pictures}")
        assert ended.code == 0, ended.err
        assert (tmp_path / f"evaluation-{number}" / "evaluation.json").is_file()
        assert f"written: evaluation-{number}" in ended.out.splitlines()
        assert tessera("sample", "model", "a").code == 0
        assert sorted(path.name for path in (tmp_path / "drawn" / number).iterdir()) == ["0.json", "0.png"]
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before


def test_the_hint_after_sampling_works(tessera: Run, generated: Path, model: Path, pictures: Path) -> None:
    for place, tail in ((generated, ""), ("model", " --set data.path=FOLDER")):
        ended = tessera("sample", place, "a", "--out", f"out{len(tail)}")
        hint = ended.out.splitlines()[-1].rpartition("   or   ")[2]
        assert hint == f"tessera evaluate {place}{tail}"
    command = shlex.split(hint.replace("FOLDER", str(pictures)).removeprefix("tessera "))
    ended = tessera(*command, "evaluate.fit_steps=2", "evaluate.resamples=2", "--n", 3)
    assert ended.code == 0, ended.err
