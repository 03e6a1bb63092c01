"""Runs of all stages that train in seconds, made once for all tests that ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera import pipeline
from tessera.data.synth.shapes import write_shapes
from tests.processes import made_once, workshop

__all__ = ["generated", "pictures", "workshop"]

SETS = {
    "engine.device": "cpu",
    "engine.log_every_steps": "1",
    "engine.validate_every_steps": "3",
    "engine.preview_every_steps": "3",
    "engine.save_every_steps": "3",
    "data.resolution": "16",
    "data.validation_fraction": "0.2",
    "data.flip": "true",
    "data.views": "2",
    "text": "{kind: bytes, length: 24, width: 16, depth: 1, heads: 2}",
    "tokenizer.batch_size": "4",
    "tokenizer.model": "{widths: [8, 8], blocks: [1, 1]}",
    "tokenizer.critic": "null",
    "tokenizer.optim": "{lr: 1.0e-2, warmup_steps: 0}",
    "tokenizer.ema_decay": "0.5",
    "tokenizer.steps": "3",
    "base.batch_size": "4",
    "base.model": "{width: 16, depth: 1, heads: 2}",
    "base.optim": "{lr: 3.0e-2, warmup_steps: 0}",  # or text would hardly have come to matter
    "base.ema_decay": "0.5",
    "base.steps": "3",
    "sample.steps": "3",
    "sample.chunk": "4",
}
SUPERRES = "{resolution: 32, batch_size: 4, steps: 3, model: {width: 16, depth: 1, heads: 2}}"


def settings(**changes: Any) -> list[str]:
    """`KEY=VALUE` of a small run; double underscores stand for dots, and a section replaces its parts."""
    own = {name.replace("__", "."): str(value) for name, value in changes.items()}
    kept = {name: value for name, value in SETS.items() if not name.startswith(tuple(f"{section}." for section in own))}
    return [f"{name}={value}" for name, value in (kept | own).items()]


def small_config(data: Path, **changes: Any) -> Any:
    """A small run's."""
    return pipeline.resolve("muse", preset="tiny", data=str(data), sets=settings(**changes))


@pytest.fixture(scope="session")
def pictures(workshop: Path) -> Path:
    """Thirty small pictures with captions."""
    path = workshop / "pictures"
    return made_once(path, lambda: write_shapes(path, 30, 0, image_size=32))


@pytest.fixture(scope="session")
def generated(workshop: Path, pictures: Path) -> Path:
    """A run of tokenizer and base; copy it before you change it."""
    path = workshop / "generated"
    return made_once(path, lambda: pipeline.train(small_config(pictures), run=path))
