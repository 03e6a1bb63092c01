"""Trackers: TensorBoard as it is, W&B and trackio by stand-ins that record, and by the real ones where they are installed."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sqlite3
import sys
import types
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.cli import main
from tessera.config import UserError
from tessera.data.synth.shapes import write_shapes
from tessera.engine import trackers
from tessera.engine.track import Journal, Metrics

Row = tuple[int, dict[str, float]]


class Fake:
    """A module with init, which records every run that was opened and what was logged to it."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        self.finished = 0
        self.fails = False

    def init(self, **options: Any) -> Fake:
        self.opened.append(options)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.fails:
            raise ConnectionError("the other side has left")
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Fake]:
    """Puts a stand-in for a package into place."""

    def place(name: str) -> Fake:
        recorder, module = Fake(), types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="stand-in")
        module.init, module.Settings = recorder.init, dict  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        return recorder

    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return place


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    path = tmp_path / "muse-001" / "tokenizer"
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_number_arrives(fake: Any, stage: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = fake(name)
    metrics = Metrics(stage, (name, name), 0, config={"seed": 3})
    metrics.write(1, "train", {"loss": 0.5, "bad": float("nan")})
    metrics.write(1, "valid", {"psnr": 20.0})
    metrics.close()
    assert recorder.rows == [(1, {"train/loss": 0.5}), (1, {"valid/psnr": 20.0})]
    assert recorder.finished == 1
    (options,) = recorder.opened  # named twice, opened once
    assert (options["project"], options["config"], options["resume"]) == ("tessera", {"seed": 3}, "allow")
    assert options["name"].startswith("muse-001-tokenizer")
    assert capsys.readouterr().out == ""


def test_wandb_stays_offline_unless_told(fake: Any, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = fake("wandb")
    Metrics(stage, ("wandb",), 0).close()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    Metrics(stage, ("wandb",), 0).close()
    assert [options["mode"] for options in recorder.opened] == ["offline", "online"]
    assert [options["project"] for options in recorder.opened] == ["tessera", "mine"]
    assert {options["dir"] for options in recorder.opened} == {str(stage)}
    assert os.environ["WANDB_MODE"] == "online"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_writes_no_step_twice(fake: Any, stage: Path, name: str) -> None:
    recorder = fake(name)

    def steps(first: int, last: int) -> None:
        """A start whose checkpoint is of step `first`, killed after `last`."""
        metrics = Metrics(stage, (name,), first)
        for step in range(first + 1, last + 1):
            metrics.write(step, "train", {"loss": 1 / step})
            if step % 2 == 0:
                metrics.write(step, "valid", {"psnr": float(step)})

    steps(0, 5)
    steps(2, 4)  # killed before it was where the first one had been
    steps(2, 7)
    assert [step for step, numbers in recorder.rows if "train/loss" in numbers] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, numbers in recorder.rows if "valid/psnr" in numbers] == [2, 4, 6]
    assert len({options["name"] + options.get("id", "") for options in recorder.opened}) == 1  # one run of the tracker's
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6, 7]


def test_two_runs_of_one_name_are_two(fake: Any, tmp_path: Path) -> None:
    recorder = fake("trackio")
    for place in ("a", "b"):
        (tmp_path / place / "muse-001" / "tokenizer").mkdir(parents=True)
        Metrics(tmp_path / place / "muse-001" / "tokenizer", ("trackio",), 0).close()
    assert len({options["name"] for options in recorder.opened}) == 2


def test_several_at_once(fake: Any, stage: Path) -> None:
    recorders = {name: fake(name) for name in ("wandb", "trackio")}
    for first in (0, 1):
        metrics = Metrics(stage, ("trackio", "wandb"), first)
        metrics.write(first + 1, "train", {"loss": 0.5})
        metrics.close()
    assert all([step for step, _ in recorder.rows] == [1, 2] for recorder in recorders.values())


