"""The image tokenizer as the engine sees it."""

from __future__ import annotations

from pydantic import Field, model_validator
from torch import nn

from tessera.config import Config, OptimConfig
from tessera.contracts import Best, LossFunction, Stage, Turn
from tessera.nn.conv import ResidualBlock
from tessera.nn.perceptual import VGG16Distance
from tessera.tokenizers.image.critic import Critic, CriticConfig
from tessera.tokenizers.image.losses import ImageLossConfig, ImageLosses, follow
from tessera.tokenizers.image.model import Decoder, Encoder, ImageTokenizer, ImageTokenizerConfig


class ImageTokenizerStageConfig(Config):
    """Training of an image tokenizer."""

    model: ImageTokenizerConfig = ImageTokenizerConfig()
    """The autoencoder."""
    loss: ImageLossConfig = ImageLossConfig()
    """Its reconstruction terms."""
    critic: CriticConfig | None = CriticConfig()
    """The discriminator; null trains on reconstruction alone."""
    optim: OptimConfig = OptimConfig()
    """Optimizer of the autoencoder."""
    critic_optim: OptimConfig = OptimConfig(lr=1e-4, betas=(0.5, 0.9), schedule="constant")
    """Optimizer of the discriminator."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are the ones to use."""
    batch_size: int = Field(64, ge=1)
    """Samples per update, over all ranks."""
    steps: int = Field(20_000, ge=1)
    """Updates."""

    @model_validator(mode="after")
    def _some_loss(self) -> ImageTokenizerStageConfig:
        if not (self.loss.l1 or self.loss.l2 or self.loss.perceptual or self.critic):
            raise ValueError("loss.l1 and loss.l2 are 0, with no perceptual term and no critic: nothing would be learned")
        return self


def build_stage(config: ImageTokenizerStageConfig, channels: int, perceptual: nn.Module | None = None) -> Stage:
    """Fresh nets from torch's current seed. Turn order matters: the critic judges what the tokenizer handed on."""
    losses = ImageLosses(config.loss, config.critic)
    nets: dict[str, nn.Module] = {"tokenizer": ImageTokenizer(config.model, channels)}
    optim = {"tokenizer": config.optim}
    turns = [Turn(name="tokenizer", trains=("tokenizer",), loss=losses.tokenizer_turn, max_grad_norm=config.optim.max_grad_norm)]
    if config.critic is not None:
        nets["critic"] = Critic(config.critic, channels)
        optim["critic"] = config.critic_optim
        turns.append(critic_turn_of(config.critic, losses.critic_turn, config.critic_optim))
    return Stage(
        nets=nets,
        frozen={} if perceptual is None else {"perceptual": perceptual},
        averaged=("tokenizer",),
        ema_decay=config.ema_decay,
        turns=turns,
        optim=optim,
        best=Best("psnr", higher_is_better=True),
        measure=losses.measure,
        after=follow,
        digest=losses.digest,
        compiled=(Encoder, Decoder, Critic, VGG16Distance),
        sharded=(Encoder, Decoder),
        checkpointed=(ResidualBlock,),
    )


def critic_turn_of(critic: CriticConfig, loss: LossFunction, optim: OptimConfig) -> Turn:
    """The opponent's turn, behind the tokenizer's."""
    return Turn(name="critic", trains=("critic",), loss=loss, max_grad_norm=optim.max_grad_norm, start=critic.first_step)
