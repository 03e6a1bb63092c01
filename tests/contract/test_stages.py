"""What every stage of every recipe must do. A new recipe is tested once `SMALL` says how to make it small; a test asks for it."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from PIL import Image

from tessera import pipeline
from tessera.batches import Batch
from tessera.config import build, dump_yaml, layer_of, read_yaml
from tessera.contracts import Context, Loss, Nets, Recipe, Stage, Train
from tessera.data.synth.digits import write_digits
from tessera.data.synth.furniture import write_furniture
from tessera.data.synth.shapes import write_shapes
from tessera.engine.dist import World
from tessera.engine.loop import Stopped
from tessera.engine.shard import sharded
from tessera.engine.step import Setting, train_step
from tessera.engine.track import read_metrics
from tessera.engine.validate import draw_preview, validate
from tessera.recipes import RECIPES
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tests.prepared import prepared

WORLD = World(0, 1, torch.device("cpu"))
STEPS = 6


@dataclass(frozen=True)
class Small:
    """How to run a recipe in seconds: its data, and what to change in its tiny preset; `quiet` is without dropout and noise."""

    write_data: Callable[[Path], object]
    sets: tuple[str, ...]
    quiet: tuple[str, ...]


MESH = (
    "data.validation_fraction=0.3",
    "data.bins=32",
    "data.scale=1.2",
    "text={kind: bytes, length: 64, width: 16, depth: 1, heads: 2}",
    "base.batch_size=5",
    "base.model={width: 32, depth: 2, heads: 2, inner_width: 16, inner_depth: 1, dropout: 0.1}",
    "base.optim={lr: 3e-3, warmup_steps: 2}",
    "sample={max_faces: 12}",
)
QUIET_MESH = (
    "base.model={width: 64, depth: 2, heads: 2, inner_width: 64, inner_depth: 1}",
    "base.loss={text_dropout_prob: 0, length_dropout_prob: 0}",
    "base.optim={lr: 1e-2, warmup_steps: 2, schedule: constant, weight_decay: 0}",
    "data.scale=1",
)

CLIPS = (
    "data.resolution=16",
    "data.frames=9",
    "data.validation_fraction=0.2",
    "data.start=random",
    "data.flip=true",
    "data.image_share=0.25",
    "data.views=2",
    "tokenizer.batch_size=5",
    "tokenizer.optim={lr: 3e-3, warmup_steps: 2}",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "base.batch_size=5",
    "base.model={width: 32, depth: 2, heads: 2, dropout: 0.1}",
    "base.optim={lr: 3e-3, warmup_steps: 2}",
    "base.critic={kind: net, model: {width: 16, depth: 1, heads: 2}}",
    "sample={steps: 3, fps: 8, overlap: 2}",
)
ONE_BY_ONE = (  # the same clips with the other generator
    *(item for item in CLIPS if not item.startswith(("base.model=", "base.critic=", "sample="))),
    "data.sketch=edges",
    "base.model={width: 32, depth: 2, heads: 2, dropout: 0.1, nearby: {frames: 2, height: 3, width: 3}, sketch_window: 3}",
    "sample={fps: 8}",
)
QUIET_CLIPS = (
    "tokenizer.critic=null",
    "base.model={width: 32, depth: 2, heads: 2, dropout: 0}",
    "base.loss={label_smoothing: 0, text_dropout_prob: 0, frames: null}",
    "base.optim={lr: 1e-2, warmup_steps: 2, schedule: constant}",
    "data.image_share=null",
)

CASCADE = (
    "data.resolution=16",
    "data.validation_fraction=0.2",
    "data.flip=true",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "embedder.batch_size=6",
    "embedder.loss.group=2",
    "embedder.model={width: 8, widths: [8, 16], blocks: 1, dropout: 0.1}",
    "embedder.optim={lr: 3e-3, warmup_steps: 2}",
    "prior.batch_size=5",
    "prior.model={width: 32, depth: 1, heads: 2, self_conditioning: true}",
    "prior.process={kind: edm}",
    "prior.optim={lr: 3e-3, warmup_steps: 2}",
    "base.batch_size=5",
    "base.self_conditioning=true",
    "base.model={kind: dit, patch: 4, width: 32, depth: 1, heads: 2, dropout: 0.1}",
    "base.process={kind: ddpm, predicts: v, learned_variance: true}",
    "base.optim={lr: 3e-3, warmup_steps: 2}",
    "upsampler1.batch_size=5",
    "upsampler1.crop=16",
    "upsampler1.text=true",
    "upsampler1.model={widths: [16, 16], blocks: [1, 1], attention: [false, true], cross: [false, false], head_width: 8, "
    "efficient: true, dropout: 0.1}",
    "upsampler1.optim={lr: 3e-3, warmup_steps: 2}",
    "sample={sampler: ancestral, steps: 3, prior: {steps: 2}, upsampler: {steps: 2}}",
)
QUIET_CASCADE = (
    "embedder.model={width: 8, widths: [8, 16], blocks: 1}",
    "prior.loss={text_dropout_prob: 0}",
    "prior.model={width: 32, depth: 1, heads: 2}",
    "prior.process={kind: ddpm, predicts: clean}",
    "prior.optim={lr: 1e-2, warmup_steps: 2, schedule: constant}",
    "base.model={kind: dit, patch: 4, width: 64, depth: 1, heads: 2}",
    "base.process={kind: ddpm, predicts: clean}",
    "base.loss={text_dropout_prob: 0, embedding_dropout_prob: 0}",
    "upsampler1.model={widths: [16, 16], blocks: [1, 1], attention: [false, true], cross: [false, false], head_width: 8, "
    "efficient: true}",
    "upsampler1.optim={lr: 1e-2, warmup_steps: 2, schedule: constant}",
    "upsampler1.loss={text_dropout_prob: 0}",
)

SMALL = {
    "phenaki": Small(
        lambda out: write_digits(out, 40, 0, image_size=32, frames=11),
        (
            *CLIPS,
            "tokenizer.model={kind: conv, widths: [16, 16, 16], blocks: [1, 1, 1], time_downsamples: 2, dropout: 0.1}",
            "tokenizer.critic={kind: clips, widths: [8, 8], start_step: 3, warmup_steps: 1, adaptive: true, penalty: {every: 2}}",
        ),
        quiet=(*QUIET_CLIPS, "tokenizer.model={kind: conv, widths: [16, 16, 16], blocks: [1, 1, 1], time_downsamples: 2}"),
    ),
    "phenaki-cvivit": Small(
        lambda out: write_digits(out, 40, 0, image_size=32, frames=11),
        (
            *CLIPS,
            "tokenizer.model={kind: cvivit, width: 32, heads: 2, patch: 4, time_patch: 2, window: 3, spatial_depth: 1, "
            "temporal_depth: 1, dropout: 0.1}",
            "tokenizer.critic={kind: frames, widths: [8, 8], start_step: 3, warmup_steps: 1, lecam: {}}",
        ),
        quiet=(
            *QUIET_CLIPS,
            "tokenizer.model={kind: cvivit, width: 64, heads: 2, patch: 4, time_patch: 2, window: 3, spatial_depth: 1, "
            "temporal_depth: 1}",
        ),
    ),
    "phenaki-frames": Small(
        lambda out: write_digits(out, 40, 0, image_size=32, frames=11),
        (
            *CLIPS,
            "tokenizer.model={kind: frames, widths: [16, 16, 16], blocks: [1, 1, 1], dropout: 0.1}",
            "tokenizer.critic={kind: clips, widths: [8, 8], start_step: 3, warmup_steps: 1, adaptive: true, penalty: {every: 2}}",
        ),
        quiet=(*QUIET_CLIPS, "tokenizer.model={kind: frames, widths: [16, 16, 16], blocks: [1, 1, 1]}"),
    ),
    "nuwa": Small(
        lambda out: write_digits(out, 40, 0, image_size=32, frames=11),
        (*ONE_BY_ONE, "tokenizer.model={kind: conv, widths: [8, 8, 8], blocks: [0, 0, 1], time_downsamples: 2}"),
        quiet=(
            "base.model={width: 32, depth: 2, heads: 2, dropout: 0, nearby: {frames: 2, height: 3, width: 3}, sketch_window: 3}",
            "base.loss={text_dropout_prob: 0, length_dropout_prob: 0, sketch_dropout_prob: 0, sketch_gaps_prob: 0}",
            "base.optim={lr: 1e-2, warmup_steps: 2, schedule: constant, weight_decay: 0}",
            "tokenizer.model={kind: conv, widths: [16, 16, 16], blocks: [1, 1, 1], time_downsamples: 2}",
            "data.image_share=null",
        ),
    ),
    "muse": Small(
        lambda out: write_shapes(out, 40, 0, image_size=32),
        (
            "data.resolution=16",
            "data.validation_fraction=0.2",
            "data.flip=true",
            "tokenizer.batch_size=5",
            "tokenizer.model={widths: [16, 16], blocks: [1, 1], dropout: 0.1}",
            "tokenizer.critic={widths: [8, 8], start_step: 3, warmup_steps: 1, adaptive: true, penalty: {every: 2}}",
            "tokenizer.optim={lr: 3e-3, warmup_steps: 2}",
            "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
            "data.views=2",
            "base.batch_size=5",
            "base.model={width: 32, depth: 2, heads: 2, dropout: 0.1}",
            "base.optim={lr: 3e-3, warmup_steps: 2}",
            "base.critic={kind: net, model: {width: 16, depth: 1, heads: 2}}",
            "superres.resolution=32",
            "superres.batch_size=5",
            "superres.model={width: 32, depth: 1, heads: 2, self_conditioning: true}",
            "superres.optim={lr: 3e-3, warmup_steps: 2}",
            "sample={steps: 3, superres: {steps: 2}}",
        ),
        quiet=(
            "tokenizer.critic=null",
            "tokenizer.model={widths: [16, 16], blocks: [1, 1]}",
            "base.model={width: 32, depth: 2, heads: 2, dropout: 0}",
            "base.loss={label_smoothing: 0, text_dropout_prob: 0}",
            "superres.loss={label_smoothing: 0, text_dropout_prob: 0, low_noise: 0}",
        ),
    ),
    "dalle2": Small(
        lambda out: write_shapes(out, 40, 0, image_size=32),
        CASCADE,
        quiet=QUIET_CASCADE,
    ),
    "meshgpt": Small(
        lambda out: write_furniture(out, 40, 0),
        MESH,
        quiet=QUIET_MESH,
    ),
    "meshgpt-graph": Small(
        lambda out: write_furniture(out, 40, 0),
        (
            *MESH,
            "tokenizer.kind=graph",
            "tokenizer.batch_size=5",
            "tokenizer.model={coordinate_width: 8, encoder_width: 32, encoder_layers: 2, decoder_width: 32, decoder_blocks: 2, "
            "heads: 2, dropout: 0.1, quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [5, 5, 4]}}}",
            "tokenizer.optim={lr: 3e-3, warmup_steps: 2}",
        ),
        quiet=(
            *QUIET_MESH,
            "tokenizer.model={coordinate_width: 16, encoder_width: 128, encoder_layers: 2, decoder_width: 128, "
            "decoder_blocks: 2, heads: 2, quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [5, 5, 4]}}}",
            "tokenizer.optim={lr: 3e-3, warmup_steps: 2, schedule: constant}",
        ),
    ),
}
"""A recipe, or one of its variants behind a dash."""
ENGINE = (
    "engine.device=cpu",
    "engine.micro_batch_size=3",
    "engine.log_every_steps=1",
    "engine.validate_every_steps=2",
    "engine.preview_every_steps=3",
    "engine.save_every_steps=4",
    "engine.keep_checkpoints=9",
    "engine.preview_samples=3",
)

PRESETS = [pytest.param(recipe, preset, id=f"{recipe.name}-{preset}") for recipe in RECIPES.values() for preset in recipe.presets]


def recipe_of(variant: str) -> Recipe:
    return RECIPES[variant.partition("-")[0]]


STAGES = [
    pytest.param(variant, train.name, id=f"{variant}-{train.name}", marks=[pytest.mark.slow] * (variant == "phenaki-frames"))
    for variant, how in SMALL.items()
    for train in recipe_of(variant).steps(pipeline.resolve(recipe_of(variant).name, preset="tiny", sets=how.sets))
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small data set for each recipe."""
    made = {name: tmp_path_factory.mktemp(name) / "data" for name in SMALL}
    for name, path in made.items():
        SMALL[name].write_data(path)
    return made


