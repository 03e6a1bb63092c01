"""`tessera doctor --resume-test`: that it finds what differs, and (slowly) that it finds nothing here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tessera.cli import main
from tessera.doctor import resume_test
from tessera.doctor.resume_test import Failed, Proof, Trial, compare, prove_resume, read_lines


@pytest.fixture
def stages(tmp_path: Path) -> tuple[Path, Path]:
    """Two stage folders that are equal but for times."""
    one = tmp_path / "one"
    for step in (2, 4):
        folder = one / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
    (one / "checkpoints" / "latest").write_text("step-000004\n")
    (one / "checkpoints" / "best").write_text("step-000002\n")
    (one / "samples").mkdir()
    (one / "samples" / "step-000004.png").write_bytes(b"picture")
    shutil.copytree(one, tmp_path / "other")
    for folder, time in ((one, 1.0), (tmp_path / "other", 2.0)):
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5, "time/step_ms": time}) + "\n")
    return one, tmp_path / "other"


def test_equal_runs_are_equal(stages: tuple[Path, Path]) -> None:
    found = dict(compare(*stages))
    assert list(found) == [
        "checkpoint step-000004 (latest): 1 files, 7 bytes",
        "checkpoint step-000002 (best): 1 files, 7 bytes",
        "previews: 1 files, 7 bytes",
        "metrics.jsonl: 1 lines, without times and memory",
    ]
    assert not any(found.values())


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("checkpoints/step-000004/model.safetensors", "weightt", "model.safetensors differs"),
        ("checkpoints/step-000002/more", "", "other files"),
        ("checkpoints/best", "step-000004", "best names step-000004, unbroken step-000002"),
        ("samples/step-000004.png", "other", "previews: step-000004.png differs"),
        ("metrics.jsonl", '{"step": 1, "loss": 0.25}\n', "'loss': 0.25"),
        ("metrics.jsonl", "", "0 lines, unbroken 1"),
    ],
)
def test_a_difference_is_found(stages: tuple[Path, Path], file: str, content: str, said: str) -> None:
    (stages[0] / file).write_text(content)
    (wrong,) = [line for _, lines in compare(*stages) for line in lines]
    assert said in wrong


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"step": 1}\n{"st')
    assert read_lines(tmp_path / "m") == [{"step": 1}]
    assert read_lines(tmp_path / "nowhere") == []


def test_nothing_compared_is_no_proof() -> None:
    assert not Proof("CPU").exact
    assert Proof("CPU", compared=["x"]).exact
    assert not Proof("CPU", compared=["x"], differences=["y"]).exact


def test_training_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_test, "SETS", ("tokenizer.stps=3",))
    proof = prove_resume(lambda line: None)
    assert not proof.exact
    (wrong,) = proof.differences
    assert wrong.startswith("`tessera train muse` ended with code 2:\ntessera: tokenizer.stps (--set): unknown key")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_verdict_is_the_exit_code(
    exact: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stand_in(say: object) -> Proof:
        return Proof("CPU, fp32", ["killed"], ["checkpoint"], [] if exact else ["model.safetensors differs"], 3.0)

    monkeypatch.setattr(resume_test, "prove_resume", stand_in)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--resume-test", *(["--json"] if as_json else [])])
    assert ended.value.code == (0 if exact else 1)
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["exact"] is exact
    else:
        assert ("exact: the resumed run equals the unbroken one, bit for bit (3 s)" in out) is exact
        assert ("DIFFERS: model.safetensors differs" in out) is not exact
        assert out.splitlines()[-1].startswith("next: tessera ")


def test_a_run_that_ends_too_early_is_told(tmp_path: Path) -> None:
    class Quick(Trial):
        def train(self, run: str) -> list[str]:
            return ["--help"]

    with pytest.raises(Failed, match="the run ended with code 0 before it was killed"):
        Quick(tmp_path, ()).kill_at_random()


def test_only_its_own_processes_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_test, "WAIT_S", 0.01)

    def nothing(arguments: Sequence[str] = ()) -> str:
        return ""

    trial = Trial(tmp_path, ())
    monkeypatch.setattr(trial, "last_words", nothing)
    with pytest.raises(Failed, match="took longer than"):
        trial.finish(["--help"])


@pytest.mark.slow
def test_resume_is_exact_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--resume-test"])
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    assert "bit for bit" in out
