"""The opponents: one judges frames as pictures, one judges patches of frames together with the frames before them."""

from __future__ import annotations

from typing import Annotated, Literal

from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from tessera.nn.conv import channels_last, initialise, store_channels_last
from tessera.tokenizers.image.critic import Critic, CriticConfig, convolve
from tessera.tokenizers.video.conv import REACH, along_time, as_pictures, reach_back


class FrameCriticConfig(CriticConfig):
    """The image tokenizer's critic, on single frames (`loss.seen_frames` of each clip)."""

    kind: Literal["frames"] = "frames"
    """What it judges."""


class ClipCriticConfig(CriticConfig):
    """A critic of all frames that sees motion: the same with convolutions along time."""

    kind: Literal["clips"] = "clips"
    """What it judges."""


VideoCriticConfig = Annotated[FrameCriticConfig | ClipCriticConfig, Field(discriminator="kind")]


class ClipCritic(Critic):
    """b c t h w -> (b t) 1 h' w', one logit a patch of each frame; starts at 0 everywhere.

    After each halving a causal convolution of three frames is added, so a logit sees its own frame and two more before it for
    every halving, and what lies behind a clip's end changes no logit of the clip. Norms are of one frame.
    """

    def __init__(self, config: CriticConfig, channels: int) -> None:
        super().__init__(config, channels)
        self.times = nn.ModuleList(
            initialise(nn.Conv2d(width, width, (1 + REACH, 1), bias=False), gain=0.7) for width in config.widths[1:]
        )
        store_channels_last(self)

    def forward(self, images: Tensor, direction: Tensor | None = None) -> Tensor:
        """With a direction, b c t h w, twice as many rows come out: the logits, then their derivatives along it."""
        pictures, directions = (None if x is None else frames_of(x) for x in (images, direction))
        assert pictures is not None
        return self.judge(channels_last(pictures), directions, len(images))

    def between(self, level: int, h: Tensor, d: Tensor | None, num: int) -> tuple[Tensor, Tensor | None]:
        """Adds what the frames before say."""
        time, height = self.times[level], h.shape[-2]
        spread, along = (None if x is None else reach_back(along_time(x, num)) for x in (h, d))
        assert spread is not None
        spread, along = convolve(time, spread, along)
        return h + as_pictures(spread, height), None if d is None or along is None else d + as_pictures(along, height)


def frames_of(clips: Tensor) -> Tensor:
    """b c t h w -> (b t) c h w"""
    return rearrange(clips, "b c t h w -> (b t) c h w")


def build_critic(config: FrameCriticConfig | ClipCriticConfig, channels: int) -> Critic:
    """The net of either kind."""
    return ClipCritic(config, channels) if isinstance(config, ClipCriticConfig) else Critic(config, channels)
