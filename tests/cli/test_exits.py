"""Exit codes, and the program as a process: quick help, closed pipes, no traceback."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera import pipeline
from tessera.cli import main
from tessera.cli.exits import guarded
from tessera.config import UserError
from tessera.engine.checkpoint import NonFiniteWeights
from tessera.engine.loop import NonFinite, Stopped
from tessera.engine.lost import RankLost

Run = Any  # the fixture `tessera`: arguments -> code, out, err


# ---- ends that have a code


def noted(error: Exception, *notes: str) -> Exception:
    for note in notes:
        error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"), 4, "out of memory (CUDA out of memory."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 4, "engine.micro_batch_size"),
        (MemoryError(), 4, "out of memory (MemoryError). The last checkpoint is intact"),
        (NonFinite("step 3: loss nan"), 3, "step 3: loss nan. Look at those samples, lower the learning rate"),
        (NonFiniteWeights("critic/out.weight holds"), 3, "tessera resume RUN"),
        (Stopped(signal.SIGTERM, 7), 143, "stopped by SIGTERM after step 7; state saved; go on with `tessera resume RUN`"),
        (Stopped(signal.SIGINT, None), 130, "stopped by SIGINT; what is written stays; go on with `tessera resume RUN`"),
        (RankLost("rank 0 lost another rank"), 1, "rank 0 lost another rank; go on with `tessera resume RUN`"),
        (noted(RankLost("rank 0 lost another rank"), "runs/a b"), 1, "; go on with `tessera resume 'runs/a b'`"),
        (noted(Stopped(signal.SIGINT, None), "a", "tessera data prepare"), 130, "stays; go on with `tessera data prepare a`"),
        (
            OSError(28, "No space left on device", "r/env.json"),
            2,
            "r/env.json cannot be used: No space left on device.",
        ),
        (UserError("found 3, expected 4"), 2, "tessera: found 3, expected 4"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_expected_end_is_a_code_and_a_message(
    tessera: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "train", fail)
    ended = tessera("train", "muse", "--data", "x")
    assert ended.code == code
    assert said in ended.err
    assert ended.err.count("\n") <= 1


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(pipeline, "train", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["train", "muse", "--data", "x"])


def test_codes_by_themselves() -> None:
    def leave() -> None:
        raise SystemExit(7)

    assert guarded(lambda: None) == 0
    assert guarded(lambda: 3) == 3
    with pytest.raises(SystemExit):
        guarded(leave)


# ---- as a process


def process(*arguments: object, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-m", "tessera", *map(str, arguments)], cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"},
        text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}, timeout=120, check=False,
    )  # fmt: skip


def test_help_is_quick(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = process("--help", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0
    for command in ("demo", "train", "resume", "export", "doctor", "list", "bench", "data"):
        assert command in ended.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_help_and_wrong_arguments_do_not_load_torch(tmp_path: Path) -> None:
    code = """
import sys
from tessera.cli import main
for arguments in (["--help"], ["train", "--help"], ["train", "--oops"], ["data", "check", "nowhere"]):
    try:
        main(arguments)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, arguments
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_module_is_the_program(tmp_path: Path) -> None:
    ended = process("train", "mse", "--data", "x", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == (
        "tessera: no recipe and no file is called 'mse'; did you mean 'muse'?; recipes: muse, dalle2, phenaki, nuwa, meshgpt; "
        "or name a .yaml file\n"
    )
    assert process("--oops", cwd=tmp_path).returncode == 2


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = process("train", "muse", "--print-config", cwd=tmp_path, stdout=writer)
    finally:
        os.close(writer)
    assert ended.returncode == 0
    assert ended.stderr == ""


def test_training_goes_on_before_a_full_pipe(tmp_path: Path, shapes: Path, tiny: list[str]) -> None:
    """The reader of our messages sleeps: `2>&1 | less`, or Ctrl-S on a terminal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    try:
        ended = process("train", "muse", "--data", shapes, "--run", "r", "--steps", 2, *tiny, cwd=tmp_path, stderr=writer)
    finally:
        os.close(writer)
        os.close(reader)
    assert ended.returncode == 0
    assert "tessera resume r" in ended.stdout
    assert (tmp_path / "r" / "tokenizer" / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert "validation" in (tmp_path / "r" / "log.txt").read_text()


def test_training_goes_on_without_a_reader(tmp_path: Path, shapes: Path, tiny: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = process(
            "train", "muse", "--data", shapes, "--run", "r", "--steps", 2, *tiny, cwd=tmp_path, stdout=writer, stderr=writer
        )
    finally:
        os.close(writer)
    assert ended.returncode == 0
    assert (tmp_path / "r" / "tokenizer" / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert "validation" in (tmp_path / "r" / "log.txt").read_text()
