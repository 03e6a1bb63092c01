"""`count.py OUT DATA`: which collectives a step runs, by micro-batch size and kind of parallelism; JSON from the main rank."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from tessera import pipeline
from tessera.engine import step
from tessera.engine.dist import World, join, leave

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.prepared import prepared

SETS = [
    "tokenizer.model={widths: [8, 8], blocks: [1, 1], quantizer: {levels: [4, 4]}}",
    "tokenizer.critic={widths: [8, 8], start_step: 0, warmup_steps: 0}",
    "tokenizer.batch_size=8",
    "data.resolution=16",
]


def count(data: str, world: World, parallel: str, micro: int) -> dict[str, int]:
    """Calls into the process group during the second step; the first one sets things up."""
    sets = [*SETS, f"engine.parallel={parallel}", f"engine.micro_batch_size={micro}"]
    config = pipeline.resolve("muse", preset="tiny", data=data, sets=sets)
    (train,) = pipeline.pick(pipeline.RECIPES["muse"].steps(config), "tokenizer")
    stage, state, loader = prepared(config, train, world, Path(sys.argv[1]).parent)
    setting = step.Setting.of(world, train.steps, config.engine)
    batches = loader.batches(0)
    step.train_step(state, stage, [batch.to(world.device) for batch in next(batches)], setting)
    micro_batches = [batch.to(world.device) for batch in next(batches)]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step.train_step(state, stage, micro_batches, setting)
    return Counter(event.name.removeprefix("c10d::") for event in recorded.events() if event.name.startswith("c10d::"))


def main() -> None:
    world = join(pipeline.resolve("muse", preset="tiny").engine)
    cases = [(parallel, micro) for parallel in ("replicate", "shard") for micro in (4, 1)]
    found = {f"{parallel} {micro}": count(sys.argv[2], world, parallel, micro) for parallel, micro in cases}
    if world.main:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave()


main()
