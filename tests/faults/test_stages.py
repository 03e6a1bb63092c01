"""Killed between two stages, while a cache is made or inside a later stage, and resumed: bit for bit the unbroken run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import check, differences, made_once, read_metrics, run, start, train_arguments

DIE = Path(__file__).parent / "die_between.py"
Command = Callable[..., int]
SETS = {
    "tokenizer__critic": "null",
    "tokenizer__steps": 4,
    "base__steps": 12,
    "base__model": "{width: 16, depth: 1, heads: 2, dropout: 0.1}",
    "base__critic": "{kind: head, weight: 0}",
    "superres": "{resolution: 32, batch_size: 4, steps: 4, model: {width: 16, depth: 1, heads: 2}}",
    "sample": "{steps: 2, superres: {steps: 2}}",
    "engine__validate_every_steps": 4,
    "engine__preview_every_steps": 4,
}


@pytest.fixture(scope="module")
def whole(workshop: Path, shapes: Path, command: Command) -> Path:
    """The unbroken run of all stages."""
    path = workshop / "whole"

    def make() -> None:
        assert command(*train_arguments(shapes, path, None, **SETS)) == 0

    return made_once(path, make)


@pytest.mark.parametrize(
    "place",
    [
        "start base",
        "half a shard",
        "step base 8",
        "step superres 3",
        *(pytest.param(place, marks=pytest.mark.slow) for place in ("shard", "cache", "step base 1", "start superres")),
    ],
)
def test_killed_anywhere_it_ends_as_if_never(place: str, shapes: Path, whole: Path, command: Command, tmp_path: Path) -> None:
    ended = run([place, *train_arguments(shapes, tmp_path / "run", None, **SETS)], tmp_path, script=DIE)
    assert ended.code == -signal.SIGKILL, ended.output
    assert command("resume", tmp_path / "run") == 0
    assert differences(tmp_path / "run", whole) == []
    homes = [tmp_path / "run" / "cache", whole / "cache"]
    caches = [{path.relative_to(home): path.read_bytes() for path in home.rglob("*") if path.is_file()} for home in homes]
    assert caches[0] == caches[1]


def test_a_signal_in_base_saves_it(shapes: Path, whole: Path, command: Command, tmp_path: Path) -> None:
    """And what was trained before is not trained again."""
    arguments = train_arguments(shapes, tmp_path / "run", None, **{**SETS, "base__steps": 5000})
    with start(arguments, tmp_path) as running:
        running.until_step(4, "base")
        running.send(signal.SIGTERM)
        ended = check(running.wait(60), 128 + signal.SIGTERM)
    step = int(ended.output.rpartition("after step ")[2].partition(";")[0])
    assert read_metrics(tmp_path / "run", "base")[-1]["step"] == step
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_killed_on_two_ranks_in_base(shapes: Path, tmp_path: Path) -> None:
    for name, place in (("broken", "step base 8"), ("unbroken", "never")):
        arguments = train_arguments(shapes, tmp_path / name, None, **SETS)
        ended = run([place, *arguments], tmp_path, ranks=2, script=DIE)
        assert (ended.code == 0) == (name == "unbroken"), ended.output
    check(run(["resume", str(tmp_path / "broken")], tmp_path, ranks=2))
    assert differences(tmp_path / "broken", tmp_path / "unbroken") == []
