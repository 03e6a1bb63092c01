"""The prior's network: text in, an embedding of the picture out of noise (Ramesh et al. 2022, section 2.2). And what is done with
its embeddings: the nearest of several to the text, and how near predictions are.

A vector of e channels is one token among others: a query, which is read at the end; the noised embedding; its noise level; the
pooled text; the network's own earlier guess, where it takes one; and the states of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config
from tessera.generators.diffusion.condition import Condition
from tessera.nn.attention import EncoderBlock, RMSNorm, frequencies_of, linear
from tessera.nn.positions import rotary_turns

LIMIT = 20.0  # of log-SNR; what lies beyond, also infinity, is told as the limit
LEVELS = 500.0  # so many are one unit of `frequencies_of`: the fastest sine turns 2 radians a unit of log-SNR
FREQUENCIES = 256


class PriorConfig(Config):
    """A transformer from text to the embedding of a picture."""

    kind: Literal["prior"] = "prior"
    """The kind of network."""
    width: int = Field(384, ge=16)
    """Channels."""
    depth: int = Field(6, ge=1)
    """Layers."""
    heads: int = Field(6, ge=1)
    """Attention heads of each layer."""
    self_conditioning: bool = False
    """Take the network's own earlier guess of the embedding."""

    @model_validator(mode="after")
    def _heads(self) -> PriorConfig:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of even width")
        return self


class Prior(nn.Module):
    """A denoiser of embeddings. It starts by saying 0; a row without text sees a learned vector in its place."""

    def __init__(self, config: PriorConfig, embedding_width: int, text_width: int, pooled_width: int | None = None) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.query = nn.Parameter(torch.randn(width))
        self.untold = nn.Parameter(torch.randn(width))
        self.places = nn.Parameter(torch.randn(4 + config.self_conditioning, width))  # what each of the single tokens is
        self.noised = linear(embedding_width, width)
        self.level = nn.Sequential(linear(FREQUENCIES, width, bias=True), nn.SiLU(), linear(width, width, bias=True))
        self.text_norm, self.text = RMSNorm(text_width), linear(text_width, width)
        self.pooled_norm = RMSNorm(pooled_width or text_width)
        self.pooled = linear(pooled_width or text_width, width)
        self.before = linear(embedding_width, width, gain=0) if config.self_conditioning else None
        self.blocks = nn.ModuleList(EncoderBlock(width, config.heads) for _ in range(config.depth))
        self.norm, self.out = RMSNorm(width), linear(width, embedding_width, gain=0)

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        """x b e, level b (log-SNR) -> b e"""
        text = condition.text
        if text is None:
            raise ValueError("the prior is told nothing; a condition of it has text, whose mask may be empty")
        told = text.mask.any(1, keepdim=True)
        pooled = torch.where(told, self.pooled(self.pooled_norm(text.pooled)), self.untold)
        states = self.text(self.text_norm(text.states.masked_fill(~text.mask[..., None], 0)))
        noise = self.level(frequencies_of(level.clamp(-LIMIT, LIMIT) / LEVELS, FREQUENCIES))
        single = [self.query.expand(len(x), -1), self.noised(x), noise, pooled]
        if self.before is not None:
            single.append(self.before(torch.zeros_like(x) if condition.before is None else condition.before))
        tokens = torch.cat([torch.stack([part.to(x.dtype) for part in single], dim=1) + self.places, states], dim=1)
        mask = F.pad(text.mask, (len(single), 0), value=True)
        turns = rotary_turns(torch.arange(tokens.shape[1], device=x.device)[:, None], self.head_width)
        tokens = tokens.to(states.dtype)  # bf16 under autocast: less to move
        for block in self.blocks:
            tokens = block(tokens, mask, turns)
        return self.out(self.norm(tokens[:, 0])).to(x.dtype)


# --- embeddings on the sphere, and in the units of the diffusion


def spread(embeddings: Tensor) -> Tensor:
    """... e -> ... e of length sqrt(e): about unit variance a channel, as the noise has it."""
    return F.normalize(embeddings.float(), dim=-1) * math.sqrt(embeddings.shape[-1])


def unit(embeddings: Tensor) -> Tensor:
    """... e -> ... e of length 1, as an encoder gives them."""
    return F.normalize(embeddings.float(), dim=-1)


def best_of(candidates: Tensor, text: Tensor) -> Tensor:
    """b n e -> b e: of several embeddings the one that is nearest to the text's, b e, by angle; the first of equals, which all
    are where there is no text (0)."""
    nearness = torch.einsum("bne,be->bn", unit(candidates), unit(text))
    return candidates[torch.arange(len(candidates), device=candidates.device), nearness.argmax(1)]


def cosine_scores(predicted: Tensor, misled: Tensor, real: Tensor, text: Tensor | None, valid: Tensor) -> dict[str, Tensor]:
    """Sums over valid rows, b e each: cosines of the prediction with the picture's embedding and, where pair and prior share a
    sphere, with the text's; and of the picture with `misled`, the prediction from another caption. A prior that does not listen
    has equal `cosine` and `cosine_misled`."""
    pairs = {"cosine": (predicted, real), "cosine_misled": (misled, real)}
    if text is not None:
        pairs |= {"cosine_text": (predicted, text), "cosine_text_real": (real, text)}
    return {name: (F.cosine_similarity(a.float(), b.float(), dim=-1) * valid).sum() for name, (a, b) in pairs.items()}


def other_rows(captions: Sequence[str | None]) -> Tensor:
    """b int64: for each row the next one, in a circle, with another caption; itself where there is none."""
    num = len(captions)
    return torch.tensor(
        [
            next(((row + step) % num for step in range(1, num) if captions[(row + step) % num] != captions[row]), row)
            for row in range(num)
        ],
        dtype=torch.int64,
    )
