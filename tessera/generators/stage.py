"""What the trainings of all generators share that have one turn: the generator, and perhaps a text encoder beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from tessera.config import OptimConfig
from tessera.contracts import Best, LossFunction, Stage, Turn


class Trained(Protocol):
    """The part of a stage's config that it takes."""

    @property
    def optim(self) -> OptimConfig: ...
    @property
    def ema_decay(self) -> float: ...


class Losses(Protocol):
    """What is minimised, and what validation sums."""

    @property
    def turn(self) -> LossFunction: ...
    @property
    def measure(self) -> LossFunction: ...


def generator_stage(
    config: Trained, nets: dict[str, nn.Module], losses: Losses, digest: Callable[[Mapping[str, Tensor]], dict[str, float]]
) -> Stage:
    """All nets learn together and are averaged. Which modules are compiled or sliced, the caller adds."""
    return Stage(
        nets=nets,
        averaged=tuple(nets),
        ema_decay=config.ema_decay,
        turns=[Turn(name="generator", trains=tuple(nets), loss=losses.turn, max_grad_norm=config.optim.max_grad_norm)],
        optim=dict.fromkeys(nets, config.optim),
        best=Best("loss", higher_is_better=False),
        measure=losses.measure,
        digest=digest,
    )
