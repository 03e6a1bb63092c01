"""Meshes: killed while they are read, between tokenizer and generator or inside the generator, and resumed: bit for bit the
unbroken run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.data.synth.furniture import write_furniture
from tests.processes import differences, made_once, run

DIE = Path(__file__).parent / "die_between.py"
Command = Callable[..., int]
SETS = (
    "data.bins=32",
    "data.scale=1.2",
    "data.validation_fraction=0.3",
    "text={kind: bytes, length: 64, width: 16, depth: 1, heads: 2}",
    "tokenizer.kind=graph",
    "tokenizer.batch_size=5",
    "tokenizer.steps=4",
    "tokenizer.model={coordinate_width: 8, encoder_width: 16, encoder_layers: 1, decoder_width: 16, decoder_blocks: 1, heads: 2, "
    "dropout: 0.1, quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [5, 5, 4]}}}",
    "base.batch_size=5",
    "base.steps=6",
    "base.model={width: 16, depth: 1, heads: 2, inner_width: 16, inner_depth: 1, dropout: 0.1}",
    "sample={max_faces: 12}",
    "engine.device=cpu",
    "engine.log_every_steps=1",
    "engine.validate_every_steps=2",
    "engine.preview_every_steps=4",
    "engine.save_every_steps=2",
)


def arguments(data: Path, run_folder: Path) -> list[str]:
    return ["train", "meshgpt", "--preset", "tiny", "--data", str(data), "--run", str(run_folder), "--set", *SETS]


@pytest.fixture(scope="module")
def furniture(workshop: Path) -> Path:
    path = workshop / "furniture"
    return made_once(path, lambda: write_furniture(path, 24, 0))


@pytest.fixture(scope="module")
def whole(workshop: Path, furniture: Path, command: Command) -> Path:
    """The unbroken run of both stages."""
    path = workshop / "whole meshes"

    def make() -> None:
        assert command(*arguments(furniture, path)) == 0

    return made_once(path, make)


def caches(path: Path) -> dict[Path, bytes]:
    home = path / "cache"
    return {file.relative_to(home): file.read_bytes() for file in home.rglob("*") if file.is_file()}


@pytest.mark.parametrize("place", ["half the meshes", "start base", pytest.param("step base 4", marks=pytest.mark.slow)])
def test_killed_anywhere_it_ends_as_if_never(place: str, furniture: Path, whole: Path, command: Command, tmp_path: Path) -> None:
    ended = run([place, *arguments(furniture, tmp_path / "run")], tmp_path, script=DIE)
    assert ended.code == -signal.SIGKILL, ended.output
    assert command("resume", tmp_path / "run") == 0
    assert differences(tmp_path / "run", whole) == []
    assert caches(tmp_path / "run") == caches(whole)
