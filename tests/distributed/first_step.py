"""`first_step.py OUT DATA`: gradients of all turns and validation numbers of given weights, on however many ranks there are.

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

STAGES = ("tokenizer", "base", "superres")
CASES = {"even": (8, "null"), "uneven": (7, "null"), "uneven in micro-batches": (7, "2")}  # batch and micro-batch
SETS = [
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


def measure(out: Path, data: str, name: str, case: str, world: World) -> None:
    """Weights are moved off their start, where the critic's last layer is 0 and passes no gradient on."""
    batch_size, micro = CASES[case]
    sets = [*SETS, f"{name}.batch_size={batch_size}", f"engine.micro_batch_size={micro}"]
    config = pipeline.resolve("muse", preset="tiny", data=data, sets=sets)
    (train,) = pipeline.pick(pipeline.RECIPES["muse"].steps(config), name)
    stage, state, loader = prepared(config, train, world, out / "caches")
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
        measure(Path(sys.argv[1]), sys.argv[2], name, case, world)
    leave()


main()
