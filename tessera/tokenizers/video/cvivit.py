"""The transformer backbone, C-ViViT (Villegas et al. 2022, section 2.1): attention within latent frames, then along time.

The first frame has its own patches and pixel head. Attention along time is causal and sees a window of latent frames, so what a
streamed decoder keeps does not grow. Positions are rotary; norms come first.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config
from tessera.nn.attention import Attention, EncoderBlock, FeedForward, RMSNorm, linear
from tessera.nn.positions import grid_coordinates, rotary_turns
from tessera.nn.quantizers import FSQConfig, QuantizerConfig
from tessera.tokenizers.video.conv import Memory


class CViViTConfig(Config):
    """Transformers over patches: full attention within a latent frame, causal attention along time."""

    kind: Literal["cvivit"] = "cvivit"
    """The kind of network."""
    width: int = Field(256, ge=8)
    """Channels of a token."""
    spatial_depth: int = Field(4, ge=1)
    """Layers within frames, of the encoder and of the decoder each."""
    temporal_depth: int = Field(4, ge=0)
    """Layers along time, of each."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    patch: int = Field(8, ge=1)
    """Pixels per token along height and width."""
    time_patch: int = Field(4, ge=1)
    """Frames per latent frame, but for the first."""
    window: int = Field(5, ge=1)
    """Latent frames that attention along time sees, its own included; at most as many as training clips have."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of embedded patches and codes."""
    quantizer: QuantizerConfig = FSQConfig()
    """How latents become codes."""

    @model_validator(mode="after")
    def _heads(self) -> CViViTConfig:
        if self.width % self.heads or self.width // self.heads % 4:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads whose width is a multiple of 4")
        return self

    @property
    def stride(self) -> int:
        """Pixels per token along each axis."""
        return self.patch

    @property
    def time_stride(self) -> int:
        """Frames per latent frame, but for the first."""
        return self.time_patch


class WindowBlock(nn.Module):
    """x + attention to oneself and the window - 1 places before, x + feed-forward, each on a normalised input."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x: Tensor, turns: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """b n d, turns 2 n k, past 2 b h m k: keys and values of the places before, None at the start. Returns the next."""
        query, key, value = self.attention.project(self.norm1(x), None, turns)
        known = torch.stack([key, value])
        if past is not None:
            known = torch.cat([past.to(known.dtype), known], dim=3)
        seen = F.scaled_dot_product_attention(
            query, known[0], known[1], attn_mask=self.mask(x.shape[1], known.shape[3], x.device)
        )
        x = x + self.attention.join(seen)
        return x + self.feed_forward(self.norm2(x)), known[:, :, :, max(0, known.shape[3] - self.window + 1) :]

    def mask(self, num: int, num_known: int, device: torch.device) -> Tensor:
        """num x num_known: which places the last num see."""
        keys = torch.arange(num_known, device=device)
        back = keys[num_known - num :, None] - keys
        return (back >= 0) & (back < self.window)


class Spatial(nn.Module):
    """Full attention within each latent frame."""

    def __init__(self, config: CViViTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.blocks = nn.ModuleList(EncoderBlock(config.width, config.heads) for _ in range(config.spatial_depth))

    def forward(self, x: Tensor) -> Tensor:
        """b k h w d -> b k h w d"""
        num, _, height, width, _ = x.shape
        turns = rotary_turns(grid_coordinates((height, width), x.device), self.head_width)
        x = rearrange(x, "b k h w d -> (b k) (h w) d")
        for block in self.blocks:
            x = block(x, None, turns)
        return rearrange(x, "(b k) (h w) d -> b k h w d", b=num, h=height)


class Temporal(nn.Module):
    """Causal attention along time, at each place of the grid."""

    def __init__(self, config: CViViTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.blocks = nn.ModuleList(WindowBlock(config.width, config.heads, config.window) for _ in range(config.temporal_depth))

    def forward(self, x: Tensor, memory: Memory | None = None, keep: bool = False) -> tuple[Tensor, Memory]:
        """b k h w d -> b k h w d. A memory: how many latent frames there were, then what every block keeps."""
        num, length, height, _, _ = x.shape
        place = torch.zeros((), dtype=torch.int64, device=x.device) if memory is None else memory[0]
        turns = rotary_turns((place + torch.arange(length, device=x.device))[:, None], self.head_width)
        x, kept = rearrange(x, "b k h w d -> (b h w) k d"), [place + length]
        for index, block in enumerate(self.blocks):
            x, own = block(x, turns, None if memory is None else memory[1 + index])
            if keep:
                kept.append(own.clone())
        return rearrange(x, "(b h w) k d -> b k h w d", b=num, h=height), tuple(kept) if keep else ()


class Encoder(nn.Module):
    """b c t h w -> b d k h/p w/p"""

    def __init__(self, config: CViViTConfig, channels: int) -> None:
        super().__init__()
        self.patch, self.time_patch, self.dropout = config.patch, config.time_patch, config.dropout
        values = channels * config.patch**2
        self.first = linear(values, config.width, bias=True)
        self.rest = linear(config.time_patch * values, config.width, bias=True)
        self.spatial, self.temporal = Spatial(config), Temporal(config)
        self.norm, self.out = RMSNorm(config.width), linear(config.width, config.quantizer.width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Unit variance in, roughly unit variance out."""
        first = rearrange(x[:, :, :1], "b c s (h p) (w q) -> b 1 h w (s c p q)", p=self.patch, q=self.patch)
        rest = rearrange(x[:, :, 1:], "b c (k s) (h p) (w q) -> b k h w (s c p q)", s=self.time_patch, p=self.patch, q=self.patch)
        h = F.dropout(torch.cat([self.first(first), self.rest(rest)], dim=1), self.dropout, self.training)
        h, _ = self.temporal(self.spatial(h))
        return rearrange(self.out(self.norm(h)), "b k h w d -> b d k h w")


class Decoder(nn.Module):
    """b d k h/p w/p -> b c t h w"""

    def __init__(self, config: CViViTConfig, channels: int) -> None:
        super().__init__()
        self.patch, self.time_patch, self.dropout = config.patch, config.time_patch, config.dropout
        values = channels * config.patch**2
        self.codes = linear(config.quantizer.width, config.width, bias=True)
        self.temporal, self.spatial = Temporal(config), Spatial(config)
        self.norm = RMSNorm(config.width)
        self.first = linear(config.width, values, gain=0, bias=True)  # starts at mid-grey
        self.rest = linear(config.width, config.time_patch * values, gain=0, bias=True)

    def forward(self, codes: Tensor, memory: Memory | None = None, keep: bool = False) -> tuple[Tensor, Memory]:
        """Not squashed. With a memory the codes continue the clip that it is of; `keep` returns the next one."""
        h = F.dropout(self.codes(rearrange(codes, "b d k h w -> b k h w d")), self.dropout, self.training)
        h, kept = self.temporal(h, memory, keep)
        h = self.norm(self.spatial(h))
        if memory is not None:
            return self.pixels(self.rest(h), self.time_patch), kept
        return torch.cat([self.pixels(self.first(h[:, :1]), 1), self.pixels(self.rest(h[:, 1:]), self.time_patch)], dim=2), kept

    def pixels(self, patches: Tensor, num: int) -> Tensor:
        """b k h w (s c p q) -> b c (k s) (h p) (w q), num frames a latent one"""
        return rearrange(patches, "b k h w (s c p q) -> b c (k s) (h p) (w q)", s=num, p=self.patch, q=self.patch)
