"""Ends that are nobody's wish: each has its code and one message, and leaves the last checkpoint as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.cli import main
from tests.processes import check, checkpoints, differences, run, start, start_ranks, train_arguments

HERE = Path(__file__).parent
Reference = Callable[[int, int], Path]
Refused = Callable[..., str]


@pytest.fixture
def finished(reference: Reference, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(reference(1, 1), tmp_path / "run"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must end with code 2 and returns its one message."""

    def run_refused(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert ended.value.code == 2, captured.err
        assert captured.err.startswith("tessera: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run_refused


# --- numbers


@pytest.mark.parametrize("value", ["nan", pytest.param("1e30", marks=pytest.mark.slow)])
def test_a_bad_sample_on_one_rank_stops_all(value: str, shapes: Path, reference: Reference, tmp_path: Path) -> None:
    arguments = train_arguments(shapes, tmp_path / "run", engine__micro_batch_size=4)
    with start_ranks(["1", "11", value, *arguments], tmp_path, 2, HERE / "poison_sample.py") as ranks:
        ends = [check(rank.wait(), 3) for rank in ranks]
    key = ends[1].output.partition("poisoned ")[2].partition(".")[0]
    for ended in ends:
        assert "Traceback" not in ended.output
        message = ended.output.splitlines()[-1]
        assert message.startswith("tessera: step 11, turn 'tokenizer': loss ")
        assert f"losses of the samples {key}, " in message
        assert "parameters: tokenizer/encoder." in message
        assert "engine.nonfinite=skip" in message
        assert "tessera resume" in message
    assert checkpoints(tmp_path / "run")[-1] == "step-000009"
    check(run(["resume", str(tmp_path / "run")], tmp_path, ranks=2))
    assert differences(tmp_path / "run", reference(1, 2)) == []


# --- folders


def test_one_writer_a_run(shapes: Path, tmp_path: Path, refused: Refused) -> None:
    arguments = train_arguments(shapes, tmp_path / "run")
    with start(["preview", "600", *arguments], tmp_path, script=HERE / "stall.py") as first:
        first.until(lambda: "stalling" in first.output)
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        message = refused("resume", tmp_path / "run")
        assert f"{tmp_path / 'run'} is being written by another process" in message
        assert f"{tmp_path / 'run'} exists" in refused(*arguments)
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
        assert first.process.poll() is None


def test_a_new_run_needs_a_new_folder(shapes: Path, finished: Path, refused: Refused) -> None:
    before = sorted(finished.rglob("*"))
    message = refused(*train_arguments(shapes, finished))
    assert f"{finished} exists" in message
    assert f"tessera resume {finished}" in message
    assert sorted(finished.rglob("*")) == before


def test_a_new_run_needs_a_new_folder_on_all_ranks(shapes: Path, finished: Path, tmp_path: Path) -> None:
    with start_ranks(train_arguments(shapes, finished), tmp_path, 2) as ranks:
        for ended in [check(rank.wait(), 2) for rank in ranks]:
            assert "exists; a new run needs a new folder" in ended.output
            assert "Traceback" not in ended.output


def test_resume_wants_a_run(tmp_path: Path, refused: Refused) -> None:
    assert f"{tmp_path / 'nowhere'} is no run folder" in refused("resume", tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    assert "is no run folder: it has no config.yaml" in refused("resume", tmp_path / "other")


def test_a_start_that_died_before_its_config_bars_no_way(shapes: Path, tmp_path: Path, refused: Refused) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    for name in (".lock", "env.json", ".config.tmp", "log.txt"):
        (run_folder / name).touch()
        assert "training never started in it" in (message := refused("resume", run_folder))
        assert f"--run {run_folder}" in message
    with pytest.raises(SystemExit) as ended:
        main(train_arguments(shapes, run_folder, tokenizer__steps=1))
    assert ended.value.code == 0
    assert checkpoints(run_folder) == ["step-000001"]


# --- changes


@pytest.mark.parametrize("change", ["tokenizer.batch_size=16", "seed=1"])
def test_resume_refuses_another_order_of_samples(change: str, finished: Path, refused: Refused) -> None:
    before = (finished / "config.yaml").read_bytes()
    message = refused("resume", finished, "--set", change, "tokenizer.steps=30")
    assert change in message
    assert "start a new run" in message
    assert (finished / "config.yaml").read_bytes() == before


def test_resume_says_what_changed(finished: Path) -> None:
    output = check(
        run(["resume", str(finished), "--set", "tokenizer.optim.lr=5e-4", "tokenizer.steps=26"], finished.parent)
    ).output
    assert "changed: tokenizer.optim.lr: 0.002 -> 0.0005\n" in output
    assert "changed: tokenizer.steps: 24 -> 26\n" in output
    assert checkpoints(finished)[-1] == "step-000026"
    assert "steps: 26" in (finished / "config.yaml").read_text()
    assert "steps: 24" in (finished / "config-1.yaml").read_text()


# --- files


def test_a_damaged_checkpoint_is_passed_over(finished: Path, reference: Reference) -> None:
    model = finished / "tokenizer" / "checkpoints" / "step-000024" / "model.safetensors"
    damaged = bytearray(model.read_bytes())
    damaged[-1] ^= 1
    model.write_bytes(damaged)
    output = check(run(["resume", str(finished)], finished.parent)).output
    assert "checkpoint passed over: step-000024: model.safetensors is not what was written (sha256 differs)\n" in output
    assert "at step 21\n" in output
    assert differences(finished, reference(1, 1)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_becomes_unreadable(workers: int, shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "shapes"
    shutil.copytree(shapes, data)
    arguments = train_arguments(
        data, tmp_path / "run", data__workers=workers, tokenizer__steps=5000, engine__validate_every_steps=5000
    )
    with start(arguments, tmp_path) as running:
        running.until_step(4)
        for picture in list((data / "train").glob("*.png"))[::2]:
            picture.write_bytes(b"no picture") if workers else picture.unlink()
        ended = check(running.wait(60), 2)
    message = ended.output.splitlines()[-1]
    assert message.startswith("tessera: ")
    assert "samples that could not be read and were replaced up to step" in message
    assert ".png: " in message
    assert "repair or remove it" in message
    assert "the state is saved" in message
    assert "Traceback" not in ended.output
    assert running.pids() == []


def test_pictures_that_one_rank_cannot_read_stop_all_after_the_same_step(shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "shapes"
    shutil.copytree(shapes, data)
    arguments = train_arguments(
        data, tmp_path / "run", tokenizer__steps=5000, engine__validate_every_steps=5000, data__corrupt_budget=0
    )
    with start_ranks(arguments, tmp_path, 2) as ranks:
        ranks[0].until_step(4)
        picture = next((data / "train").glob("*.png"))
        picture.unlink()
        ends = [check(rank.wait(60), 2) for rank in ranks]
    messages = [ended.output.splitlines()[-1] for ended in ends]
    assert messages[0] == messages[1], "the same step, and the file is named by both"
    assert f"Unreadable: {picture}: no such file" in messages[0]
    assert ends[0].output.count(str(picture)) == 2, "when it was replaced and at the end"
    step = int(messages[0].partition("up to step ")[2].partition(":")[0])
    assert checkpoints(tmp_path / "run")[-1] == f"step-{step:06d}"
