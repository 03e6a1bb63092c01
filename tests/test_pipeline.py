"""What Python users call: `resolve`, `train`, `resume`, `dry_run`, with a folder, a dataset or a stage of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import tessera
from tessera import pipeline, rehearsal
from tessera.batches import ImageBatch
from tessera.config import OptimConfig, UserError, dump_yaml
from tessera.contracts import Best, Context, Loss, Nets, Stage, Turn
from tessera.data.sources import ImageFolder
from tessera.data.synth.shapes import write_shapes
from tessera.engine.dist import World
from tessera.engine.loop import NonFinite
from tessera.engine.track import read_metrics
from tessera.media.images import UnreadableImage
from tessera.recipes import RECIPES
from tessera.sampling import session
from tessera.sampling.session import load
from tessera.staging import build_stage

SETS = (
    "engine.device=cpu",
    "engine.log_every_steps=1",
    "data.resolution=16",
    "data.validation_fraction=0.2",
    "tokenizer.batch_size=4",
    "tokenizer.model={widths: [8, 8], blocks: [1, 1]}",
    "tokenizer.critic=null",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
    "base.batch_size=4",
    "base.model={width: 16, depth: 1, heads: 2}",
)
WORLD = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "shapes"
    write_shapes(path, 30, 0, image_size=32)
    return path


def config(data: Path | None = None, steps: int = 3, sets: tuple[str, ...] = ()) -> Any:
    path, own = None if data is None else str(data), {item.partition("=")[0] for item in sets}
    kept = [item for item in SETS if item.partition("=")[0] not in own]  # each key once
    return pipeline.resolve("muse", preset="tiny", data=path, steps=steps, sets=[*kept, *sets])


# ---- configuration


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: muse\npreset: tiny\nseed: 5\ndata: {resolution: 48}\ntokenizer: {steps: 7, batch_size: 9}\n")
    made = pipeline.resolve(str(file), data="there", steps=11, sets=["tokenizer.batch_size=13"])
    assert (made.preset, made.seed, made.data.resolution, made.data.path) == ("tiny", 5, 48, "there")
    assert (made.tokenizer.steps, made.tokenizer.batch_size) == (11, 13)
    assert made.tokenizer.model.widths == (16, 48, 96)  # the preset's
    assert pipeline.resolve(str(file), preset="base").tokenizer.model.widths == (128, 128, 256, 256, 512)
    assert pipeline.resolve(str(file), preset="base").data.resolution == 48


def test_a_preset_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "whole.yaml").write_text(dump_yaml(pipeline.resolve("muse", preset="small")))
    with pytest.raises(UserError, match=r"preset tiny changes nothing: .*whole\.yaml sets every value itself"):
        pipeline.resolve(str(tmp_path / "whole.yaml"), preset="tiny")
    assert pipeline.resolve(str(tmp_path / "whole.yaml"), preset="small") == pipeline.resolve("muse", preset="small")


@pytest.mark.parametrize("preset", ["tiny", "base"])
def test_a_preset_by_set_brings_its_values(preset: str) -> None:
    assert pipeline.resolve("muse", sets=[f"preset={preset}"]) == pipeline.resolve("muse", preset=preset)


def test_small_is_the_default() -> None:
    assert pipeline.resolve("muse").preset == "small"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pipeline.resolve("mose"), r"no recipe and no file is called 'mose'; did you mean 'muse'\?"),
        (lambda: pipeline.resolve("muse", preset="smal"), r"has no preset 'smal'; did you mean 'small'\?"),
        (lambda: pipeline.resolve("muse", sets=["preset=huge"]), "has no preset 'huge'"),
        (lambda: pipeline.resolve("muse", stage="tokeniser"), r"no stage is called 'tokeniser'; did you mean 'tokenizer'\?"),
        (lambda: pipeline.resolve("nowhere.yaml"), "nowhere.yaml does not exist"),
        (lambda: pipeline.train(config(), run="x"), "no data: give a folder with --data PATH"),
        (lambda: pipeline.train("muse", stages={"tokeniser": build_plain}), r"no stage is called 'tokeniser'; did you mean"),
        (lambda: pipeline.resume("nowhere"), "nowhere is no run folder"),
    ],
)
def test_wrong_names_are_the_users_errors(
    call: Callable[[], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        call()
    assert not list(tmp_path.iterdir())


# ---- a dataset of the user's own


@dataclass
class Sample:
    key: str
    image: Any
    caption: str | None = None


class Mine:
    """Map-style, with pictures of every kind that is allowed."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        pixels = np.full((20, 17, 3), 20 * index, np.uint8)
        if index % 3 == 0:
            return {"key": f"k{index}", "image": Image.fromarray(pixels), "caption": "a picture"}
        image = pixels if index % 3 == 1 else Image.fromarray(pixels).convert("L")
        return Sample(f"k{index}", image, None if index == 4 else "grey")


