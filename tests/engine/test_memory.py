"""Memory does not grow with the number of steps."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tessera.data.synth.shapes import write_shapes
from tessera.engine import loop
from tessera.pipeline import resolve, train


def resident() -> float:
    """MiB that this process holds now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch, stage: str = "tokenizer") -> float:
    """MiB that the resident set grew from a fifth of a stage's steps to the last."""
    write_shapes(folder / "shapes", 64, 0, image_size=32)
    seen: dict[int, float] = {}
    real = loop.train_step

    def watched(state, *rest, **options):
        if (state.step + 1) % (steps // 5) == 0:
            seen[state.step + 1] = resident()
        return real(state, *rest, **options)

    monkeypatch.setattr(loop, "train_step", watched)
    small = [
        "tokenizer.model.widths=[8,8]",
        "tokenizer.model.blocks=[1,1]",
        "tokenizer.critic.widths=[8,8]",
        "tokenizer.batch_size=4",
        "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
        "base.model={width: 16, depth: 1, heads: 2}",
        "base.batch_size=4",
        *(f"{name}.steps={steps if name == stage else 1}" for name in ("tokenizer", "base")),
    ]
    rhythm = ["tokenizer.critic.start_step=10", "engine.validate_every_steps=50", "engine.save_every_steps=50"]
    config = resolve("muse", preset="tiny", data=str(folder / "shapes"), sets=[*small, *rhythm])
    train(config, run=folder / "run")
    print(f"resident MiB by step: {seen}")
    return seen[steps] - seen[steps // 5]


@pytest.mark.parametrize("stage", ["tokenizer", pytest.param("base", marks=pytest.mark.slow)])
def test_memory_is_flat_over_three_hundred_steps(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert growth(tmp_path, 300, monkeypatch, stage) < 6


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert growth(tmp_path, 2000, monkeypatch) < 16  # 1 MiB a hundred steps
