"""Attention and feed-forward layers of the generators and text encoders. Sequences are b n d."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tessera.nn.positions import rotate


def linear(width_in: int, width_out: int, *, gain: float = 1.0, bias: bool = False) -> nn.Linear:
    """Normal weights of deviation gain / sqrt(width_in), biases 0: unit variance in, variance gain^2 out."""
    layer = nn.Linear(width_in, width_out, bias=bias)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(width_in)) if gain else nn.init.zeros_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class RMSNorm(nn.RMSNorm):
    """torch's, with its weight in the input's type: under autocast the two differ, and torch then leaves its fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """... d -> ... d"""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class Attention(nn.Module):
    """Multi-head attention to oneself or to a context. Queries and keys are normalised by head, so logits cannot grow without
    bound (Dehghani et al. 2023, section 3.1)."""

    def __init__(self, width: int, heads: int, context_width: int | None = None) -> None:
        super().__init__()
        if width % heads or width // heads % 2:
            raise ValueError(f"width {width} does not split into {heads} heads of even width")
        self.heads = heads
        self.query = linear(width, width)
        self.key_value = linear(context_width or width, 2 * width)
        self.query_norm, self.key_norm = RMSNorm(width // heads), RMSNorm(width // heads)
        self.out = linear(width, width)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, turns: Tensor | None = None
    ) -> Tensor:
        """x b n d; context b m c, else x itself; mask b m, True where a key may be seen; turns 2 n k turn queries and keys."""
        query, key, value = self.project(x, context, turns)
        return self.attend(query, key, value, mask)

    def project(self, x: Tensor, context: Tensor | None, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, b h n k each."""
        query, (key, value) = self.asked(x), self.offered(x if context is None else context)
        if turns is not None:
            query, key = rotate(query, turns), rotate(key, turns)
        return query, key.to(query.dtype), value.to(query.dtype)

    def asked(self, x: Tensor) -> Tensor:
        """b n d -> queries b h n k"""
        return self._by_head(self.query(x), self.query_norm)

    def offered(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """b m c -> keys and values b h m k"""
        key, value = self.key_value(context).chunk(2, dim=-1)
        return self._by_head(key, self.key_norm), self._by_head(value)

    def recall(self, x: Tensor, kept: Tensor, bias: Tensor) -> Tensor:
        """x b n d looks at a context whose keys and values (2 b h m k, of `offered`) were kept; bias b 1 1 m, of its mask."""
        key, value = kept.unbind(0)
        return self.join(F.scaled_dot_product_attention(self.asked(x), key, value, attn_mask=bias))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """b h n k each, mask b m -> b n d"""
        allowed = None if mask is None else mask[:, None, None, :]
        return self.join(F.scaled_dot_product_attention(query, key, value, attn_mask=allowed))

    def join(self, seen: Tensor) -> Tensor:
        """b h n k -> b n d"""
        return self.out(rearrange(seen, "b h n k -> b n (h k)"))

    def _by_head(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """b n d -> b h n k; normalised before heads are taken apart: queries then need no copy."""
        x = x.unflatten(-1, (self.heads, -1))
        return rearrange(x if norm is None else norm(x), "b n h k -> b h n k")


class CausalAttention(Attention):
    """Each place sees itself and those before it. `step` does one place at a time, and keeps keys and values of the others."""

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, turns: Tensor | None = None
    ) -> Tensor:
        """x b n d, turns 2 n k; there is no context, and no mask but the order."""
        query, key, value = self.project(x, None, turns)
        return self.join(F.scaled_dot_product_attention(query, key, value, is_causal=True))

    def step(self, x: Tensor, turns: Tensor, kept: Tensor, place: Tensor, bias: Tensor) -> Tensor:
        """x b 1 d at a place (1 int64) whose turns are 2 1 k; kept 2 b h n k is written there, and seen as far as bias (1 n)
        lets it."""
        query, key, value = self.project(x, None, turns)
        kept.index_copy_(3, place, torch.stack([key, value]).to(kept.dtype))
        key, value = kept.to(query.dtype).unbind(0)
        return self.join(F.scaled_dot_product_attention(query, key, value, attn_mask=bias))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020), two thirds as wide as a plain one of that ratio, so that it costs the same."""

    def __init__(self, width: int, ratio: float = 4.0) -> None:
        super().__init__()
        inner = max(8, round(width * ratio * 2 / 3 / 8) * 8)
        self.up, self.down = linear(width, 2 * inner), linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """b n d -> b n d"""
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class EncoderBlock(nn.Module):
    """x + attention, x + feed-forward, each on a normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x: Tensor, mask: Tensor | None, turns: Tensor) -> Tensor:
        """b n d -> b n d"""
        x = x + self.attention(self.norm1(x), mask=mask, turns=turns)
        return x + self.feed_forward(self.norm2(x))


def bias_of(seen: Tensor, kind: torch.dtype) -> Tensor:
    """Of a mask (... m, True where a key may be seen) what attention adds to its logits, for many layers: each of them would make
    this of a mask anew, and copy it into rows whose lengths in memory are multiples of 16, as kernels for GPUs need them."""
    *rest, num = seen.shape
    bias = torch.full((*rest, num + -num % 16), -math.inf, dtype=kind, device=seen.device)[..., :num]
    return bias.masked_fill_(seen, 0.0)


def pool(states: Tensor, mask: Tensor) -> Tensor:
    """b n d -> b d, the mean over what the mask shows; 0 where it shows nothing."""
    weights = mask.to(states.dtype)[..., None]
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


def frequencies_of(values: Tensor, width: int) -> Tensor:
    """b in [0, 1] -> b width: sines and cosines of the value at geometric frequencies."""
    half = width // 2
    rates = torch.exp(-math.log(1000.0) * torch.arange(half, device=values.device) / half) * 1000.0
    angles = values.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
