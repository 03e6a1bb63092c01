"""A denoiser as the engine sees it, whatever network it is."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import nn

from tessera.config import Config, OptimConfig
from tessera.contracts import Classes, Stage
from tessera.generators.diffusion.losses import DiffusionLossConfig, DiffusionLosses, Read, digest
from tessera.generators.diffusion.processes import PIXELS_STD, DdpmConfig, FlowConfig, Process, ProcessConfig, build_process
from tessera.generators.stage import generator_stage


class DiffusionStageConfig(Config):
    """Training of a denoiser. Its network's section stands beside the network."""

    process: ProcessConfig = FlowConfig()
    """Which noise, and what is predicted."""
    loss: DiffusionLossConfig = DiffusionLossConfig()
    """What errors count, and what is taken away."""
    optim: OptimConfig = OptimConfig(lr=3e-4, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=500)
    """Optimizer of the denoiser and of the text encoder that is trained with it."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are the ones to use."""
    batch_size: int = Field(256, ge=1)
    """Samples per update, over all ranks."""
    steps: int = Field(20_000, ge=1)
    """Updates."""

    @property
    def data_std(self) -> float:
        """Standard deviation of what is drawn."""
        return PIXELS_STD

    def build_process(self) -> Process:
        """The diffusion itself."""
        return build_process(self.process, self.data_std)

    @property
    def learned_variance(self) -> bool:
        """Whether the network guesses a variance, too."""
        return isinstance(self.process, DdpmConfig) and self.process.learned_variance


def build_stage(
    config: DiffusionStageConfig, nets: dict[str, nn.Module], read: Read, *, recalls: bool = False,
    compiled: Classes = (), recorded: Classes = (), sharded: Classes = (), checkpointed: Classes = (),
) -> Stage:  # fmt: skip
    """How `nets` are trained: the denoiser, named generator, and the text encoder that is trained with it, if there is one.
    `read` makes examples of batches; `recalls`: the network takes an earlier guess; the classes are those of its modules, whose
    inputs have a few shapes: those of each level."""
    losses = DiffusionLosses(config.loss, config.build_process(), read, recalls)
    return replace(
        generator_stage(config, nets, losses, digest),
        compiled=compiled,
        recorded=recorded,
        shapes="few",
        sharded=sharded,
        checkpointed=checkpointed,
    )
