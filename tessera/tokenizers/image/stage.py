"""The image tokenizer as the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.compiling import Shapes
from tessera.config import Config, OptimConfig
from tessera.contracts import Best, Classes, LossFunction, Stage, Turn
from tessera.nn.conv import GroupNorm, ResidualBlock
from tessera.nn.perceptual import VGG16Distance
from tessera.tokenizers.image.critic import Critic, CriticConfig
from tessera.tokenizers.image.losses import ImageLossConfig, ImageLosses, follow
from tessera.tokenizers.image.model import Decoder, Encoder, ImageTokenizer, ImageTokenizerConfig
from tessera.tokenizers.image.two_sizes import TwoSizes


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
        refuse_nothing(self.loss, self.critic)
        return self


def build_stage(
    config: ImageTokenizerStageConfig, channels: int, perceptual: nn.Module | None = None, *, small: tuple[int, int] | None = None
) -> Stage:
    """Fresh nets from torch's current seed. With `small` pictures are also seen shrunk to that height and width."""
    own, tokenizer = ImageLosses(config.loss, config.critic), ImageTokenizer(config.model, channels)
    losses = own if small is None else TwoSizes(own, small)
    critic = None if config.critic is None else Critic(config.critic, channels)
    stage = autoencoder_stage(config, losses, tokenizer, critic, perceptual)
    stage = sped_up(stage, (Encoder, Decoder), (ResidualBlock,), "one" if small is None else "few")
    return replace(stage, checkpointed=(ResidualBlock,))


class Training(Protocol):
    """What the stages of image and video tokenizers have in common, of their configs."""

    @property
    def critic(self) -> CriticConfig | None: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def critic_optim(self) -> OptimConfig: ...
    @property
    def ema_decay(self) -> float: ...


class Turns(Protocol):
    """And of their losses."""

    @property
    def tokenizer_turn(self) -> LossFunction: ...
    @property
    def critic_turn(self) -> LossFunction: ...
    @property
    def measure(self) -> LossFunction: ...
    def digest(self, stats: Mapping[str, Tensor]) -> dict[str, float]: ...


def autoencoder_stage(
    config: Training, losses: Turns, tokenizer: nn.Module, critic: nn.Module | None, perceptual: nn.Module | None
) -> Stage:
    """Of pictures or clips. Turn order matters: the critic judges what the tokenizer handed on."""
    nets, optim = {"tokenizer": tokenizer}, {"tokenizer": config.optim}
    turns = [Turn(name="tokenizer", trains=("tokenizer",), loss=losses.tokenizer_turn, max_grad_norm=config.optim.max_grad_norm)]
    if critic is not None and config.critic is not None:
        nets["critic"], optim["critic"] = critic, config.critic_optim
        limit, start = config.critic_optim.max_grad_norm, config.critic.first_step
        turns.append(Turn(name="critic", trains=("critic",), loss=losses.critic_turn, max_grad_norm=limit, start=start))
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
    )


def sped_up(stage: Stage, halves: Classes, blocks: Classes, sizes: Shapes = "one") -> Stage:
    """What is compiled and recorded of an autoencoder's two halves, for pictures of one or a few sizes.

    Halves are recorded around compiled blocks: equal ones, in both halves, are compiled once, so the first step comes in half the
    time. With a critic torch compiles and records each half, and the critic, as one piece: it was timed so (bench/RESULTS.md).
    """
    if "critic" in stage.nets:
        return replace(stage, compiled=(*halves, Critic, VGG16Distance), shapes=sizes, sharded=halves)
    compiled, recorded = (*blocks, GroupNorm, VGG16Distance), (*halves, VGG16Distance)
    return replace(stage, compiled=compiled, recorded=recorded, shapes="few", sharded=halves)


def refuse_nothing(loss: ImageLossConfig, critic: CriticConfig | None) -> None:
    """Something must be learned."""
    if not (loss.l1 or loss.l2 or loss.perceptual or critic):
        raise ValueError("loss.l1 and loss.l2 are 0, with no perceptual term and no critic: nothing would be learned")
