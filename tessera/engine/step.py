"""One training step, final: the only place that calls `backward` and an optimizer.

For every turn that is due: each micro-batch forward and backward; sums over ranks; then divide, clip, refuse
non-finite numbers and update, all on the device. Nothing here waits for a GPU: the division, the clipping and the refusal
ride in the fused AdamW kernel as `grad_scale` and `found_inf`, and reports are read later (`loop`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tessera.batches import Batch
from tessera.config import EngineConfig
from tessera.contracts import Context, Loss, Stage, Turn, frozen
from tessera.engine.dist import World, sum_gradients
from tessera.engine.ema import decay_at, update_average
from tessera.engine.optim import learning_rate
from tessera.engine.shard import gradient_norms, sum_in_backward
from tessera.engine.state import TrainState
from tessera.engine.trace import check_reach
from tessera.randomness import mix


@dataclass(frozen=True, slots=True)
class Setting:
    """What the step needs to know besides state and stage."""

    world: World
    steps: int  # of the whole stage: the end of the learning-rate schedule
    precision: str = "fp32"
    nonfinite: str = "stop"
    compiled: bool = False
    cuda_graphs: bool = False

    @classmethod
    def of(cls, world: World, steps: int, config: EngineConfig) -> Setting:
        """The engine section's part in it."""
        return cls(world, steps, config.precision, config.nonfinite, config.compile, config.cuda_graphs)


@dataclass(frozen=True, slots=True)
class Sums:
    """A turn's losses, summed over micro-batches and ranks."""

    numbers: dict[str, Tensor]  # loss, weight and parts, fp64 scalars
    stats: dict[str, Tensor]  # Loss.stats, fp64
    asked: Tensor  # the loop's own counts (`train_step`), summed over ranks


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did to a turn's nets."""

    lrs: dict[str, float]
    names: list[str]  # parameters of the turn, as net/parameter
    norms: Tensor  # gradient norm of each of them, before the division
    norm: Tensor  # of all together, after the division and before clipping
    broken: Tensor  # 1 where a loss or gradient was not finite, and so nothing was updated


@dataclass(frozen=True, slots=True)
class TurnReport:
    """Device tensors that describe one turn. Reading one waits for the device."""

    turn: Turn
    sums: Sums
    update: Update
    keys: list[tuple[str, ...]]  # sample keys of each micro-batch of this rank
    totals: Tensor  # loss of each micro-batch of this rank

    def numbers(self) -> dict[str, float]:
        """The log line of this turn: means over the global batch."""
        weight = self.sums.numbers["weight"]
        values = {name: total / weight for name, total in self.sums.numbers.items() if name != "weight"}
        values |= {"weight": weight, "grad_norm": self.update.norm.double()}
        read = torch.stack(list(values.values())).tolist()
        named = {f"{self.turn.name}/{name}": value for name, value in zip(values, read, strict=True)}
        return named | {f"lr/{net}": lr for net, lr in self.update.lrs.items()}


