"""Runs that were resumed with other values than their first stages were trained with: each stage is used as it was trained, and
files are looked for where they lie now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera import pipeline
from tessera.data.opening import open_source
from tessera.data.synth.shapes import write_shapes
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tests.recipes.test_dalle2_drawing import RATES, SETS
from tests.text.test_frozen import clip_folder

__all__ = ["clip_folder"]

OTHERS = ["base.process.kind=edm", "prior.process={kind: ddpm, predicts: v}"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_shapes(tmp_path / "data", 20, 0, image_size=32)
    return tmp_path / "data"


def resolved(data: Path, *sets: str) -> Any:
    named = {item.partition("=")[0] for item in sets}
    kept = [item for item in (*SETS, *RATES) if item.partition("=")[0] not in named]
    return pipeline.resolve("dalle2", preset="tiny", data=str(data), steps=2, sets=[*kept, *sets])


def drawn(place: Path, **more: Any) -> bytes:
    return bytes(load(place, device="cpu").sample("a red circle", seed=3, **more)[0].tobytes())


def test_the_order_in_which_stages_were_trained_changes_nothing(data: Path, tmp_path: Path) -> None:
    """The recipe's last stage first, with another process of the stages before it."""
    whole = pipeline.train(resolved(data, *OTHERS), run=tmp_path / "whole")
    run = pipeline.train(resolved(data), run=tmp_path / "run", stage="upsampler1")
    pipeline.resume(run, sets=OTHERS)
    config = load(run, device="cpu").config
    assert (config.base.process.kind, config.prior.process.predicts) == ("edm", "v")
    assert drawn(run) == drawn(export_run(run, tmp_path / "model")) == drawn(whole)


def test_embeddings_that_came_after_an_upsampler(data: Path, tmp_path: Path) -> None:
    config = resolved(data, f"embeddings={{kind: list, path: {tmp_path / 'nowhere.npy'}}}")
    run = pipeline.train(config, run=tmp_path / "run", stage="upsampler1")
    source = open_source(data, config.data)
    np.save(tmp_path / "found.npy", np.random.default_rng(0).normal(size=(len(source), 6)).astype(np.float32))
    (tmp_path / "found.txt").write_text("\n".join(source.key(index) for index in range(len(source))))
    pipeline.resume(run, sets=[f"embeddings.path={tmp_path / 'found.npy'}"])
    assert load(run, device="cpu").config.embedding_width == 6
    assert drawn(run) == drawn(export_run(run, tmp_path / "model"))


@pytest.mark.parametrize(("section", "more"), [("embeddings", ""), ("text", ", length: 12")])
def test_a_model_that_moved_after_the_last_step(section: str, more: str, clip_folder: Path, data: Path, tmp_path: Path) -> None:
    here = Path(shutil.copytree(clip_folder, tmp_path / "here"))
    run = pipeline.train(resolved(data, f"{section}={{kind: clip, path: {here}{more}}}"), run=tmp_path / "run")
    red = Image.new("RGB", (32, 32), (255, 0, 0))
    before = drawn(run, image=red)
    there = shutil.move(here, tmp_path / "there")
    pipeline.resume(run, sets=[f"{section}.path={there}"])
    assert drawn(run, image=red) == before


def test_data_that_moved_after_the_last_step(data: Path, tmp_path: Path) -> None:
    """Where `tessera evaluate` looks for them."""
    run = pipeline.train(resolved(data), run=tmp_path / "run")
    there = shutil.move(data, tmp_path / "there")
    pipeline.resume(run, sets=[f"data.path={there}"])
    assert load(run, device="cpu").config.data.path == str(there)
