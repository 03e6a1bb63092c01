"""A data set and a way to run a command inside this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tessera.cli import main
from tessera.data.synth.shapes import write_shapes


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "shapes"
    write_shapes(path, 30, 0, image_size=32)
    return path


@pytest.fixture
def tessera(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs a command in an empty folder; nothing but SystemExit may come out of it."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        assert "Traceback" not in said.out + said.err
        return Ended(end.value.code, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Flags that make training a matter of milliseconds."""
    sets = [
        "engine.device=cpu",
        "engine.log_every_steps=1",
        "data.resolution=16",
        "tokenizer.batch_size=4",
        "tokenizer.model={widths: [8, 8], blocks: [1, 1]}",
        "tokenizer.critic.widths=[8, 8]",
        "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
        "base.batch_size=4",
        "base.model={width: 16, depth: 1, heads: 2}",
        "sample.steps=3",
        "sample.chunk=4",
    ]
    return ["--preset", "tiny", "--set", *sets]
