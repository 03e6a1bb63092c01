"""The training of the autoregressive generator as a `Stage`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import nn

from tessera.batches import SequenceBatch
from tessera.config import Config, OptimConfig
from tessera.contracts import Nets, Stage
from tessera.generators.autoregressive.losses import AutoregressiveLossConfig, AutoregressiveLosses, as_it_is, digest
from tessera.generators.autoregressive.model import Autoregressive, AutoregressiveConfig, Block, Level
from tessera.generators.stage import generator_stage
from tessera.nn.attention import EncoderBlock
from tessera.text.bytes import ByteEncoder


class AutoregressiveStageConfig(Config):
    """Training of an autoregressive generator."""

    model: AutoregressiveConfig = AutoregressiveConfig()
    """The network."""
    loss: AutoregressiveLossConfig = AutoregressiveLossConfig()
    """What is taken away in training."""
    optim: OptimConfig = OptimConfig(lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=500)
    """AdamW and its schedule."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are the ones to use."""
    batch_size: int = Field(64, ge=1)
    """Samples per update, over all ranks."""
    steps: int = Field(20_000, ge=1)
    """Updates."""


def build_nets(
    config: AutoregressiveStageConfig, *, vocab_size: int, group: Sequence[int], text_width: int, encoder: nn.Module | None = None
) -> dict[str, nn.Module]:
    """Fresh nets from torch's current seed: the generator, and the text encoder that is trained with it, if there is one."""
    nets: dict[str, nn.Module] = {"generator": Autoregressive(config.model, vocab_size, group, text_width)}
    return nets if encoder is None else {**nets, "text": encoder}


def build_stage(
    config: AutoregressiveStageConfig, nets: dict[str, nn.Module], read: Callable[[Nets, Any], SequenceBatch] = as_it_is
) -> Stage:
    """What `build_nets` made, and how it is trained. `read` turns what the loader brings into tokens."""
    losses = AutoregressiveLosses(config.loss, read)
    return replace(
        generator_stage(config, nets, losses, digest),
        compiled=(Block, Level, EncoderBlock),
        recorded=(Autoregressive, ByteEncoder),
        shapes="many",
        sharded=(Block,),
        checkpointed=(Block,),
    )
