"""The networks to choose from: `net(x, level, condition) -> guess`, whatever its kind."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tessera.generators.diffusion.conditioning import Inputs
from tessera.generators.diffusion.dit import DiT, DiTConfig
from tessera.generators.diffusion.unet import Grow, LastNorm, Layer, Shrink, UNet, UNetConfig
from tessera.nn.adaptive import AdaptiveBlock

Denoiser = Annotated[UNetConfig | DiTConfig, Field(discriminator="kind")]

# For a stage. A U-Net's layers differ in width and size, but half of them equal another one, which is compiled once for both.
COMPILED = (Layer, Shrink, Grow, LastNorm, AdaptiveBlock)
RECORDED = (UNet, DiT)
SHARDED = (UNet, AdaptiveBlock)
CHECKPOINTED = (Layer, AdaptiveBlock)


def build_denoiser(
    config: UNetConfig | DiTConfig, *, channels: int, size: tuple[int, int], text_width: int | None = None,
    embedding_width: int | None = None, low: bool = False, self_conditioning: bool = False, variance: bool = False,
) -> UNet | DiT:  # fmt: skip
    """A fresh net from torch's current seed. Without text_width or embedding_width it is never told any; with `low` it sees a
    smaller picture, with `self_conditioning` its earlier guess, and with `variance` it guesses twice the channels."""
    inputs = Inputs(
        channels=channels, size=size, text_width=text_width, embedding_width=embedding_width, low=low,
        self_conditioning=self_conditioning, variance=variance,
    )  # fmt: skip
    return UNet(config, inputs) if isinstance(config, UNetConfig) else DiT(config, inputs)