def small(recipe: str, data: dict[str, Path], *sets: str) -> Any:
    own = {item.partition("=")[0] for item in sets}
    kept = [item for item in (*SMALL[recipe].sets, *ENGINE) if item.partition("=")[0] not in own]
    return pipeline.resolve(recipe_of(recipe).name, preset="tiny", data=str(data[recipe]), steps=STEPS, sets=[*kept, *sets])


def named(config: Any, stage: str) -> Train:
    (train,) = pipeline.pick(RECIPES[config.recipe].steps(config), stage)
    return train


def test_every_recipe_is_made_small_here() -> None:
    assert {recipe_of(variant).name for variant in SMALL} == set(RECIPES)


# ---- presets


@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_a_preset_is_its_own_file(recipe: Any, preset: str, tmp_path: Path) -> None:
    config = recipe.presets[preset]()
    assert (config.recipe, config.preset) == (recipe.name, preset)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert build(recipe.config_type, [read_yaml(tmp_path / "config.yaml")]) == config
    assert pipeline.resolve(str(tmp_path / "config.yaml")) == config
    assert build(recipe.config_type, [layer_of(config, "preset")]) == config  # made by model_copy or not, it is valid


@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_a_preset_builds_without_memory_and_names_every_net(recipe: Any, preset: str) -> None:
    config = recipe.presets[preset]()
    trains = recipe.steps(config)
    assert len({train.name for train in trains}) == len(trains) > 0
    for train in trains:
        with torch.device("meta"):
            stage = train.build()
        tensors = [t for net in stage.nets.values() for t in (*net.parameters(), *net.buffers())]
        assert all(tensor.is_meta for tensor in tensors)
        assert train.steps >= 1
        assert train.batch_size >= 1
        assert set(stage.optim) == set(stage.nets)
        assert {net for turn in stage.turns for net in turn.trains} == set(stage.nets)  # no net is left untrained
        assert all(parameter.dtype == torch.float32 for net in stage.nets.values() for parameter in net.parameters())
        assert set(stage.averaged) <= set(stage.nets)
        assert stage.averaged


