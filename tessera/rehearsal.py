"""One real step of each stage before a run: what it will need of memory, time and disk. Writes nothing."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from tessera.batches import ImageBatch
from tessera.config import UserError
from tessera.contracts import Train
from tessera.data.sources import Source
from tessera.engine.checkpoint import sizes
from tessera.engine.clock import peak_bytes
from tessera.engine.dist import World
from tessera.engine.step import Setting, train_step
from tessera.pipeline import StageBuilders, open_source, pick, prepare_stage, session
from tessera.recipes import RECIPES


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one real step of a stage says about all of them."""

    stage: str
    parameters: dict[str, int]
    peak_bytes: int
    items_per_s: float
    seconds: float  # for all steps of the stage
    disk_bytes: int  # for the checkpoints that retention keeps
    losses: dict[str, float]
    faults: tuple[str, ...]  # samples of the batch that could not be read


def dry_run(config: Any, *, data: Any = None, stage: str | None = None, stages: StageBuilders | None = None) -> list[Estimate]:
    """One real step of each stage on the user's data, as its last step will be; writes nothing."""
    with session(config) as (world, _):
        source = open_source(config, data)
        trains = pick(RECIPES[config.recipe].steps(config), stage, stages)
        return [_try(config, train, source, world) for train in trains]


def _try(config: Any, train: Train, source: Source, world: World) -> Estimate:
    stage, state, loader = prepare_stage(config, train, source, world)
    setting = Setting.of(world, train.steps, config.engine)
    state.step = train.steps - 1  # the last step: every turn that ever starts takes part by then
    batches = loader.batches(0)
    try:
        micro_batches: list[ImageBatch] = [batch.to(world.device) for batch in next(batches)]
        faults = tuple(fault for batch in micro_batches for fault in batch.faults)
        seconds = []
        for _ in range(3):  # the first one compiles and warms up
            start = time.perf_counter()
            report = train_step(state, stage, micro_batches, setting)
            losses = {turn.turn.name: turn.numbers()[f"{turn.turn.name}/loss"] for turn in report.turns}  # waits for the device
            seconds.append(time.perf_counter() - start)
    finally:
        batches.close()
    if not all(map(math.isfinite, losses.values())):
        why = f"samples that cannot be read: {'; '.join(faults[:3])}" if faults else f"losses are {losses}"
        raise UserError(
            f"{train.name}: a step on this data gives no finite loss; {why}. `tessera data check` looks at every file"
        )
    step = min(seconds[1:])
    kept = config.engine.keep_checkpoints + 2  # best, and the one being written
    return Estimate(
        stage=train.name,
        parameters={name: sum(p.numel() for p in net.parameters()) for name, net in stage.nets.items()},
        peak_bytes=peak_bytes(world.device),
        items_per_s=train.batch_size / step,
        seconds=step * train.steps,
        disk_bytes=sum(sizes(state)) * kept,
        losses=losses,
        faults=faults,
    )
