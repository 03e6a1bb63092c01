"""A cascade under evaluation: samples as they were asked for, and reconstructions that leave the prior out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.evals import Subject
from tessera.evals import run as judging
from tessera.evals.run import evaluate_run
from tessera.recipes.dalle2.drawing import Painter
from tessera.sampling.session import Session, load
from tests.recipes.test_dalle2_drawing import run, session, workshop

__all__ = ["run", "session", "workshop"]


def test_what_is_judged_is_drawn_as_asked(run: Path, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is set for the evaluation, and not with what the run says: guidance 3."""
    met: list[Subject] = []
    monkeypatch.setattr(judging, "evaluate", lambda subject, *rest, **more: met.append(subject))
    monkeypatch.setattr(judging, "write_evaluation", lambda *rest: [])
    captions, found = ["a red circle", "a blue square"], list[Any]()
    for guidance in (1.0, 5.0):
        evaluate_run(run, n=2, sets=[f"sample.guidance={guidance}"], device="cpu")
        assert met[-1].about["sample"]["guidance"] == guidance
        assert met[-1].sample is not None
        found.append(met[-1].sample(captions, 7))
        for row, caption in enumerate(captions):
            (wanted,) = session.sample(caption, seed=7 + row, options={"guidance": guidance})
            gap = np.asarray(wanted).astype(int) - found[-1][row]
            assert abs(gap).max() <= 1, "the same picture; its place in a chunk changes rounding"
    assert not np.array_equal(*found)


def test_it_is_judged_with_the_decoder_and_the_prior_apart(run: Path) -> None:
    evaluation, _ = evaluate_run(run, n=4, sets=["evaluate.fit_steps=2", "evaluate.resamples=2"], device="cpu")
    assert set(evaluation.report["oracle"]["rows"]) == {"chance", "nearest", "real", "reconstruction", "samples"}
    assert "the decoder loses" in evaluation.report["health"]["sentence"]
    assert evaluation.report["loss"]["loss"] > 0


def test_reconstructions_have_noise_of_their_own(run: Path) -> None:
    session = load(run, device="cpu")
    assert isinstance(session.draw, Painter)
    pixels, captions = np.zeros((2, 16, 16, 3), np.uint8), ["a red circle"] * 2
    first, second = session.draw.redrawn(pixels, captions, 5, session.config.sample)
    assert not np.array_equal(first, second)
    assert np.array_equal(session.draw.redrawn(pixels[:1], captions[:1], 6, session.config.sample)[0], second)