# ---- stages


def losses_of(stage: Stage, state: Any, batches: Sequence[Batch], steps: int) -> list[float]:
    setting = Setting(WORLD, steps)
    first = stage.turns[0].name
    return [train_step(state, stage, batches, setting).turns[0].numbers()[f"{first}/loss"] for _ in range(steps)]


@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_a_stage_learns_one_batch_by_heart(recipe: str, name: str, data: dict[str, Path], tmp_path: Path) -> None:
    config = small(recipe, data, *SMALL[recipe].quiet)
    stage, state, loader = prepared(config, replace(named(config, name), batch_size=2), WORLD, tmp_path)
    batches = loader.batches(0)
    first = [batch.to(WORLD.device) for batch in next(batches)]
    batches.close()
    losses = losses_of(stage, state, first, 80)
    assert losses[-1] * 3 < losses[0]


@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_cutting_into_micro_batches_changes_no_gradient(recipe: str, name: str, data: dict[str, Path], tmp_path: Path) -> None:
    reports = []
    for micro in ("null", "2"):
        off = [item for item in SMALL[recipe].quiet if ".model=" in item]  # dropout differs by design
        config = small(recipe, data, f"engine.micro_batch_size={micro}", *off)
        stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
        for parameter in (p for net in state.nets.values() for p in net.parameters() if not p.any()):
            torch.nn.init.constant_(parameter, 0.05)  # layers that start at 0 would hide those below
        state.step = STEPS - 1  # all turns take part by then
        batches = loader.batches(0)
        moved = [batch.to(WORLD.device) for batch in next(batches)]
        reports.append(train_step(state, stage, moved, Setting(WORLD, STEPS)))
        batches.close()
    whole, parts = reports
    assert [report.turn.name for report in whole.turns] == [turn.name for turn in stage.turns]
    for a, b in zip(whole.turns, parts.turns, strict=True):
        assert len(b.keys) > len(a.keys)
        torch.testing.assert_close(a.update.norms, b.update.norms, rtol=1e-4, atol=1e-5)
        assert a.numbers() == pytest.approx(b.numbers(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_recomputing_activations_changes_no_gradient(recipe: str, name: str, data: dict[str, Path], tmp_path: Path) -> None:
    reports = []
    for recompute in ("false", "true"):
        config = small(recipe, data, f"engine.activation_checkpointing={recompute}")
        stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
        state.step = STEPS - 1
        batches = loader.batches(0)
        moved = [batch.to(WORLD.device) for batch in next(batches)]
        reports.append(train_step(state, stage, moved, Setting(WORLD, STEPS)))
        batches.close()
    for a, b in zip(reports[0].turns, reports[1].turns, strict=True):
        assert torch.equal(a.update.norms, b.update.norms)  # dropout included


@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_validation_knows_the_metric_of_best(recipe: str, name: str, data: dict[str, Path], tmp_path: Path) -> None:
    config = small(recipe, data)
    stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
    nets = {**state.averaged_nets, **stage.frozen}
    numbers = validate(nets, stage, loader.validation(), 0, 0, Setting(WORLD, STEPS))
    assert stage.best.metric in numbers
    assert all(value == value for value in numbers.values())
    again = validate(nets, stage, loader.validation(), 0, 0, Setting(WORLD, STEPS))
    assert again == numbers


@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_a_preview_is_a_readable_file(recipe: str, name: str, data: dict[str, Path], tmp_path: Path) -> None:
    config = small(recipe, data)
    stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
    batch, setting = loader.preview().to(WORLD.device), Setting(WORLD, STEPS)
    preview = draw_preview(stage, state, batch, setting)
    assert preview == draw_preview(stage, state, batch, setting)
    assert json.loads(json.dumps(preview.facts))
    assert preview.extension in ("png", "gif", "glb")
    if preview.extension == "png":
        with Image.open(io.BytesIO(preview.content)) as picture:
            picture.load()
            assert picture.mode == "RGB"
            side = 128 if recipe.startswith("meshgpt") else config.data.resolution
            assert picture.width >= 3 * side  # three samples side by side
            assert picture.height >= 2 * side  # what there is, and what the nets make of it


SAMPLED = ("meshgpt-base", "nuwa-base")  # previews of these call more of their nets than `forward`
SLICED = [pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] * (case.id not in SAMPLED)) for case in STAGES]


