"""A disk that fills up while training: a checkpoint that cannot be written stops the run, a picture or a line does not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.engine import checkpoint, loop, track
from tests.processes import check, checkpoints, content, differences, start

FILL_DISK = Path(__file__).parent / "fill_disk.py"
Plain = Callable[[Path], list[str]]
Command = Callable[..., int]


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_room_for_a_checkpoint(plain: Plain, command: Command, tmp_path: Path, unbroken: Path) -> None:
    """The system's own limit on file sizes, met by safetensors in the middle of a file."""
    with start(["4", *plain(tmp_path / "run")], tmp_path, script=FILL_DISK) as running:
        ended = check(running.wait(60), 2)
    home = tmp_path / "run" / "tokenizer" / "checkpoints"
    message = ended.output.splitlines()[-1]
    assert message.startswith(f"tessera: {home / 'step-000004'} cannot be written: ")
    assert "File too large" in message
    assert "What was saved before is intact. Make room" in message
    assert f"tessera resume {tmp_path / 'run'}" in message
    assert "Traceback" not in ended.output
    assert sorted(path.name for path in home.iterdir()) == ["latest", "step-000002"], "and no temporary folder"
    for file in (home / "step-000002").iterdir():
        assert content(file) == content(unbroken / "tokenizer" / "checkpoints" / "step-000002" / file.name)
    assert command("resume", tmp_path / "run") == 0
    assert differences(tmp_path / "run", unbroken) == []


@pytest.mark.parametrize("place", ["rename", "replace", "fsync"])
def test_no_room_at_other_points_of_a_save(
    place: str, plain: Plain, command: Command, tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    real, run = loop.save_checkpoint, tmp_path / "run"

    def save(folder: Path, state: Any, facts: Any, **more: Any) -> Path:
        with monkeypatch.context() as patch:
            if state.step == 4:
                patch.setattr(checkpoint.os, place, full)
            return real(folder, state, facts, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", save)
        assert command(*plain(run)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "step-000004 cannot be written: No space left on device. What was saved before is intact" in message
    assert not list((run / "tokenizer" / "checkpoints").glob(".step*"))
    assert checkpoints(run)[0] == "step-000002"
    assert command("resume", run) == 0
    assert differences(run, unbroken) == []


def test_no_room_for_previews_is_told_and_training_goes_on(
    plain: Plain, command: Command, tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    monkeypatch.setattr(loop, "write_json", full)  # the facts beside the picture, after the picture
    assert command(*plain(run)) == 0
    assert capsys.readouterr().err.count("no preview, it cannot be written: [Errno 28] No space left on device") == 2
    assert list((run / "tokenizer" / "samples").iterdir()) == [], "half of a pair is none"
    shutil.copytree(unbroken / "tokenizer" / "samples", run / "tokenizer" / "samples", dirs_exist_ok=True)
    assert differences(run, unbroken) == [], "nothing else is missing"


def test_no_room_for_the_log_is_no_end(
    plain: Plain, command: Command, tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = track.Journal.__init__

    def to_a_full_disk(self: track.Journal, path: Path | None, **more: Any) -> None:
        real(self, Path("/dev/full"), **more)

    monkeypatch.setattr(track.Journal, "__init__", to_a_full_disk)
    assert command(*plain(tmp_path / "run")) == 0
    assert not (tmp_path / "run" / "log.txt").exists()
    assert differences(tmp_path / "run", unbroken) == []


@pytest.mark.parametrize("name", [".lock", "env.json", "config.yaml", "tokenizer"])
def test_no_room_at_the_start(
    name: str, plain: Plain, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_open, real_mkdir, real_replace = Path.open, os.mkdir, os.replace

    def guard(path: Any) -> None:
        if Path(path).name == name and tmp_path in Path(path).parents:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (guard(self), real_open(self, *a, **k))[1])
    monkeypatch.setattr(os, "mkdir", lambda path, *a, **k: (guard(path), real_mkdir(path, *a, **k))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (guard(new), real_replace(old, new))[1])
    assert command(*plain(tmp_path / "run")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("tessera: ")
    assert "No space left on device" in said
    assert name in said
