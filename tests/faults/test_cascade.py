"""A cascade that is killed in any stage, or while its pair embeds the pictures, and resumed: bit for bit the unbroken one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cascade import arguments
from tests.processes import differences, made_once, run

DIE = Path(__file__).parent / "die_between.py"
Command = Callable[..., int]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(workshop: Path, shapes: Path, command: Command) -> Path:
    """The unbroken run of all stages."""
    path = workshop / "whole cascade"

    def make() -> None:
        assert command(*arguments(shapes, path)) == 0

    return made_once(path, make)


def caches(path: Path) -> dict[Path, bytes]:
    home = path / "cache"
    return {file.relative_to(home): file.read_bytes() for file in home.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "place",
    [
        "half an array",
        *(pytest.param(f"step {stage} 3", marks=slow) for stage in ("embedder", "prior", "base", "upsampler1")),
        *(pytest.param(place, marks=slow) for place in ("start prior", "cache", "start upsampler1")),
    ],
)
def test_killed_anywhere_it_ends_as_if_never(place: str, shapes: Path, whole: Path, command: Command, tmp_path: Path) -> None:
    ended = run([place, *arguments(shapes, tmp_path / "run")], tmp_path, script=DIE)
    assert ended.code == -signal.SIGKILL, ended.output
    assert command("resume", tmp_path / "run") == 0
    assert differences(tmp_path / "run", whole) == []
    assert caches(tmp_path / "run") == caches(whole)


@pytest.mark.parametrize("lost", ["cache", pytest.param("manifest.json", marks=slow), "00000.npy"])
def test_a_cache_that_is_gone_is_made_again(lost: str, whole: Path, command: Command, tmp_path: Path) -> None:
    """All of it, or a file: what was trained before goes on with the same vectors."""
    path = Path(shutil.copytree(whole, tmp_path / "run"))
    for stage in ("prior", "base"):
        shutil.rmtree(path / stage / "checkpoints" / "step-000004")
    if lost == "cache":
        shutil.rmtree(path / "cache")
    else:
        next((path / "cache").rglob(lost)).unlink()
    assert command("resume", path) == 0
    assert differences(path, whole) == []
    assert caches(path) == caches(whole)
