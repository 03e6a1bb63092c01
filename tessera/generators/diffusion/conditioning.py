"""What a denoiser is told, as networks use it: one vector a sample, tokens to attend to, channels beside the sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.generators.diffusion.condition import Condition
from tessera.nn.attention import linear

LIMIT = 20.0  # of log-SNR: beyond, nothing is left of the noise, or of the sample
SLOWEST, FASTEST = 1 / 16, 2.0  # radians a unit of log-SNR: one turn at most over all of it, and smooth from one step to the next
FEATURES = 128  # sines and cosines of a level
NULL_DEVIATION = 0.02  # of vectors that stand for what is not told; they are learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a denoiser is built for."""

    channels: int  # of the sample
    size: tuple[int, int]  # its height and width; a U-Net takes others, too
    text_width: int | None = None  # of text states; None: is never told any
    embedding_width: int | None = None
    low: bool = False  # sees a smaller picture
    self_conditioning: bool = False  # sees its own earlier guess
    variance: bool = False  # guesses as many channels again

    @property
    def channels_in(self) -> int:
        """Of the sample and of what lies beside it."""
        return self.channels * (1 + self.low + self.self_conditioning)

    @property
    def channels_out(self) -> int:
        """Of a guess."""
        return self.channels * (1 + self.variance)

    @property
    def attended(self) -> bool:
        """Whether there is anything to attend to beside the sample itself."""
        return self.text_width is not None or self.embedding_width is not None

    def stack(self, x: Tensor, condition: Condition) -> Tensor:
        """b c h w -> b c' h w: with the smaller picture and the earlier guess, 0 where there is none yet, as further channels."""
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"a sample of shape {tuple(x.shape)}; this denoiser was built for b {self.channels} h w")
        self.refuse_more(condition)
        if self.low and condition.low is None:
            raise ValueError("this denoiser enlarges a smaller picture, and the condition has no `low`")
        parts = [x]
        for name, used, found in (("low", self.low, condition.low), ("before", self.self_conditioning, condition.before)):
            if found is not None and found.shape != x.shape:
                raise ValueError(
                    f"`{name}` of the condition is {tuple(found.shape)}, the sample {tuple(x.shape)}; they must match"
                )
            if used:
                parts.append(torch.zeros_like(x) if found is None else found.to(x.dtype))
        return torch.cat(parts, dim=1)

    def refuse_more(self, condition: Condition) -> None:
        """What is told and would not be heard."""
        heard = {
            "text": self.text_width is not None,
            "embedding": self.embedding_width is not None,
            "low": self.low,
            "before": self.self_conditioning,
        }
        for name, used in heard.items():
            if not used and getattr(condition, name) is not None:
                raise ValueError(f"the condition has `{name}`, and this denoiser was built without it")


class LevelEmbedding(nn.Module):
    """A log-SNR as a vector that changes smoothly with it; what lies beyond the limit, also infinity, is told as the limit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = linear(FEATURES, width, bias=True), linear(width, width, bias=True)

    def forward(self, level: Tensor) -> Tensor:
        """b -> b d"""
        half = FEATURES // 2
        steps = torch.arange(half, device=level.device, dtype=level.dtype) / (half - 1)
        angles = level.clamp(-LIMIT, LIMIT)[:, None] * SLOWEST * (FASTEST / SLOWEST) ** steps
        features = math.sqrt(2) * torch.cat([angles.cos(), angles.sin()], dim=-1)  # of unit variance
        return self.second(F.silu(self.first(features.to(self.first.weight.dtype))))


class TextConditioning(nn.Module):
    """Text states as tokens behind a learned one, which is all that a row without text sees; their mean as a vector."""

    def __init__(self, text_width: int, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(text_width, elementwise_affine=False)  # encoders differ in scale by a factor of ten and more
        self.states, self.pooled = linear(text_width, width), linear(text_width, width)
        self.null = nn.Parameter(torch.randn(1, 1, width) * NULL_DEVIATION)

    def forward(self, text: TextStates | None, num: int) -> tuple[Tensor | float, Tensor, Tensor]:
        """A vector b d, tokens b m d and which of them may be seen, b m. None: no row has text."""
        null, seen = self.null.expand(num, -1, -1), torch.ones(num, 1, dtype=torch.bool, device=self.null.device)
        if text is None:
            return 0.0, null, seen
        states = self.states(self.norm(text.states.masked_fill(~text.mask[..., None], 0)))
        tokens = torch.cat([null.to(states.dtype), states], dim=1)
        return self.pooled(self.norm(text.pooled)), tokens, torch.cat([seen, text.mask], dim=1)


class EmbeddingConditioning(nn.Module):
    """An embedding's direction as a vector and as a few tokens; learned ones for a row that is told none. Always through a
    projection of its own, whatever the widths."""

    def __init__(self, embedding_width: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(embedding_width, elementwise_affine=False)  # embeddings of unit length have tiny channels
        self.parts = linear(embedding_width, (1 + num_tokens) * width)
        self.null = nn.Parameter(torch.randn(1 + num_tokens, width) * NULL_DEVIATION)

    def forward(self, embedding: Tensor | None, told: Tensor | None, num: int) -> tuple[Tensor, Tensor]:
        """b e, and which rows are told it (None: all) -> b d, b k d"""
        if embedding is None:
            parts = self.null.expand(num, -1, -1)
        else:
            told = torch.ones(num, dtype=torch.bool, device=embedding.device) if told is None else told
            embedding = embedding.masked_fill(~told[:, None], 0).to(self.null.dtype)
            known = self.parts(self.norm(embedding)).unflatten(-1, self.null.shape)
            parts = torch.where(told[:, None, None], known, self.null.to(known.dtype))
        return parts[:, 0], parts[:, 1:]


class Conditioning(nn.Module):
    """Level, text and embedding: a vector to shift and scale by, and a context to attend to."""

    def __init__(self, inputs: Inputs, width: int, num_tokens: int) -> None:
        super().__init__()
        self.level = LevelEmbedding(width)
        self.low_level = LevelEmbedding(width) if inputs.low else None
        self.text = None if inputs.text_width is None else TextConditioning(inputs.text_width, width)
        embeds = inputs.embedding_width
        self.embedding = None if embeds is None else EmbeddingConditioning(embeds, width, num_tokens)

    def forward(self, level: Tensor, condition: Condition) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """b -> b d; the context b m d, None of a denoiser that is told neither text nor embedding; its mask b m, None: see all"""
        vector, context, mask = self.level(level), None, None
        if self.low_level is not None:
            low_level = torch.full_like(level, LIMIT) if condition.low_level is None else condition.low_level
            vector = vector + self.low_level(low_level)
        if self.text is not None:
            pooled, context, mask = self.text(condition.text, len(level))
            vector = vector + pooled
        if self.embedding is not None:
            added, tokens = self.embedding(condition.embedding, condition.has_embedding, len(level))
            vector = vector + added
            mask = None if mask is None else F.pad(mask, (0, tokens.shape[1]), value=True)
            context = tokens if context is None else torch.cat([context.to(tokens.dtype), tokens], dim=1)
        return vector, context, mask
