"""What a stage wants to know of its training data before its first step: sums over the first batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.contracts import Loader, Stage, Survey
from tessera.engine.state import TrainState
from tessera.engine.step import Setting, autocast
from tessera.engine.validate import eval_mode


@torch.no_grad()
def take_survey(stage: Stage, survey: Survey, state: TrainState, loader: Loader, batch_size: int, setting: Setting) -> None:
    """Fills the buffers of nets and averages; the same on every rank, and whatever their number but for rounding of fp64."""
    nets, device = {**state.nets, **stage.frozen}, setting.world.device
    sums: dict[str, Tensor] = {}
    batches = loader.batches(0)
    try:
        with eval_mode(nets, setting.compiled):
            for _ in range(-(-min(survey.samples, len(loader.train)) // batch_size)):
                for batch in next(batches):
                    with autocast(device, setting.precision):
                        own = survey.sums(nets, batch.to(device))
                    sums = {name: sums[name] + value if sums else value for name, value in own.items()}
    finally:
        batches.close()
    total = {name: setting.world.sum_(value) for name, value in sums.items()}
    survey.keep(state.nets, total)
    survey.keep(state.averaged_nets, total)
