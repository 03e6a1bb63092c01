"""Looks at a stage between steps: its `measure` over the fixed validation batches, summed over all ranks and divided once;
and its picture of fixed samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from tessera.batches import Batch
from tessera.contracts import Context, Loss, Nets, Preview, Stage
from tessera.engine.replay import launched_one_by_one
from tessera.engine.shard import gathered
from tessera.engine.state import TrainState
from tessera.engine.step import Setting, autocast, reduce_losses


@torch.no_grad()
def validate(nets: Nets, stage: Stage, batches: Sequence[Batch], step: int, seed: int, setting: Setting) -> dict[str, float]:
    """Every rank brings equally many batches; the numbers are the same on all of them."""
    assert stage.measure is not None
    device = setting.world.device
    losses: list[Loss] = []
    with eval_mode(nets, setting.compiled):
        for batch in batches:
            moved = batch.to(device)
            context = Context(step, seed, batch.positions.to(device), gather=setting.world.rows)
            with autocast(device, setting.precision):
                losses.append(stage.measure(nets, moved, context))
    sums = reduce_losses(losses, setting.world)
    weight = sums.numbers["weight"]
    means: dict[str, Tensor] = {name: total / weight for name, total in sums.numbers.items() if name != "weight"}
    return {name: float(value) for name, value in means.items()} | stage.digest(sums.stats)


@torch.no_grad()
def draw_preview(stage: Stage, state: TrainState, batch: Batch, setting: Setting) -> Preview:
    """The stage's picture of fixed samples, by raw and by averaged weights. Sampling calls more than nets as a whole, so slices
    are gathered before."""
    assert stage.preview is not None
    raw, smooth = {**state.nets, **stage.frozen}, {**state.averaged_nets, **stage.frozen}
    context = Context(state.step, state.seed, batch.positions.to(setting.world.device))
    whole = gathered([*state.nets.values(), *state.averages.values()])
    with whole, eval_mode(raw, setting.compiled), autocast(setting.world.device, setting.precision):  # averages always are
        return stage.preview(raw, smooth, batch, context)


@contextlib.contextmanager
def eval_mode(nets: Mapping[str, nn.Module], compiled: bool = False) -> Iterator[None]:
    """Eval mode for the time of a validation or preview, then back to what it was.

    Compiled modules run eager meanwhile and nothing is recorded, because other shapes would be compiled and recorded anew.
    """
    training = {name: net.training for name, net in nets.items()}
    for net in nets.values():
        net.eval()
    try:
        with launched_one_by_one(), torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        for name, net in nets.items():
            net.train(training[name])
