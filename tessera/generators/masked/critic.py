"""The token critic (Lezama et al. 2022): of a grid without hidden tokens it says which ones the generator got wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.config import Config, OptimConfig
from tessera.generators.masked.model import Low, MaskedConfig, MaskedTransformer, Trunk
from tessera.nn.attention import linear

CRITIC_OPTIM = OptimConfig(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=500)


class HeadCriticConfig(Config):
    """A critic that reads the generator's own features."""

    kind: Literal["head"] = "head"
    """One linear layer on the features of a second pass, over the filled grid."""
    weight: float = Field(0.5, ge=0)
    """Of the critic's loss in the generator's own. 0 trains the layer alone, which sees little: a generator that is only asked
    for hidden tokens has no reason to compare visible ones with their surroundings."""
    optim: OptimConfig = CRITIC_OPTIM
    """Optimizer of the critic."""


class NetCriticConfig(Config):
    """A critic with a transformer of its own."""

    kind: Literal["net"] = "net"
    """A whole network, of any size."""
    model: MaskedConfig = MaskedConfig(width=256, depth=4, heads=4)
    """Its transformer."""
    optim: OptimConfig = CRITIC_OPTIM
    """Optimizer of the critic."""

    @model_validator(mode="after")
    def _plain(self) -> NetCriticConfig:
        if self.model.self_conditioning:
            raise ValueError("a critic makes one pass and has nothing to remember; set model.self_conditioning=false")
        return self


TokenCriticConfig = Annotated[HeadCriticConfig | NetCriticConfig, Field(discriminator="kind")]


class CriticHead(nn.Module):
    """Features b n d -> logits b n that a token is wrong."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = linear(width, 1, gain=0, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """b n d -> b n, fp32"""
        return self.head(features)[..., 0].float()


class CriticNet(nn.Module):
    """Tokens, text and coarser tokens -> logits b n that a token is wrong."""

    def __init__(
        self, config: MaskedConfig, vocab_size: int, grid: Sequence[int], text_width: int, low: Low | None = None
    ) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(config, vocab_size, grid, text_width, low), CriticHead(config.width)

    def forward(self, ids: Tensor, text: TextStates, low: Tensor | None = None, frames: Tensor | None = None) -> Tensor:
        """b n -> b n, fp32; frames b t bool as for the generator"""
        return self.head(self.trunk(ids, text, low, frames=frames))


def build_critic(
    config: TokenCriticConfig, generator: MaskedTransformer, text_width: int, low: Low | None = None
) -> CriticHead | CriticNet:
    """A fresh critic of a generator's tokens."""
    if isinstance(config, HeadCriticConfig):
        return CriticHead(generator.width)
    return CriticNet(config.model, generator.vocab_size, generator.grid, text_width, low)


def judge(
    critic: nn.Module, generator: MaskedTransformer, ids: Tensor, text: TextStates, low: Tensor | None,
    frames: Tensor | None = None, *, through: bool = False,
) -> Tensor:  # fmt: skip
    """Logits b n that tokens are wrong, by either kind. `through` lets gradients of a head pass on into the generator."""
    if isinstance(critic, CriticHead):
        with torch.set_grad_enabled(through):
            features = generator(ids, text, low, frames=frames)
        return critic(features)
    return critic(ids, text, low, frames=frames)
