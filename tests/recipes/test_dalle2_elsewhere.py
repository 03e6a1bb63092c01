"""Stages of several runs in one: combined, replaced, exported, and what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import pipeline, rehearsal
from tessera.config import UserError
from tessera.contracts import Chunk
from tessera.data.opening import open_source
from tessera.evals.run import evaluate_run
from tessera.recipes.dalle2.drawing import Painter
from tessera.sampling.package import export_run
from tessera.sampling.places import taken_by
from tessera.sampling.session import load
from tests.processes import made_once, workshop
from tests.recipes.test_dalle2_drawing import SETS, run

__all__ = ["run", "workshop"]

QUIET = ("engine.device=cpu", "data.validation_fraction=0.2", "engine.preview_every_steps=100", *SETS[-1:])
UPSAMPLER = (
    "upsampler1={batch_size: 4, ema_decay: 0.5, process: {kind: edm}, low: {kind: blur}, "
    "model: {widths: [8, 16], blocks: [1, 1], attention: [false, true], cross: [false, false], head_width: 8, efficient: true}}"
)


def trained(home: Path, run: Path, *sets: str, steps: int = 3, stage: str | None = None) -> Path:
    """A run on the same data."""
    data = str(run.parent / "data")
    config = pipeline.resolve("dalle2", preset="tiny", data=data, steps=steps, sets=[*QUIET, *sets], stage=stage)
    return pipeline.train(config, run=home, stage=stage)


def stages_of(place: Path) -> list[str]:
    """Settings that name pair, prior and base of a run or an export."""
    return [f"embeddings.path={place / 'embedder'}", *(f"{name}.path={place / name}" for name in ("prior", "base"))]


def drawn(place: Path, prompt: str = "a red circle", **more: Any) -> bytes:
    return bytes(load(place, device="cpu").sample(prompt, seed=3, **more)[0].tobytes())


@pytest.fixture(scope="module")
def upsampler(workshop: Path, run: Path) -> Path:
    """A run that has trained nothing but another upsampler of 16 to 32 pixels."""
    place = workshop / "upsampler"
    return made_once(place, lambda: trained(place, run, UPSAMPLER, "upsampler1.optim.lr=1.0e-2", "seed=5", stage="upsampler1"))


@pytest.fixture(scope="module")
def larger(workshop: Path, run: Path) -> Path:
    """One of 32 to 64."""
    place = workshop / "larger"
    model = "upsampler1.model={widths: [8], blocks: [1], attention: [false], cross: [false], head_width: 8, efficient: true}"
    sets = ("data.resolution=32", "upsampler1.resolution=64", "upsampler1.batch_size=2", model)
    return made_once(place, lambda: trained(place, run, *sets, steps=1, stage="upsampler1"))


@pytest.fixture(scope="module")
def combined(workshop: Path, run: Path, upsampler: Path) -> Path:
    """All but the upsampler from the one, the upsampler from the other; nothing is trained."""
    place = workshop / "combined"
    return made_once(place, lambda: trained(place, run, *stages_of(run), f"upsampler1.path={upsampler / 'upsampler1'}"))


def test_stages_of_two_runs_draw_as_each_did(run: Path, upsampler: Path, combined: Path) -> None:
    first, other, both = (load(place, device="cpu") for place in (run, upsampler, combined))
    assert both.hashes == {**first.hashes, "upsampler1": other.hashes["upsampler1"]}
    assert json.loads((combined / "taken.json").read_text()) == both.hashes
    assert not any((combined / name).exists() for name in both.hashes), "they stay where they are"
    assert isinstance(first.draw, Painter)
    assert isinstance(other.draw, Painter)
    chunk = Chunk(["a red circle"] * 3, torch.arange(3, 6), both.config.sample)
    with torch.no_grad():
        small = first.draw.decode(chunk, first.draw.imagine(chunk, chunk.options.prior), chunk.options)
        large = other.draw.enlarged(chunk, small, ["upsampler1"], chunk.options)
    wanted = ((large[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0)
    assert drawn(combined) == bytes(wanted.contiguous().numpy().tobytes())
    assert drawn(combined) != drawn(run)


def test_an_export_of_it_stands_alone(run: Path, combined: Path, tmp_path: Path) -> None:
    model = export_run(combined, tmp_path / "model")
    assert str(run.parent) not in (model / "config.json").read_text(), "no path of this machine"
    assert sorted(path.parent.name for path in model.glob("*/model.safetensors")) == ["base", "embedder", "prior", "upsampler1"]
    assert (model / "base" / "sample.png").is_file(), "of the run that trained it"
    assert drawn(model) == drawn(combined)


def test_a_run_that_has_learned_all_takes_no_more(run: Path, larger: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(run, tmp_path / "mine"))
    with pytest.raises(UserError, match=r"would now take stage upsampler2 from .* nothing is left here to learn beside it"):
        pipeline.resume(mine, sets=[f"upsampler2.path={larger / 'upsampler1'}"])


def test_it_is_judged_as_any_run(combined: Path) -> None:
    evaluation, _ = evaluate_run(combined, n=4, sets=["evaluate.fit_steps=2", "evaluate.resamples=2"], device="cpu")
    assert {"samples", "reconstruction"} <= set(evaluation.report["oracle"]["rows"])


def test_stages_of_exports_are_known_by_their_weights(run: Path, combined: Path, tmp_path: Path) -> None:
    """Base of a run, and the pair of its export; then the other way round."""
    model = export_run(combined, tmp_path / "model")
    for pair, base in ((model, run), (run, model)):
        sets = [f"embeddings.path={pair / 'embedder'}", f"prior.path={run / 'prior'}", f"base.path={base / 'base'}"]
        again = trained(tmp_path / f"pair of {pair.name}", run, *sets, f"upsampler1.path={model / 'upsampler1'}")
        assert drawn(again) == drawn(combined)
    (model / "base" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match="damaged"):
        load(again)


def test_what_trains_on_over_there_changes_nothing_here(run: Path, upsampler: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(upsampler, tmp_path / "other"))
    mine = trained(tmp_path / "mine", run, *stages_of(run), f"upsampler1.path={other / 'upsampler1'}")
    before = drawn(mine)
    pipeline.resume(
        other, sets=["upsampler1.steps=9", "engine.save_every_steps=2", "engine.keep_checkpoints=1"], stage="upsampler1"
    )
    assert load(other, device="cpu").steps == {"upsampler1": 9}
    assert drawn(mine) == before
    assert load(mine, device="cpu").steps["upsampler1"] == 3
    moved = Path(shutil.move(other, tmp_path / "moved"))
    pipeline.resume(mine, sets=[f"upsampler1.path={moved / 'upsampler1'}"])
    assert drawn(mine) == before
    with pytest.raises(UserError, match="has trained stage upsampler1 itself, and would now take it from"):
        pipeline.resume(moved, sets=[f"upsampler1.path={upsampler / 'upsampler1'}"], stage="upsampler1")
    shutil.rmtree(moved / "upsampler1" / "checkpoints" / "step-000003")
    with pytest.raises(UserError, match=r"no longer holds the checkpoint .* or which it took over"):
        load(mine)


def test_a_pair_that_was_trained_on_is_taken_as_the_decoder_knew_it(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    pipeline.resume(other, sets=["embedder.steps=6"], stage="embedder")
    mine = trained(tmp_path / "mine", run, *stages_of(other), "upsampler1=null")
    assert load(mine, device="cpu").steps == {"embedder": 4, "prior": 4, "base": 4}


def test_a_prior_is_trained_for_a_decoder_from_elsewhere(run: Path, tmp_path: Path) -> None:
    sets = [item for item in stages_of(run) if not item.startswith("prior")]
    prior = "prior={batch_size: 4, model: {width: 16, depth: 1, heads: 2}}"
    config = pipeline.resolve(
        "dalle2", preset="tiny", data=str(run.parent / "data"), steps=1, sets=[*QUIET, *sets, prior, "upsampler1=null"]
    )
    (estimate,) = rehearsal.dry_run(config)
    assert estimate.stage == "prior"
    mine = pipeline.train(config, run=tmp_path / "mine")
    session = load(mine, device="cpu")
    assert session.steps == {"embedder": 4, "prior": 1, "base": 4}
    assert (session.config.data.resolution, session.config.base.model.widths) == (16, (16, 16))
    assert session.sample("a red circle")[0].size == (16, 16)


def test_more_upsamplers_than_two_and_one_in_the_place_of_another(run: Path, larger: Path, tmp_path: Path) -> None:
    third = (
        "upsampler3={resolution: 72, batch_size: 2, crop: 24, model: {kind: unet, widths: [8], blocks: [1], attention: [false], "
    )
    sets = [*stages_of(run), f"upsampler1.path={run / 'upsampler1'}", f"upsampler2={{path: {larger / 'upsampler1'}}}"]
    mine = trained(tmp_path / "mine", run, *sets, third + "cross: [false], head_width: 8, efficient: true}}", steps=1)
    session = load(mine, device="cpu")
    assert session.steps == {"embedder": 4, "prior": 4, "base": 4, "upsampler1": 4, "upsampler2": 1, "upsampler3": 1}
    assert session.sample("a red circle")[0].size == (72, 72)
    photo = Image.new("RGB", (64, 64), "red")
    assert session.sample("", image=photo, options={"start": "upsampler3"})[0].size == (72, 72)
    with pytest.raises(
        UserError, match=r"no such stage is trained here; drawing can start at prior, upsampler1, upsampler2, upsampler3"
    ):
        session.sample("", image=photo, options={"start": "upsampler4"})
    taken = [f"upsampler1.path={run / 'upsampler1'}", f"upsampler2={{path: {mine / 'upsampler2'}}}"]
    again = trained(tmp_path / "again", run, *stages_of(mine), *taken)  # of a run that has it from elsewhere itself
    assert load(again, device="cpu").hashes == {name: known for name, known in session.hashes.items() if name != "upsampler3"}


def test_what_has_moved_is_told_with_all_its_keys(run: Path, workshop: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    mine = trained(tmp_path / "mine", run, *stages_of(other), UPSAMPLER, steps=1)
    before = drawn(mine)
    there = [f"its {name} from {other / name}" for name in ("embedder", "prior", "base")]
    assert taken_by(mine) == [item.removeprefix("its ") for item in there]
    moved = other.rename(tmp_path / "moved")
    calls: list[Callable[[], object]] = [
        lambda: load(mine),
        lambda: export_run(mine, tmp_path / "model"),
        lambda: pipeline.resume(mine),
        lambda: pipeline.resume(mine, sets=[f"base.path={moved / 'base'}"]),
    ]
    for call in calls:
        with pytest.raises(UserError) as error:
            call()
        assert f"{mine} takes {' and '.join(there)}, where there is no trained stage; put them back" in str(error.value)
        assert "--set embeddings.path=NEW/embedder prior.path=NEW/prior base.path=NEW/base" in str(error.value)
    pipeline.resume(mine, stage="upsampler1")  # which reads nothing of them
    pipeline.resume(mine, sets=stages_of(moved))
    assert drawn(mine) == before


def test_what_another_run_takes_from_where_it_has_moved(run: Path, tmp_path: Path) -> None:
    """Base is taken from a run, and its pair from where that run took it."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    base = trained(tmp_path / "base", run, f"embeddings.path={other / 'embedder'}", "upsampler1=null", steps=1)
    other.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=f"{base} takes its embedder from .*: tessera resume {base} --set embeddings.path=NEW"):
        trained(tmp_path / "mine", run, f"embeddings.path={run / 'embedder'}", f"base.path={base / 'base'}", "upsampler1=null")


