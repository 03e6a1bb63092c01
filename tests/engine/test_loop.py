"""The loop: which chore runs when, what it leaves in the folder, and how it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch
from toys import ALONE, Points, Stream, fit, gan, placed, points, setting, simple_turn, single, train

from tessera.contracts import Best, Context, Loss, Nets, Preview
from tessera.engine.checkpoint import list_checkpoints, newest_valid, read_pointer, restore
from tessera.engine.loop import Stopped, shorten, write_preview
from tessera.engine.signals import StopFlag
from tessera.engine.step import Setting
from tessera.engine.track import Journal, read_metrics
from tessera.engine.validate import eval_mode, validate

QUIET = {"log_every_steps": 1000, "save_every_steps": 1000, "validate_every_steps": 1000, "preview_every_steps": 1000}


def steps_of(folder: Path, kind: str) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == kind]


def saved(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / "checkpoints")]


def scored(scores: dict[int, float]) -> Callable[[Nets, Points, Context], Loss]:
    """A measure whose number is known beforehand."""
    return lambda nets, batch, context: Loss(torch.tensor(0.0), torch.tensor(1.0), {"score": torch.tensor(scores[context.step])})


# ---- chores


def test_every_chore_has_its_rhythm_and_the_last_step_does_all(tmp_path: Path) -> None:
    stage = gan(measure=scored(dict.fromkeys(range(20), 1.0)), best=Best("score", higher_is_better=True))
    rhythm = {"log_every_steps": 2, "validate_every_steps": 3, "preview_every_steps": 4, "save_every_steps": 5}
    fit(tmp_path, stage, placed(stage), steps=11, keep_checkpoints=9, **rhythm).run()
    assert steps_of(tmp_path, "train") == [2, 4, 6, 8, 10, 11]
    assert steps_of(tmp_path, "valid") == steps_of(tmp_path, "valid_raw") == [3, 6, 9, 11]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        f"step-{step:06d}.{kind}" for step in (4, 8, 11) for kind in ("json", "txt")
    ]
    assert saved(tmp_path) == [3, 5, 10, 11], "3 was a first record"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000011\n"


def test_a_single_step_does_everything(tmp_path: Path) -> None:
    stage = gan()
    fit(tmp_path, stage, placed(stage), steps=1, **QUIET).run()
    assert steps_of(tmp_path, "train") == steps_of(tmp_path, "valid") == saved(tmp_path) == [1]
    assert len(list((tmp_path / "samples").iterdir())) == 2
    assert read_pointer(tmp_path / "checkpoints" / "best") == "step-000001"


def test_best_follows_the_metric_and_is_saved_at_once(tmp_path: Path) -> None:
    scores = {1: 5.0, 2: float("nan"), 3: 4.0, 4: 4.0, 5: 6.0, 6: 3.0, 7: 9.0}
    stage = gan(measure=scored(scores), best=Best("score", higher_is_better=False))
    state = placed(stage)
    seen: list[str | None] = []
    loader = Stream(on_step=lambda step: seen.append(read_pointer(tmp_path / "checkpoints" / "best")))
    engine = {**QUIET, "validate_every_steps": 1, "keep_checkpoints": 1}
    fit(tmp_path, stage, state, steps=7, loader=loader, **engine).run()
    assert seen == [None] + [f"step-{step:06d}" for step in (1, 1, 3, 3, 3, 6)]
    assert saved(tmp_path) == [6, 7], "best outlives the newest"
    assert (state.best, state.best_step) == (3.0, 6)
    numbers = json.loads((tmp_path / "checkpoints" / "step-000007" / "state.json").read_text())
    assert (numbers["best"], numbers["best_step"], numbers["best_metric"]) == (3.0, 6, "score")


@pytest.mark.parametrize(("metric", "best"), [("score", (0.5, 3)), ("another", (5.0, 1)), (None, (0.5, 3))])
def test_a_record_of_another_metric_is_none(metric: str | None, best: tuple[float, int], tmp_path: Path) -> None:
    """As where a resumed stage has a new one; older checkpoints do not say which they had."""
    stage = gan(measure=scored({1: 5.0, 2: 6.0}), best=Best("score", higher_is_better=False))
    state = placed(stage)
    state.best, state.best_step, state.best_metric = 0.5, 3, metric
    fit(tmp_path, stage, state, steps=2, **{**QUIET, "validate_every_steps": 1}).run()
    assert (state.best, state.best_step) == best


@pytest.mark.parametrize(("last", "told"), [(9.0, True), (float("nan"), True), (3.0, False), (2.0, False)])
def test_it_is_said_that_an_earlier_step_was_better(last: float, told: bool, tmp_path: Path) -> None:
    stage, stream = gan(measure=scored({1: 5.0, 2: 3.0, 3: last}), best=Best("score", higher_is_better=False)), StringIO()
    journal = Journal(tmp_path / "log.txt", stream=stream)
    fit(tmp_path, stage, placed(stage), steps=3, journal=journal, **{**QUIET, "validate_every_steps": 1}).run()
    shown = stream.getvalue()
    assert "toy step 3 validation: " in shown
    assert shown.count("(best so far)") == (3 if last == 2 else 2)
    assert ("(best: score 3 at step 2)" in shown) == (last != 2)
    assert ("toy: step 2 had the better score, and is kept as checkpoints/best" in shown) == told


def test_metrics_say_what_the_step_did(tmp_path: Path) -> None:
    fit_numbers = train(tmp_path, 4, **{**QUIET, "log_every_steps": 1})[1].job
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["samples"] for line in lines] == [8, 16, 24, 32]
    names = {"loss", "weight", "grad_norm", "error"}
    for line in lines:
        assert {f"maker/{name}" for name in names} | {"judge/loss", "judge/real", "lr/maker", "lr/judge"} <= set(line)
        assert {"time/items_per_s", "time/step_ms", "time/wait_share", "memory/peak_gib"} <= set(line)
        assert line["lr/maker"] == 0.01
        assert line["maker/weight"] == 20
    assert fit_numbers.steps == 4


def test_digest_turns_sums_into_numbers(tmp_path: Path) -> None:
    stage = gan(digest=lambda stats: {f"total/{name}": float(value.sum()) for name, value in stats.items()}, measure=None)
    fit(tmp_path, stage, placed(stage), steps=2, **{**QUIET, "log_every_steps": 1}).run()
    assert all("total/made" in line for line in read_metrics(tmp_path / "metrics.jsonl"))


def test_without_validation_and_preview(tmp_path: Path) -> None:
    stage = single(simple_turn)
    state = placed(stage)
    fit(tmp_path / "a", stage, state, steps=2).run()
    assert state.best is None
    assert read_pointer(tmp_path / "a" / "checkpoints" / "best") is None
    assert not (tmp_path / "a" / "samples").exists()
    assert steps_of(tmp_path / "a", "valid") == []
    stage = gan()
    fit(tmp_path / "b", stage, placed(stage), steps=2, loader=Stream(held_out=[])).run()
    assert steps_of(tmp_path / "b", "valid") == []
    assert saved(tmp_path / "b") == [2]


def test_retention_spares_the_one_resumed_from(tmp_path: Path) -> None:
    stage = gan(measure=None)
    engine = {**QUIET, "save_every_steps": 1, "keep_checkpoints": 2}
    state = placed(stage)
    fit(tmp_path, stage, state, steps=3, **engine).run()
    assert saved(tmp_path) == [2, 3]
    fit(tmp_path, stage, state, steps=7, pinned=frozenset({"step-000003"}), **engine).run()
    assert saved(tmp_path) == [3, 6, 7]


def test_progress_lines_and_messages(tmp_path: Path) -> None:
    stage, stream = gan(), StringIO()
    fit(tmp_path, stage, placed(stage), steps=3, journal=Journal(tmp_path / "log.txt", stream=stream)).run()
    shown = stream.getvalue().splitlines()
    assert [line.split()[1] for line in shown if line.startswith("toy ") and "items/s" in line] == ["1/3", "2/3", "3/3"]
    assert any("toy step 3 validation: loss" in line and line.endswith("(best so far)") for line in shown)
    assert "toy step 3 saved" in (tmp_path / "log.txt").read_text()


def test_nets_are_in_training_mode_during_steps_whatever_chores_did(tmp_path: Path) -> None:
    stage = gan(dropout=0.5)
    state = placed(stage)
    modes: list[tuple[bool, ...]] = []
    nets = [*state.nets.values(), state.averages["maker"]]
    loader = Stream(on_step=lambda step: modes.append(tuple(net.training for net in nets)))
    fit(tmp_path, stage, state, steps=3, loader=loader, validate_every_steps=1, preview_every_steps=1).run()
    assert modes == [(True, True, False)] * 3


def test_eval_mode_is_undone_when_something_fails() -> None:
    state = placed(gan())

    def fail() -> None:
        with eval_mode(state.nets):
            assert not any(net.training for net in state.nets.values())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(net.training for net in state.nets.values())


def test_a_failing_loader_closes_everything(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise OSError("unplugged")

    stage, loader = gan(), Stream(on_step=fail)
    run = fit(tmp_path, stage, placed(stage), steps=5, loader=loader)
    with pytest.raises(OSError, match="unplugged"):
        run.run()
    assert loader.closed == 1
    assert run.metrics is not None
    assert run.metrics._file.closed
    assert steps_of(tmp_path, "train") == [1, 2]


def test_a_finished_state_does_nothing(tmp_path: Path) -> None:
    stage = gan()
    state = placed(stage)
    state.step = 5
    fit(tmp_path, stage, state, steps=5).run()
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_after_a_step_with_the_state_saved(tmp_path: Path, number: int) -> None:
    stop, stage = StopFlag(), gan()
    state = placed(stage)

    def ask(step: int) -> None:
        if step == 3:
            stop.signal = number

    loader = Stream(on_step=ask)
    with pytest.raises(Stopped, match=rf"stopped by {signal.Signals(number).name} after step 4; state saved") as caught:
        fit(tmp_path, stage, state, steps=9, loader=loader, stop=stop, **QUIET).run()
    assert caught.value.number == number
    assert saved(tmp_path) == [4]
    assert newest_valid(tmp_path / "checkpoints") == (tmp_path / "checkpoints" / "step-000004", [])
    assert loader.closed == 1
    other = placed(gan())
    restore(tmp_path / "checkpoints" / "step-000004", other)
    assert other.step == 4


def test_a_signal_in_the_last_step_still_finishes_it(tmp_path: Path) -> None:
    stop, stage = StopFlag(), gan()
    stop.signal = signal.SIGTERM
    with pytest.raises(Stopped):
        fit(tmp_path, stage, placed(stage), steps=1, stop=stop, **QUIET).run()
    assert saved(tmp_path) == steps_of(tmp_path, "train") == [1]


# ---- validation


def test_validation_is_one_mean_over_all_targets() -> None:
    stage = gan(digest=lambda stats: {"digested": float(stats["made"].sum())})
    nets = stage.nets

    def measure(nets: Nets, batch: Points, context: Context) -> Loss:
        assert not torch.is_grad_enabled()
        assert not nets["maker"].training
        assert (context.step, context.seed, context.positions.tolist()) == (7, 3, batch.positions.tolist())
        error = (nets["maker"](batch.x) - batch.y).square().mean(1)
        total = (error * batch.count).sum()
        return Loss(total, batch.count.sum(), {"double": 2 * total}, {"made": nets["maker"](batch.x).sum(0)})

    batches = [points(0, 3), points(3, 1), points(4, 6)]
    found = validate(nets, gan(measure=measure, digest=stage.digest), batches, 7, 3, setting())
    whole = points(0, 10)
    with torch.no_grad():
        made = nets["maker"](whole.x).double()
    wanted = (((made - whole.y) ** 2).mean(1) * whole.count).sum().item() / whole.count.sum().item()
    assert found == pytest.approx({"loss": wanted, "double": 2 * wanted, "digested": made.sum().item()}, rel=1e-5)
    assert nets["maker"].training


def test_validation_without_a_target_is_no_record(tmp_path: Path) -> None:
    stage = gan(measure=lambda nets, batch, context: Loss(torch.tensor(0.0), torch.tensor(0.0), {"error": torch.tensor(0.0)}))
    state = placed(stage)
    fit(tmp_path, stage, state, steps=2, **QUIET).run()
    assert state.best is None
    assert [line["error"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "valid"] == [None]


def test_averages_and_raw_weights_are_both_measured(tmp_path: Path) -> None:
    state, done = train(tmp_path, 6, **{**QUIET, "log_every_steps": 1})
    lines = {line["kind"]: line["error"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] != "train"}
    held_out = done.job.loader.validation()
    for kind, nets in (("valid", state.averaged_nets), ("valid_raw", state.nets)):
        assert lines[kind] == validate(nets, done.job.stage, held_out, 6, 5, setting())["error"]
    assert lines["valid"] != lines["valid_raw"]


def test_precision_reaches_training_validation_and_preview(tmp_path: Path) -> None:
    seen: set[tuple[str, torch.dtype]] = set()

    def loss(nets: Nets, batch: Points, context: Context) -> Loss:
        made = nets["maker"](batch.x)
        seen.add(("loss" if torch.is_grad_enabled() else "measure", made.dtype))
        return Loss((made.float() - batch.y).square().sum(), torch.tensor(float(len(batch.keys))))

    def preview(raw: Nets, averaged: Nets, batch: Points, context: Context) -> Preview:
        seen.add(("preview", averaged["maker"](batch.x).dtype))
        return Preview("txt", b"")

    stage = single(loss, measure=loss, preview=preview, averaged=("maker",))
    state = placed(stage)
    run = fit(tmp_path, stage, state, steps=2, precision="bf16")
    assert run.setting == Setting(ALONE, 2, "bf16", "stop")
    run.run()
    assert seen == {(place, torch.bfloat16) for place in ("loss", "measure", "preview")}
    assert all(p.dtype == torch.float32 for net in (state.nets["maker"], state.averages["maker"]) for p in net.parameters())


def test_previews_lie_beside_their_facts(tmp_path: Path) -> None:
    write_preview(tmp_path / "samples", 42, Preview("png", b"picture", {"prompt": "a red circle"}))
    assert (tmp_path / "samples" / "step-000042.png").read_bytes() == b"picture"
    assert json.loads((tmp_path / "samples" / "step-000042.json").read_text()) == {"step": 42, "prompt": "a red circle"}


def test_a_preview_of_several_files_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    write_preview(folder, 42, Preview("gif", b"moving", {"fps": 8}, beside={"png": b"frames"}))
    assert {path.name for path in folder.iterdir()} == {"step-000042.gif", "step-000042.png", "step-000042.json"}
    assert (folder / "step-000042.png").read_bytes() == b"frames"
    with pytest.raises(OSError, match="no/such"):
        write_preview(folder, 43, Preview("gif", b"moving", beside={"png": b"frames", "no/such": b""}))
    assert not list(folder.glob("step-000043*"))


def test_shorten() -> None:
    assert shorten([]) == "none"
    assert shorten(list("abc")) == "a, b, c"
    assert shorten(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"