class Flags:
    """A few numbers on their way to the host. Reading them waits for what was launched before them, not for what came after."""

    def __init__(self, values: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> list[float]:
        """The numbers."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values.tolist()


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: a report a turn, and what the loop must know of every step."""

    step: int  # the number of this update, from 1
    turns: list[TurnReport]
    flags: Flags  # the loop's counts over all ranks, and turns that broke

    @property
    def stats(self) -> dict[str, Tensor]:
        """Loss.stats of all turns together."""
        return {name: value for turn in self.turns for name, value in turn.sums.stats.items()}


def train_step(
    state: TrainState, stage: Stage, batches: Sequence[Batch], setting: Setting, asked: Sequence[int] = ()
) -> StepReport:
    """One update per turn. Every turn sees the same micro-batches, so a critic judges what its generator just made.

    `asked` are counts of the loop's own that ride along in the sum over ranks and come back in the report's flags.
    """
    if setting.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()  # what recorded graphs put out in the last step may be overwritten
    handed: list[dict[str, Any]] = [{} for _ in batches]
    reports = []
    for index, turn in enumerate(stage.turns):
        if not turn.due(state.step):
            continue
        with frozen(p for net, named in state.parameters.items() if net not in turn.trains for _, p in named):
            losses = []
            for micro, batch in enumerate(batches):
                seed_dropout(state, index, micro, setting.world)
                sum_in_backward((unit for net in turn.trains for unit in state.units[net]), micro == len(batches) - 1)
                losses.append(backward(state, stage, turn, batch, handed[micro], setting))
        sums = reduce_losses(losses, setting.world, asked)
        done = update(state, stage, turn, sums, setting)
        totals = torch.stack([loss.total for loss in losses])
        reports.append(TurnReport(turn, sums, done, [batch.keys for batch in batches], totals))
    if not reports:
        raise ValueError(f"no turn of this stage is due at step {state.step}; one of them must start at 0 and run every step")
    broken = torch.stack([turn.update.broken for turn in reports]).sum(0, keepdim=True)
    report = StepReport(state.step + 1, reports, Flags(torch.cat([reports[0].sums.asked, broken])))
    finish(state, stage, report, setting)
    return report


def backward(state: TrainState, stage: Stage, turn: Turn, batch: Batch, handed: dict[str, Any], setting: Setting) -> Loss:
    """Forward and backward of one turn on one micro-batch; gradients add up in .grad."""
    device = setting.world.device
    context = Context(state.step, state.seed, batch.positions.to(device, non_blocking=True), handed, setting.world.rows)
    with autocast(device, setting.precision):
        loss = turn.loss(stage.all_nets, batch, context)
    if turn.name not in state.traced:  # once a process: a walk over the graph
        check_reach(loss, turn, stage)
        state.traced.add(turn.name)
    loss.total.backward()
    handed[turn.name] = loss.hand
    return replace(loss, total=loss.total.detach(), hand=None)


def reduce_losses(losses: Sequence[Loss], world: World, asked: Sequence[int] = ()) -> Sums:
    """Sums over micro-batches and ranks, all in one collective."""
    names = ["loss", "weight", *part_names(losses)]
    # fp64 before the stack: a bf16 total would round the number of targets
    scalars = sum_of(
        [torch.stack([loss.total, loss.weight.double(), *map(loss.parts.__getitem__, names[2:])]) for loss in losses]
    )
    stats = {name: sum_of([loss.stats[name] for loss in losses]) for name in losses[0].stats}
    counts = torch.tensor(asked, dtype=torch.float64).to(world.device, non_blocking=True)
    flat = torch.cat([counts, scalars, *(value.flatten() for value in stats.values())])
    counts, scalars, *rest = world.sum_(flat).split([len(asked), len(names), *(value.numel() for value in stats.values())])
    summed = {name: part.view(stats[name].shape) for name, part in zip(stats, rest, strict=True)}
    return Sums(dict(zip(names, scalars.unbind(), strict=True)), summed, counts)


def part_names(losses: Sequence[Loss]) -> list[str]:
    """The names of Loss.parts, the same in every micro-batch; `loss` and `weight` are the step's own."""
    names = list(losses[0].parts)
    for loss in losses:
        if loss.parts.keys() != losses[0].parts.keys():
            raise ValueError(f"Loss.parts are {names} in one micro-batch and {list(loss.parts)} in another; name the same in all")
    if taken := {"loss", "weight"} & set(names):
        raise ValueError(f"Loss.parts has {sorted(taken)}, the names of Loss.total and Loss.weight in the log; rename it")
    return names


@torch.no_grad()
def update(state: TrainState, stage: Stage, turn: Turn, sums: Sums, setting: Setting) -> Update:
    """Divide by the global weight, clip, refuse non-finite numbers, step, zero."""
    named = [(f"{net}/{name}", p) for net in turn.trains for name, p in state.parameters[net] if p.requires_grad]
    parameters = [p for _, p in named]
    sum_gradients(setting.world, parameters)
    weight = sums.numbers["weight"].float()
    norms = gradient_norms([p.grad for p in parameters if p.grad is not None])
    norm = torch.linalg.vector_norm(norms) / weight
    broken = (~(torch.isfinite(norm) & torch.isfinite(sums.numbers["loss"]))).float()
    if setting.nonfinite == "stop":  # once broken, nothing moves: the weights stay as they were before
        state.broken = broken = broken if state.broken is None else torch.maximum(broken, state.broken)
    divisor = weight if turn.max_grad_norm is None else weight * (norm / turn.max_grad_norm).clamp(min=1)
    lrs = {net: learning_rate(stage.optim[net], state.step, turn.start, setting.steps) for net in turn.trains}
    for net, lr in lrs.items():
        optimizer = state.optimizers[net]
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.grad_scale, optimizer.found_inf = divisor, broken  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return Update(lrs, [name for name, _ in named], norms, norm, broken)


@torch.no_grad()
def finish(state: TrainState, stage: Stage, report: StepReport, setting: Setting) -> None:
    """After all turns: codebooks and other running sums, EMA, the step."""
    # Reading the flags waits for the device. With `stop` on a GPU the averages may therefore move once more; nothing saves them.
    reads = setting.nonfinite == "skip" or setting.world.device.type == "cpu"
    refused = reads and any(bool(turn.update.broken) for turn in report.turns)
    state.skips = state.skips + 1 if refused else 0
    if not refused:
        seed_generators(mix(state.seed, state.step) >> 1, setting.world.device)  # what `after` draws is the same on all ranks
        stage.after(stage.all_nets, report.stats, state.step)
        for pairs in state.pairs.values():
            update_average(pairs, decay_at(state.step, stage.ema_decay))
    state.step += 1


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """bf16 products under autocast, or nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def seed_dropout(state: TrainState, turn: int, micro: int, world: World) -> None:
    """Dropout = f(seed, step, turn, micro-batch, rank)."""
    seed_generators(mix(state.seed, state.step, turn, micro, world.rank) >> 1, world.device)


def seed_generators(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the host and this device alone. Torch seeds devices of every kind: for those that are not there it
    writes down who asked, which takes 0.3 ms, twice in every step (bench/RESULTS.md)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index].manual_seed(seed)


def sum_of(values: Sequence[Tensor]) -> Tensor:
    """fp64 sum of scalars or equal shapes."""
    if len(values) == 1:  # as nearly always: two launches less
        return values[0].detach().double()
    return torch.stack([value.detach().double() for value in values]).sum(0)
