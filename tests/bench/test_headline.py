"""The runs behind RESULTS.md: every one is a valid config, and is resumed where a command has taken its nine minutes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tessera import pipeline

NAMES = ("phenaki", "nuwa", "dalle2", "meshgpt", "graph")


@pytest.fixture
def headline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("headline")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_run_is_a_config(name: str, quick: bool, headline: ModuleType) -> None:
    assert set(headline.HEADLINES) == set(NAMES)
    run = headline.HEADLINES[name]
    sets = headline.sets_of(run, Path("out"), quick)
    config = pipeline.resolve(run.recipe, preset="tiny" if quick else "small", data="data", sets=sets)
    assert config.recipe == run.recipe
    assert (config.base.steps == 2) == quick


def test_what_takes_longer_is_resumed(tmp_path: Path, headline: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, ...]] = []
    ends = iter([False, False, True])

    def tessera(log: Path, *words: str) -> bool:
        said.append((log.name, *words[:2]))
        return next(ends)

    monkeypatch.setattr(headline, "tessera", tessera)
    headline.train(headline.HEADLINES["meshgpt"], tmp_path / "data", tmp_path / "m", 3, quick=False)
    run = str(tmp_path / "m" / "run")
    assert said == [("train-1.log", "train", "meshgpt"), ("train-2.log", "resume", run), ("train-3.log", "resume", run)]


def test_a_command_is_stopped_in_time_and_a_failure_is_told(
    tmp_path: Path, headline: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert headline.tessera(tmp_path / "list.log", "list")
    assert "phenaki" in (tmp_path / "list.log").read_text()
    with pytest.raises(SystemExit, match="code 2"):
        headline.tessera(tmp_path / "train.log", "train", "nobody")
    monkeypatch.setattr(headline, "MOST_SECONDS", 0.01)
    assert not headline.tessera(tmp_path / "train.log", "train", "muse")
