"""One trained run and one export of it, which tests copy before they spoil them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tessera import pipeline
from tessera.data.synth.shapes import write_shapes
from tessera.sampling.package import export_run

SETS = (
    "engine.device=cpu",
    "engine.log_every_steps=1",
    "engine.validate_every_steps=2",
    "engine.preview_every_steps=2",
    "engine.save_every_steps=2",
    "data.resolution=16",
    "data.validation_fraction=0.2",
    "tokenizer.batch_size=4",
    "tokenizer.model={widths: [8, 8], blocks: [1, 1]}",
    "tokenizer.critic={widths: [8, 8], start_step: 2}",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
    "base.batch_size=4",
    "base.model={width: 16, depth: 1, heads: 2}",
    "sample.steps=3",
    "sample.chunk=4",
)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sampling") / "photos"
    write_shapes(path, 30, 0, image_size=32)
    return path


@pytest.fixture(scope="session")
def trained(photos: Path) -> Path:
    """Five steps of the tokenizer; checkpoints of steps 2, 4 and 5."""
    config = pipeline.resolve("muse", preset="tiny", data=str(photos), steps=5, sets=SETS)
    return pipeline.train(config, run=photos.parent / "run", stage="tokenizer")


@pytest.fixture(scope="session")
def exported(trained: Path) -> Path:
    return export_run(trained, trained.parent / "exported")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))
