"""The network: a bidirectional transformer over a token grid, with cross-attention to text and a coarser grid added by place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.config import Config
from tessera.nn.adaptive import AdaptiveBlock
from tessera.nn.attention import RMSNorm, frequencies_of, linear
from tessera.nn.positions import grid_coordinates, rotary_turns

LARGE_VOCABULARY = 2**14  # from here on ids are written as two digits


class MaskedConfig(Config):
    """A bidirectional transformer that guesses hidden tokens."""

    kind: Literal["masked"] = "masked"
    """The kind of generator."""
    width: int = Field(384, ge=16)
    """Channels."""
    depth: int = Field(8, ge=1)
    """Layers."""
    heads: int = Field(6, ge=1)
    """Attention heads of each layer."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout after attention and feed-forward."""
    self_conditioning: bool = False
    """Give the features of an earlier pass to the next one; training then runs two passes, sampling no more than before."""

    @model_validator(mode="after")
    def _heads(self) -> MaskedConfig:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of even width")
        return self


@dataclass(frozen=True, slots=True)
class Low:
    """The coarser grid of a super-resolution generator."""

    vocab_size: int
    grid: tuple[int, ...]


def cells_below(grid: Sequence[int], low: Sequence[int]) -> Tensor:
    """n: for every cell of a grid, in raster order, the cell of a coarser one under its middle."""
    if len(grid) != len(low) or any(coarse > fine for fine, coarse in zip(grid, low, strict=True)):
        raise ValueError(f"a low grid {tuple(low)} does not lie under {tuple(grid)}; it needs as many axes, none of them longer")
    flat = torch.zeros(math.prod(grid), dtype=torch.long)
    for index, fine, coarse in zip(grid_coordinates(grid).unbind(-1), grid, low, strict=True):
        flat = flat * coarse + (2 * index + 1) * coarse // (2 * fine)  # floor((index + 0.5) * coarse / fine), in whole numbers
    return flat


