"""The loop and samples that could not be read: counted over ranks and resumes, named once, and too many of them stop the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from toys import Points, Stream, differing, fit, gan, placed, points, snapshot

from tessera.config import UserError
from tessera.engine.checkpoint import list_checkpoints, read_json, restore, save_checkpoint
from tessera.engine.loop import Fit
from tessera.engine.track import Journal, read_metrics
from tessera.files import write_json

QUIET = {"log_every_steps": 1000, "save_every_steps": 1000, "validate_every_steps": 1000, "preview_every_steps": 1000}


def spoilt(*steps: int, number: int = 1) -> Callable[[int, list[Points]], list[Points]]:
    """At these steps (from 0) the first micro-batch has faults."""

    def change(step: int, batches: list[Points]) -> list[Points]:
        faults = tuple(f"{step % 3}-{place}.png: cut off" for place in range(number))
        return [replace(batches[0], faults=faults), *batches[1:]] if step in steps else batches

    return change


def run(
    folder: Path, state: Any, stage: Any, *, budget: float, num_samples: int = 100, stream: StringIO | None = None, **more: Any
) -> Fit:
    journal = Journal(folder / "log.txt", stream=stream or StringIO())
    folder.mkdir(exist_ok=True)
    made = fit(folder, stage, state, journal=journal, **{**QUIET, **more})
    made.job = replace(made.job, corrupt_budget=budget, num_samples=num_samples)
    made.run()
    return made


def test_counted_named_once_and_told_in_the_metrics(tmp_path: Path) -> None:
    stage, stream = gan(), StringIO()
    state = placed(stage)
    run(tmp_path, state, stage, budget=0.1, steps=8, loader=Stream(change=spoilt(1, 4, 5)), stream=stream, log_every_steps=1)
    assert state.replaced == 3
    said = [line for line in stream.getvalue().splitlines() if "cut off" in line]
    assert said == [
        f"toy step {step}: another sample took the place of one that cannot be read: {file}.png: cut off"
        for step, file in ((2, "1-0"), (6, "2-0"))
    ], "the file of steps 2 and 5 once"
    train = [line["replaced"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "train"]
    assert train == [0, 1, 1, 1, 2, 3, 3, 3]
    assert read_json(tmp_path / "checkpoints" / "step-000008" / "state.json")["replaced"] == 3


def test_after_the_first_few_names_go_to_the_log_alone(tmp_path: Path) -> None:
    stage, stream = gan(), StringIO()
    run(tmp_path, placed(stage), stage, budget=1.0, steps=1, loader=Stream(change=spoilt(0, number=30)), stream=stream)
    assert stream.getvalue().count("cut off") == 20
    assert (tmp_path / "log.txt").read_text().count("cut off") == 30


def test_past_the_budget_it_stops_with_the_state_saved(tmp_path: Path) -> None:
    """1 % of the 100 samples of the set until so many were seen; then of those that were seen: 8 a step."""
    stage = gan()
    state = placed(stage)
    with pytest.raises(UserError) as caught:
        run(tmp_path, state, stage, budget=0.01, steps=50, loader=Stream(change=spoilt(3, 6)))
    message = str(caught.value)
    assert message.startswith("samples that could not be read and were replaced up to step 7: 2, more than data.corrupt_budget=")
    assert "=0.01 allows of 100; the state is saved. Unreadable: 0-0.png: cut off." in message
    assert "tessera data check" in message
    assert f"tessera resume {tmp_path.parent}" in message
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000007"]
    stage = gan()
    state = placed(stage)
    run(tmp_path / "b", state, stage, budget=0.01, steps=50, loader=Stream(change=spoilt(3, 25)))
    assert state.replaced == 2, "of 208 by then"


def test_a_budget_of_zero_stops_at_the_first(tmp_path: Path) -> None:
    stage = gan()
    with pytest.raises(UserError, match="replaced up to step 4: 1, more than"):
        run(tmp_path, placed(stage), stage, budget=0, steps=9, loader=Stream(change=spoilt(3)))


def test_counted_across_a_resume(tmp_path: Path) -> None:
    """As the unbroken run does, it stops at step 7; after that the repaired data let it go on."""
    stage = gan()
    state = placed(stage)
    run(tmp_path, state, stage, budget=0.01, steps=5, loader=Stream(change=spoilt(3, 6)))
    stage = gan()
    resumed = placed(stage)
    restore(tmp_path / "checkpoints" / "step-000005", resumed)
    assert resumed.replaced == 1
    with pytest.raises(UserError, match="up to step 7: 2"):
        run(tmp_path, resumed, stage, budget=0.01, steps=9, loader=Stream(change=spoilt(3, 6)))
    run(tmp_path, resumed, stage, budget=0.01, steps=9)
    assert (resumed.step, resumed.replaced) == (9, 2)


def test_a_checkpoint_from_before_they_were_counted(tmp_path: Path) -> None:
    state = placed(gan())
    state.replaced = 7
    path = save_checkpoint(tmp_path, state, {})
    numbers = json.loads((path / "state.json").read_text())
    assert numbers.pop("replaced") == 7
    write_json(path / "state.json", numbers)
    restore(path, state)
    assert state.replaced == 0


def test_a_batch_without_a_readable_sample_is_no_update(tmp_path: Path) -> None:
    def nothing(step: int, batches: list[Points]) -> list[Points]:
        return [replace(b, count=0 * b.count, faults=b.keys) for b in batches] if step == 2 else batches

    stage = gan()
    state = placed(stage)
    with pytest.raises(UserError, match=r"up to step 3: 8, .* the last checkpoint is intact"):
        run(tmp_path, state, stage, budget=0.01, steps=9, loader=Stream(change=nothing), save_every_steps=2)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000002"]
    kept = placed(gan())
    restore(tmp_path / "checkpoints" / "step-000002", kept)
    assert differing(snapshot(state), snapshot(kept)) == []


def test_validation_and_preview_are_told_and_do_not_count(tmp_path: Path) -> None:
    stage, stream = gan(), StringIO()
    state = placed(stage)
    held_out = [replace(points(10_000, 4), faults=("held.png: cut off",)), points(10_004, 4)]
    run(tmp_path, state, stage, budget=0, steps=2, loader=Stream(held_out=held_out), stream=stream, validate_every_steps=1)
    assert state.replaced == 0
    assert stream.getvalue().count("toy: validation leaves out what cannot be read: held.png: cut off") == 1
