"""Every file of a run truncated, emptied or with one byte flipped: resume takes what is intact and says what it passed over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import differences

CHECKPOINT = ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
HOME = "tokenizer/checkpoints"
OTHERS = ("config.yaml", "env.json", "log.txt", "tokenizer/metrics.jsonl", f"{HOME}/latest", f"{HOME}/best")
Command = Callable[..., int]


def truncate(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def empty(raw: bytes) -> bytes:
    return b""


def flip(raw: bytes) -> bytes:
    place = len(raw) // 2
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


DAMAGES = [truncate, empty, flip]
Damage = Callable[[bytes], bytes]


@pytest.fixture
def run(unbroken: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(unbroken, tmp_path / "run"))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", CHECKPOINT)
def test_of_a_checkpoint(
    name: str, damage: Damage, run: Path, unbroken: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / HOME / "step-000004" / name
    file.write_bytes(damage(file.read_bytes()))
    capsys.readouterr()
    assert command("resume", run, "--stage", "tokenizer") == 0
    said = capsys.readouterr().err
    if name == "manifest.json" and damage is flip:
        return  # it may have hit a letter of the config that it repeats, which is no damage
    assert f"checkpoint passed over: step-000004: {name} " in said
    assert "at step 2\n" in said
    assert differences(run, unbroken) == []


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OTHERS)
def test_of_another_file(name: str, damage: Damage, run: Path, unbroken: Path, command: Command) -> None:
    """A config may be unreadable, which is the user's to see; everything else is put right or not used."""
    (run / name).write_bytes(damage((run / name).read_bytes()))
    code = command("resume", run, "--stage", "tokenizer")
    assert code in ((0, 2) if name == "config.yaml" else (0,))
    if name.startswith(HOME):
        assert (run / name).read_bytes() == (unbroken / name).read_bytes()


def test_when_nothing_is_intact_it_says_what_to_do(run: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    for file in run.glob(f"{HOME}/*/state.json"):
        file.write_bytes(b"")
    assert command("resume", run, "--stage", "tokenizer") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "none of the 2 checkpoints in" in message
    assert "move that folder away" in message
