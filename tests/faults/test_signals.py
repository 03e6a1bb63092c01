"""A signal lets the step end, saves, and leaves with 128 + its number; the run then goes on as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.engine.checkpoint import newest_valid
from tests.processes import Ended, check, checkpoints, differences, run, start, start_ranks, train_arguments

STALL = Path(__file__).parent / "stall.py"
Reference = Callable[[int, int], Path]


def stopped_at(ended: Ended, name: str) -> int:
    """The step that the last message names."""
    found = re.search(rf"tessera: stopped by {name} after step (\d+); state saved; go on with `tessera resume", ended.output)
    assert found, ended.output
    assert "Traceback" not in ended.output
    return int(found[1])


@pytest.mark.parametrize(  # by `kill`; by Ctrl-C on a terminal
    ("name", "everyone"), [pytest.param("SIGTERM", False, marks=pytest.mark.slow), ("SIGINT", True)]
)
def test_a_signal_saves_and_the_resumed_run_is_exact(
    name: str, everyone: bool, shapes: Path, reference: Reference, tmp_path: Path
) -> None:
    with start(train_arguments(shapes, tmp_path / "run", data__workers=2, engine__micro_batch_size=8), tmp_path) as running:
        running.until_step(4)
        (running.send_group if everyone else running.send)(signal.Signals[name])
        ended = check(running.wait(30), 128 + signal.Signals[name])
        assert running.pids() == [], "workers outlive the program"
    step = stopped_at(ended, name)
    assert checkpoints(tmp_path / "run")[-1] == f"step-{step:06d}"
    assert f"at step {step}\n" in check(run(["resume", str(tmp_path / "run")], tmp_path)).output
    assert differences(tmp_path / "run", reference(1, 1)) == []


def test_a_signal_to_one_rank_stops_all_after_the_same_step(shapes: Path, reference: Reference, tmp_path: Path) -> None:
    arguments = train_arguments(shapes, tmp_path / "run", data__workers=2, engine__micro_batch_size=4)
    with start_ranks(arguments, tmp_path, 2) as (main, other):
        main.until_step(4)
        other.send(signal.SIGTERM)
        ends = [check(rank.wait(30), 128 + signal.SIGTERM) for rank in (main, other)]
    step, same = (stopped_at(ended, "SIGTERM") for ended in ends)
    assert step == same
    assert checkpoints(tmp_path / "run")[-1] == f"step-{step:06d}"
    check(run(["resume", str(tmp_path / "run")], tmp_path, ranks=2))
    assert differences(tmp_path / "run", reference(1, 2)) == []


@pytest.mark.parametrize("whom", [pytest.param("one rank", marks=pytest.mark.slow), "torchrun"])
def test_under_torchrun_a_signal_saves_and_nobody_hangs(whom: str, shapes: Path, tmp_path: Path) -> None:
    with start(train_arguments(shapes, tmp_path / "run", tokenizer__steps=5000), tmp_path, ranks=2) as running:
        running.until_step(4)
        pids = running.pids(RANK="1") if whom == "one rank" else [running.process.pid]
        assert len(pids) == 1
        sent = time.monotonic()
        os.kill(pids[0], signal.SIGTERM)
        assert running.wait(30).code != 0
        assert time.monotonic() - sent < 20, "torchrun had to kill a rank that did not leave"
    step = int(checkpoints(tmp_path / "run")[-1].removeprefix("step-"))
    saved, ended = (tmp_path / "run" / "log.txt").read_text().splitlines()[-2:]
    assert f"tokenizer step {step} saved" in saved
    assert f"ended: Stopped: stopped by SIGTERM after step {step}" in ended


@pytest.mark.parametrize(("place", "step"), [("preview", 8), pytest.param("validation", 8, marks=pytest.mark.slow), ("save", 3)])
def test_a_signal_during_a_chore_waits_for_its_end_and_for_no_more(place: str, step: int, shapes: Path, tmp_path: Path) -> None:
    with start([place, "1", *train_arguments(shapes, tmp_path / "run")], tmp_path, script=STALL) as running:
        running.until(lambda: "stalling" in running.output)
        running.send(signal.SIGTERM)
        ended = check(running.wait(30), 128 + signal.SIGTERM)
    assert stopped_at(ended, "SIGTERM") == step
    assert checkpoints(tmp_path / "run")[-1] == f"step-{step:06d}"
    assert newest_valid(tmp_path / "run" / "tokenizer" / "checkpoints")[1] == []


def test_a_signal_to_one_rank_during_a_chore_stops_all(shapes: Path, tmp_path: Path) -> None:
    with start_ranks(["save", "1", *train_arguments(shapes, tmp_path / "run")], tmp_path, 2, STALL) as (main, other):
        main.until(lambda: "stalling" in main.output)
        other.send(signal.SIGTERM)
        ends = [check(rank.wait(30), 128 + signal.SIGTERM) for rank in (main, other)]
    assert [stopped_at(ended, "SIGTERM") for ended in ends] == [3, 3]
    assert checkpoints(tmp_path / "run") == ["step-000003"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_leaves_at_once(name: str, shapes: Path, tmp_path: Path) -> None:
    arguments = train_arguments(shapes, tmp_path / "run", data__workers=2)
    with start(["preview", "600", *arguments], tmp_path, script=STALL) as running:
        running.until(lambda: "stalling" in running.output)
        running.send(signal.SIGTERM)
        time.sleep(0.7)  # sooner it would count as the echo of the first
        assert running.process.poll() is None
        running.send(signal.Signals[name])
        check(running.wait(5), 128 + signal.Signals[name])