def test_a_file_that_names_no_recipe_is_told_which_one_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(tessera_yaml(folder).replace("recipe: muse\n", ""))
    run = tessera.train(file, run=tmp_path / "run")
    assert "recipe muse, preset tiny" in capsys.readouterr().err.splitlines()[1]
    assert "recipe muse, preset tiny" in (run / "log.txt").read_text()
    told = r"mine.yaml names no recipe, so it is read as one for muse; write recipe: NAME in it"
    file.write_text("prior: {steps: 3}\n")
    with pytest.raises(UserError, match=told):
        pipeline.resolve(str(file))
    file.write_text("recipe: muse\nprior: {steps: 3}\n")
    with pytest.raises(UserError, match=r"prior .*unknown key") as error:
        pipeline.resolve(str(file))
    assert "names no recipe" not in str(error.value)


def test_a_dataset_instead_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tessera.train(config(), data=Mine(), run=tmp_path / "run")
    assert run == tmp_path / "run"
    assert "data: 12 samples" in capsys.readouterr().err
    assert (run / "tokenizer" / "checkpoints" / "latest").read_text() == "step-000003\n"
    assert pipeline.resolve(str(run / "config.yaml")).data.path is None
    with pytest.raises(UserError, match="no data"):
        tessera.resume(run, sets=["tokenizer.steps=5"])
    tessera.resume(run, sets=["tokenizer.steps=5"], data=Mine())
    assert [line["step"] for line in read_metrics(run / "tokenizer" / "metrics.jsonl") if line["kind"] == "train"] == [
        1,
        2,
        3,
        4,
        5,
    ]
    manifest = json.loads((run / "tokenizer" / "checkpoints" / "step-000005" / "manifest.json").read_text())
    assert manifest["data"]["num_samples"] == 12


def test_a_folder_and_a_dataset_of_the_same_samples_train_alike(folder: Path, tmp_path: Path) -> None:
    source = ImageFolder.open(folder)
    first = tessera.train(config(folder), run=tmp_path / "a")
    second = tessera.train(config(), data=[source[index] for index in range(len(source))], run=tmp_path / "b")
    assert weights(first) == weights(second)


def test_a_path_or_a_name_in_place_of_a_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(tessera_yaml(folder))
    run = tessera.train(tmp_path / "config.yaml", run=tmp_path / "a")
    assert weights(run) == weights(tessera.train(config(), data=folder, run=str(tmp_path / "b")))


def tessera_yaml(folder: Path) -> str:
    return dump_yaml(config(folder))


def weights(run: Path, step: int = 3) -> bytes:
    return (run / "tokenizer" / "checkpoints" / f"step-{step:06d}" / "ema.safetensors").read_bytes()


# ---- a stage of the user's own


