"""Old checkpoints load, and golden losses come out again. What is compared with was written by `freeze.py`,
and is written anew only where tokens or data themselves have changed, by a commit that says so.

Other processors round otherwise, so losses are compared to 1e-4, not to the bit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tessera import pipeline
from tessera.engine.checkpoint import list_checkpoints
from tessera.recipes import RECIPES
from tests.contract.freeze import FROZEN, SETS, STEPS, kind_of, losses, recipe_of, write_data

HOMES = sorted(path.name for path in FROZEN.iterdir())
STAGES = [(home, path.parent.name) for home in HOMES for path in sorted((FROZEN / home).glob("*/losses.json"))]


def assert_same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """Numbers that this version logs in addition are no fault."""
    assert [(line["step"], line["kind"]) for line in found] == [(line["step"], line["kind"]) for line in wanted]
    for line, golden in zip(found, wanted, strict=True):
        numbers = {name: value for name, value in golden.items() if isinstance(value, float)}
        assert {name: line[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6), line["step"]


def test_every_recipe_is_frozen() -> None:
    assert {recipe_of(name) for name in HOMES} == set(RECIPES) == {recipe_of(kind) for kind in SETS}
    assert {kind_of(name) for name in HOMES} == set(SETS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same commands as then."""
    made = {}
    for kind, sets in SETS.items():
        folder, recipe = tmp_path_factory.mktemp(kind), recipe_of(kind)
        write_data(recipe, folder / "data")
        config = pipeline.resolve(recipe, preset="tiny", data=str(folder / "data"), steps=STEPS, sets=sets)
        made[kind] = pipeline.train(config, run=folder / "run")
    return made


def test_every_stage_is_frozen() -> None:
    for kind, sets in SETS.items():
        config = pipeline.resolve(recipe_of(kind), preset="tiny", sets=sets)
        frozen = {stage for home, stage in STAGES if kind_of(home) == kind}
        assert {train.name for train in RECIPES[recipe_of(kind)].steps(config)} <= frozen


@pytest.mark.parametrize(("home", "stage"), STAGES)
def test_golden_losses(home: str, stage: str, runs: dict[str, Path]) -> None:
    assert_same(losses(runs[kind_of(home)], stage), json.loads((FROZEN / home / stage / "losses.json").read_text()))


@pytest.mark.parametrize(("home", "stage"), STAGES)
def test_an_old_checkpoint_goes_on_as_if_nothing_had_happened(home: str, stage: str, tmp_path: Path) -> None:
    write_data(recipe_of(home), tmp_path / "data")
    shutil.copytree(FROZEN / home, tmp_path / "run")
    (saved,) = list_checkpoints(tmp_path / "run" / stage / "checkpoints")
    first = int(saved.name.removeprefix("step-"))
    pipeline.resume(tmp_path / "run", sets=[f"data.path={tmp_path / 'data'}"], stage=stage)
    if first == STEPS:  # kept for those that were trained on it
        return
    golden = json.loads((FROZEN / home / stage / "losses.json").read_text())
    assert_same(losses(tmp_path / "run", stage), [line for line in golden if line["step"] > first])
