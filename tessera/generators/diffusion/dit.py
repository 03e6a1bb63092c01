"""A transformer that denoises pictures, or latents of pictures, of one size: for the base of a cascade."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config, UserError
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.conditioning import Conditioning, Inputs
from tessera.nn.adaptive import AdaptiveBlock, num_shifts
from tessera.nn.attention import linear
from tessera.nn.positions import grid_coordinates, rotary_turns


class DiTConfig(Config):
    """A transformer over patches of the picture."""

    kind: Literal["dit"] = "dit"
    """The kind of network."""
    patch: int = Field(2, ge=1)
    """Pixels of a patch along each axis. Half of it is four times as many tokens."""
    width: int = Field(384, ge=16)
    """Channels."""
    depth: int = Field(12, ge=1)
    """Layers."""
    heads: int = Field(6, ge=1)
    """Attention heads of each layer."""
    embedding_tokens: int = Field(4, ge=1)
    """Tokens made of an embedding, to attend to."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after attention and feed-forward."""

    @model_validator(mode="after")
    def _heads(self) -> DiTConfig:
        if self.width % self.heads or self.width // self.heads % 4:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads whose width is a multiple of 4")
        return self


class DiT(nn.Module):
    """Peebles and Xie 2023, with text and embedding by cross-attention. Rotation tells where patches are to each other, a learned
    vector for each row and column where they are: in pure noise all patches look alike. An untrained one guesses 0."""

    turns: Tensor

    def __init__(self, config: DiTConfig, inputs: Inputs) -> None:
        super().__init__()
        width, patch = config.width, config.patch
        self.inputs, self.patch = inputs, patch
        refuse_size(inputs.size, patch)
        self.grid = (inputs.size[0] // patch, inputs.size[1] // patch)
        context = width if inputs.attended else None
        self.conditioning = Conditioning(inputs, width, config.embedding_tokens)
        self.embed = linear(inputs.channels_in * patch**2, width, bias=True)
        self.places = nn.ParameterList(torch.randn(size, width) / math.sqrt(2) for size in self.grid)
        self.shifts = linear(width, num_shifts(context) * width, gain=0, bias=True)
        self.blocks = nn.ModuleList(AdaptiveBlock(width, config.heads, context, config.dropout) for _ in range(config.depth))
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.modulate = linear(width, 2 * width, gain=0, bias=True)
        self.out = linear(width, inputs.channels_out * patch**2, gain=0, bias=True)
        self.register_buffer("turns", rotary_turns(grid_coordinates(self.grid), width // config.heads), persistent=False)

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        """x b c h w, level b the log-SNR of the noise on it -> b c h w, with variance b 2c h w"""
        if tuple(x.shape[-2:]) != self.inputs.size:
            raise ValueError(
                f"a sample of {x.shape[-2]} x {x.shape[-1]} pixels; this transformer was built for {self.inputs.size}"
            )
        vector, context, mask = self.conditioning(level, condition)
        vector = F.silu(vector)
        shifts = self.shifts(vector).unflatten(-1, (-1, self.norm.normalized_shape[0]))
        patches = rearrange(self.inputs.stack(x, condition), "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch, q=self.patch)
        rows, columns = self.places
        h = self.embed(patches) + (rows[:, None] + columns[None]).flatten(0, 1)
        h = h.to(shifts.dtype)  # under autocast bf16 from here on
        for block in self.blocks:
            h = block(h, context, mask, shifts, self.turns)
        scale, shift = self.modulate(vector)[:, None].chunk(2, dim=-1)
        guess = self.out(self.norm(h) * (1 + scale) + shift)
        height, _ = self.grid
        return rearrange(guess, "b (h w) (c p q) -> b c (h p) (w q)", h=height, p=self.patch, q=self.patch).to(x.dtype)


def refuse_size(size: tuple[int, int], patch: int) -> None:
    """Pictures must be whole patches."""
    if size[0] % patch or size[1] % patch:
        raise UserError(f"pictures of {size[0]} x {size[1]} pixels cannot be divided into patches of {patch}; set another patch")
