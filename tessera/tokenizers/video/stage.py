"""The video tokenizer as the engine sees it."""

from __future__ import annotations

from pydantic import Field, model_validator
from torch import nn

from tessera.config import Config, OptimConfig
from tessera.contracts import Best, Stage, Turn
from tessera.nn.attention import EncoderBlock
from tessera.nn.conv import ResidualBlock
from tessera.nn.perceptual import VGG16Distance
from tessera.tokenizers.image.critic import Critic
from tessera.tokenizers.image.losses import follow
from tessera.tokenizers.image.stage import critic_turn_of
from tessera.tokenizers.video import conv, cvivit
from tessera.tokenizers.video.critic import VideoCriticConfig, build_critic
from tessera.tokenizers.video.losses import VideoLossConfig, VideoLosses
from tessera.tokenizers.video.model import VideoTokenizer, VideoTokenizerConfig


class VideoTokenizerStageConfig(Config):
    """Training of a video tokenizer."""

    model: VideoTokenizerConfig = conv.CausalConvConfig()
    """The autoencoder."""
    loss: VideoLossConfig = VideoLossConfig()
    """Its reconstruction terms."""
    critic: VideoCriticConfig | None = None
    """The discriminator, of frames or of clips; null trains on reconstruction alone."""
    optim: OptimConfig = OptimConfig()
    """Optimizer of the autoencoder."""
    critic_optim: OptimConfig = OptimConfig(lr=1e-4, betas=(0.5, 0.9), schedule="constant")
    """Optimizer of the discriminator."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are the ones to use."""
    batch_size: int = Field(16, ge=1)
    """Clips per update, over all ranks."""
    steps: int = Field(20_000, ge=1)
    """Updates."""

    @model_validator(mode="after")
    def _some_loss(self) -> VideoTokenizerStageConfig:
        if not (self.loss.l1 or self.loss.l2 or self.loss.perceptual or self.critic):
            raise ValueError("loss.l1 and loss.l2 are 0, with no perceptual term and no critic: nothing would be learned")
        return self


def build_stage(config: VideoTokenizerStageConfig, channels: int, perceptual: nn.Module | None = None) -> Stage:
    """Fresh nets from torch's current seed. Turn order matters: the critic judges what the tokenizer handed on."""
    losses = VideoLosses(config.loss, config.critic)
    nets: dict[str, nn.Module] = {"tokenizer": VideoTokenizer(config.model, channels)}
    optim = {"tokenizer": config.optim}
    turns = [Turn(name="tokenizer", trains=("tokenizer",), loss=losses.tokenizer_turn, max_grad_norm=config.optim.max_grad_norm)]
    if config.critic is not None:
        nets["critic"] = build_critic(config.critic, channels)
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
        compiled=(conv.Encoder, conv.Decoder, cvivit.Encoder, cvivit.Decoder, Critic, VGG16Distance),
        sharded=(conv.Encoder, conv.Decoder, cvivit.Encoder, cvivit.Decoder),
        checkpointed=(ResidualBlock, conv.TimeBlock, EncoderBlock, cvivit.WindowBlock),
    )
