"""The video tokenizer as the engine sees it."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field, model_validator
from torch import nn

from tessera.config import Config, OptimConfig
from tessera.contracts import Stage
from tessera.nn.attention import EncoderBlock
from tessera.nn.conv import ResidualBlock
from tessera.tokenizers.image.stage import autoencoder_stage, refuse_nothing, sped_up
from tessera.tokenizers.video import conv, cvivit, frames
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
        refuse_nothing(self.loss, self.critic)
        return self


def build_stage(config: VideoTokenizerStageConfig, channels: int, perceptual: nn.Module | None = None) -> Stage:
    """Fresh nets from torch's current seed."""
    losses, tokenizer = VideoLosses(config.loss, config.critic), VideoTokenizer(config.model, channels)
    critic = None if config.critic is None else build_critic(config.critic, channels)
    halves = (conv.Encoder, conv.Decoder, cvivit.Encoder, cvivit.Decoder, frames.Encoder, frames.Decoder)
    blocks = (ResidualBlock, conv.TimeLayer, EncoderBlock, cvivit.WindowBlock)
    stage = sped_up(autoencoder_stage(config, losses, tokenizer, critic, perceptual), halves, blocks)
    return replace(stage, checkpointed=(ResidualBlock, conv.TimeBlock, EncoderBlock, cvivit.WindowBlock))