def build_plain() -> Stage:
    """One convolution that learns the identity."""
    net = nn.Conv2d(3, 3, 3, padding=1)

    def loss(nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        error = (nets["mine"](batch.images) - batch.images).square().flatten(1).mean(1) * batch.valid
        return Loss(error.sum(), batch.valid.sum().float(), {"mse": error.detach().sum()})

    turn = Turn(name="mine", trains=("mine",), loss=loss)
    optim = OptimConfig(lr=0.03, warmup_steps=0, schedule="constant")
    return Stage(
        nets={"mine": net},
        turns=[turn],
        optim={"mine": optim},
        best=Best("mse", higher_is_better=False),
        averaged=("mine",),
        measure=loss,
    )


def test_a_stage_in_the_place_of_ours(folder: Path, tmp_path: Path) -> None:
    mine = {"stage": "tokenizer", "stages": {"tokenizer": build_plain}}
    run = tessera.train(config(folder, steps=30), run=tmp_path / "run", **mine)
    saved = load_file(run / "tokenizer" / "checkpoints" / "step-000030" / "model.safetensors")
    assert set(saved) == {"mine/weight", "mine/bias"}
    lines = read_metrics(run / "tokenizer" / "metrics.jsonl")
    losses = [line["mine/loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0] / 3
    assert [line["mse"] for line in lines if line["kind"] == "valid"]
    assert not (run / "tokenizer" / "samples").exists()  # it has no preview
    tessera.resume(run, sets=["tokenizer.steps=31"], **mine)
    assert (run / "tokenizer" / "checkpoints" / "latest").read_text() == "step-000031\n"
    (estimate,) = rehearsal.dry_run(config(folder), **mine)
    assert estimate.parameters == {"mine": 84}


# ---- resume


def test_a_change_that_does_not_fit_leaves_the_run_as_it_was(folder: Path, tmp_path: Path) -> None:
    run = tessera.train(config(folder), run=tmp_path / "run")
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="does not fit net 'tokenizer'"):
        tessera.resume(run, sets=["tokenizer.model.widths=[12, 12]", "tokenizer.steps=5"])
    assert (run / "config.yaml").read_bytes() == before
    tessera.resume(run, sets=["tokenizer.steps=4", "engine.log_every_steps=2"])
    assert pipeline.resolve(str(run / "config.yaml")).tokenizer.steps == 4
    assert (run / "config-1.yaml").read_bytes() == before  # nothing is lost
    assert weights(run, 4)


@pytest.mark.parametrize("change", ["seed=1", "tokenizer.batch_size=8"])
def test_what_the_order_depends_on_cannot_change(folder: Path, tmp_path: Path, change: str) -> None:
    run = tessera.train(config(folder, steps=1), run=tmp_path / "run")
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError, match=f"--set {change}: this run was made with"):
        tessera.resume(run, sets=[change])
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_finished_run_says_so_and_a_change_of_data_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tessera.train(config(), data=Mine(), run=tmp_path / "run", stage="tokenizer")
    tessera.resume(run, sets=[f"data.path={folder}"], stage="tokenizer")
    said = capsys.readouterr().err
    assert "tokenizer: all 3 steps are done" in said
    assert "the data has changed since this run was saved" in said
    assert f"changed: data.path: None -> {folder}" in said


def test_a_new_run_never_takes_an_existing_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    with pytest.raises(UserError, match="tessera resume"):
        tessera.train(config(folder), run=tmp_path / "taken")
    assert [str(tessera.train(config(folder, steps=1))) for _ in range(2)] == ["runs/muse-001", "runs/muse-002"]


# ---- what must not matter, and what must work


def test_workers_and_rhythms_change_no_weight(folder: Path, tmp_path: Path) -> None:
    dropout = "tokenizer.model={widths: [8, 8], blocks: [1, 1], dropout: 0.2}"
    plain = tessera.train(config(folder, sets=(dropout,)), run=tmp_path / "a")
    busy = ("data.workers=2", "engine.validate_every_steps=1", "engine.preview_every_steps=1", "engine.save_every_steps=1")
    assert weights(tessera.train(config(folder, sets=(dropout, *busy)), run=tmp_path / "b")) == weights(plain)
    other = ("engine.log_every_steps=7", "engine.keep_checkpoints=1", "data.prefetch=1")
    assert weights(tessera.train(config(folder, sets=(dropout, *other)), run=tmp_path / "c")) == weights(plain)
    assert weights(tessera.train(config(folder, sets=(dropout, "seed=1")), run=tmp_path / "d")) != weights(plain)


@pytest.mark.parametrize(
    "sets",
    [
        ("data.channels=1",),
        ("data.channels=4", "tokenizer.critic={widths: [8, 8], start_step: 1}"),
        ("data.validation_fraction=0.0",),
        ("engine.precision=bf16", "tokenizer.critic={widths: [8, 8], start_step: 1, adaptive: true, penalty: {every: 1}}"),
        ("tokenizer.model={widths: [8], blocks: [0]}",),
        ("tokenizer.model={widths: [8, 8, 8, 8, 8], blocks: [0, 0, 0, 0, 1]}", "tokenizer.batch_size=50"),
    ],
    ids=["grey", "alpha", "no validation", "bf16", "stride 1", "one token"],
)
def test_unusual_configs_train(folder: Path, tmp_path: Path, sets: tuple[str, ...]) -> None:
    run = tessera.train(config(folder, steps=2, sets=sets), run=tmp_path / "run")
    assert (run / "tokenizer" / "samples" / "step-000002.png").stat().st_size > 100
    for line in read_metrics(run / "tokenizer" / "metrics.jsonl"):
        assert None not in line.values()


# ---- the rest


def test_a_batch_larger_than_the_data_set(folder: Path, tmp_path: Path) -> None:
    """It goes through the samples as often as it takes; none is left out and none invented."""
    run = tessera.train(config(folder, steps=2, sets=("tokenizer.batch_size=70",)), run=tmp_path / "run")
    lines = [line for line in read_metrics(run / "tokenizer" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["tokenizer/weight"] for line in lines] == [70, 70]
    assert [line["replaced"] for line in lines] == [0, 0]


def test_an_empty_validation_split_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tessera.train(config(folder, steps=2, sets=("data.validation_fraction=0.0",)), run=tmp_path / "run")
    assert "no sample falls into the validation split, so there is no validation and no best" in capsys.readouterr().err
    assert {line["kind"] for line in read_metrics(run / "tokenizer" / "metrics.jsonl")} == {"train"}
    assert not (run / "tokenizer" / "checkpoints" / "best").exists()


def test_initial_weights_depend_on_the_seed_alone(folder: Path) -> None:
    def first(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(noise)
        made = config(folder, sets=(f"seed={seed}",))
        (train,) = pipeline.pick(RECIPES["muse"].steps(made), "tokenizer")
        stage, _ = build_stage(made, train, {}, WORLD)
        return torch.cat([p.detach().flatten() for p in stage.nets["tokenizer"].parameters()])

    assert torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))


def test_more_ranks_than_samples_in_a_batch(folder: Path) -> None:
    made = config(folder)
    for train in RECIPES["muse"].steps(made):
        with pytest.raises(UserError, match=rf"{train.name}.batch_size 4 is smaller than the number of ranks 5"):
            build_stage(made, train, {}, World(4, 5, torch.device("cpu")))


def test_slices_with_unequal_numbers_of_micro_batches(folder: Path) -> None:
    made = config(folder, sets=("engine.parallel=shard", "engine.micro_batch_size=1"))
    train = RECIPES["muse"].steps(made)[0]
    with pytest.raises(
        UserError, match=r"parallel=shard needs equally many micro-batches on 3 ranks, and tokenizer\.batch_size 4"
    ):
        build_stage(made, train, {}, World(2, 3, torch.device("cpu")))


def test_numbers_that_explode_stop_the_run_with_the_samples_named(folder: Path, tmp_path: Path) -> None:
    wild = ("tokenizer.optim={lr: 1.0e38, warmup_steps: 0, max_grad_norm: null}",)
    with pytest.raises(NonFinite, match=r"turn 'tokenizer': loss .*not finite: losses of the samples 0000\d\d"):
        tessera.train(config(folder, steps=9, sets=wild), run=tmp_path / "run")


def test_data_that_moved(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "here")
    run = pipeline.train(config(tmp_path / "here"), run=tmp_path / "run")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(UserError, match=r"here, the data of this run, is not there any more; .* --set data\.path=NEW"):
        pipeline.resume(run)
    pipeline.resume(run, sets=[f"data.path={tmp_path / 'there'}"])


def test_a_dry_run_on_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for index in range(6):
        (tmp_path / f"{index}.png").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"gives no finite loss; samples that cannot be read: .*\.png"):
        rehearsal.dry_run(config(tmp_path), stage="tokenizer")


