"""Run folders, their lock and their config; the clock's numbers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toys import ALONE, gan, placed, points, setting, train

from tessera.config import OptimConfig, UserError
from tessera.engine import clock
from tessera.engine.clock import Clock, duration
from tessera.engine.run import lock, new_run, unwritable, write_config, write_environment
from tessera.engine.step import train_step
from tessera.engine.track import read_metrics


def test_runs_are_numbered_and_never_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(new_run("muse", None)) for _ in range(3)] == ["runs/muse-001", "runs/muse-002", "runs/muse-003"]
    (tmp_path / "runs" / "muse-004").write_text("a file in the way")
    assert str(new_run("muse", None)) == "runs/muse-005"
    assert new_run("muse", tmp_path / "deep" / "own").is_dir()


def test_an_existing_folder_names_resume(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"exists; a new run needs a new folder.*tessera resume {tmp_path}"):
        new_run("muse", tmp_path)
    with pytest.raises(UserError, match="file is a file, not a folder; name another --run"):
        new_run("muse", tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot be made: .*file is a file, so .* cannot lie in it; name another --run"):
        new_run("muse", tmp_path / "file" / "run")


def test_runs_that_cannot_be_made_are_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("a file, not a folder")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot be made: runs is a file, so"):
        new_run("muse", None)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    held = lock(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tessera.config import UserError; from tessera.engine.run import lock\n"
        "try: lock(Path(sys.argv[1]))\nexcept UserError as error: sys.exit(str(error))\n"
    )
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "is being written by another process" in other.stderr
    held.close()
    lock(tmp_path).close()


def test_an_older_config_is_kept(tmp_path: Path) -> None:
    for lr in (0.1, 0.1, 0.2, 0.3):
        write_config(tmp_path, OptimConfig(lr=lr))
    kept = {path.name: float(path.read_text().split("lr:")[1].split()[0]) for path in tmp_path.iterdir()}
    assert kept == {"config.yaml": 0.3, "config-1.yaml": 0.1, "config-2.yaml": 0.2}


def test_environment_is_json(tmp_path: Path) -> None:
    write_environment(tmp_path, ALONE)
    found = json.loads((tmp_path / "env.json").read_text())
    assert (found["ranks"], found["torch"], found["device"][:3]) == (1, torch.__version__, "cpu")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (90_061, "25:01:01"),
        (400_000, "4 d 15 h"),
        (1e30, "11574 d 1 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_clock_leaves_chores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    watch = Clock(torch.device("cpu"), batch_size=8, step=10, steps=20)
    now[0] += 2
    with watch.waiting():
        now[0] += 1
    with watch.chore():
        now[0] += 100
    now[0] += 1
    numbers = watch.read(14)
    assert numbers["time/items_per_s"] == pytest.approx(8.0)
    assert numbers["time/step_ms"] == pytest.approx(1000.0)
    assert numbers["time/wait_share"] == pytest.approx(0.25)
    assert 0 < numbers["memory/peak_gib"] < 64
    now[0] += 1
    assert watch.read(15)["time/wait_share"] == 0
    assert watch.read(15)["time/items_per_s"] == 0, "no step since, and no division by zero"


@pytest.mark.parametrize("jump", [-1e9, 1e9, float("nan")])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """The time of day is set while training runs: rates, the ETA and signals go by clocks that cannot be set."""
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + jump * next(calls))
    _, done = train(tmp_path, 3, validate_every_steps=1, preview_every_steps=1, save_every_steps=1)
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 < line["time/step_ms"] < 60_000 and 0 <= line["time/wait_share"] <= 1 for line in lines)
    assert done.job.steps == 3


def test_nobody_asks_for_the_time_of_day() -> None:
    """But for what stands in front of the lines of log.txt."""
    sources = {path: path.read_text(encoding="utf8") for path in Path(clock.__file__).parents[1].rglob("*.py")}
    assert len(sources) > 30
    assert [path for path, text in sources.items() if "time.time(" in text or "datetime.now(" in text] == []


def test_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = gan()
    state = placed(stage)
    report = train_step(state, stage, [points(0, 8)], setting())
    watch = Clock(ALONE.device, batch_size=8, step=0, steps=101)
    watch.rate = 80.0
    line = watch.line("toy", report, {"maker/loss": 0.5, "judge/loss": float("nan"), "memory/peak_gib": 1.0})
    assert line == "toy 1/101  maker loss 0.5000  judge loss nan  lr 1.0e-02  80 items/s  ETA 0:10  1.00 GiB"
    assert os.linesep not in line


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "Correct its rights; then"), (errno.ENOSPC, "Make room, or keep less")]
)
def test_what_cannot_be_written_is_told_with_what_to_do(number: int, advice: str, tmp_path: Path) -> None:
    said = str(unwritable(tmp_path / "run" / ".lock", OSError(number, os.strerror(number))))
    assert advice in said
    assert f"tessera resume {tmp_path / 'run'}" in said
