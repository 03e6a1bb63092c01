"""The script that times a trained model: on a tiny run, it draws the captions that were held out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tessera.evals.material import load_material
from tessera.sampling.session import Session
from tests.recipes.test_dalle2_drawing import run, session, workshop

__all__ = ["run", "session", "workshop"]


def test_what_was_held_out_is_drawn_twice_and_timed_once(
    run: Path, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    module = importlib.import_module("draw")
    asked: list[tuple[str, ...]] = []
    plain = Session.sample
    monkeypatch.setattr(
        Session, "sample", lambda self, prompts, **rest: asked.append(tuple(prompts)) or plain(self, prompts, **rest)
    )
    monkeypatch.setattr(sys, "argv", ["draw.py", str(run), "--n", "3"])
    module.main()
    row = json.loads(capsys.readouterr().out)
    held_out = load_material(session.config.data.at(32), most_train=1, most_held_out=3, seed=0).held_out.captions
    assert asked == [tuple(held_out)] * 2
    assert row["n"] == 3
    assert row["samples_per_s"] == pytest.approx(3 / row["s"], rel=0.1)
    assert "tokens" not in row, "diffusion has none"
