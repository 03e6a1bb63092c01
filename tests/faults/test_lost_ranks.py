"""One rank dies, stands still or runs out of memory: the others end too, with one message, and torchrun's restarts go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.engine.checkpoint import newest_valid
from tests.processes import check, checkpoints, differences, start, start_ranks, train_arguments

HARM = Path(__file__).parent / "harm_rank.py"
Reference = Callable[[int, int], Path]


def test_out_of_memory_on_one_rank_ends_all(shapes: Path, tmp_path: Path) -> None:
    arguments = train_arguments(shapes, tmp_path / "run", engine__micro_batch_size=4)
    with start_ranks(["1", "11", "memory", *arguments], tmp_path, 2, HARM) as (other, harmed):
        ended = check(harmed.wait(60), 4)
        left = check(other.wait(30), 1)
    assert (
        "tessera: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB). The last checkpoint is intact." in ended.output
    )
    message = left.output.splitlines()[-1]
    assert message.startswith("tessera: rank 0 lost another rank, which ended first: its own last lines say why")
    assert f"tessera resume {tmp_path / 'run'}" in message
    assert not [ended for ended in (ended, left) if "Traceback" in ended.output]
    home = tmp_path / "run" / "tokenizer" / "checkpoints"
    assert newest_valid(home) == (home / "step-000009", [])


@pytest.mark.slow
def test_a_rank_that_stands_still_does_not_hold_the_others_for_ever(shapes: Path, tmp_path: Path) -> None:
    arguments = train_arguments(shapes, tmp_path / "run", engine__timeout_s=10)
    with start_ranks(["1", "5", "stop", *arguments], tmp_path, 2, HARM) as (waiting, stopped):
        waiting.until_step(4)
        since = time.monotonic()
        ended = check(waiting.wait(30), 1)
        assert time.monotonic() - since > 8
        stopped.send(signal.SIGCONT)
        check(stopped.wait(30), 1)
    message = ended.output.splitlines()[-1]
    assert message.startswith("tessera: rank 0 waited 10 s for another rank, which stands still or never started.")
    assert "Look at the last lines of every rank" in message
    assert "raise engine.timeout_s" in message
    assert f"tessera resume {tmp_path / 'run'}" in message
    assert "Traceback" not in ended.output + stopped.output
    assert "rank 1 lost another rank" in stopped.output
    assert checkpoints(tmp_path / "run")[-1] == "step-000003"


@pytest.mark.slow
def test_a_rank_that_never_starts_is_told(shapes: Path, tmp_path: Path) -> None:
    arguments = train_arguments(shapes, tmp_path / "run", engine__timeout_s=10)
    with start(arguments, tmp_path, WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29711") as alone:
        ended = check(alone.wait(60), 1)
    assert "rank 0 waited 10 s for another rank, which stands still or never started" in ended.output.splitlines()[-1]


@pytest.mark.parametrize("rank", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_torchrun_restarts_a_dead_rank_and_the_run_is_exact(
    rank: str, shapes: Path, reference: Reference, tmp_path: Path
) -> None:
    arguments = train_arguments(shapes, tmp_path / "run", engine__micro_batch_size=4)
    with start([rank, "11", "die", *arguments], tmp_path, ranks=2, script=HARM, restarts=1) as running:
        ended = check(running.wait(90))
    assert f"resumed from {tmp_path / 'run' / 'tokenizer' / 'checkpoints' / 'step-000009'} at step 9\n" in ended.output
    assert differences(tmp_path / "run", reference(1, 2)) == []
