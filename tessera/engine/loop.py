"""The loop: steps, and between steps the chores that are due: log, validate, preview, save.

On a GPU the loop never waits for the step it just launched: reports are read one step late, except before a chore.
Once a number is not finite the device refuses all further updates, so reading late loses nothing.
"""

from __future__ import annotations

import math
import shlex
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.batches import Batch
from tessera.config import EngineConfig, UserError
from tessera.contracts import Loader, Preview, Stage
from tessera.engine.checkpoint import list_checkpoints, point, prune, save_checkpoint, step_name
from tessera.engine.clock import Clock
from tessera.engine.dist import World
from tessera.engine.retention import needed_elsewhere
from tessera.engine.run import unwritable
from tessera.engine.signals import StopFlag
from tessera.engine.state import TrainState
from tessera.engine.step import Setting, StepReport, train_step
from tessera.engine.survey import take_survey
from tessera.engine.track import Journal, Metrics
from tessera.engine.validate import draw_preview, validate
from tessera.files import write_json

MOST_NAMED = 20  # unreadable files on the terminal; log.txt has all


class NonFinite(Exception):
    """A loss or gradient was not finite; the weights are those before that update."""


class Stopped(Exception):
    """A signal asked us to stop; the state is saved. Without a step nothing was trained, and what is written stays."""

    def __init__(self, number: int, step: int | None) -> None:
        done = "; what is written stays" if step is None else f" after step {step}; state saved"
        super().__init__(f"stopped by {signal.Signals(number).name}{done}")
        self.number = number


@dataclass(frozen=True, slots=True)
class Job:
    """One stage to train in one folder."""

    name: str
    stage: Stage
    loader: Loader
    steps: int
    batch_size: int
    folder: Path
    config: EngineConfig
    facts: Mapping[str, Any]  # goes into every manifest
    pinned: frozenset[str] = frozenset()  # checkpoints that retention spares: the one resumed from
    num_samples: int = 0  # in the training set
    corrupt_budget: float = 0.0  # share of the samples that may be unreadable