@pytest.mark.parametrize(("recipe", "name"), SLICED)
def test_nets_in_slices_draw_the_preview_of_whole_ones(
    recipe: str, name: str, data: dict[str, Path], tmp_path: Path, one_rank: None
) -> None:
    previews = []
    for parallel in ("replicate", "shard"):
        config = small(recipe, data, f"engine.parallel={parallel}")
        stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
        sliced = any(map(sharded, (p for net in state.nets.values() for p in net.parameters())))
        assert sliced == (parallel == "shard" and bool(stage.sharded))
        previews.append(draw_preview(stage, state, loader.preview().to(WORLD.device), Setting(WORLD, STEPS)))
        assert any(map(sharded, (p for net in state.nets.values() for p in net.parameters()))) == sliced, "slices are put back"
    assert previews[0] == previews[1]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield
    torch_dist.destroy_process_group()


# ---- stop and go on


def stopping(build_stage: Callable[[], Stage], at: int) -> Callable[[], Stage]:
    """The stage as it is, but a signal arrives during one of its steps."""

    def built() -> Stage:
        stage = build_stage()
        first, *others = stage.turns
        left = [at]

        def loss(nets: Nets, batch: Any, context: Context) -> Loss:
            if context.step in left:
                left.clear()  # once: a second signal would end the process
                signal.raise_signal(signal.SIGTERM)
            return first.loss(nets, batch, context)

        return replace(stage, turns=[replace(first, loss=loss), *others])

    return built


