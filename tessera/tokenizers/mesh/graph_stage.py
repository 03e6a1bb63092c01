"""The graph tokenizer as the engine sees it."""

from __future__ import annotations

from pydantic import Field

from tessera.config import Config, OptimConfig
from tessera.contracts import Best, Stage, Turn
from tessera.nn.attention import EncoderBlock
from tessera.nn.quantizers import Residual
from tessera.tokenizers.mesh.autoencoder import ConvBlock, Decoder, Encoder, GraphLayer, GraphTokenizer, GraphTokenizerConfig
from tessera.tokenizers.mesh.bins import BinScores
from tessera.tokenizers.mesh.graph_losses import GraphLossConfig, GraphLosses, follow


class GraphTokenizerStageConfig(Config):
    """Training of a graph tokenizer."""

    model: GraphTokenizerConfig = GraphTokenizerConfig()
    """The autoencoder."""
    loss: GraphLossConfig = GraphLossConfig()
    """Its target."""
    optim: OptimConfig = OptimConfig(lr=1e-3)
    """Its optimizer."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are the ones to use."""
    batch_size: int = Field(64, ge=1)
    """Meshes per update, over all ranks."""
    steps: int = Field(20_000, ge=1)
    """Updates."""


def build_stage(config: GraphTokenizerStageConfig, bins: int) -> Stage:
    """A fresh net from torch's current seed, for coordinates of so many bins."""
    losses = GraphLosses(config.loss)
    return Stage(
        nets={"tokenizer": GraphTokenizer(config.model, bins)},
        averaged=("tokenizer",),
        ema_decay=config.ema_decay,
        turns=[Turn(name="tokenizer", trains=("tokenizer",), loss=losses.turn, max_grad_norm=config.optim.max_grad_norm)],
        optim={"tokenizer": config.optim},
        best=Best("decoded_accuracy", higher_is_better=True),
        measure=losses.measure,
        after=follow,
        digest=losses.digest,
        compiled=(Encoder, Residual, ConvBlock, EncoderBlock, BinScores),
        recorded=(GraphTokenizer,),
        shapes="many",
        sharded=(Encoder, Decoder),
        checkpointed=(GraphLayer, ConvBlock, EncoderBlock),
    )