class Fit:
    """Training of one stage, from the state's step to the last."""

    def __init__(self, job: Job, state: TrainState, world: World, journal: Journal, stop: StopFlag) -> None:
        self.job, self.state, self.world, self.journal, self.stop = job, state, world, journal, stop
        self.setting = Setting.of(world, job.steps, job.config)
        self.metrics = world.together(self.open_metrics)
        self.clock = Clock(world.device, job.batch_size, state.step, job.steps)
        self.unread: deque[tuple[StepReport, tuple[str, ...]]] = deque()  # with the faults of this rank's samples
        self.validation: Sequence[Batch] | None = None
        self.signal: int | None = None  # that some rank received, known to all
        self.named: dict[str, None] = {}  # faults of samples that the journal has told
        self.spoilt = False  # more samples were unreadable than is allowed, known to all

    def open_metrics(self) -> Metrics | None:
        """Only the main rank writes; a tracker that cannot start stops all."""
        if not self.world.main:
            return None
        job = self.job
        return Metrics(job.folder, job.config.trackers, self.state.step, self.journal, job.facts.get("config"))

    def run(self) -> None:
        """Trains to the end. Raises `Stopped` on a signal, `NonFinite` where numbers break, `UserError` on too many bad files."""
        if self.state.step == 0 and self.job.stage.survey is not None:
            take_survey(self.job.stage, self.job.stage.survey, self.state, self.job.loader, self.job.batch_size, self.setting)
        batches = self.job.loader.batches(self.state.step)
        try:
            while self.state.step < self.job.steps:
                self.advance(batches)
                if self.spoilt:
                    self.save_last()
                    raise self.over_budget("the state is saved")
                if self.signal is not None:
                    self.save_last()
                    raise Stopped(self.signal, self.state.step)
        finally:
            batches.close()  # ends the workers now
            if self.metrics is not None:
                self.metrics.close()

    def advance(self, batches: Iterator[Sequence[Batch]]) -> None:
        """One step and the chores after it."""
        with self.clock.waiting():
            micro_batches = [batch.to(self.world.device) for batch in next(batches)]
        faults = tuple(fault for batch in micro_batches for fault in batch.faults)
        asked = (int(self.stop.signal == signal.SIGINT), int(self.stop.signal == signal.SIGTERM), len(faults))
        report = train_step(self.state, self.job.stage, micro_batches, self.setting, asked)
        self.unread.append((report, faults))
        due = self.due()
        self.read_reports(leave=0 if due or self.world.device.type == "cpu" else 1)
        self.run_chores(due, report)
        if due - {"log"}:  # they take a while: a signal that came meanwhile need not wait for another step
            received = [number for number in self.world.gather(self.stop.signal) if number is not None]
            self.signal = max(received, default=self.signal)  # SIGTERM is the larger

    def read_reports(self, leave: int) -> None:
        """Reads all but the newest `leave` reports: signals, breaks and unreadable samples of all ranks."""
        while len(self.unread) > leave:
            report, faults = self.unread.popleft()
            interrupts, terminations, replaced, broken = report.flags.read()
            if replaced:
                self.count_replaced(report.step, faults, int(replaced))
            if broken and self.spoilt:  # perhaps no sample was left at all
                saved = list_checkpoints(self.job.folder / "checkpoints")
                raise self.over_budget("the last checkpoint is intact" if saved else "nothing was saved yet")
            if broken:
                self.refuse(report)
            if interrupts or terminations:
                self.signal = signal.SIGTERM if terminations else signal.SIGINT

    def count_replaced(self, step: int, faults: tuple[str, ...], replaced: int) -> None:
        """Names the files and keeps the budget. Every rank knows the sum, so every rank gets here at the same step."""
        self.state.replaced += replaced
        gathered = [fault for faults_of_rank in self.world.gather(faults) for fault in faults_of_rank]
        self.name_faults(gathered, f"{self.job.name} step {step}: another sample took the place of one that cannot be read")
        seen = max(step * self.job.batch_size, self.job.num_samples)
        self.spoilt = self.spoilt or self.state.replaced > self.job.corrupt_budget * seen

    def name_faults(self, faults: Sequence[str], what: str) -> None:
        """Each file once; after the first few only in log.txt."""
        for fault in dict.fromkeys(faults):
            if fault not in self.named:
                (self.journal.say if len(self.named) < MOST_NAMED else self.journal.note)(f"{what}: {fault}")
                self.named[fault] = None

    def over_budget(self, left: str) -> UserError:
        """What to say when too many samples could not be read."""
        run = shlex.quote(str(self.job.folder.parent))
        seen = max(self.state.step * self.job.batch_size, self.job.num_samples)
        return UserError(
            f"samples that could not be read and were replaced up to step {self.state.step}: {self.state.replaced}, more than "
            f"data.corrupt_budget={self.job.corrupt_budget:g} allows of {seen}; {left}. "
            f"Unreadable: {shorten(list(self.named))}. `tessera data check` on the data folder lists every such file: "
            f"repair or remove it, or raise data.corrupt_budget; then `tessera resume {run}`"
        )

    def refuse(self, report: StepReport) -> None:
        """Says what broke; raises unless the update was to be skipped and few enough were."""
        message = describe_break(report, self.world)
        config = self.job.config
        if config.nonfinite == "skip" and self.state.skips < config.max_skips:
            self.journal.say(f"update left out ({self.state.skips} in a row, at most {config.max_skips}): {message}")
            return
        raise NonFinite(message)

    def due(self) -> set[str]:
        """The chores after the step that was just launched; after the last one, all."""
        config, step = self.job.config, self.state.step
        rhythm = {
            "log": config.log_every_steps,
            "validate": config.validate_every_steps,
            "preview": config.preview_every_steps,
            "save": config.save_every_steps,
        }
        return {chore for chore, every in rhythm.items() if step == self.job.steps or step % every == 0}

    def run_chores(self, due: set[str], report: StepReport) -> None:
        """The one hook point between steps."""
        improved = False
        if "log" in due:
            self.log(report)
        if "validate" in due:
            improved = self.validate()
        if "preview" in due:
            self.preview()
        if "save" in due or improved:
            self.save()

    def log(self, report: StepReport) -> None:
        """metrics.jsonl and the progress line. Numbers are those of this step, over the whole batch."""
        numbers: dict[str, float] = {"samples": self.state.step * self.job.batch_size, "replaced": self.state.replaced}
        for turn in report.turns:
            numbers |= turn.numbers()
        numbers |= self.job.stage.digest(report.stats)
        numbers |= self.clock.read(self.state.step)
        if self.metrics is not None:
            self.metrics.write(self.state.step, "train", numbers)
        self.journal.progress(self.clock.line(self.job.name, report, numbers))

    def validate(self) -> bool:
        """Averages and raw weights on the same batches; True if the stage's metric is a new best."""
        stage, state = self.job.stage, self.state
        if self.validation is None:
            self.validation = self.world.together(self.job.loader.validation)
            own = [fault for batch in self.validation for fault in batch.faults]
            left_out = [fault for faults in self.world.gather(own) for fault in faults]
            self.name_faults(left_out, f"{self.job.name}: validation leaves out what cannot be read")
        if stage.measure is None or not self.validation:
            return False
        with self.clock.chore():
            weights = {"valid": state.averaged_nets, "valid_raw": state.nets} if state.averages else {"valid": state.nets}
            numbers = {}
            for kind, nets in weights.items():
                whole = {**nets, **stage.frozen}
                numbers[kind] = validate(whole, stage, self.validation, state.step, state.seed, self.setting)
                if self.metrics is not None:
                    self.metrics.write(state.step, kind, numbers[kind])
        if stage.best.metric not in numbers["valid"]:
            raise ValueError(f"Stage.best names {stage.best.metric!r}; validation measures {', '.join(numbers['valid'])}")
        value = numbers["valid"][stage.best.metric]
        if state.best_metric not in (None, stage.best.metric):  # the record of another number is none
            state.best = state.best_step = None
        shown = "  ".join(f"{name} {number:.4g}" for name, number in numbers["valid"].items())
        improved = stage.best.improves(value, state.best)
        if not all(math.isfinite(number) for number in numbers["valid"].values()):
            self.journal.say(f"{self.job.name} step {state.step}: validation is not finite; look at its pictures and its data")
        before = "" if state.best_step is None else f"  (best: {stage.best.metric} {state.best:.4g} at step {state.best_step})"
        self.journal.say(f"{self.job.name} step {state.step} validation: {shown}{'  (best so far)' if improved else before}")
        if improved:
            state.best, state.best_step, state.best_metric = value, state.step, stage.best.metric
        elif state.step == self.job.steps and state.best_step is not None and value != state.best:
            self.journal.say(
                f"{self.job.name}: step {state.best_step} had the better {stage.best.metric}, and is kept as checkpoints/best; "
                f"if this is the last stage, --checkpoint best draws and judges with it"
            )
        return improved

    def preview(self) -> None:
        """Every rank computes, the main one writes."""
        stage, state = self.job.stage, self.state
        if stage.preview is None:
            return
        with self.clock.chore():
            preview = self.world.together(self.make_preview)
            if self.world.main:
                try:
                    write_preview(self.job.folder / "samples", state.step, preview)
                except OSError as error:  # a picture less is no reason to stop; a checkpoint less is
                    self.journal.say(f"{self.job.name} step {state.step}: no preview, it cannot be written: {error}")

    def make_preview(self) -> Preview:
        """Of the fixed samples; those that cannot be read are named."""
        batch = self.job.loader.preview().to(self.world.device)
        self.name_faults(batch.faults, f"{self.job.name}: the preview shows black for what cannot be read")
        return draw_preview(self.job.stage, self.state, batch, self.setting)

    def save_last(self) -> None:
        """Before leaving early; the newest step may be one that broke."""
        self.read_reports(leave=0)
        self.save()

    def save(self) -> None:
        """Publishes a checkpoint, then deletes what is no longer kept."""
        folder = self.job.folder / "checkpoints"

        def write() -> None:
            try:
                path = save_checkpoint(folder, self.state, self.job.facts, writes=self.world.main)
                if not self.world.main:
                    return
                if self.state.best_step == self.state.step:
                    point(folder / "best", path.name)
                prune(folder, self.job.config.keep_checkpoints, {*self.job.pinned, *needed_elsewhere(folder)})
            except OSError as error:
                raise unwritable(folder / step_name(self.state.step), error) from None

        with self.clock.chore():
            self.world.together(write)
        self.journal.note(f"{self.job.name} step {self.state.step} saved")


