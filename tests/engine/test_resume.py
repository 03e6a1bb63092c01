"""Resuming equals never stopping: bit for bit, wherever and however the run was stopped."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import Points, Stream, differing, fit, gan, placed, snapshot

from tessera.config import OptimConfig
from tessera.contracts import Context, Loss, Nets, Stage
from tessera.engine.checkpoint import newest_valid, restore, save_checkpoint
from tessera.engine.loop import Stopped
from tessera.engine.signals import StopFlag
from tessera.engine.state import TrainState
from tessera.engine.track import read_metrics

STEPS = 10
ENGINE: dict[str, Any] = {"log_every_steps": 1, "validate_every_steps": 4, "save_every_steps": 3, "preview_every_steps": 5}
OPTIM = OptimConfig(lr=5e-3, weight_decay=0.1, warmup_steps=4, schedule="cosine", max_grad_norm=0.5)


class Killed(BaseException):
    """As by SIGKILL: nothing of ours runs after it."""


def stage() -> Stage:
    """Dropout, a judge that starts late, a running buffer, and an `after` that draws random numbers."""
    made = gan(OPTIM, dropout=0.3, start=3)
    count = made.after

    def after(nets: Nets, stats: Any, step: int) -> None:
        count(nets, stats, step)
        nets["maker"].seen.add_(torch.rand(3))

    return replace(made, after=after)


def attempt(folder: Path, stop_at: int | None = None, kill_at: int | None = None, **engine: Any) -> TrainState:
    """A fresh process, as far as one process can tell: new nets, foreign random states, the newest valid checkpoint."""
    toy = stage()
    state = placed(toy)
    path, _ = newest_valid(folder / "checkpoints")
    if path is not None:
        restore(path, state)
    torch.manual_seed(random.randrange(2**60))
    np.random.seed(random.randrange(2**30))
    stop = StopFlag()

    def on_step(step: int) -> None:
        if step == stop_at:
            stop.signal = signal.SIGTERM
        if step == kill_at:
            raise Killed

    pinned = frozenset() if path is None else frozenset({path.name})
    fit(folder, toy, state, steps=STEPS, loader=Stream(on_step=on_step), stop=stop, pinned=pinned, **{**ENGINE, **engine}).run()
    return state


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what differs from run to run."""
    found = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))} for line in found]


def last_checkpoint(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints" / f"step-{STEPS:06d}").iterdir()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainState, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("unbroken")
    return attempt(folder), folder


def assert_equal(folder: Path, state: TrainState, unbroken: tuple[TrainState, Path]) -> None:
    assert differing(snapshot(state), snapshot(unbroken[0])) == []
    assert lines(folder) == lines(unbroken[1])
    assert last_checkpoint(folder) == last_checkpoint(unbroken[1])
    pointers = [(folder / "checkpoints" / name).read_text() for name in ("latest", "best")]
    assert pointers == [(unbroken[1] / "checkpoints" / name).read_text() for name in ("latest", "best")]
    samples = {path.name: path.read_bytes() for path in (folder / "samples").iterdir()}
    assert samples == {path.name: path.read_bytes() for path in (unbroken[1] / "samples").iterdir()}


def test_the_unbroken_run_uses_all_it_should(unbroken: tuple[TrainState, Path]) -> None:
    state, folder = unbroken
    assert [line["step"] for line in lines(folder) if line["kind"] == "train"] == list(range(1, STEPS + 1))
    assert state.nets["maker"].seen.abs().sum() > 0
    assert differing(snapshot(attempt(folder.parent / f"{folder.name}-again")), snapshot(state)) == [], "and repeats itself"


@pytest.mark.parametrize("step", [0, 2, 3, 5, STEPS - 1])
def test_stopped_by_a_signal(tmp_path: Path, unbroken: tuple[TrainState, Path], step: int) -> None:
    with pytest.raises(Stopped):
        attempt(tmp_path, stop_at=step)
    assert len([line for line in lines(tmp_path) if line["kind"] == "train"]) == step + 1
    if step == STEPS - 1:  # it was the last one; there is nothing left to do
        state = placed(stage())
        restore(tmp_path / "checkpoints" / f"step-{STEPS:06d}", state)
    else:
        state = attempt(tmp_path)
    assert_equal(tmp_path, state, unbroken)


@pytest.mark.parametrize("step", [1, 3, 5, 9])
def test_killed_between_two_checkpoints(tmp_path: Path, unbroken: tuple[TrainState, Path], step: int) -> None:
    with pytest.raises(Killed):
        attempt(tmp_path, kill_at=step)
    if (tmp_path / "metrics.jsonl").exists():
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "kind": "tra')
    assert_equal(tmp_path, attempt(tmp_path), unbroken)


def test_stopped_again_and_again(tmp_path: Path, unbroken: tuple[TrainState, Path]) -> None:
    for step in range(0, STEPS - 2, 2):
        with pytest.raises(Stopped):
            attempt(tmp_path, stop_at=step)
        with pytest.raises(Killed):
            attempt(tmp_path, kill_at=step + 2)
    assert_equal(tmp_path, attempt(tmp_path), unbroken)


def test_falls_back_when_the_newest_is_damaged(tmp_path: Path, unbroken: tuple[TrainState, Path]) -> None:
    with pytest.raises(Killed):
        attempt(tmp_path, kill_at=8)
    newest, _ = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    (newest / "optimizer.safetensors").write_bytes(b"gone")
    assert_equal(tmp_path, attempt(tmp_path, keep_checkpoints=1), unbroken)


def test_another_chore_rhythm_changes_no_weight(tmp_path: Path, unbroken: tuple[TrainState, Path]) -> None:
    other = {"log_every_steps": 4, "validate_every_steps": 1, "save_every_steps": 1, "preview_every_steps": 2}
    state = attempt(tmp_path, **other)
    assert differing(snapshot(state), snapshot(unbroken[0])) == []


def test_activation_checkpointing_and_accumulation_do_not_change_the_samples(tmp_path: Path) -> None:
    """What a loss is called with is a function of the step alone."""
    seen: list[tuple[int, list[int]]] = []

    def spy(nets: Nets, batch: Points, context: Context) -> Loss:
        seen.append((context.step, context.positions.tolist()))
        return Loss(nets["maker"](batch.x).sum(), torch.tensor(1.0))

    for num_micro in (1, 4):
        toy = gan(after=lambda nets, stats, step: None, measure=None, preview=None)
        toy = replace(toy, turns=[replace(toy.turns[0], loss=spy)])
        fit(tmp_path / str(num_micro), toy, placed(toy), steps=2, loader=Stream(num_micro=num_micro)).run()
    assert seen[:2] == [(0, list(range(8))), (1, list(range(8, 16)))]
    assert [position for _, positions in seen[2:] for position in positions] == list(range(16))


def test_skips_are_counted_across_a_resume(tmp_path: Path) -> None:
    toy = gan()
    state = placed(toy)
    state.skips, state.step = 4, 3
    other = placed(gan())
    restore(save_checkpoint(tmp_path / "checkpoints", state, {}), other)
    assert other.skips == 4
