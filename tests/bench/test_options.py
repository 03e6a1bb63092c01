"""The script that compares sampling options: what the oracle says of each try, of all three media."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from tessera.config import MeshDataConfig, VideoDataConfig
from tessera.data.synth.digits import write_digits
from tessera.data.synth.furniture import write_furniture
from tessera.evals.clip_material import load_clips
from tessera.evals.material import load_material
from tessera.evals.mesh_material import load_meshes
from tessera.media.clips import Frames
from tessera.sampling.request import Request
from tessera.sampling.session import Session
from tests.recipes.test_dalle2_drawing import run, session, workshop

__all__ = ["run", "session", "workshop"]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("options")


def test_each_try_is_drawn_with_its_options_and_judged(
    run: Path, session: Session, options: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = load_material(session.config.data.at(32), most_train=1, most_held_out=4, seed=0).held_out
    asked: list[list[tuple[str, int]]] = []
    wanted: list[tuple[int, float, str]] = []

    def draw_rows(self: Session, rows: list[tuple[str, int]], request: Request) -> list[Any]:
        asked.append(rows)
        wanted.append((request.options.chunk, request.options.guidance, request.options.sampler))
        made = real.pictures if request.options.guidance == 2 else real.pictures[::-1]
        return [Image.fromarray(picture) for picture in made]  # as a session hands them out

    monkeypatch.setattr(Session, "draw_rows", draw_rows)
    monkeypatch.setattr(sys, "argv", ["options.py", str(run), "--n", "4", "--tries", "as-it-is", "guidance=2,sampler=heun"])
    options.main()
    first, own, other = capsys.readouterr().out.splitlines()
    assert first == f"{len(real)} held-out captions"
    assert asked == [[(caption, seed) for seed, caption in enumerate(real.captions)]] * 2, "a seed for each, and the same in both"
    config = session.config.sample
    assert wanted == [(64, config.guidance, config.sampler), (64, 2, "heun")]
    assert other.startswith("guidance=2,sampler=heun ")
    assert "joint 100.0%" in other
    assert own.startswith("as-it-is ")
    assert "joint 100.0%" not in own


def test_what_a_session_draws_is_judged(
    run: Path, options: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["options.py", str(run), "--n", "2", "--tries", "steps=2"])
    options.main()
    first, tried = capsys.readouterr().out.splitlines()
    assert first == "2 held-out captions"
    assert re.match(r"steps=2 .* joint \d", tried)


@dataclass(frozen=True)
class Made:
    frames: Frames


def test_clips_and_meshes_are_judged_by_their_own_oracles(options: ModuleType, tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", 40, 0, image_size=32, frames=11)
    data = VideoDataConfig(path=str(tmp_path / "digits"), resolution=32, frames=9)
    clips = load_clips(data, most_train=1, most_held_out=4, seed=0)
    captions = list(clips.held_out.captions)
    found = options.JUDGES["clip"](clips, [Made(clip) for clip in clips.held_out.clips], captions).as_dict()
    assert (found["joint"], found["n"]) == (1.0, len(captions))
    assert all(row["joint"] == 1.0 for row in found["directions"].values())
    backwards = options.JUDGES["clip"](clips, [Made(clip[::-1]) for clip in clips.held_out.clips], captions).as_dict()
    assert (backwards["direction"], backwards["colour"]) == (0.0, 1.0)

    write_furniture(tmp_path / "furniture", 40, 0)
    meshes = load_meshes(MeshDataConfig(path=str(tmp_path / "furniture")), most_train=1, most_held_out=4, seed=0)
    captions = list(meshes.held_out.captions)
    assert options.JUDGES["mesh"](meshes, meshes.held_out.meshes, captions).as_dict()["joint"] == 1.0