def test_a_dry_run_shows_each_stage_once_it_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    tried = rehearsal._measure
    monkeypatch.setattr(rehearsal, "_measure", lambda config, train, *rest: told.append("try") or tried(config, train, *rest))
    rehearsal.dry_run(config(folder), show=lambda estimate: told.append(estimate.stage))
    assert told == ["try", "tokenizer", "try", "base"]


def test_a_config_without_any_loss_is_refused() -> None:
    nothing = ["tokenizer.loss={l1: 0, l2: 0}", "tokenizer.critic=null"]
    with pytest.raises(UserError, match="nothing would be learned"):
        pipeline.resolve("muse", preset="tiny", sets=nothing)
    chain = "tokenizer.model.quantizer={kind: residual, num_quantizers: 9, quantizer: {kind: fsq}}"
    with pytest.raises(UserError, match="finer than fp32 can tell; at most 8 links"):
        pipeline.resolve("muse", preset="tiny", sets=[chain])


def test_a_dry_run_writes_nothing_and_foresees_the_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = config(folder, sets=("engine.keep_checkpoints=1", "tokenizer.critic={widths: [8, 8], start_step: 2}"))
    estimates = rehearsal.dry_run(made)
    assert not list(tmp_path.iterdir())
    assert [estimate.stage for estimate in estimates] == ["tokenizer", "base"]
    assert set(estimates[0].losses) == {"tokenizer", "critic"}
    run = tessera.train(made)
    for estimate in estimates:
        assert estimate.seconds == pytest.approx(3 * 4 / estimate.items_per_s)
        saved = run / estimate.stage / "checkpoints" / "step-000003"
        written = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
        assert estimate.disk_bytes == pytest.approx(3 * written, rel=0.3)  # the one kept, best, and the one being written
        for name, net in load(run, device="cpu").nets[estimate.stage].items():
            assert estimate.parameters[name] == sum(p.numel() for p in net.parameters())


