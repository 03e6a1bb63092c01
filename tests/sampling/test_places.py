"""Stages that are gone, moved or deleted: what is said of them, by every way in, and what goes on without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tessera import pipeline
from tessera.config import Layer, UserError, build
from tessera.files import digest
from tessera.recipes import RECIPES
from tessera.sampling.package import export_run
from tessera.sampling.places import refuse_incomplete, taken_by
from tessera.sampling.session import load
from tests.cli.conftest import tessera
from tests.small import SUPERRES, generated, pictures, small_config, workshop

__all__ = ["generated", "pictures", "tessera", "workshop"]

GRAPH = {"tokenizer": {"kind": "graph"}}
LATENT = {"base": {"latent": {"path": "other/tokenizer"}}}
PLACES = [  # recipe, values, the stage that is taken, its key
    ("muse", {}, "tokenizer", "base.needs.tokenizer"),
    ("muse", {"superres": {"resolution": 64}}, "fine_tokenizer", "superres.needs.tokenizer"),
    ("phenaki", {}, "tokenizer", "base.needs.tokenizer"),
    ("nuwa", {}, "tokenizer", "base.needs.tokenizer"),
    ("meshgpt", GRAPH, "tokenizer", "base.needs.tokenizer"),
    ("dalle2", {}, "embedder", "embeddings.path"),
    ("dalle2", {}, "prior", "prior.path"),
    ("dalle2", {}, "base", "base.path"),
    ("dalle2", {}, "upsampler1", "upsampler1.path"),
    ("dalle2", LATENT, "tokenizer", "base.latent.path"),
]
KINDS = [
    ("muse", {}, "tokenizer", ["base"]),
    ("phenaki", {}, "tokenizer", ["base"]),
    ("nuwa", {}, "tokenizer", ["base"]),
    ("meshgpt", GRAPH, "tokenizer", ["base"]),
    ("dalle2", {}, "embedder", ["prior"]),
    ("dalle2", {}, "embedder", ["base"]),
]


def steps_of(recipe: str, values: dict[str, Any], *more: Layer) -> Any:
    """Stages of a tiny config."""
    found = RECIPES[recipe]
    preset = found.presets["tiny"]()
    layers = [Layer.of(preset.model_dump(mode="json"), "preset"), Layer.of(values, "test"), *more]
    return found.steps(build(found.config_type, layers))


def leave_checkpoint(run: Path, stage: str) -> None:
    (run / stage / "checkpoints" / "step-000001").mkdir(parents=True)


@pytest.mark.parametrize(("recipe", "values", "stage", "key"), PLACES)
def test_every_stage_that_is_taken_names_its_key(
    recipe: str, values: dict[str, Any], stage: str, key: str, tmp_path: Path
) -> None:
    place = tmp_path / "other" / "place"
    named: Any = reduce(lambda value, name: {name: value}, reversed(key.split(".")), str(place))
    trains = {train.name: train for train in steps_of(recipe, values, Layer.of(named, "test"))}
    assert trains[stage].origin == str(place)
    run = tmp_path / "a run"
    for name in trains:
        leave_checkpoint(run, name)
    with pytest.raises(UserError) as error:
        refuse_incomplete(run, list(trains.values()))
    assert f"takes its {stage} from {place}, where there is no trained stage" in str(error.value)
    assert f"tessera resume '{run}' --set {key}=NEW/place" in str(error.value)


@pytest.mark.parametrize(("recipe", "values", "stage", "users"), KINDS)
def test_a_stage_of_the_run_that_was_deleted(
    recipe: str, values: dict[str, Any], stage: str, users: list[str], tmp_path: Path
) -> None:
    trains = steps_of(recipe, values)
    leave_checkpoint(tmp_path, stage)
    refuse_incomplete(tmp_path, trains)  # it alone, while it trains
    for user in users:
        leave_checkpoint(tmp_path, user)
    refuse_incomplete(tmp_path, trains)
    shutil.rmtree(tmp_path / stage)
    with pytest.raises(UserError, match=f"{tmp_path / stage} is gone, .* and stage {users[0]} was trained on it"):
        refuse_incomplete(tmp_path, trains)


def test_what_nothing_trained_reads_may_be_missing(tmp_path: Path) -> None:
    """An upsampler asks for no pair, and embeddings of files have none."""
    away = Layer.of({"embeddings": {"path": "gone/embedder"}}, "test")
    leave_checkpoint(tmp_path, "upsampler1")
    refuse_incomplete(tmp_path, steps_of("dalle2", {}))
    refuse_incomplete(tmp_path, steps_of("dalle2", {}, away))
    leave_checkpoint(tmp_path, "base")
    refuse_incomplete(tmp_path, steps_of("dalle2", {"embeddings": {"kind": "list", "path": "e.npy"}}))
    with pytest.raises(UserError, match="its embedder from gone/embedder"):
        refuse_incomplete(tmp_path, steps_of("dalle2", {}, away))


# ---- by every way in


@pytest.fixture
def other(generated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(generated, tmp_path / "other"))


@pytest.fixture
def moved(other: Path, pictures: Path, tmp_path: Path) -> Path:
    """A run on the tokenizer of another, which has moved."""
    run = pipeline.train(small_config(pictures, base__needs__tokenizer=other / "tokenizer"), run=tmp_path / "run")
    other.rename(tmp_path / "elsewhere")
    return run


def drawn(model: Path) -> bytes:
    return bytes(load(model, device="cpu").sample("a red circle", seed=3)[0].tobytes())


@pytest.mark.parametrize(
    "command",
    [
        lambda run: ("sample", run, "a red circle"),
        lambda run: ("evaluate", run),
        lambda run: ("export", run, "--out", "model"),
        lambda run: ("resume", run),
        lambda run: ("resume", run, "--set", "base.steps=4"),
        lambda run: ("resume", run, "--stage", "base"),
        lambda run: ("data", "prepare", run),
    ],
)  # fmt: skip
def test_a_tokenizer_that_has_moved_is_told(
    command: Callable[[Path], tuple[object, ...]], moved: Path, other: Path, tessera: Any, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ended = tessera(*command(moved))
    assert ended.code == 2
    assert f"{moved} takes its tokenizer from {other / 'tokenizer'}, where there is no trained stage" in ended.err
    assert f"tessera resume {moved} --set base.needs.tokenizer=NEW/tokenizer" in ended.err
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_the_command_of_the_message_mends_it(moved: Path, tessera: Any, tmp_path: Path) -> None:
    assert f"tokenizer from {tmp_path / 'other' / 'tokenizer'} (gone)" in tessera_list(moved, tessera)
    pipeline.resume(moved, sets=[f"base.needs.tokenizer={tmp_path / 'elsewhere' / 'tokenizer'}"])
    assert drawn(moved) == drawn(export_run(moved, tmp_path / "model"))
    assert f"base step-000003, tokenizer from {tmp_path / 'elsewhere' / 'tokenizer'}\n" in tessera_list(moved, tessera)


def tessera_list(run: Path, tessera: Any) -> str:
    """What is listed, with this run among the runs."""
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    if not (runs / run.name).exists():
        (runs / run.name).symlink_to(run)
    found: str = tessera("list").out
    return found


def test_a_run_with_a_broken_config_is_listed_beside_others(tessera: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("recipe: nothing")
    assert "run runs/a: no checkpoint yet" in tessera("list").out


def test_one_that_moved_before_base_was_trained(pictures: Path, other: Path, tessera: Any, tmp_path: Path) -> None:
    config = small_config(pictures, base__needs__tokenizer=other / "tokenizer")
    run = pipeline.train(config, run=tmp_path / "run", stage="tokenizer")
    assert load(run, device="cpu").steps == {"tokenizer": 3}
    assert f"run runs/run: tokenizer from {other / 'tokenizer'}\n" in tessera_list(run, tessera), (
        "though nothing was trained here"
    )
    other.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"takes its tokenizer from .* --set base.needs.tokenizer=NEW/tokenizer"):
        load(run)


def test_a_tokenizer_that_the_other_run_took_itself(other: Path, pictures: Path, tmp_path: Path) -> None:
    """It is taken from where it lies, and the run between may go."""
    place = other / "tokenizer"
    for name, origin in (("first", place), ("second", tmp_path / "first" / "tokenizer")):
        run = pipeline.train(small_config(pictures, base__needs__tokenizer=origin), run=tmp_path / name)
        assert taken_by(run) == [f"tokenizer from {place}"]
    shutil.rmtree(tmp_path / "first")
    assert load(run, device="cpu").hashes["tokenizer"] == load(other, device="cpu").hashes["tokenizer"]


def test_the_finer_tokenizer_is_not_replaced_by_the_coarse_one(
    generated: Path, pictures: Path, other: Path, tmp_path: Path
) -> None:
    sets = [f"superres={SUPERRES[:-1]}, needs: {{tokenizer: {other}/tokenizer}}}}"]
    run = Path(shutil.copytree(generated, tmp_path / "run"))
    pipeline.resume(run, sets=sets)
    assert "fine_tokenizer" in load(run, device="cpu").steps
    other.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"its fine_tokenizer from .* --set superres.needs.tokenizer=NEW/tokenizer"):
        load(run)


def test_a_tokenizer_that_was_deleted_is_told_and_trained_again(generated: Path, tessera: Any, tmp_path: Path) -> None:
    run = Path(shutil.copytree(generated, tmp_path / "run"))
    shutil.rmtree(run / "tokenizer")
    for command in (("sample", run, "a red circle"), ("evaluate", run), ("export", run, "--out", "model")):
        ended = tessera(*command)
        assert ended.code == 2
        assert f"{run / 'tokenizer'} is gone, or has no checkpoint any more, and stage base was trained on it" in ended.err
    assert not (tmp_path / "model").exists()
    pipeline.resume(run)
    assert drawn(run) == drawn(generated)


def test_an_export_without_a_stage_that_another_needs(generated: Path, tmp_path: Path) -> None:
    """As they were written when a stage was gone."""
    model = export_run(generated, tmp_path / "model")
    shutil.rmtree(model / "tokenizer")
    facts, manifest = (json.loads((model / name).read_text()) for name in ("config.json", "manifest.json"))
    del facts["stages"]["tokenizer"], manifest["files"]["tokenizer/model.safetensors"]
    (model / "config.json").write_text(json.dumps(facts))
    manifest["files"]["config.json"] = {"bytes": (model / "config.json").stat().st_size, "sha256": digest(model / "config.json")}
    (model / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"holds no tokenizer, and its base was trained on one .* export the run again"):
        load(model)
