"""Numbers that break: nothing moves, the message says where, and `skip` goes on for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toys import Points, Stream, cut, differing, fit, gan, placed, points, setting, snapshot

from tessera.contracts import Context, Loss, LossFunction, Nets, Stage
from tessera.engine.checkpoint import NonFiniteWeights, list_checkpoints, save_checkpoint
from tessera.engine.loop import Fit, NonFinite, Stopped
from tessera.engine.signals import StopFlag
from tessera.engine.step import train_step
from tessera.engine.track import Journal, read_metrics

Poison = Callable[[Tensor], Tensor]
POISONS: dict[str, Poison] = {
    "nan loss": lambda total: total * float("nan"),
    "inf loss": lambda total: total + float("inf"),
    "inf gradient": lambda total: total + (total - total.detach()).sqrt(),  # the root at 0: value 0, slope infinite
    "nan gradient": lambda total: total + (total - total.detach()).sqrt() * 0,
}


def poisoned(loss: LossFunction, poison: Poison, when: Callable[[Points, Context], bool]) -> LossFunction:
    def broken(nets: Nets, batch: Points, context: Context) -> Loss:
        found = loss(nets, batch, context)
        return replace(found, total=poison(found.total)) if when(batch, context) else found

    return broken


def breaking(turn: str, kind: str, when: Callable[[Points, Context], bool]) -> Stage:
    """The toy stage, one turn of which breaks at times."""
    stage = gan()
    turns = [replace(t, loss=poisoned(t.loss, POISONS[kind], when)) if t.name == turn else t for t in stage.turns]
    return replace(stage, turns=turns)


def at(*steps: int) -> Callable[[Points, Context], bool]:
    return lambda batch, context: context.step in steps


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("turn", ["maker", "judge"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_refused_update_changes_no_bit(turn: str, kind: str, policy: str) -> None:
    stage = breaking(turn, kind, at(3))
    state = placed(stage)
    for number in range(3):
        train_step(state, stage, cut(points(number * 8, 8), 2), setting(nonfinite=policy))
    before = snapshot(state)
    report = train_step(state, stage, cut(points(24, 8), 2), setting(nonfinite=policy))
    changed = set(differing(before, snapshot(state)))
    assert [bool(one.update.broken) for one in report.turns] == [turn == "maker", turn == "judge" or policy == "stop"]
    assert not [name for name in changed if name.split("/")[1] == turn or name.startswith("ema/")]
    assert "raw/maker/seen" not in changed, "running sums wait as well"
    if turn == "maker" and policy == "stop":
        assert not changed, "once broken, nothing moves"
    assert all(p.grad is None for net in state.nets.values() for p in net.parameters())


@pytest.mark.parametrize("kind", ["nan loss", "inf gradient"])
def test_nothing_moves_after_a_break_that_was_read_late(kind: str) -> None:
    """On a GPU the next step is launched before the break is read."""
    stage = breaking("maker", kind, at(0))
    state = placed(stage)
    before = snapshot(state, "maker")
    for number in range(3):
        train_step(state, stage, [points(number * 8, 8)], setting())
    after = snapshot(state, "maker")
    assert not [name for name in differing(before, after) if name in before and not name.startswith("ema/")]
    assert not any(value.any() for name, value in after.items() if name.startswith("optim/")), "moments and counters are 0"


def test_a_finite_part_of_the_batch_does_not_save_it() -> None:
    stage = breaking("maker", "nan loss", lambda batch, context: "sample-7" in batch.keys)
    state = placed(stage)
    before = snapshot(state)
    train_step(state, stage, cut(points(0, 8), 4), setting())
    names = differing(before, snapshot(state))
    assert all(name.startswith("optim/") for name in names), "only empty moments were made"


# ---- in the loop


def test_stop_names_step_turn_parameters_and_samples(tmp_path: Path) -> None:
    stage = breaking("judge", "nan loss", lambda batch, context: context.step == 4 and "sample-37" in batch.keys)
    state = placed(stage)
    run = fit(tmp_path, stage, state, steps=9, loader=Stream(num_micro=4), save_every_steps=2)
    with pytest.raises(NonFinite) as caught:
        run.run()
    message = str(caught.value)
    assert "step 5, turn 'judge': loss nan" in message
    assert "losses of the samples sample-36, sample-37;" in message
    assert "gradients of 4 of 4 parameters: judge/first.weight, judge/first.bias, judge/last.weight, judge/last.bias" in message
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000002", "step-000004"]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "train"] == [1, 2, 3, 4]
    assert run.job.loader.closed == 1


def test_a_broken_gradient_names_every_sample_it_may_come_from(tmp_path: Path) -> None:
    stage = breaking("maker", "inf gradient", lambda batch, context: "sample-5" in batch.keys)
    with pytest.raises(NonFinite) as caught:
        fit(tmp_path, stage, placed(stage), steps=9, loader=Stream(num_micro=4)).run()
    message = str(caught.value)
    assert "step 1, turn 'maker': loss " in message
    assert "nan" not in message
    assert "sample-5" in message, "it is in the third micro-batch"
    assert "maker/first.weight" in message


def test_a_weight_of_zero_is_refused_in_words(tmp_path: Path) -> None:
    def emptied(step: int, batches: list[Points]) -> list[Points]:
        return [replace(batch, count=batch.count * (step < 2)) for batch in batches]

    stage = gan()
    state = placed(stage)
    before: dict[str, Tensor] = {}
    loader = Stream(change=emptied, on_step=lambda step: before.update(snapshot(state)) if step == 2 else None)
    with pytest.raises(NonFinite, match=r"step 3, turn 'maker': the weight over the whole batch is 0, so there is no target"):
        fit(tmp_path, stage, state, steps=9, loader=loader).run()
    assert differing(before, snapshot(state)) == []


def test_one_micro_batch_without_targets_is_no_error(tmp_path: Path) -> None:
    def half_empty(step: int, batches: list[Points]) -> list[Points]:
        return [replace(batches[0], count=batches[0].count * 0), batches[1]]

    stage, alone = gan(), gan()
    state, other = placed(stage), placed(alone)
    fit(tmp_path / "a", stage, state, steps=3, loader=Stream(change=half_empty)).run()
    fit(tmp_path / "b", alone, other, steps=3, loader=Stream(change=lambda step, batches: batches[1:])).run()
    for name, value in state.nets["maker"].named_parameters():
        torch.testing.assert_close(value, dict(other.nets["maker"].named_parameters())[name], rtol=0, atol=1e-6)


def test_skip_leaves_the_update_out_and_goes_on(tmp_path: Path) -> None:
    stage = breaking("maker", "nan loss", at(2, 3, 6))
    state = placed(stage)
    counts: list[tuple[int, int]] = []
    spoken = StringIO()
    loader = Stream(on_step=lambda step: counts.append((step, state.skips)))
    run = fit(
        tmp_path, stage, state, steps=9, loader=loader, journal=Journal(tmp_path / "log.txt", stream=spoken),
        nonfinite="skip", max_skips=3,
    )  # fmt: skip
    run.run()
    assert counts == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 0), (6, 0), (7, 1), (8, 0)]
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines if line["maker/loss"] is None] == [3, 4, 7]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert spoken.getvalue().count("update left out") == 3
    assert "update left out (2 in a row, at most 3): step 4, turn 'maker'" in (tmp_path / "log.txt").read_text()
    assert state.optimizers["maker"].state[state.nets["maker"].first.weight]["step"] == 6
    assert state.step == 9


def test_skip_stops_when_too_many_come_in_a_row(tmp_path: Path) -> None:
    stage = breaking("judge", "inf gradient", lambda batch, context: context.step >= 2)
    state = placed(stage)
    with pytest.raises(NonFinite, match=r"step 5, turn 'judge'"):
        fit(tmp_path, stage, state, steps=50, nonfinite="skip", max_skips=3).run()
    assert state.skips == 3


# ---- what must never reach the disk


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, value: float) -> None:
    state = placed(gan())
    good = save_checkpoint(tmp_path, state, {})
    state.step = 1
    with torch.no_grad():
        state.nets["judge"].last.bias.fill_(value)
    with pytest.raises(NonFiniteWeights, match=r"judge/last\.bias holds non-finite numbers at step 1; not saved"):
        save_checkpoint(tmp_path, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", good.name]
    assert (tmp_path / "latest").read_text() == "step-000000\n"


class Late(Fit):
    """Reads reports as on a GPU: the newest step is still under way."""

    calls = 0

    def read_reports(self, leave: int) -> None:
        newest = self.unread[-1][0].step if self.unread else 0
        first_of_this_step, self.calls = newest != self.calls, newest
        super().read_reports(leave=1 if first_of_this_step and not self.due() else leave)


def test_a_signal_does_not_hide_a_break_of_the_newest_step(tmp_path: Path) -> None:
    stage = breaking("maker", "nan loss", at(5))
    state, stop = placed(stage), StopFlag()

    def ask(step: int) -> None:
        if step == 4:
            stop.signal = signal.SIGTERM

    quiet = {"log_every_steps": 100, "save_every_steps": 100, "validate_every_steps": 100, "preview_every_steps": 100}
    with pytest.raises(NonFinite, match="step 6"):
        fit(tmp_path, stage, state, steps=9, loader=Stream(on_step=ask), stop=stop, kind=Late, **quiet).run()
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_reading_late_still_stops_and_saves(tmp_path: Path) -> None:
    stage = gan()
    state, stop = placed(stage), StopFlag()

    def ask(step: int) -> None:
        if step == 4:
            stop.signal = signal.SIGINT

    quiet = {"log_every_steps": 100, "save_every_steps": 100, "validate_every_steps": 100, "preview_every_steps": 100}
    with pytest.raises(Stopped) as caught:
        fit(tmp_path, stage, state, steps=9, loader=Stream(on_step=ask), stop=stop, kind=Late, **quiet).run()
    assert caught.value.number == signal.SIGINT
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000006"]