def write_preview(folder: Path, step: int, preview: Preview) -> None:
    """`step-000500.png`, what the stage puts beside it, and the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {preview.extension: preview.content, **preview.beside}
    files = {folder / f"{step_name(step)}.{extension}": content for extension, content in contents.items()}
    facts = folder / f"{step_name(step)}.json"
    try:
        for path, content in files.items():
            path.write_bytes(content)
        write_json(facts, {"step": step, **preview.facts})
    except OSError:  # half a picture is none
        for path in (*files, facts):
            path.unlink(missing_ok=True)
        raise


def describe_break(report: StepReport, world: World) -> str:
    """Step, turn, parameters and sample keys of the first turn that broke, from all ranks."""
    turn = next(turn for turn in report.turns if bool(turn.update.broken))
    loss, weight = turn.sums.numbers["loss"].item(), turn.sums.numbers["weight"].item()
    if weight == 0:
        return f"step {report.step}, turn {turn.turn.name!r}: the weight over the whole batch is 0, so there is no target"
    bad = [name for name, norm in zip(turn.update.names, turn.update.norms.tolist(), strict=True) if not abs(norm) < float("inf")]
    own = [keys for keys, total in zip(turn.keys, turn.totals.tolist(), strict=True) if not abs(total) < float("inf")]
    blamed = [key for keys in world.gather([key for micro in own for key in micro]) for key in keys]
    seen = [key for keys in world.gather([key for micro in turn.keys for key in micro]) for key in keys]
    where = f"losses of the samples {shorten(blamed)}" if blamed else f"gradients of the samples {shorten(seen)}"
    if not bad and not blamed:
        return (
            f"step {report.step}, turn {turn.turn.name!r}: loss {loss / weight:.4g}; every number is finite, but the norm of all "
            f"gradients together is not: they grew without bound, on the samples {shorten(seen)}. The update was not made"
        )
    return (
        f"step {report.step}, turn {turn.turn.name!r}: loss {loss / weight:.4g}, not finite: {where}; "
        f"gradients of {len(bad)} of {len(turn.update.names)} parameters: {shorten(bad)}. The update was not made"
    )


def shorten(names: Sequence[str], most: int = 8) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "none"