@pytest.mark.parametrize("content", ["", "[]", "{", '{"id": 3}', '{"id": "x", "wandb": 3}', "[" * 100_000, "\x80\x04."])
def test_a_damaged_memory_starts_anew(fake: Any, stage: Path, content: str) -> None:
    recorder = fake("wandb")
    (stage / "trackers.json").write_bytes(content.encode("latin-1"))
    metrics = Metrics(stage, ("wandb",), 0)
    metrics.write(1, "train", {"loss": 0.5})
    assert [step for step, _ in recorder.rows] == [1]


def test_a_failure_is_said_once_and_stops_nothing(fake: Any, stage: Path) -> None:
    recorder, stream = fake("trackio"), StringIO()
    metrics = Metrics(stage, ("trackio",), 0, Journal(None, stream=stream))
    metrics.write(1, "train", {"loss": 0.5})
    recorder.fails = True
    for step in (2, 3):
        metrics.write(step, "train", {"loss": 0.5})
    recorder.fails = False
    metrics.write(4, "train", {"loss": 0.5})
    metrics.close()
    assert stream.getvalue() == (
        "tracker trackio failed at step 2 (ConnectionError: the other side has left); metrics.jsonl has every number\n"
    )
    assert [step for step, _ in recorder.rows] == [1, 4]
    assert len((stage / "metrics.jsonl").read_text().splitlines()) == 4


def test_tensorboard_that_fails_stops_nothing(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", fail)
    stream = StringIO()
    metrics = Metrics(stage, ("tensorboard",), 0, Journal(None, stream=stream))
    metrics.write(1, "train", {"loss": 0.5})
    metrics.write(2, "train", {"loss": 0.5})
    metrics.close()
    assert stream.getvalue().count("\n") == 1
    assert "No space left" in stream.getvalue()


def test_one_that_cannot_start_is_named(fake: Any, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("wandb")

    def fail(**options: Any) -> None:
        raise PermissionError("no write\npermission")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(UserError, match="wandb, which cannot start: no write permission; leave it out"):
        Metrics(stage, ("wandb",), 0)


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "track"), ("wandb", "wandb"), ("trackio", "trackio")])
def test_a_missing_package_is_named_before_there_is_a_run(
    name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shapes(tmp_path / "photos", 12, 0, image_size=32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "muse", "--data", "photos", "--set", f"engine.trackers=[{name}]"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"engine.trackers names {name}, which is not installed; pip install 'tessera-gen[{extra}]'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(trackers.EXTRAS, "trackio_folder", "x")
    with pytest.raises(UserError, match="is not installed"):
        trackers.refuse_missing(("trackio_folder",))


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine.trackers.*'wandbb'.*did you mean 'wandb'"):
        tessera.train("muse", sets=["engine.trackers=[wandbb]"])


def train(tmp_path: Path, name: str) -> Path:
    """Three steps with a tracker, then two more."""
    write_shapes(tmp_path / "photos", 12, 0, image_size=32)
    sets = [
        "engine.device=cpu", "engine.log_every_steps=1", "data.resolution=16", "tokenizer.batch_size=4",
        "tokenizer.model={widths: [8], blocks: [0]}", "tokenizer.critic=null", f"engine.trackers=[{name}]",
    ]  # fmt: skip
    run = tessera.train(
        "muse", preset="tiny", data=tmp_path / "photos", steps=3, sets=sets, run=tmp_path / "run", stage="tokenizer"
    )
    return tessera.resume(run, sets=["tokenizer.steps=5"], stage="tokenizer")


def test_training_fills_a_tracker(fake: Any, tmp_path: Path) -> None:
    recorder = fake("wandb")
    train(tmp_path, "wandb")
    assert [step for step, numbers in recorder.rows if "train/tokenizer/loss" in numbers] == [1, 2, 3, 4, 5]
    assert recorder.opened[0]["config"]["tokenizer"]["steps"] == 3
    assert recorder.finished == 2


def test_real_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = train(tmp_path, "wandb")
    files = list((run / "tokenizer" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1


def test_real_trackio_writes_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    train(tmp_path, "trackio")
    (database,) = Path(os.environ["TRACKIO_DIR"]).glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    assert [step for step, metrics in rows if b"train/tokenizer/loss" in metrics] == [1, 2, 3, 4, 5]
