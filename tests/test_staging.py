"""What a stage reads of others: which checkpoint, from this run or another, and what is said when it is not there."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import pipeline, rehearsal
from tessera.config import UserError
from tessera.data import prepare
from tessera.data.token_cache import TokenCache
from tessera.engine.checkpoint import list_checkpoints, weights_hash
from tessera.engine.dist import World
from tessera.engine.loop import Stopped
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tessera.staging import describe
from tests.small import SUPERRES, generated, pictures, small_config, workshop

__all__ = ["generated", "pictures", "workshop"]


@pytest.fixture
def run(generated: Path, tmp_path: Path) -> Path:
    """A copy to go on with."""
    return Path(shutil.copytree(generated, tmp_path / "run"))


def manifest(run: Path, stage: str) -> dict[str, Any]:
    """Of the newest checkpoint."""
    found: dict[str, Any] = json.loads((list_checkpoints(run / stage / "checkpoints")[-1] / "manifest.json").read_text())
    return found


def hash_at(run: Path, stage: str, step: int) -> str:
    return weights_hash(run / stage / "checkpoints" / f"step-{step:06d}")


def weights(run: Path, stage: str) -> bytes:
    return (list_checkpoints(run / stage / "checkpoints")[-1] / "ema.safetensors").read_bytes()


def said_by(error: pytest.ExceptionInfo[UserError]) -> str:
    return str(error.value)


# ---- within a run


def test_cached_ids_are_those_that_a_user_gets(generated: Path, pictures: Path) -> None:
    (folder,) = (generated / "cache").iterdir()
    cache, session = TokenCache(folder), load(generated, device="cpu")
    source = pipeline.open_source(session.config)
    files = [source.path(index) for index in range(len(source))]
    wanted = session.encode(*files).numpy()
    assert np.array_equal(np.stack([cache.ids(index, 0) for index in range(len(source))]), wanted)


def test_the_manifest_names_what_a_stage_was_trained_on(generated: Path) -> None:
    assert manifest(generated, "base")["needs"] == {"tokenizer": hash_at(generated, "tokenizer", 3)}
    assert manifest(generated, "tokenizer")["needs"] == {}


def test_base_goes_on_with_the_tokenizer_that_it_was_trained_on(run: Path, tmp_path: Path) -> None:
    """Whatever became of it since."""
    first = hash_at(run, "tokenizer", 3)
    pipeline.resume(run, sets=["tokenizer.steps=15", "engine.keep_checkpoints=1"], stage="tokenizer")
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run / "tokenizer" / "checkpoints")]
    assert 3 in steps, "retention keeps what another stage was trained on"
    assert 9 not in steps
    assert steps[-1] == 15
    pipeline.resume(run, sets=["base.steps=6"])
    assert manifest(run, "base")["needs"] == {"tokenizer": first}
    assert len(list((run / "cache").iterdir())) == 1
    session = load(run, device="cpu")
    assert session.steps == {"tokenizer": 3, "base": 6}
    assert session.hashes["tokenizer"] == first
    facts = json.loads((export_run(run, tmp_path / "out") / "config.json").read_text())
    assert {name: stage["step"] for name, stage in facts["stages"].items()} == {"tokenizer": 3, "base": 6}
    assert load(tmp_path / "out", device="cpu").sample("a", seed=5)[0].tobytes() == session.sample("a", seed=5)[0].tobytes()


def test_a_tokenizer_that_moved_changes_no_later_stage(run: Path, generated: Path, tmp_path: Path) -> None:
    still = Path(shutil.copytree(generated, tmp_path / "still"))
    pipeline.resume(run, sets=["tokenizer.steps=5"], stage="tokenizer")
    for path in (run, still):
        pipeline.resume(path, sets=["base.steps=5"])
    assert weights(run, "base") == weights(still, "base")
    assert weights(run, "tokenizer") != weights(still, "tokenizer")


def test_a_second_generator_reads_the_tokenizer_of_the_first(run: Path) -> None:
    first = hash_at(run, "tokenizer", 3)
    pipeline.resume(run, sets=["tokenizer.steps=5"], stage="tokenizer")
    pipeline.resume(run, sets=[f"superres={SUPERRES}"])
    assert manifest(run, "superres")["needs"] == {"tokenizer": first}
    session = load(run, device="cpu")
    assert session.steps == {"tokenizer": 3, "base": 3, "superres": 3}
    assert session.sample("a")[0].size == (32, 32)


def test_what_it_was_trained_on_is_gone(run: Path) -> None:
    pipeline.resume(run, sets=["tokenizer.steps=5"], stage="tokenizer")
    shutil.rmtree(run / "tokenizer" / "checkpoints" / "step-000003")
    with pytest.raises(UserError, match="no longer holds the checkpoint on which other stages of this run were trained"):
        pipeline.resume(run, sets=["base.steps=5"])
    with pytest.raises(UserError, match="no longer holds the checkpoint"):
        load(run)


def test_a_stage_before_the_one_that_it_needs(pictures: Path, tmp_path: Path) -> None:
    config = small_config(pictures)
    with pytest.raises(UserError, match="stage base needs the tokenizer, which a new run does not have"):
        pipeline.train(config, run=tmp_path / "run", stage="base")
    assert not list(tmp_path.iterdir()), "refused before there is a folder"
    pipeline.train(config, run=tmp_path / "run", stage="tokenizer")
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(
        UserError, match=r"stage base needs the tokenizer, of which .* holds no checkpoint; train it first"
    ) as error:
        pipeline.resume(tmp_path / "run", stage="base")
    assert "tessera resume" in said_by(error)
    pipeline.resume(tmp_path / "run")
    assert load(tmp_path / "run", device="cpu").steps == {"tokenizer": 3, "base": 3}


# ---- from another run, or an export


@pytest.mark.parametrize("exported", [False, True])
def test_a_tokenizer_from_elsewhere(exported: bool, generated: Path, pictures: Path, tmp_path: Path) -> None:
    """It brings its architecture, it is not trained again, and the result is that of one run."""
    place = export_run(generated, tmp_path / "model") if exported else generated
    changes = {"tokenizer__model": "{widths: [12, 12, 12], blocks: [0, 0, 0]}", "base__needs__tokenizer": place / "tokenizer"}
    config = small_config(pictures, **changes)
    (estimate,) = rehearsal.dry_run(config)
    assert estimate.stage == "base"
    run = pipeline.train(config, run=tmp_path / "run")
    assert weights(run, "base") == weights(generated, "base")
    assert not (run / "tokenizer").exists()
    assert pipeline.resolve(str(run / "config.yaml")).tokenizer.model.widths == (8, 8)
    session, first = load(run, device="cpu"), load(generated, device="cpu")
    assert estimate.parameters["generator"] == sum(p.numel() for p in session.nets["base"]["generator"].parameters())
    assert manifest(run, "base")["needs"] == {"tokenizer": session.hashes["tokenizer"]}
    assert session.sample("a circle", seed=4)[0].tobytes() == first.sample("a circle", seed=4)[0].tobytes()
    pipeline.resume(run, sets=["base.steps=4"])
    assert load(run, device="cpu").steps == {"tokenizer": 3, "base": 4}


def test_it_may_train_on_over_there(run: Path, pictures: Path, tmp_path: Path) -> None:
    mine = pipeline.train(small_config(pictures, base__needs__tokenizer=run / "tokenizer"), run=tmp_path / "mine")
    pipeline.resume(run, sets=["tokenizer.steps=5"], stage="tokenizer")
    pipeline.resume(mine, sets=["base.steps=4"])
    assert load(mine, device="cpu").steps == {"tokenizer": 3, "base": 4}


def test_an_export_of_such_a_run_stands_alone(generated: Path, pictures: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(generated, tmp_path / "other"))
    needs = {
        "base__needs__tokenizer": other / "tokenizer",
        "superres": f"{SUPERRES[:-1]}, needs: {{tokenizer: {other}/tokenizer}}}}",
    }
    run = pipeline.train(small_config(pictures, **needs), run=tmp_path / "run")
    drawn = load(run, device="cpu").sample("a", seed=2)[0].tobytes()
    model = export_run(run, tmp_path / "model")
    shutil.rmtree(other)
    assert str(tmp_path) not in (model / "config.json").read_text(), "no path of this machine"
    session = load(model, device="cpu")
    assert list(session.steps) == ["tokenizer", "base", "fine_tokenizer", "superres"]
    assert session.sample("a", seed=2)[0].tobytes() == drawn


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere/tokenizer", "nowhere is no run folder"),
        ("{run}/tokeniser", r"tokeniser is no trained stage; expected RUN/STAGE, such as runs/muse-001/tokenizer"),
        ("{run}", "name a stage of it"),
        ("{empty}/tokenizer", "no checkpoint in .* is intact: there is none"),
    ],
)
def test_a_tokenizer_that_is_not_there(place: str, said: str, generated: Path, pictures: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(generated / "config.yaml", empty)
    where = place.format(run=generated, empty=empty)
    with pytest.raises(UserError, match=said):
        pipeline.train(small_config(pictures, base__needs__tokenizer=where), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_other_channels(generated: Path, pictures: Path, tmp_path: Path) -> None:
    config = small_config(pictures, data__channels=1, base__needs__tokenizer=generated / "tokenizer")
    with pytest.raises(UserError, match=r"was trained on pictures of 3 channels, data.channels is 1; set data.channels=3"):
        pipeline.train(config, run=tmp_path / "run")


# ---- captions


@pytest.mark.parametrize(("budget", "missing", "refused"), [(0.1, 3, False), (0.1, 4, True), (0, 1, True), (1, 30, False)])
def test_captions_that_are_missing(budget: float, missing: int, refused: bool, pictures: Path, tmp_path: Path) -> None:
    source = pipeline.open_source(small_config(pictures))
    data = [{"key": source.key(i), "image": source.read(i), "caption": None if i < missing else "a"} for i in range(30)]
    config = small_config(pictures, data__uncaptioned_budget=budget, tokenizer__steps=1, base__steps=1)
    if not refused:
        pipeline.train(config, data=data, run=tmp_path / "run")
        return
    with pytest.raises(
        UserError, match=rf"^{missing} of 30 samples have no caption, more than data.uncaptioned_budget={budget:g}"
    ):
        pipeline.train(config, data=data, run=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "before anything trains"
    with pytest.raises(UserError, match="have no caption"):
        rehearsal.dry_run(config, data=data)
    run = pipeline.train(config, data=data, run=tmp_path / "run", stage="tokenizer")
    with pytest.raises(UserError, match="have no caption"):
        pipeline.resume(run, data=data)
    silent = small_config(pictures, text="{kind: none}", data__uncaptioned_budget=budget, tokenizer__steps=1, base__steps=1)
    pipeline.train(silent, data=data, run=tmp_path / "silent")


# ---- caches by themselves


def test_caches_by_themselves(run: Path, generated: Path) -> None:
    (folder,) = (run / "cache").iterdir()
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(run / "cache")
    assert pipeline.prepare(run) == {"base": [folder]}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    with pytest.raises(UserError, match="stage tokenizer of recipe muse reads no caches"):
        pipeline.prepare(run, "tokenizer")
    with pytest.raises(UserError, match="no stage is called 'bsae'; did you mean 'base'"):
        pipeline.prepare(run, "bsae")


def test_caches_of_data_that_moved(run: Path, pictures: Path, tmp_path: Path) -> None:
    """The help is that of `resume`, and serves `prepare`, too."""
    here, there = Path(shutil.copytree(pictures, tmp_path / "here")), tmp_path / "there"
    pipeline.resume(run, sets=[f"data.path={here}"])
    here.rename(there)
    told = f"here, the data of this run, is not there any more; if it has moved: tessera resume {run} --set data.path=NEW"
    with pytest.raises(UserError, match=told):
        pipeline.prepare(run)
    pipeline.resume(run, sets=[f"data.path={there}"])
    assert list(pipeline.prepare(run)) == ["base"]


def test_a_signal_ends_the_making_of_caches(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written stays, and is gone on with."""
    shutil.rmtree(run / "cache")
    write_shard = prepare.write_shard

    def signalled(*arguments: Any) -> None:
        write_shard(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(prepare, "SHARD_SAMPLES", 8)
    monkeypatch.setattr(prepare, "write_shard", signalled)
    with pytest.raises(Stopped) as caught:
        pipeline.prepare(run)
    assert str(caught.value) == "stopped by SIGTERM; what is written stays"
    assert caught.value.__notes__ == [str(run), "tessera data prepare"], "the command that goes on with it"
    assert [path.name for path in (run / "cache").rglob("*.npy")] == ["00000.npy"]
    monkeypatch.setattr(prepare, "write_shard", write_shard)
    (folder,) = pipeline.prepare(run)["base"]
    assert TokenCache(folder).num_samples == 30


def test_a_lost_stage_is_trained_again_alike(run: Path, generated: Path) -> None:
    shutil.rmtree(run / "base")
    torch.manual_seed(7)
    pipeline.resume(run)
    assert weights(run, "base") == weights(generated, "base")


def test_a_run_without_its_stage_is_told(generated: Path, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a stage of it, such as"):
        pipeline.train(small_config(pictures, base__needs__tokenizer=generated), run=tmp_path / "run")


# ---- what is told before the first step


def lines_of(config: Any, device: str = "cpu") -> list[str]:
    return list(describe(config, pipeline.open_source(config), World(0, 1, torch.device(device))))


def reading(length: int) -> str:
    return f"{{kind: bytes, length: {length}, width: 16, depth: 1, heads: 2}}"


def test_captions_that_are_cut_are_counted(pictures: Path) -> None:
    source = pipeline.open_source(small_config(pictures))
    lengths = sorted(len((source.caption(index) or "").encode()) for index in range(len(source)))
    cut = [line for line in lines_of(small_config(pictures, text=reading(lengths[-3]))) if "captions are cut" in line]
    assert cut == [
        f"data: {sum(length > lengths[-3] for length in lengths)} of {len(lengths)} captions are cut after {lengths[-3]} bytes, "
        f"and what follows is never learned; the longest has {lengths[-1]}: raise text.length"
    ]
    assert not any("are cut" in line for line in lines_of(small_config(pictures, text=reading(lengths[-1]))))


def test_rejects_are_told_with_how_many_more_there_are(pictures: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pictures / "train", tmp_path / "photos"))
    with (folder / "metadata.jsonl").open("a") as table:
        table.writelines(json.dumps({"file_name": f"missing{number}.png", "text": "a"}) + "\n" for number in range(11))
    rejected = [line for line in lines_of(small_config(folder)) if "rejected" in line or "more;" in line]
    assert len(rejected) == 9
    assert rejected[-1] == "data: and 3 more; `tessera data check` lists them all"


def test_animations_that_are_taken_for_pictures_are_told(pictures: Path, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), (shade, 0, 0)) for shade in range(0, 250, 5)]
    for number in range(40):
        moving = {"save_all": True, "append_images": frames[number + 1 : number + 3]} if number % 2 == 0 else {}
        frames[number].save(tmp_path / f"{number:02d}.gif", **moving)
        (tmp_path / f"{number:02d}.txt").write_text("red")
    (told,) = [line for line in lines_of(small_config(tmp_path)) if "are animations" in line]
    assert told.startswith("data: 20 of 20 files that were looked into are animations, of which the first frame alone is used;")
    (tmp_path / "00.gif").write_bytes(b"no")
    assert "data: 19 of 20 files" in "".join(lines_of(small_config(tmp_path)))
    assert not any("are animations" in line for line in lines_of(small_config(pictures)))


def test_a_preset_for_a_gpu_is_told_on_a_cpu(pictures: Path) -> None:
    config = pipeline.resolve("muse", preset="small", data=str(pictures))
    assert lines_of(config)[:1] == ["recipe muse, preset small"]
    assert lines_of(config)[1].startswith("preset small is meant for a GPU, and this is a CPU")
    assert not any("meant for a GPU" in line for line in [*lines_of(config, "meta"), *lines_of(small_config(pictures))])


def test_a_dry_run_says_so_too(pictures: Path) -> None:
    said: list[str] = []
    rehearsal.dry_run(small_config(pictures, text=reading(8)), stage="tokenizer", say=said.append)
    assert any("captions are cut after 8 bytes" in line for line in said)


def test_what_a_later_stage_refuses_is_not_written(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.glob("config*")}
    with pytest.raises(UserError, match=r"does not fit net 'generator' .* undo what --set changed"):
        pipeline.resume(run, sets=["base.model.width=32", "base.steps=4"])
    assert {path.name: path.read_bytes() for path in run.glob("config*")} == before
