"""The unbroken runs that broken ones are compared with; made once, whatever number of test processes asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.cli import main
from tests.processes import check, made_once, run, shapes, train_arguments, workshop

__all__ = ["shapes", "workshop"]


@pytest.fixture(scope="session")
def command() -> Callable[..., int]:
    """Runs a command in this process and returns its code."""

    def run_command(*arguments: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run_command


@pytest.fixture(scope="session")
def plain(shapes: Path) -> Callable[[Path], list[str]]:
    """Arguments that train for four steps without a critic, in a second; saved at 2 and 4."""
    sets = {"tokenizer__critic": "null", "tokenizer__steps": 4, "engine__save_every_steps": 2}
    return lambda path: train_arguments(shapes, path, **sets, engine__preview_every_steps=2, engine__validate_every_steps=4)


@pytest.fixture(scope="session")
def unbroken(workshop: Path, plain: Callable[[Path], list[str]], command: Callable[..., int]) -> Path:
    """What `plain` makes."""

    def make() -> None:
        assert command(*plain(workshop / "plain")) == 0

    return made_once(workshop / "plain", make)


@pytest.fixture(scope="session")
def reference(workshop: Path, shapes: Path) -> Callable[[int, int], Path]:
    """The unbroken run with so many micro-batches and ranks; the number of workers changes no bit, so it has none."""

    def find(accumulation: int, ranks: int) -> Path:
        path = workshop / f"unbroken-{accumulation}-{ranks}"
        arguments = train_arguments(shapes, path, engine__micro_batch_size=8 // ranks // accumulation)
        return made_once(path, lambda: check(run(arguments, workshop, ranks=ranks)))

    return find
