"""The pair as the engine sees it."""

from __future__ import annotations

from pydantic import Field, model_validator

from tessera.config import Config, OptimConfig
from tessera.contracts import Best, Stage, Turn
from tessera.nn.conv import ResidualBlock
from tessera.text.bytes import ByteEncoder
from tessera.text.encoders import TextConfig, build_encoder, text_width
from tessera.tokenizers.pair.losses import PairLossConfig, PairLosses
from tessera.tokenizers.pair.model import Embedder, EmbedderConfig, PictureTower


class EmbedderStageConfig(Config):
    """Training of a pair of encoders, of pictures and of captions."""

    model: EmbedderConfig = EmbedderConfig()
    """The pair."""
    loss: PairLossConfig = PairLossConfig()
    """What is told apart."""
    optim: OptimConfig = OptimConfig(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05, warmup_steps=200)
    """Optimizer of the pair and of the text encoder that is trained with it."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are the ones to use."""
    batch_size: int = Field(256, ge=2)
    """Samples per update, over all ranks."""
    steps: int = Field(5_000, ge=1)
    """Updates."""

    @model_validator(mode="after")
    def _groups(self) -> EmbedderStageConfig:
        if self.batch_size > self.loss.group and self.batch_size % self.loss.group:
            raise ValueError(
                f"batch_size {self.batch_size} is not made of whole groups of loss.group {self.loss.group}; "
                f"set batch_size to {self.batch_size // self.loss.group * self.loss.group}, or loss.group to a divisor of it"
            )
        return self


def build_embedder(config: EmbedderConfig, text: TextConfig, channels: int) -> Embedder:
    """Fresh, from torch's current seed; with the text encoder in it where that is trained, so that the pair is one net."""
    return Embedder(config, channels, text_width(text), build_encoder(text))


def build_stage(config: EmbedderStageConfig, embedder: Embedder) -> Stage:
    """What `build_embedder` made, and how it is trained."""
    losses = PairLosses(config.loss)
    return Stage(
        nets={"embedder": embedder},
        averaged=("embedder",),
        ema_decay=config.ema_decay,
        turns=[Turn(name="embedder", trains=("embedder",), loss=losses.turn, max_grad_norm=config.optim.max_grad_norm)],
        optim={"embedder": config.optim},
        best=Best("loss", higher_is_better=False),
        measure=losses.measure,
        compiled=(PictureTower, ByteEncoder),
        checkpointed=(ResidualBlock,),
    )
