"""`first_step.py OUT DATA`: gradients of both turns and validation numbers of given weights, on however many ranks there are.

Writes OUT/CASE.safetensors (summed gradients, by turn) and OUT/CASE.json (validation) from the main rank.
"""

from __future__ import annotations

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

CASES = {
    "even": ["tokenizer.batch_size=8"],
    "uneven": ["tokenizer.batch_size=7"],
    "uneven in micro-batches": ["tokenizer.batch_size=7", "engine.micro_batch_size=2"],
}
SETS = [
    "tokenizer.model={widths: [8, 8], blocks: [1, 1], quantizer: {levels: [4, 4]}}",
    "tokenizer.critic={widths: [8, 8], start_step: 0, warmup_steps: 0, adaptive: true, penalty: {every: 1}}",
    "data.resolution=16",
    "data.validation_fraction=0.15",
    "engine.validation_samples=5",
]


def measure(out: Path, data: str, case: str, world: World) -> None:
    """Weights are moved off their start, where the critic's last layer is 0 and passes no gradient on."""
    config = pipeline.resolve("muse", preset="tiny", data=data, sets=[*SETS, *CASES[case]])
    (train,) = pipeline.RECIPES["muse"].steps(config)
    stage, state, loader = pipeline.prepare_stage(config, train, pipeline.open_source(config), world)
    torch.manual_seed(0)
    for net in state.nets.values():
        for parameter in net.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    setting = step.Setting(world, train.steps)
    numbers = validate(state.nets, stage, loader.validation(), 0, 0, setting)
    gradients: list[Tensor] = []

    def keep(world: World, parameters: Sequence[Tensor]) -> None:
        sum_gradients(world, parameters)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))

    step.sum_gradients = keep
    step.train_step(state, stage, [batch.to(world.device) for batch in next(loader.batches(0))], setting)
    if world.main:
        save_file(dict(zip([turn.name for turn in stage.turns], gradients, strict=True)), out / f"{case}.safetensors")
        (out / f"{case}.json").write_text(json.dumps(numbers))


def main() -> None:
    world = join(pipeline.resolve("muse", preset="tiny").engine)
    for case in CASES:
        measure(Path(sys.argv[1]), sys.argv[2], case, world)
    leave()


main()
