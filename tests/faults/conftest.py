"""The unbroken runs that broken ones are compared with; made once, whatever number of test processes asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import check, made_once, run, shapes, train_arguments, workshop

__all__ = ["shapes", "workshop"]


@pytest.fixture(scope="session")
def reference(workshop: Path, shapes: Path) -> Callable[[int, int], Path]:
    """The unbroken run with so many micro-batches and ranks; the number of workers changes no bit, so it has none."""

    def find(accumulation: int, ranks: int) -> Path:
        path = workshop / f"unbroken-{accumulation}-{ranks}"
        arguments = train_arguments(shapes, path, engine__micro_batch_size=8 // ranks // accumulation)
        return made_once(path, lambda: check(run(arguments, workshop, ranks=ranks)))

    return find
