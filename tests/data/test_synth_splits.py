"""Synthetic sets are written by all cores: the same bytes as by one, or nothing at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessera.config import UserError
from tessera.data.synth import splits
from tessera.data.synth.splits import Split, write_set

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one process writes")


def sample(path: Path, split: Split, index: int) -> str:
    path.write_text(f"{split} {index}")
    return f"caption {index} of {split}"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "FEWEST_A_CORE", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)


@pytest.mark.parametrize("text_files", [False, True])
def test_all_cores_write_what_one_writes(text_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: dict[str, set[int]] = {}
    for name, cores in (("one", 1), ("three", 3)):
        monkeypatch.setattr(splits, "FEWEST_A_CORE", 1)
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        seen = tmp_path / f"{name}-writers"
        seen.mkdir()

        def noted(path: Path, split: Split, index: int, seen: Path = seen) -> str:
            (seen / str(os.getpid())).touch()
            return sample(path, split, index)

        write_set(tmp_path / name, 40, {"kind": "test"}, ".dat", noted, text_files=text_files)
        writers[name] = {int(path.name) for path in seen.iterdir()}
    assert bytes_of(tmp_path / "three") == bytes_of(tmp_path / "one")
    assert len(bytes_of(tmp_path / "one")) == (91 if text_files else 48)
    assert writers["one"] == {os.getpid()}
    assert len(writers["three"]) == 6, "three for each split"


@pytest.mark.usefixtures("three_cores")
def test_an_error_in_one_of_them_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    def broken(path: Path, split: Split, index: int) -> str:
        if index == 11:
            raise UserError("sample 11 is odd")
        return sample(path, split, index)

    with pytest.raises(UserError, match="sample 11 is odd"):
        write_set(tmp_path / "set", 40, {}, ".dat", broken)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file"), PermissionError(errno.EACCES, "Denied")], ids=repr
)
def test_a_folder_that_cannot_be_made_is_named_as_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        error.filename = str(path)
        raise error

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError) as caught:
        write_set(tmp_path / "set", 40, {}, ".dat", sample)
    assert str(caught.value) == f"{tmp_path / 'set'} cannot be made: {error.strerror}; name another --out"
    assert not list(tmp_path.iterdir())


def test_writers_end_when_whoever_asked_is_killed(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from tessera.data.synth import splits
splits.FEWEST_A_CORE, os.cpu_count = 1, lambda: 3
def slow(path, split, index):
    time.sleep(0.02)
    path.touch()
    return ""
splits.write_set(Path(sys.argv[1]), 100000, {}, ".dat", slow)
"""

    def written() -> int:
        return len(list(tmp_path.glob(".set.partial-*/train/*.dat")))

    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "set")]) as process:
        while written() < 3 and process.poll() is None:
            time.sleep(0.05)
        process.kill()
    time.sleep(0.5)
    before = written()
    time.sleep(0.5)
    assert before == written() >= 3


@pytest.mark.usefixtures("three_cores")
def test_a_death_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    def deadly(path: Path, split: Split, index: int) -> str:
        if index == 11:
            os._exit(9)
        return sample(path, split, index)

    with pytest.raises(UserError, match="was killed"):
        write_set(tmp_path / "set", 40, {}, ".dat", deadly)
    assert not list(tmp_path.iterdir())
