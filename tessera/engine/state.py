"""What training changes: nets, averages, optimizers and a step. Order and noise are functions of the step, not state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from tessera.compiling import compile_parts
from tessera.config import EngineConfig
from tessera.contracts import Stage
from tessera.engine.ema import Pairs, average_of, pairs_of
from tessera.engine.optim import build_optimizer
from tessera.engine.replay import replay
from tessera.engine.shard import shard_net, units_of


@dataclass(slots=True)
class TrainState:
    """What a checkpoint holds, and below the line what is only of this process."""

    step: int  # updates done
    seed: int
    nets: dict[str, nn.Module]
    averages: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.AdamW]
    best: float | None = None  # record of the stage's best metric
    best_step: int | None = None
    best_metric: str | None = None  # its name; of an older checkpoint None
    skips: int = 0  # updates left out in a row, with nonfinite: skip
    replaced: int = 0  # samples that could not be read, over all ranks
    # ---
    broken: torch.Tensor | None = None  # on the device: 1 once a loss or gradient was not finite
    traced: set[str] = field(default_factory=set)  # turns whose graph was checked
    parameters: dict[str, list[tuple[str, nn.Parameter]]] = field(init=False)  # walking the modules at every step takes
    pairs: dict[str, Pairs] = field(init=False)  # milliseconds, so these lists are made once
    units: dict[str, list[FSDPModule]] = field(init=False)  # modules that gather their own weights, of nets that are sharded

    def __post_init__(self) -> None:
        self.parameters = {name: list(net.named_parameters()) for name, net in self.nets.items()}
        self.units = {name: units_of(net) for name, net in self.nets.items()}
        self.pairs = {name: pairs_of(average, self.nets[name]) for name, average in self.averages.items()}

    @property
    def averaged_nets(self) -> dict[str, nn.Module]:
        """The nets to use: averages where there are any."""
        return {**self.nets, **self.averages}


def place(stage: Stage, seed: int, config: EngineConfig, device: torch.device) -> TrainState:
    """Moves a stage's nets to the device, freezes what is frozen, and makes averages and optimizers."""
    refuse_shared(stage)
    for net in stage.frozen.values():
        net.to(device).eval().requires_grad_(False)
    for net in stage.nets.values():
        net.to(device).train()
    averages = {name: average_of(stage.nets[name]) for name in stage.averaged}
    for net in stage.all_nets.values():
        speed_up(net, stage, config)
    if config.parallel == "shard":
        for net in (*stage.nets.values(), *averages.values()):
            shard_net(net, stage.sharded, device)
    optimizers = {name: build_optimizer(net, stage.optim[name]) for name, net in stage.nets.items()}
    return TrainState(0, seed, dict(stage.nets), averages, optimizers)


def refuse_shared(stage: Stage) -> None:
    """A turn freezes the nets that it does not train, so a parameter of two nets would never be trained at all."""
    owners: dict[nn.Parameter, str] = {}
    for net, module in stage.all_nets.items():
        for name, parameter in module.named_parameters():
            if owners.setdefault(parameter, net) != net:
                raise ValueError(
                    f"nets {owners[parameter]!r} and {net!r} share the parameter {name}; it must belong to one of them"
                )


def speed_up(net: nn.Module, stage: Stage, config: EngineConfig) -> None:
    """Recomputation first, compilation around it, a recording around that. All in place, so parameter names stay what they are.

    A recording costs the host as much as launching a dozen kernels, so few large modules are better than many: those that a stage
    names as recorded are, and what is compiled in them is not recorded again.
    """
    for module in net.modules():
        if config.activation_checkpointing and isinstance(module, stage.checkpointed):
            module.forward = recomputed(module.forward)
    if config.compile:
        compile_parts(net, stage.compiled, recorded=config.cuda_graphs and not stage.recorded, shapes=stage.shapes)
    for module in net.modules():
        if config.cuda_graphs and isinstance(module, stage.recorded):
            replay(module)


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps its inputs alone, and computes the rest once more on the way back."""

    def again(*args: Any, **kwargs: Any) -> Any:  # a function: torch.compile passes over a partial
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again
