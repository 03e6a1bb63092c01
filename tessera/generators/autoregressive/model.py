"""The network: an hourglass over groups of tokens. A group is a face of a mesh, a cell of a grid, or a single token.

On the way in the embeddings of a group's tokens are joined, level by level, into one vector for the whole group. A causal
transformer runs over groups; it says what is known of the next one. On the way out each level says what is known of its next
part, given that and the parts before it: the face's corner, then the corner's coordinate. So one place of the long sequence
serves nine tokens, and the levels inside are products of small matrices, without attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.config import Config
from tessera.nn.attention import Attention, CausalAttention, FeedForward, RMSNorm, bias_of, linear
from tessera.nn.positions import rotary_turns

PREFIX = 2  # places before the first group: the text as a whole, and the length that is asked for
ROTARY_BASE = 10_000.0  # wavelengths up to tens of thousands of groups
LENGTHS = 4 * 16 + 1  # lengths up to 2^16 are told apart by quarters of an octave; the last one stands for any

Look = Callable[[Tensor], Tensor]
"""What a stream is to what is added to it, b n d -> b n d."""


class AutoregressiveConfig(Config):
    """A causal transformer over groups of tokens, with a small decoder inside them."""

    kind: Literal["autoregressive"] = "autoregressive"
    """The kind of generator."""
    width: int = Field(512, ge=16)
    """Channels of the sequence of groups."""
    depth: int = Field(12, ge=1)
    """Layers of it."""
    heads: int = Field(8, ge=1)
    """Attention heads of each layer."""
    inner_width: int = Field(256, ge=16)
    """Channels inside a group."""
    inner_depth: int = Field(2, ge=1)
    """Layers of each level inside a group."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after attention and feed-forward."""

    @model_validator(mode="after")
    def _heads(self) -> AutoregressiveConfig:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of even width")
        return self


