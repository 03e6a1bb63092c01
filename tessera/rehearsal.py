"""One real step of each stage before a run: what it will need of memory, time and disk. Writes nothing."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.config import UserError
from tessera.contracts import Loader, Stage, Train
from tessera.data.sources import Source, split_indices
from tessera.engine.checkpoint import sizes
from tessera.engine.clock import peak_bytes
from tessera.engine.dist import World
from tessera.engine.state import TrainState
from tessera.engine.step import Setting, train_step
from tessera.engine.track import Journal
from tessera.media.images import Pixels
from tessera.pipeline import StageBuilders, pick, session
from tessera.recipes import RECIPES
from tessera.staging import (
    Needed,
    build_stage,
    describe,
    make_feed,
    make_loader,
    open_source,
    refuse_unfit,
    settled,
    stage_elsewhere,
)  # fmt: skip


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


def dry_run(
    config: Any, *, data: Any = None, stage: str | None = None, stages: StageBuilders | None = None,
    say: Callable[[str], None] = lambda line: None, show: Callable[[Estimate], None] = lambda estimate: None,
) -> list[Estimate]:  # fmt: skip
    """One real step of each stage on the user's data, as its last step will be, each shown once it is made; writes nothing."""
    config = RECIPES[config.recipe].adopt(config, stage_elsewhere)
    with session(config, saves=False) as (world, _):
        source = open_source(config, data)
        for line in describe(config, source, world):
            say(line)
        config = settled(config, source, pick(RECIPES[config.recipe].steps(config), stage))
        trains = pick(RECIPES[config.recipe].steps(config), stage, stages)
        refuse_unfit(trains, world.device)
        estimates = []
        for train in trains:
            if train.origin is None:
                estimates.append(_try(config, train, source, world))
                show(estimates[-1])
        return estimates


class Few:
    """The first training samples of a source, as many as one step takes."""

    def __init__(self, source: Source, validation_fraction: float, most: int) -> None:
        self.source, self.indices = source, split_indices(source, validation_fraction)[0][:most]

    def __len__(self) -> int:
        return len(self.indices)

    def key(self, index: int) -> str:
        return self.source.key(int(self.indices[index]))

    def group(self, index: int) -> str:
        return self.source.group(int(self.indices[index]))

    def caption(self, index: int) -> str | None:
        return self.source.caption(int(self.indices[index]))

    def read(self, index: int) -> Pixels:
        return self.source.read(int(self.indices[index]))


def few_batches(config: Any, train: Train, source: Source, world: World, folder: Path) -> tuple[Stage, TrainState, Loader]:
    """A stage with its caches of a few samples. Nets of earlier stages are fresh ones: they cost what trained ones do."""
    others = {other.name: other for other in RECIPES[config.recipe].steps(config)}
    fresh = {net: next(iter(others[name].serves().values())).to(world.device) for net, name in train.needs.items()}
    given = {net: Needed(train.needs[net], "untrained", module) for net, module in fresh.items()}
    stage, state = build_stage(config, train, given, world)
    few_may_lack = {"validation_fraction": 0.0, "corrupt_budget": 1.0}  # a budget is a share of all
    all_of_them = config.model_copy(update={"data": config.data.model_copy(update=few_may_lack)})
    few = Few(source, config.data.validation_fraction, train.batch_size)
    feed = make_feed(all_of_them, train, few, world, folder, stage.needs, Journal(folder / "log.txt", speaks=False))
    return stage, state, make_loader(train, given, replace(feed, whole=source))


def _try(config: Any, train: Train, source: Source, world: World) -> Estimate:
    with tempfile.TemporaryDirectory() as folder:
        stage, state, loader = few_batches(config, train, source, world, Path(folder))
        return _measure(config, train, stage, state, loader, world)


def _measure(config: Any, train: Train, stage: Stage, state: TrainState, loader: Loader, world: World) -> Estimate:
    setting = Setting.of(world, train.steps, config.engine)
    state.step = train.steps - 1  # the last step: every turn that ever starts takes part by then
    batches = loader.batches(0)
    try:
        micro_batches = [batch.to(world.device) for batch in next(batches)]
        faults = tuple(fault for batch in micro_batches for fault in batch.faults)
        seconds = []
        recorded = config.engine.cuda_graphs and world.device.type == "cuda"
        for _ in range(5 if recorded else 3):  # the first one compiles and warms up, the third records
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