def final(run: Path, stage: str) -> dict[str, bytes]:
    folder = run / stage / "checkpoints" / f"step-{STEPS:06d}"
    return {
        name: (folder / name).read_bytes()
        for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json")
    }


def numbers(run: Path, stage: str) -> list[dict[str, Any]]:
    lines = read_metrics(run / stage / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))} for line in lines]


@pytest.fixture(scope="module")
def unbroken(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole run of each recipe."""
    return {name: pipeline.train(small(name, data), run=tmp_path_factory.mktemp(name) / "run") for name in SMALL}


@pytest.mark.parametrize(("at", "last"), [(0, 2), (2, 3), (STEPS - 2, STEPS)])  # the next step is the last, or a chore before it
@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_stopping_and_resuming_is_never_having_stopped(
    recipe: str, name: str, at: int, last: int, data: dict[str, Path], unbroken: dict[str, Path], tmp_path: Path
) -> None:
    config = small(recipe, data)
    own = {name: stopping(named(config, name).build, at)}
    with pytest.raises(Stopped) as stopped:
        pipeline.train(config, run=tmp_path / "run", stages=own)
    assert stopped.value.number == signal.SIGTERM
    assert (tmp_path / "run" / name / "checkpoints" / "latest").read_text() == f"step-{last:06d}\n"
    assert pipeline.resume(tmp_path / "run") == tmp_path / "run"
    for stage in [train.name for train in recipe_of(recipe).steps(config)]:
        assert final(tmp_path / "run", stage) == final(unbroken[recipe], stage)
        assert numbers(tmp_path / "run", stage) == numbers(unbroken[recipe], stage)


@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_it_can_be_exported_and_opened(recipe: str, name: str, unbroken: dict[str, Path], tmp_path: Path) -> None:
    run = unbroken[recipe]
    (train,) = [train for train in recipe_of(recipe).steps(pipeline.resolve(str(run / "config.yaml"))) if train.name == name]
    stage, served = train.build(), train.serves()
    assert served
    assert set(stage.averaged) <= set(served) <= set(stage.nets)
    for net, module in served.items():
        wanted = {key: tensor.shape for key, tensor in stage.nets[net].state_dict().items()}
        assert {key: tensor.shape for key, tensor in module.state_dict().items()} == wanted
    model = export_run(run, tmp_path / "model")
    for path in (run, model):
        nets = load(path, device="cpu").nets[name]
        assert set(nets) == set(served)
    saved = load(run, device="cpu").nets[name]
    for net, module in load(model, device="cpu").nets[name].items():
        assert all(torch.equal(tensor, saved[net].state_dict()[key]) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize(("recipe", "name"), STAGES)
def test_a_run_holds_what_was_promised(recipe: str, name: str, unbroken: dict[str, Path], data: dict[str, Path]) -> None:
    run = unbroken[recipe]
    config = small(recipe, data)
    assert pipeline.resolve(str(run / "config.yaml")) == config
    assert json.loads((run / "env.json").read_text())["torch"] == torch.__version__
    assert sorted(path.name for path in (run / name / "checkpoints").iterdir() if path.is_dir())[-1] == f"step-{STEPS:06d}"
    assert (run / name / "checkpoints" / "best").read_text().startswith("step-")
    assert {path.stem for path in (run / name / "samples").iterdir()} == {"step-000003", "step-000006"}
    nets = load(run, device="cpu").nets[name]
    assert all(not net.training for net in nets.values())
    assert all(bool(torch.isfinite(p).all()) and not p.requires_grad for net in nets.values() for p in net.parameters())