class Layer(nn.Module):
    """Self-attention of one kind or another, cross-attention to the text, feed-forward; each adds to a stream that it reads
    normalised."""

    def __init__(self, config: AutoregressiveConfig, text_width: int, attention: Attention) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.norm2, self.norm3 = RMSNorm(width), RMSNorm(width), RMSNorm(width)
        self.attention = attention
        self.cross = Attention(width, config.heads, text_width)
        self.feed_forward = FeedForward(width)
        self.dropout = config.dropout
        for layer in (self.attention.out, self.cross.out, self.feed_forward.down):
            layer.weight.data.mul_(1 / math.sqrt(3 * config.depth))  # so that depth does not make the stream louder

    def along(self, x: Tensor, attend: Look, cross: Look, beside: Look | None = None) -> Tensor:
        """The three parts, with one way or another to look back, and at the text; perhaps also at a second condition."""
        x = x + self._drop(attend(self.norm1(x)))
        x = x + self._drop(cross(self.norm2(x)))
        x = x if beside is None else x + self._drop(beside(x))
        return x + self._drop(self.feed_forward(self.norm3(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Block(Layer):
    """A layer whose places see all those before them."""

    attention: CausalAttention

    def __init__(self, config: AutoregressiveConfig, text_width: int) -> None:
        super().__init__(config, text_width, CausalAttention(config.width, config.heads))

    def forward(self, x: Tensor, text: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
        """x b n d, text b m c, mask b m, turns 2 n k"""
        return self.along(x, lambda x: self.attention(x, turns=turns), lambda x: self.cross(x, text, mask))

    def step(self, x: Tensor, told: Tensor, bias: Tensor, turns: Tensor, kept: Tensor, place: Tensor, seen: Tensor) -> Tensor:
        """One place, x b 1 d; told 2 b h m k and bias b 1 1 m, of the text; kept 2 b h n k and seen 1 n, the bias of places: 0 up
        to this one, -inf behind it."""
        attend = partial(self.attention.step, turns=turns, kept=kept, place=place, bias=seen)
        return self.along(x, attend, partial(self.cross.recall, kept=told, bias=bias))


class Level(nn.Module):
    """The parts of one whole, in order: what is known of each, from the whole's context and the parts before it."""

    def __init__(self, size: int, above: int, width: int, depth: int) -> None:
        super().__init__()
        self.size = size
        self.start = nn.Parameter(torch.randn(size, width) * 0.5)
        self.context = linear(above, width)
        self.before = linear(size * width, width)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(depth + 1))
        self.layers = nn.ModuleList(FeedForward(width) for _ in range(depth))
        self.join = linear(size * width, above)  # the way in: parts to the whole

    def forward(self, context: Tensor, parts: Tensor) -> Tensor:
        """context m a, parts m n c -> m n c; part i is not seen before i + 1."""
        earlier = torch.ones(self.size, self.size, dtype=parts.dtype, device=parts.device).tril(-1)
        seen = (parts[..., None, :, :] * earlier[:, :, None]).flatten(-2)
        known = self.context(context)[..., None, :] + self.before(seen)
        return self.through(known + self.start.to(known.dtype))

    def at(self, index: int, context: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """What is known of one part, ... c, once those before it are."""
        seen = torch.zeros(*context.shape[:-1], self.size, self.start.shape[1], dtype=context.dtype, device=context.device)
        if index:
            seen = torch.cat([torch.stack([part.to(seen.dtype) for part in parts], dim=-2), seen[..., index:, :]], dim=-2)
        known = self.context(context) + self.before(seen.flatten(-2))
        return self.through(known + self.start[index].to(known.dtype))

    def through(self, x: Tensor) -> Tensor:
        """Layer by layer, each place for itself."""
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.norms[-1](x)


class Hourglass(nn.Module):
    """What stands around layers of any kind: the condition, and levels inside a group of tokens (`group`, outermost first)."""

    def __init__(
        self, config: AutoregressiveConfig, num_ids: int, group: Sequence[int], text_width: int, layer: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        width, inner = config.width, config.inner_width
        self.group, self.width, self.heads, self.head_width = tuple(group), width, config.heads, width // config.heads
        self.embed = nn.Embedding(num_ids, inner if group else width)
        nn.init.normal_(self.embed.weight, std=1.0)
        widths = [width, *[inner] * len(self.group)]
        self.levels = nn.ModuleList(
            Level(size, above, inner, config.inner_depth) for size, above in zip(self.group, widths, strict=False)
        )
        self.start = nn.Parameter(torch.randn(width))
        self.lengths = nn.Embedding(LENGTHS, width)
        self.pooled = linear(text_width, width)
        self.null = nn.Parameter(torch.randn(1, 1, text_width) * 0.02)  # what is attended to when there is no text
        self.text_norm = nn.RMSNorm(text_width, elementwise_affine=False)
        self.blocks = nn.ModuleList(layer() for _ in range(config.depth))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(widths[-1], num_ids)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def embed_parts(self, ids: Tensor) -> list[Tensor]:
        """... t -> vectors of groups ... d, of their parts ... p c, ..., of tokens."""
        parts = [self.embed(ids.unflatten(-1, self.group) if self.group else ids[..., 0])]
        for level in reversed(self.levels):
            parts.insert(0, level.join(parts[0].flatten(-2)))  # type: ignore[operator]
        return parts

    def context_of(self, text: TextStates) -> tuple[Tensor, Tensor]:
        """Text states b m c and their mask, with one state that is always there."""
        null = self.null.expand(len(text.mask), -1, -1).to(text.states.dtype)
        return torch.cat([null, self.text_norm(text.states)], dim=1), F.pad(text.mask, (1, 0), value=True)

    def told(self, states: Tensor) -> Tensor:
        """b m c -> l 2 b h m k: keys and values of the text in every layer, for many steps."""
        return torch.stack([torch.stack(block.cross.offered(states)) for block in self.blocks])  # type: ignore[operator, union-attr]

    def logits(self, features: Tensor) -> Tensor:
        """... c -> ... v, fp32"""
        return self.head(features).float()

    def write(self, context: Tensor, choose: Callable[[Tensor], Tensor], depth: int = 0) -> Tensor:
        """One group, token by token: `choose` gets logits b v and returns ids b. Returns the group's vector, b d."""
        if depth == len(self.levels):
            return self.embed(choose(self.logits(context)))
        level: Any = self.levels[depth]
        parts: list[Tensor] = []
        for index in range(level.size):
            parts.append(self.write(level.at(index, context, parts), choose, depth + 1))
        return level.join(torch.cat(parts, dim=-1))


class Autoregressive(Hourglass):
    """Tokens in groups, each from those before it and the text. `end` is one more id, which may only stand where a group
    begins."""

    def __init__(self, config: AutoregressiveConfig, vocab_size: int, group: Sequence[int], text_width: int) -> None:
        super().__init__(config, vocab_size + 1, group, text_width, lambda: Block(config, text_width))
        self.vocab_size, self.end = vocab_size, vocab_size

    def forward(self, ids: Tensor, text: TextStates, lengths: Tensor) -> Tensor:
        """ids b n t, t tokens a group; lengths b as `length_class` names them -> logits b n + 1 t v, fp32: group i is not seen
        before group i + 1, nor a token before the next one."""
        parts = self.embed_parts(ids)
        context = self.outer(parts[0], text, lengths)
        for level, below in zip(self.levels, parts[1:], strict=True):
            below = F.pad(below, (0, 0) * (below.ndim - 2) + (0, 1))  # nothing of the group behind the last
            found = level(context.flatten(0, -2), below.flatten(0, -3))  # one rank for all levels: they share compiled code
            context = found.view(*below.shape)
        return self.logits(context).reshape(len(ids), ids.shape[1] + 1, ids.shape[2], -1)

    def outer(self, groups: Tensor, text: TextStates, lengths: Tensor) -> Tensor:
        """b n d -> b n + 1 d: what is known of each group and of the one behind the last."""
        prefix = self.prefix(text, lengths)
        x = torch.cat([prefix.to(groups.dtype), groups], dim=1)
        states, mask = self.context_of(text)
        turns = self.turns(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x, states, mask, turns)
        return self.norm(x[:, PREFIX - 1 :])

    def prefix(self, text: TextStates, lengths: Tensor) -> Tensor:
        """b 2 d"""
        told = self.start + self.pooled(self.text_norm(text.pooled))
        return torch.stack([told, self.lengths(lengths).to(told.dtype)], dim=1)

    def turns(self, places: Tensor) -> Tensor:
        """n -> 2 n k"""
        return rotary_turns(places[:, None], self.head_width, base=ROTARY_BASE)

    def step(self, x: Tensor, told: Tensor, mask: Tensor, kept: Tensor, place: Tensor) -> Tensor:
        """One place of the outer sequence, x b 1 d, with told l 2 b h m k and kept l 2 b h n k -> what is known of the next
        group, b d."""
        turns, bias = self.turns(place).to(x.dtype), bias_of(mask[:, None, None], x.dtype)
        seen = bias_of(torch.arange(kept.shape[4], device=x.device)[None] <= place, x.dtype)
        for block, text, own in zip(self.blocks, told, kept, strict=True):
            x = block.step(x, text, bias, turns, own, place, seen)  # type: ignore[operator]
        return self.norm(x[:, 0])


def length_class(lengths: Tensor) -> Tensor:
    """b numbers of groups -> b: quarters of an octave; 0 or less stands for any."""
    classes = torch.floor(4 * torch.log2(lengths.clamp(min=1).float()) + 1e-4).long().clamp(max=LENGTHS - 2)
    return torch.where(lengths > 0, classes, LENGTHS - 1)
