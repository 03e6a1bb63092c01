"""What retention deletes, when, and what it never touches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import fit, gan, placed

from tessera.config import UserError
from tessera.engine import loop
from tessera.engine.checkpoint import FILES, list_checkpoints, point, prune, step_name
from tessera.engine.retention import hashes_of, needed_elsewhere
from tessera.files import digest

OFTEN = {"save_every_steps": 1, "validate_every_steps": 1000, "preview_every_steps": 1000}


def fabricate(home: Path, step: int, **facts: Any) -> Path:
    """A checkpoint that is nothing but its manifest."""
    path = home / step_name(step)
    path.mkdir(parents=True)
    files = {name: {"bytes": 1, "sha256": f"{home.parent.name} {step} {name}"} for name in FILES}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": files, **facts}))
    return path


def names(home: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(home)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The checkpoints 1 to 6 of a run's first stage."""
    home = tmp_path / "tokenizer" / "checkpoints"
    for step in range(1, 7):
        fabricate(home, step)
    point(home / "latest", step_name(6))
    return home


def test_a_checkpoint_that_another_stage_was_trained_on_stays(tokenizer: Path, tmp_path: Path) -> None:
    base = tmp_path / "base" / "checkpoints"
    fabricate(base, 10, needs={"tokenizer": digest(tokenizer / step_name(2) / "manifest.json")})
    fabricate(base, 20, needs={"tokenizer": f"tokenizer 4 {FILES[1]}"})  # an older one than the newest refers to another
    fabricate(tmp_path / "superres" / "checkpoints", 5, needs={"tokenizer": "of another run", "base": None})
    assert needed_elsewhere(tokenizer) == {step_name(2), step_name(4)}
    assert needed_elsewhere(base) == set()
    assert prune(tokenizer, 1, needed_elsewhere(tokenizer)) == [step_name(step) for step in (1, 3, 5)]
    assert names(tokenizer) == [2, 4, 6]


def test_the_loop_spares_it_too(tmp_path: Path) -> None:
    stage = gan(measure=None)
    state = placed(stage)
    first = fit(tmp_path / "tokenizer", stage, state, steps=2, keep_checkpoints=1, **OFTEN)
    first.run()
    home = tmp_path / "tokenizer" / "checkpoints"
    assert names(home) == [2]
    fabricate(tmp_path / "base" / "checkpoints", 7, needs={"tokenizer": digest(home / step_name(2) / "manifest.json")})
    fit(tmp_path / "tokenizer", stage, state, steps=5, keep_checkpoints=1, **OFTEN).run()
    assert names(home) == [2, 5]


def test_pinned_by_name(tokenizer: Path) -> None:
    (tokenizer / "pins").write_text("step-000003\n\nstep-000099\n")
    assert prune(tokenizer, 1, needed_elsewhere(tokenizer)) == [step_name(step) for step in (1, 2, 4, 5)]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"needs": 3}', '{"needs": ["x"]}', '{"needs": {"tokenizer": {"a": 1}}}'])
def test_a_manifest_that_says_nothing_pins_nothing(tokenizer: Path, tmp_path: Path, text: str) -> None:
    path = fabricate(tmp_path / "base" / "checkpoints", 3)
    (path / "manifest.json").write_text(text)
    assert needed_elsewhere(tokenizer) == set()
    assert hashes_of(path) == ({digest(path / "manifest.json")} if text.startswith('{"') else set())


def test_nothing_goes_before_the_new_one_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at step 3: the checkpoints before it are all there still."""
    stage = gan(measure=None)
    state = placed(stage)
    fit(tmp_path, stage, state, steps=2, keep_checkpoints=2, **OFTEN).run()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(UserError, match="No space left"):
        fit(tmp_path, stage, state, steps=3, keep_checkpoints=1, **OFTEN).run()
    assert names(tmp_path / "checkpoints") == [1, 2]


def test_best_and_the_one_resumed_from_stay(tmp_path: Path) -> None:
    stage = gan(measure=None)
    state = placed(stage)
    fit(tmp_path, stage, state, steps=3, keep_checkpoints=3, **OFTEN).run()
    point(tmp_path / "checkpoints" / "best", step_name(1))
    fit(tmp_path, stage, state, steps=7, keep_checkpoints=1, pinned=frozenset({step_name(3)}), **OFTEN).run()
    assert names(tmp_path / "checkpoints") == [1, 3, 7]
