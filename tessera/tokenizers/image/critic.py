"""The opponent: judges patches of a picture as real or made (PatchGAN, Isola et al. 2017)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config
from tessera.nn.conv import GroupNorm, channels_last, initialise, store_channels_last


class PenaltyConfig(Config):
    """R1: weight / 2 times the squared gradient of the critic at real pictures (Mescheder et al. 2018)."""

    weight: float = Field(1.0, gt=0)
    """Strength, as if it were applied at every step."""
    every: int = Field(16, ge=1)
    """Steps from one application to the next; each is that many times stronger. 1 applies it always."""


class LeCamConfig(Config):
    """Keeps the critic's logits near their past means, which helps where data are few (Tseng et al. 2021)."""

    weight: float = Field(1e-3, gt=0)
    """Strength."""
    decay: float = Field(0.99, ge=0, lt=1)
    """Of the moving averages of the critic's logits, each step."""


class CriticConfig(Config):
    """A patch critic and its part in the tokenizer's loss."""

    widths: tuple[int, ...] = Field((64, 128, 256), min_length=2)
    """Channels after the first convolution and after each halving."""
    start_step: int = Field(2000, ge=0)
    """First step at which the tokenizer hears the critic; before that it learns to reconstruct."""
    warmup_steps: int = Field(500, ge=0)
    """How many steps before start_step the critic itself begins to learn."""
    loss: Literal["hinge", "bce"] = "hinge"
    """`hinge`, or `bce`: the logistic loss, for the tokenizer in the form that does not saturate."""
    weight: float = Field(0.1, gt=0)
    """Weight of the adversarial term; with adaptive, a share of the reconstruction's pull."""
    adaptive: bool = False
    """Rescale the term so that its gradient at the reconstruction has `weight` times the norm of the other terms'."""
    penalty: PenaltyConfig | None = None
    """Gradient penalty on the critic; null: none."""
    lecam: LeCamConfig | None = None
    """Regularisation of the critic's logits; null: none."""

    @model_validator(mode="after")
    def _widths(self) -> CriticConfig:
        if any(width < 4 or width % 4 for width in self.widths):
            raise ValueError(f"widths {list(self.widths)} must be multiples of 4")
        return self

    @property
    def first_step(self) -> int:
        """First step of the critic's own turn."""
        return max(0, self.start_step - self.warmup_steps)


class PastLogits(nn.Module):
    """Moving averages of the critic's logits on real and on made pictures, over whole global batches. Both start at 0, as the
    critic does."""

    real: Tensor
    made: Tensor

    def __init__(self, config: LeCamConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("real", torch.zeros(()))
        self.register_buffer("made", torch.zeros(()))

    def penalty(self, real_logits: Tensor, made_logits: Tensor) -> Tensor:
        """b n logits of each -> b (Tseng et al. 2021, R_LC): real ones near the past made ones, and the other way round."""
        apart = (real_logits - self.made).square().mean(1) + (made_logits - self.real).square().mean(1)
        return self.config.weight * apart

    @torch.no_grad()
    def follow(self, real_mean: Tensor, made_mean: Tensor) -> None:
        """One step of both averages."""
        self.real.lerp_(real_mean.float(), 1 - self.config.decay)
        self.made.lerp_(made_mean.float(), 1 - self.config.decay)


class Critic(nn.Module):
    """b c h w -> b 1 h' w', one logit a patch; starts at 0 everywhere, so the first hinge loss is 2, the first bce 2 ln 2."""

    def __init__(self, config: CriticConfig, channels: int) -> None:
        super().__init__()
        self.past = None if config.lecam is None else PastLogits(config.lecam)
        self.first = initialise(nn.Conv2d(channels, config.widths[0], 5, padding=2))
        pairs = list(zip(config.widths[:-1], config.widths[1:], strict=True))
        self.convs = nn.ModuleList(initialise(nn.Conv2d(a, b, 4, stride=2, padding=1), gain=1.4) for a, b in pairs)
        self.norms = nn.ModuleList(GroupNorm(b) for _, b in pairs)
        self.mix = initialise(nn.Conv2d(config.widths[-1], config.widths[-1], 1), gain=1.4)
        self.out = initialise(nn.Conv2d(config.widths[-1], 1, 3, padding=1), gain=0)
        store_channels_last(self)

    def forward(self, images: Tensor, direction: Tensor | None = None) -> Tensor:
        """Any size from 2^(number of halvings) pixels up. With a direction, b c h w, twice as many rows come out:
        the logits, then their derivatives along it, made of plain sums and products."""
        return self.judge(channels_last(images), direction, len(images))

    def judge(self, h: Tensor, d: Tensor | None, num: int) -> Tensor:
        """Pictures, and where given directions, of num samples."""
        h, d = bend(*convolve(self.first, h, d))
        for level, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            assert isinstance(norm, GroupNorm)
            h, d = self.between(level, *convolve(conv, h, d), num)
            h, d = bend(norm(h), None if d is None else norm.along(h, d))
        h, d = convolve(self.out, *bend(*convolve(self.mix, h, d)))
        return (h if d is None else torch.cat([h, d])).float()

    def between(self, level: int, h: Tensor, d: Tensor | None, num: int) -> tuple[Tensor, Tensor | None]:
        """What passes between the pictures of a sample: nothing, it is one picture."""
        return h, d


def convolve(conv: nn.Module, h: Tensor, d: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A convolution, and its derivative at h along d: the same without the bias."""
    assert isinstance(conv, nn.Conv2d)
    if d is not None:
        d = F.conv2d(d, conv.weight, None, conv.stride, conv.padding)
    return conv(h), d


def bend(h: Tensor, d: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Leaky ReLU, and its derivative at h along d."""
    return F.leaky_relu(h, 0.2), None if d is None else torch.where(h > 0, d, 0.2 * d)
