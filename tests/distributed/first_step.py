"""`first_step.py OUT SHAPES FURNITURE CLIPS SHAPES CLIPS`: gradients of all turns and validation numbers of given weights,
on any number of ranks.

Writes OUT/STAGE CASE.safetensors (summed gradients, by turn) and OUT/STAGE CASE.json (validation) from the main rank.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tessera import pipeline
from tessera.engine import step
from tessera.engine.dist import World, join, leave, sum_gradients
from tessera.engine.validate import validate

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.prepared import prepared

STAGES = {  # name -> recipe and stage, and sets of its own
    "tokenizer": ("muse", "tokenizer", "superres.enlarged=false"),
    "tokenizer of two grids": ("muse", "tokenizer", "tokenizer.critic=null"),
    "base": ("muse", "base"),
    "superres": ("muse", "superres"),
    "mesh tokenizer": ("meshgpt", "tokenizer"),
    "mesh base": ("meshgpt", "base"),
    "video tokenizer": ("phenaki", "tokenizer"),
    "video base": ("phenaki", "base"),
    "video base, token by token": ("nuwa", "base"),
    "embedder": ("dalle2", "embedder"),
    "prior": ("dalle2", "prior"),
    "decoder": ("dalle2", "base"),
    "upsampler": ("dalle2", "upsampler1"),
}
CASES = {"even": (8, "null"), "uneven": (7, "null"), "uneven in micro-batches": (7, "2")}  # batch and micro-batch
MUSE = [
    "tokenizer.model={widths: [8, 8], blocks: [1, 1], quantizer: {levels: [4, 4]}}",
    "tokenizer.critic={widths: [8, 8], start_step: 0, warmup_steps: 0, adaptive: true, penalty: {every: 1}}",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "base.model={width: 16, depth: 1, heads: 2, dropout: 0}",
    "base.critic={kind: net, model: {width: 16, depth: 1, heads: 2}}",
    "superres.resolution=32",
    "superres.model={width: 16, depth: 1, heads: 2, self_conditioning: true}",
    "data.resolution=16",
    "data.flip=true",
    "data.views=2",
    "data.validation_fraction=0.15",
    "engine.validation_samples=5",
]
MESHGPT = [
    "tokenizer.kind=graph",
    "tokenizer.model={coordinate_width: 8, encoder_width: 16, encoder_layers: 1, decoder_width: 16, decoder_blocks: 1, heads: 2, "
    "quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [5, 5, 4]}}}",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "base.model={width: 16, depth: 1, heads: 2, inner_width: 16, inner_depth: 1}",
    "data.bins=32",
    "data.scale=1.1",
    "data.validation_fraction=0.3",
    "engine.validation_samples=5",
]
PHENAKI = [
    "tokenizer.model={widths: [8, 8, 8], blocks: [0, 0, 1], time_downsamples: 1, quantizer: {levels: [4, 4]}}",
    "tokenizer.critic={kind: clips, widths: [8, 8], start_step: 0, warmup_steps: 0, adaptive: true, penalty: {every: 1}}",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "base.model={width: 16, depth: 1, heads: 2, dropout: 0}",
    "base.critic={kind: net, model: {width: 16, depth: 1, heads: 2}}",
    "data.resolution=16",
    "data.frames=5",
    "data.start=random",
    "data.image_share=0.3",
    "data.views=2",
    "data.validation_fraction=0.3",
    "engine.validation_samples=5",
]
DALLE2 = [
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "embedder.model={width: 8, widths: [8, 8]}",
    "embedder.loss.group=8",  # one, which ranks cut
    "prior.model={width: 16, depth: 1, heads: 2, self_conditioning: true}",
    "base.model={widths: [8, 8], blocks: [1, 1], attention: [false, true], cross: [false, true], head_width: 8}",
    "base.self_conditioning=true",
    "base.process={kind: ddpm, predicts: v, learned_variance: true}",
    "sample.sampler=ancestral",
    "upsampler1.model={kind: unet, widths: [8, 8], blocks: [1, 1], attention: [false, true], cross: [false, false], "
    "head_width: 8}",
    "upsampler1.crop=16",
    "sample.prior.steps=2",
    "data.flip=true",
    "data.validation_fraction=0.15",
    "engine.validation_samples=5",
]
NUWA = [
    *(item for item in PHENAKI if not item.startswith(("base.", "tokenizer.critic="))),
    "base.model={width: 16, depth: 1, heads: 2, inner_width: 16, sketch_window: 3, nearby: {frames: 2, height: 3, width: 3}}",
    "base.loss={sketch_gaps_prob: 0.3}",
    "data.sketch=edges",
    "data.image_share=null",
]
SETS = {"muse": MUSE, "meshgpt": MESHGPT, "phenaki": PHENAKI, "dalle2": DALLE2, "nuwa": NUWA}


def measure(out: Path, data: dict[str, str], name: str, case: str, world: World) -> None:
    """Weights are moved off their start, where the critic's last layer is 0 and passes no gradient on."""
    batch_size, micro = CASES[case]
    recipe, own, *others = STAGES[name]
    chosen = {item.split("=")[0]: item for item in (*SETS[recipe], *others)}  # the later one wins
    sets = [*chosen.values(), f"{own}.batch_size={batch_size}", f"engine.micro_batch_size={micro}"]
    config = pipeline.resolve(recipe, preset="tiny", data=data[recipe], sets=sets)
    (train,) = pipeline.pick(pipeline.RECIPES[recipe].steps(config), own)
    stage, state, loader = prepared(config, train, world, out / f"caches of {recipe}")
    torch.manual_seed(0)
    for net in state.nets.values():
        for parameter in net.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    setting = step.Setting(world, train.steps)
    numbers = validate({**state.nets, **stage.frozen}, stage, loader.validation(), 0, 0, setting)
    gradients: list[Tensor] = []

    def keep(world: World, parameters: Sequence[Tensor]) -> None:
        sum_gradients(world, parameters)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))

    step.sum_gradients = keep
    step.train_step(state, stage, [batch.to(world.device) for batch in next(loader.batches(0))], setting)
    if world.main:
        save_file(dict(zip([turn.name for turn in stage.turns], gradients, strict=True)), out / f"{name} {case}.safetensors")
        (out / f"{name} {case}.json").write_text(json.dumps(numbers))


def main() -> None:
    world = join(pipeline.resolve("muse", preset="tiny").engine)
    for name, case in itertools.product(STAGES, CASES):
        step.sum_gradients = sum_gradients
        measure(Path(sys.argv[1]), dict(zip(SETS, sys.argv[2:], strict=True)), name, case, world)
    leave()


main()
