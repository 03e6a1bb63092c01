"""The training of the autoregressive generator of clips as a `Stage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from tessera.contracts import Stage
from tessera.generators.autoregressive.grid_losses import GridLossConfig, GridLosses, digest
from tessera.generators.autoregressive.grid_model import GridAutoregressive, GridBlock, GridConfig
from tessera.generators.autoregressive.model import Level
from tessera.generators.autoregressive.stage import AutoregressiveStageConfig
from tessera.generators.stage import generator_stage
from tessera.nn.attention import EncoderBlock
from tessera.text.bytes import ByteEncoder


class GridStageConfig(AutoregressiveStageConfig):
    """Training of an autoregressive generator of clips."""

    model: GridConfig = GridConfig()
    """The network."""
    loss: GridLossConfig = GridLossConfig()
    """What is taken away in training."""


def build_nets(
    config: GridStageConfig, *, vocab_size: int, grid: Sequence[int], text_width: int, codes: int | None = None,
    encoder: nn.Module | None = None,
) -> dict[str, nn.Module]:  # fmt: skip
    """Fresh nets from torch's current seed: the generator of grids t h w, whose cells have one token or so many `codes`, and the
    text encoder that is trained with it, if there is one."""
    nets: dict[str, nn.Module] = {"generator": GridAutoregressive(config.model, vocab_size, grid, text_width, codes)}
    return nets if encoder is None else {**nets, "text": encoder}


def build_stage(config: GridStageConfig, nets: dict[str, nn.Module]) -> Stage:
    """What `build_nets` made, and how it is trained on a `TokenBatch`."""
    losses = GridLosses(config.loss)
    return replace(
        generator_stage(config, nets, losses, digest),
        compiled=(GridBlock, Level, EncoderBlock),
        recorded=(GridAutoregressive, ByteEncoder),
        sharded=(GridBlock,),
        checkpointed=(GridBlock,),
    )