def test_a_pair_that_was_deleted(run: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(run, tmp_path / "mine"))
    shutil.rmtree(mine / "embedder")
    with pytest.raises(UserError, match=f"{mine / 'embedder'} is gone, .* and stage prior was trained on it"):
        load(mine)
    shutil.rmtree(mine / "prior")
    with pytest.raises(UserError, match=f"{mine / 'embedder'} is gone, .* and stage base was trained on it"):
        load(mine)
    shutil.rmtree(mine / "base")
    photo = Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8))
    assert load(mine, device="cpu").sample("", image=photo)[0].size == (32, 32), "an upsampler alone"


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["base.path={run}/base"], r"was trained on the embeddings of .*/embedder; name it, too: --set embeddings.path="),
        (["base.path={run}/base", "embeddings.path={pair}/embedder"], "with other weights; take stages that were trained on one"),
        (["prior.path={run}/prior", "embeddings={kind: list, path: e.npy}"], "embeddings by a trained pair, and here they come"),
        (["base.path={run}/prior", "embeddings.path={run}/embedder"], "stage of another kind; expected RUN/base"),
        (["base.path={run}/bsae"], "is no trained stage; expected RUN/STAGE, such as runs/dalle2-001/base"),
        (["prior.path={run}/prior", "embeddings.path={run}/embedder", "data.resolution=18"], "of pictures of 16 pixels, and the"),
        (["upsampler1.path={run}"], "name a stage of it, such as"),
        (["upsampler1.path={run}/upsampler1", "data.channels=1"], "pictures of 3 channels, data.channels is 1; set data"),
        (["upsampler1.path={larger}/upsampler1"], "enlarges pictures of 32 pixels, and as upsampler1 it would get"),
        (["upsampler1.path={run}/upsampler1", "upsampler2={resolution: 32}"], "upsampler2.resolution 32 must be larger"),
        (
            ["base.path={run}/base", "prior.path={pair}/prior", "embeddings.path={pair}/embedder"],
            "base was trained on the embeddings of .*/dalle2/run/embedder, and they would come from .*/strangers/embedder",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_before_there_is_a_folder(
    sets: list[str], told: str, run: Path, larger: Path, strangers: Path, tmp_path: Path
) -> None:
    places = {"run": run, "larger": larger, "pair": strangers}
    with pytest.raises(UserError, match=told):
        trained(tmp_path / "new", run, *(item.format(**places) if "{" in item.partition("path=")[2] else item for item in sets))
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def strangers(workshop: Path, run: Path) -> Path:
    """A run with a pair of its own, built as the first one's."""
    place = workshop / "strangers"

    def make() -> None:
        own = [item for item in SETS if item.startswith(("text=", "embedder=", "prior="))]
        trained(place, run, *own, "seed=9", "upsampler1=null", "base.batch_size=2", steps=1)

    return made_once(place, make)


def test_captions_that_are_read_in_two_ways(run: Path, workshop: Path, tmp_path: Path) -> None:
    sets = ["text={kind: bytes, length: 16, width: 16, depth: 1, heads: 1}", "upsampler1.text=true"]
    told = trained(tmp_path / "told", run, UPSAMPLER, *sets, steps=1, stage="upsampler1")
    with pytest.raises(UserError, match="read captions in two ways"):
        trained(tmp_path / "new", run, *stages_of(run), f"upsampler1.path={told / 'upsampler1'}")
    taken = trained(tmp_path / "taken", run, f"upsampler1.path={told / 'upsampler1'}", stage="upsampler1")
    assert load(taken, device="cpu").config.text.length == 16


def test_a_prior_and_a_decoder_of_embeddings_of_two_widths(run: Path, tmp_path: Path) -> None:
    """Of files it is not known what made them, but how wide they are."""
    data = run.parent / "data"
    source = open_source(data, load(run, device="cpu").config.data)
    places, named = [], "embeddings={{kind: list, path: {}}}"
    for width, stage in ((6, "prior"), (8, "base")):
        vectors = tmp_path / f"{width}.npy"
        np.save(vectors, np.random.default_rng(0).normal(size=(len(source), width)).astype(np.float32))
        vectors.with_suffix(".txt").write_text("\n".join(source.key(index) for index in range(len(source))))
        own = [item for item in SETS if item.startswith(("text=", f"{stage}="))]
        trained(tmp_path / stage, run, *own, named.format(vectors), steps=1, stage=stage)
        places.append(f"{stage}.path={tmp_path / stage / stage}")
    with pytest.raises(UserError, match=r"prior learned from embeddings of 6 channels, and .*/base/base from those of 8; take"):
        trained(tmp_path / "new", run, *places, named.format(tmp_path / "8.npy"))
    with pytest.raises(UserError, match="embedding_width=8, which is named or brought by a stage from elsewhere, and those of"):
        trained(tmp_path / "new", run, places[1], named.format(tmp_path / "6.npy"))
    assert not (tmp_path / "new").exists()
