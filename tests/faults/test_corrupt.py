"""Unreadable files in the training set: a run that is killed and resumed meets and replaces them as the unbroken one does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.engine import loop
from tests.processes import checkpoints, differences, read_metrics, train_arguments

Command = Callable[..., int]
SETS: dict[str, Any] = {
    "tokenizer__critic": "null",
    "tokenizer__steps": 16,
    "engine__save_every_steps": 3,
    "data__corrupt_budget": 0.1,
}


@pytest.fixture(scope="module")
def spoilt(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four of sixty are bad, each in its own way; those may also be held out."""
    data = Path(shutil.copytree(shapes, tmp_path_factory.mktemp("spoilt") / "shapes"))
    pictures = sorted((data / "train").glob("*.png"))
    pictures[3].write_bytes(b"")
    pictures[11].write_bytes(pictures[11].read_bytes()[:60])
    pictures[29].write_bytes(b"no picture")
    pictures[40].write_bytes(pictures[40].read_bytes()[:-30])
    return data


@pytest.fixture(scope="module")
def whole(spoilt: Path, command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert command(*train_arguments(spoilt, run, **SETS)) == 0
    return run


class Killed(BaseException):
    """Nothing in the program catches this."""


@pytest.mark.parametrize("step", [4, 11])
def test_killed_and_resumed_it_replaces_the_same(
    step: int, spoilt: Path, whole: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.train_step

    def kill(state: Any, *rest: Any) -> Any:
        if state.step == step:
            raise Killed
        return real(state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", kill)
        with pytest.raises(Killed):
            command(*train_arguments(spoilt, tmp_path / "run", **SETS))
    assert checkpoints(tmp_path / "run")[-1] == f"step-{step // 3 * 3:06d}"
    assert command("resume", tmp_path / "run") == 0
    assert differences(tmp_path / "run", whole) == []


def test_every_bad_file_is_named_and_counted(whole: Path) -> None:
    log = (whole / "log.txt").read_text()
    for number in (3, 11, 29, 40):
        assert log.count(f"{number:06d}.png: ") in (1, 2), "once in training, or once in validation and once in the preview"
    replaced = [line["replaced"] for line in read_metrics(whole) if line["kind"] == "train"]
    assert replaced == sorted(replaced)
    assert replaced[-1] > log.count("took the place"), "some twice: sixteen steps are two epochs"
    assert "Traceback" not in log