def test_trained_nets_are_the_averaged_ones(folder: Path, tmp_path: Path) -> None:
    run = tessera.train(config(folder), run=tmp_path / "run")
    saved = load_file(run / "tokenizer" / "checkpoints" / "step-000003" / "ema.safetensors")
    net = load(run, device="cpu").nets["tokenizer"]["tokenizer"]
    assert all(torch.equal(value, saved[f"tokenizer/{name}"]) for name, value in net.state_dict().items())
    with pytest.raises(UserError, match="no checkpoint called 'oldest'"):
        load(run, device="cpu", checkpoint="oldest")


def test_the_package_offers_train_resume_and_load_only() -> None:
    assert tessera.train is pipeline.train
    assert tessera.resume is pipeline.resume
    assert tessera.load is session.load
    assert tessera.__all__ == ["load", "resume", "train"]
    with pytest.raises(AttributeError, match="no attribute 'sample'"):
        tessera.sample  # noqa: B018


class Spoilt(ImageFolder):
    """A folder whose pictures become unreadable after a while."""

    reads = 0
    most = 10**9

    def read(self, index: int) -> Any:
        type(self).reads += 1
        if type(self).reads > type(self).most:
            raise UnreadableImage(self.path(index), "it is gone")
        return super().read(index)


def test_what_was_trained_is_kept_when_files_fail(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Spoilt.reads, Spoilt.most = 0, 12  # three steps of four, then nothing can be read any more
    with pytest.raises(UserError, match=r"up to step 4: 4, more than.*it is gone.*repair or remove") as caught:
        tessera.train(config(steps=9, sets=("engine.save_every_steps=3",)), data=Spoilt.open(folder), run=tmp_path / "run")
    assert caught.value.__notes__ == [str(tmp_path / "run")]
    assert (tmp_path / "run" / "tokenizer" / "checkpoints" / "latest").read_text() == "step-000003\n"
    assert "ended: UserError" in (tmp_path / "run" / "log.txt").read_text()
    Spoilt.most = 10**9
    tessera.resume(tmp_path / "run", data=Spoilt.open(folder))
    assert "at step 3" in capsys.readouterr().err
    unbroken = tessera.train(config(steps=9), data=ImageFolder.open(folder), run=tmp_path / "unbroken")
    assert weights(unbroken, 9) == weights(tmp_path / "run", 9)


def test_paths_are_kept_absolute(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    run = tessera.train(config(Path("shapes")), run=tmp_path / "run")
    tessera.resume(run, sets=["data.path=shapes", "tokenizer.steps=4"])
    monkeypatch.chdir(tmp_path)
    tessera.resume("run", sets=["tokenizer.steps=5"])
    assert pipeline.resolve(str(run / "config.yaml")).data.path == str(folder)


def test_a_change_is_kept_even_where_nothing_is_left_to_do(folder: Path, tmp_path: Path) -> None:
    run = tessera.train(config(folder), run=tmp_path / "run")
    tessera.resume(run, sets=["engine.keep_checkpoints=7"])
    assert pipeline.resolve(str(run / "config.yaml")).engine.keep_checkpoints == 7


def test_a_turn_that_never_starts_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = ("tokenizer.critic={widths: [8, 8], start_step: 50, warmup_steps: 10}",)
    tessera.train(config(folder, steps=2, sets=late), run=tmp_path / "run")
    assert "turn critic starts at step 40, so in 2 steps it never trains" in capsys.readouterr().err


def test_the_flags_of_the_command_line_have_their_place_in_python(folder: Path, tmp_path: Path) -> None:
    run = tessera.train("muse", data=folder, preset="tiny", steps=2, sets=list(SETS), run=tmp_path / "run")
    assert (run / "tokenizer" / "checkpoints" / "latest").read_text() == "step-000002\n"
    with pytest.raises(UserError, match="a config object is complete"):
        tessera.train(config(folder), steps=2, run=tmp_path / "other")


def test_steps_reach_a_stage_that_only_a_set_makes_and_yield_to_one_that_names_them() -> None:
    made = pipeline.resolve("meshgpt", preset="tiny", steps=7, sets=["tokenizer.kind=graph", "base.steps=3"])
    assert (made.tokenizer.steps, made.base.steps) == (7, 3)
    assert pipeline.resolve("muse", preset="tiny", steps=7, sets=["superres.resolution=64"]).superres.steps == 7
