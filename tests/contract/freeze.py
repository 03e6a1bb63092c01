"""`python tests/contract/freeze.py`: writes a small run of each recipe and its losses to tests/contract/frozen, to be kept.

A checkpoint that was once written must load for ever, and the same command must give the same losses: `test_frozen.py` holds us
to both. Run it for a new recipe, for new stages of one, or when the checkpoint format gets a new number; the old folders stay.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tessera import pipeline
from tessera.data.synth.digits import write_digits
from tessera.data.synth.furniture import write_furniture
from tessera.data.synth.shapes import write_shapes
from tessera.engine.checkpoint import FORMAT
from tessera.engine.track import read_metrics
from tessera.recipes import RECIPES

FROZEN = Path(__file__).parent / "frozen"
STEPS, SAVED = 8, 5
NAMES = {"muse": "muse-stages"}  # it is older than its second stage
CLIPS = (
    "data.resolution=16",
    "data.frames=9",
    "data.start=random",
    "data.image_share=0.25",
    "data.validation_fraction=0.2",
    "data.views=2",
    "tokenizer.batch_size=4",
    "tokenizer.loss={l1: 1, l2: 1, temporal: 0.5, seen_frames: 3}",
    "tokenizer.optim={lr: 1.0e-2, warmup_steps: 2}",
    "tokenizer.ema_decay=0.9",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
    "base.batch_size=4",
    "base.model={width: 16, depth: 1, heads: 2, dropout: 0}",
    "base.optim={lr: 1.0e-2, warmup_steps: 2}",
    "base.loss={label_smoothing: 0.1, frames: {prefix_prob: 0.2, between_prob: 0.2, later_prob: 0.3, shorter_prob: 0.2}}",
    "base.ema_decay=0.9",
    "sample={steps: 2, chunk: 2, fps: 8}",
    "engine.device=cpu",
    "engine.log_every_steps=1",
    f"engine.save_every_steps={SAVED}",
    "engine.validate_every_steps=4",
)
ONE_BY_ONE = (  # the same clips with the other generator
    *(item for item in CLIPS if not item.startswith(("base.model=", "base.loss=", "sample="))),
    "base.loss={text_dropout_prob: 0.3, length_dropout_prob: 0.5, sketch_dropout_prob: 0.3, sketch_gaps_prob: 0}",
    "sample={chunk: 2, fps: 8}",
)
MESHES = (
    "data.bins=32",
    "data.validation_fraction=0.3",
    "data.scale=1.1",
    "data.yaw=quarters",
    "tokenizer.kind=graph",
    "tokenizer.batch_size=4",
    "tokenizer.optim={lr: 1.0e-2, warmup_steps: 2}",
    "tokenizer.ema_decay=0.9",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
    "base.batch_size=4",
    "base.model={width: 16, depth: 1, heads: 2, inner_width: 16, inner_depth: 1}",
    "base.optim={lr: 1.0e-2, warmup_steps: 2}",
    "base.ema_decay=0.9",
    "sample={max_faces: 8}",
    "engine.device=cpu",
    "engine.log_every_steps=1",
    f"engine.save_every_steps={SAVED}",
    "engine.validate_every_steps=4",
)
SETS = {  # a recipe, or RECIPE-KIND
    "muse": (
        "data.resolution=16",
        "data.validation_fraction=0.2",
        "data.crop=random",
        "tokenizer.batch_size=4",
        "tokenizer.model={widths: [4, 4], blocks: [1, 1], quantizer: {levels: [4, 4]}}",
        "tokenizer.critic={widths: [4, 4], start_step: 3, warmup_steps: 2, weight: 0.02, adaptive: true, penalty: {every: 2}}",
        "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
        "data.views=2",
        "base.batch_size=4",
        "base.model={width: 16, depth: 1, heads: 2, dropout: 0}",
        "base.optim={lr: 1.0e-2, warmup_steps: 2}",
        "base.loss={label_smoothing: 0.1}",
        "base.ema_decay=0.9",
        "base.critic={kind: head}",
        "superres.resolution=32",
        "superres.enlarged=false",  # as it was when these were frozen
        "superres.batch_size=4",
        "superres.model={width: 16, depth: 1, heads: 2, self_conditioning: true}",
        "superres.optim={lr: 1.0e-2, warmup_steps: 2}",
        "superres.loss={label_smoothing: 0.1}",
        "superres.ema_decay=0.9",
        "sample={steps: 2, superres: {steps: 2}}",
        "engine.device=cpu",
        "engine.log_every_steps=1",
        f"engine.save_every_steps={SAVED}",
        "engine.validate_every_steps=4",
    ),
    "dalle2": (
        "data.resolution=16",
        "data.validation_fraction=0.2",
        "data.crop=random",
        "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
        "embedder.batch_size=4",
        "embedder.loss.group=4",
        "embedder.model={width: 8, widths: [8, 8], blocks: 1}",
        "embedder.optim={lr: 1.0e-2, warmup_steps: 2}",
        "embedder.ema_decay=0.9",
        "prior.batch_size=4",
        "prior.model={width: 16, depth: 1, heads: 2}",
        "prior.optim={lr: 1.0e-2, warmup_steps: 2}",
        "prior.ema_decay=0.9",
        "base.batch_size=4",
        "base.model={widths: [8, 8], blocks: [1, 1], attention: [false, true], cross: [false, true], head_width: 8}",
        "base.optim={lr: 1.0e-2, warmup_steps: 2}",
        "base.ema_decay=0.9",
        "upsampler1.batch_size=4",
        "upsampler1.crop=16",
        "upsampler1.model={widths: [8, 8], blocks: [1, 1], attention: [false, false], cross: [false, false], head_width: 8}",
        "upsampler1.optim={lr: 1.0e-2, warmup_steps: 2}",
        "upsampler1.ema_decay=0.9",
        "sample={steps: 2, prior: {steps: 2}, upsampler: {steps: 2}}",
        "engine.device=cpu",
        "engine.log_every_steps=1",
        f"engine.save_every_steps={SAVED}",
        "engine.validate_every_steps=4",
    ),
    "meshgpt": (
        *MESHES,
        "tokenizer.model={coordinate_width: 4, encoder_width: 8, encoder_layers: 1, decoder_width: 8, decoder_blocks: 1, "
        "heads: 2, quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [4, 4]}}}",
    ),
    "meshgpt-digits": (  # codes so many that they are written as two
        *MESHES,
        "tokenizer.model={coordinate_width: 4, encoder_width: 8, encoder_layers: 1, decoder_width: 8, decoder_blocks: 1, "
        "heads: 2, quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [8, 8, 8, 8, 5]}}}",
    ),
    "phenaki": (
        *CLIPS,
        "tokenizer.model={kind: conv, widths: [4, 4, 4], blocks: [1, 0, 1], time_downsamples: 1, quantizer: {levels: [4, 4]}}",
        "tokenizer.critic={kind: clips, widths: [4, 4], start_step: 3, warmup_steps: 2, weight: 0.02, adaptive: true, "
        "penalty: {every: 2}}",
        "base.critic={kind: head, optim: {lr: 1.0e-2, warmup_steps: 2}}",
    ),
    "phenaki-cvivit": (
        *CLIPS,
        "tokenizer.model={kind: cvivit, width: 16, heads: 2, patch: 4, time_patch: 4, window: 2, spatial_depth: 1, "
        "temporal_depth: 1, quantizer: {kind: residual, num_quantizers: 2, quantizer: {kind: fsq, levels: [4, 4]}}}",
        "tokenizer.critic={kind: frames, widths: [4, 4], start_step: 3, warmup_steps: 2, weight: 0.02}",
        "base.critic={kind: net, model: {width: 16, depth: 1, heads: 2}, optim: {lr: 1.0e-2, warmup_steps: 2}}",
    ),
    "phenaki-frames": (
        *CLIPS,
        "tokenizer.model={kind: frames, widths: [4, 4, 4], blocks: [1, 0, 1], quantizer: {kind: fsq, levels: [4, 4]}}",
        "tokenizer.critic={kind: frames, widths: [4, 4], start_step: 3, warmup_steps: 2, weight: 0.02}",
    ),
    "nuwa": (
        *ONE_BY_ONE,
        "tokenizer.model={kind: conv, widths: [4, 4, 4], blocks: [1, 0, 1], time_downsamples: 1, quantizer: {levels: [4, 4]}}",
        "base.model={width: 16, depth: 2, heads: 2}",
        "base.model.nearby={frames: 2, height: 3, width: 3, dilation: [1, 2], first_whole: false}",
    ),
    "nuwa-first": (  # sees the first frame whole
        *ONE_BY_ONE,
        "tokenizer.model={kind: conv, widths: [4, 4, 4], blocks: [1, 0, 1], time_downsamples: 1, quantizer: {levels: [4, 4]}}",
        "base.model={width: 16, depth: 2, heads: 2, nearby: {height: 3, width: 3, first_step: 0}}",
    ),
    "nuwa-sketch": (
        *ONE_BY_ONE,
        "data.sketch=edges",
        "tokenizer.model={kind: cvivit, width: 16, heads: 2, patch: 4, time_patch: 4, window: 2, spatial_depth: 1, "
        "temporal_depth: 1, quantizer: {kind: residual, num_quantizers: 2, quantizer: {kind: fsq, levels: [4, 4]}}}",
        "base.model={width: 16, depth: 1, heads: 2, inner_width: 16, nearby: {frames: 2, whole: true}, sketch_window: 3}",
    ),
}


def recipe_of(name: str) -> str:
    """The recipe of a key of `SETS`, or of a folder."""
    return name.split("-")[0]


def kind_of(home: str) -> str:
    """The key of `SETS` that a folder is of."""
    return max((kind for kind in SETS if home.startswith(kind)), key=len)


def write_data(recipe: str, folder: Path) -> None:
    """What the run was trained on; synthetic, so that it need not be kept."""
    if recipe == "meshgpt":
        write_furniture(folder, 24, 0)
    elif recipe in ("phenaki", "nuwa"):
        write_digits(folder, 24, 0, image_size=32, frames=11)
    else:
        write_shapes(folder, 24, 0, image_size=32)


def losses(run: Path, stage: str) -> list[dict[str, float]]:
    """Every logged number of a stage but those that measure time and memory."""
    lines = read_metrics(run / stage / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def freeze(kind: str) -> None:
    """Each stage as it was at the step that is kept, or at its end where another was trained on it, and the losses of all."""
    with tempfile.TemporaryDirectory() as scratch:
        data, run = Path(scratch) / "data", Path(scratch) / "run"
        recipe = recipe_of(kind)
        write_data(recipe, data)
        config = pipeline.resolve(recipe, preset="tiny", data=str(data), steps=STEPS, sets=SETS[kind])
        pipeline.train(config, run=run)
        home = home_of(kind)
        home.mkdir(parents=True)
        shutil.copy(run / "config.yaml", home)
        trains = RECIPES[recipe].steps(config)
        needed = {name for train in trains for name in train.needs.values()}
        for stage in (train.name for train in trains):
            name = f"step-{STEPS if stage in needed else SAVED:06d}"
            shutil.copytree(run / stage / "checkpoints" / name, home / stage / "checkpoints" / name)
            (home / stage / "losses.json").write_text(json.dumps(losses(run, stage), indent=1) + "\n")


def home_of(kind: str) -> Path:
    """Where a run is kept."""
    return FROZEN / f"{NAMES.get(kind, kind)}-format-{FORMAT}"


if __name__ == "__main__":
    for name in SETS:
        if not home_of(name).exists():
            freeze(name)
