"""What a window has room for: overlaps that are too large are refused by name, whoever sets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera import pipeline
from tessera.config import UserError
from tessera.contracts import Chunk, Scene
from tessera.recipes.clips.drawing import Animator
from tessera.recipes.phenaki import PHENAKI

SETS = (
    "engine.device=cpu", "data.resolution=16", "tokenizer.model={widths: [8, 8, 8], blocks: [0, 0, 0]}", "text.kind=none",
    "base.model={width: 16, depth: 1, heads: 2}", "sample.steps=1",
)  # fmt: skip


def animator(frames: int) -> Animator:
    """With weights as they start; time stride 4."""
    config = pipeline.resolve("phenaki", preset="tiny", sets=[*SETS, f"data.frames={frames}"])
    return Animator(config, {train.name: train.serves() for train in PHENAKI.steps(config)}, torch.device("cpu"))


def draw(window: int, scenes: tuple[Scene, ...] | None = None, **options: Any) -> int:
    """How many frames come out."""
    made = animator(window)
    chosen = made.config.sample.model_copy(update=options)
    (clip,) = made(Chunk(captions=[""], seeds=torch.tensor([3]), options=chosen, scenes=scenes))
    return len(clip.frames)


@pytest.mark.parametrize(("frames", "asked"), [(1, 1), (5, 5), (5, 3), (9, 30), (13, 30), (17, 40)])
def test_any_window_draws_without_an_overlap_being_named(frames: int, asked: int) -> None:
    assert draw(frames, frames=asked) == asked


@pytest.mark.parametrize(("frames", "asked"), [(1, 2), (5, 6)])
def test_a_window_that_cannot_go_on(frames: int, asked: int) -> None:
    with pytest.raises(UserError, match=rf"trained on clips of {frames} frames, in which nothing can go on .* data.frames"):
        draw(frames, frames=asked)


def test_an_overlap_of_one_call() -> None:
    assert draw(17, frames=30, overlap=12) == 30
    assert draw(17, frames=17, overlap=13) == 17, "one window overlaps nothing"
    with pytest.raises(UserError, match="an overlap leaves no room for new frames in a window of 17; use at most 12"):
        draw(17, frames=30, overlap=13)


def test_an_overlap_of_a_scene() -> None:
    with pytest.raises(UserError, match="an overlap leaves no room for new frames in a window of 17; use at most 12"):
        draw(17, (Scene("", 20), Scene("", 20, 16)))


def test_an_overlap_in_the_config() -> None:
    assert pipeline.resolve("phenaki", preset="tiny", sets=["data.frames=9", "sample.overlap=4"]).sample.overlap == 4
    with pytest.raises(UserError, match=r"sample.overlap 5.* in a window of 9; use at most 4"):
        pipeline.resolve("phenaki", preset="tiny", sets=["data.frames=9", "sample.overlap=5"])
    with pytest.raises(UserError, match=r"sample.overlap 1 leaves no room for new frames in a window of 5; set it to null"):
        pipeline.resolve("phenaki", preset="tiny", sets=["data.frames=5", "sample.overlap=1"])