def digit_sizes(vocab_size: int) -> tuple[int, ...]:
    """One digit, or for a large vocabulary the two most equal ones whose product it is: embeddings and head then grow with its
    root. The digits of a token are guessed independently of each other. A prime stays whole."""
    if vocab_size < LARGE_VOCABULARY:
        return (vocab_size,)
    low = next(size for size in range(math.isqrt(vocab_size), 0, -1) if vocab_size % size == 0)
    return (vocab_size,) if low < 2 else (low, vocab_size // low)


def split_digits(ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """... -> ... p, the last one changing fastest."""
    return ids[..., None] if len(sizes) == 1 else torch.stack([ids // sizes[1], ids % sizes[1]], dim=-1)


def join_digits(digits: Tensor, sizes: Sequence[int]) -> Tensor:
    """The inverse of `split_digits`."""
    return digits[..., 0] if len(sizes) == 1 else digits[..., 0] * sizes[1] + digits[..., 1]


class TokenEmbedding(nn.Module):
    """Ids -> vectors of unit variance, the sum over digits. `vocab_size` itself is a hidden token, the last row of each table."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size, self.digits = vocab_size, digit_sizes(vocab_size)
        self.tables = nn.ModuleList(nn.Embedding(size + 1, width) for size in self.digits)
        for table in self.tables:
            nn.init.normal_(table.weight, std=1 / math.sqrt(len(self.digits)))  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        """... -> ... d"""
        return torch.stack([table(digit) for table, digit in zip(self.tables, self.split(ids), strict=True)]).sum(0)

    def split(self, ids: Tensor) -> list[Tensor]:
        """Ids -> digits, the last one changing fastest; a hidden token is hidden in every digit."""
        if len(self.digits) == 1:
            return [ids]
        hidden, (high, low) = ids == self.vocab_size, self.digits
        return [(ids // low).masked_fill(hidden, high), (ids % low).masked_fill(hidden, low)]

    def join(self, digits: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`, of visible tokens."""
        return digits[0] if len(digits) == 1 else digits[0] * self.digits[1] + digits[1]


class Trunk(nn.Module):
    """Tokens, text and coarser tokens in, features of every place out: what the generator and its critic share in kind."""

    turns: Tensor
    below: Tensor

    def __init__(
        self, config: MaskedConfig, vocab_size: int, grid: Sequence[int], text_width: int, low: Low | None = None
    ) -> None:
        super().__init__()
        width = config.width
        self.vocab_size, self.mask_id, self.grid, self.width = vocab_size, vocab_size, tuple(grid), width
        self.embed = TokenEmbedding(vocab_size, width)
        self.embed_low = None if low is None else TokenEmbedding(low.vocab_size, width)
        self.num_low = 0 if low is None else math.prod(low.grid)
        self.recall = linear(width, width, gain=0) if config.self_conditioning else None
        self.places = nn.ParameterList(torch.randn(size, width) / math.sqrt(len(self.grid)) for size in self.grid)
        self.null = nn.Parameter(torch.randn(1, 1, text_width) * 0.02)  # what is attended to when there is no text
        self.share = nn.Sequential(linear(256, width, bias=True), nn.SiLU(), linear(width, width, bias=True))
        self.text_norm = nn.RMSNorm(text_width, elementwise_affine=False)  # encoders differ in scale by a factor of ten and more
        self.pooled = linear(text_width, width)
        self.condition = linear(width, 9 * width, gain=0, bias=True)
        self.blocks = nn.ModuleList(AdaptiveBlock(width, config.heads, text_width, config.dropout) for _ in range(config.depth))
        self.norm = RMSNorm(width)
        turns = rotary_turns(grid_coordinates(self.grid), width // config.heads)
        self.register_buffer("turns", turns, persistent=False)
        below = torch.zeros(0, dtype=torch.long) if low is None else cells_below(self.grid, low.grid)
        self.register_buffer("below", below, persistent=False)

    def forward(
        self, ids: Tensor, text: TextStates, low: Tensor | None = None, previous: Tensor | None = None,
        frames: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """ids b n, hidden ones `mask_id`; low b k, tokens of the coarser grid; previous b n d, features of an earlier pass;
        frames b t bool, which steps of the first axis are there, at least one of each sample, None: all. Tokens of the others
        may be anything and change nothing."""
        present = None if frames is None else self.spread(frames)
        hidden = share_of(ids == self.mask_id, present)
        x = self.embed(ids) + self.absolute() + self._from_low(low) + self._from_previous(previous)
        condition = self.share(frequencies_of(hidden, 256)) + self.pooled(self.text_norm(text.pooled))
        shifts = self.condition(F.silu(condition)).unflatten(-1, (9, -1))
        states = torch.cat([self.null.expand(len(ids), -1, -1).to(text.states.dtype), self.text_norm(text.states)], dim=1)
        mask = F.pad(text.mask, (1, 0), value=True)
        x = x.to(shifts.dtype)  # under autocast bf16 from here on: half of what is left of the time is moving these
        for block in self.blocks:
            x = block(x, states, mask, shifts, self.turns, present)
        return self.norm(x)

    def spread(self, frames: Tensor) -> Tensor:
        """b t -> b n: what is true of a step of the first axis is true of every token in it."""
        if frames.ndim != 2 or frames.shape[1] != self.grid[0]:
            raise ValueError(f"frames of shape {tuple(frames.shape)}; expected b {self.grid[0]}, the first axis of {self.grid}")
        return frames.repeat_interleave(math.prod(self.grid[1:]), dim=1)

    def absolute(self) -> Tensor:
        """n d, one learned vector for each index of each axis. Rotation says where tokens are to each other; where nothing is
        visible yet all of them look alike, and only this tells left from right."""
        coordinates = grid_coordinates(self.grid, self.turns.device)
        return torch.stack([table[index] for table, index in zip(self.places, coordinates.unbind(-1), strict=True)]).sum(0)

    def _from_low(self, low: Tensor | None) -> Tensor | float:
        """Each token gets the coarse one below it; self-attention brings in that one's neighbours."""
        if self.embed_low is None:
            if low is not None:
                raise ValueError("this generator was built without a coarser grid, and got tokens `low`; build it with Low(...)")
            return 0.0
        if low is None or low.shape[1] != self.num_low:
            found = "none" if low is None else f"{low.shape[1]}"
            raise ValueError(f"this generator refines a coarser grid of {self.num_low} tokens, and got {found} as `low`")
        return self.embed_low(low)[:, self.below]

    def _from_previous(self, previous: Tensor | None) -> Tensor | float:
        """Self-conditioning (Chen et al. 2022, section 3.2); it starts at 0, and 0 stands for no earlier pass."""
        if previous is None:
            return 0.0
        if self.recall is None:
            raise ValueError("features of an earlier pass, but self_conditioning is off")
        return self.recall(previous)


def share_of(hidden: Tensor, present: Tensor | None) -> Tensor:
    """b n bool -> b: of the tokens that are there."""
    if present is None:
        return hidden.float().mean(1)
    return (hidden & present).sum(1).float() / present.sum(1)


class Head(nn.Linear):
    """Features to logits. A kind of its own: it is called outside the network's forward, so sharded it must gather by itself."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class MaskedTransformer(Trunk):
    """The generator: a distribution for every hidden token."""

    def __init__(
        self, config: MaskedConfig, vocab_size: int, grid: Sequence[int], text_width: int, low: Low | None = None
    ) -> None:
        super().__init__(config, vocab_size, grid, text_width, low)
        self.digits = self.embed.digits
        self.head = Head(config.width, sum(self.digits))

    def logits(self, features: Tensor) -> list[Tensor]:
        """... d -> ... size for every digit, fp32."""
        return list(self.head(features).float().split(self.digits, dim=-1))

    def split(self, ids: Tensor) -> list[Tensor]:
        """Ids -> digits."""
        return self.embed.split(ids)

    def join(self, digits: Sequence[Tensor]) -> Tensor:
        """Digits -> ids."""
        return self.embed.join(digits)
