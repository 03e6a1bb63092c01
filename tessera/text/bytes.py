"""The default encoder: a small transformer over the bytes of a caption, trained with the generator. It needs nothing, reads every
script, and knows no language but that of the user's captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera.batches import Text, TextStates
from tessera.config import Config
from tessera.nn.attention import EncoderBlock, RMSNorm, pool
from tessera.nn.positions import rotary_turns


class ByteTextConfig(Config):
    """A small transformer over bytes, trained with the generator."""

    kind: Literal["bytes"] = "bytes"
    """The kind of encoder."""
    length: int = Field(128, ge=8, le=4096)
    """Most bytes of a caption that are read; a longer one is cut at a whole character."""
    width: int = Field(256, ge=16)
    """Channels."""
    depth: int = Field(4, ge=1)
    """Layers."""
    heads: int = Field(4, ge=1)
    """Attention heads of each layer."""


def num_bytes(caption: str) -> int:
    """Of a caption, as they are counted here."""
    return len(caption.encode("utf-8", "replace"))


def read_bytes(captions: Sequence[str | None], length: int) -> Text:
    """Captions -> ids b m: 1 to 256 for bytes, 0 where there is none. An absent caption is an empty one."""
    ids = torch.zeros(len(captions), length, dtype=torch.int64)
    for row, caption in enumerate(captions):
        cut = (caption or "").encode("utf-8", "replace")[:length].decode("utf-8", "ignore").encode()
        ids[row, : len(cut)] = torch.frombuffer(bytearray(cut), dtype=torch.uint8).long() + 1 if cut else 0
    return Text(ids)


class ByteEncoder(nn.Module):
    """Bytes -> states."""

    def __init__(self, config: ByteTextConfig) -> None:
        super().__init__()
        self.width = config.width
        self.embed = nn.Embedding(257, config.width)
        nn.init.normal_(self.embed.weight, std=1.0)
        self.place = nn.Parameter(torch.randn(config.length, config.width))
        self.words = nn.Conv1d(config.width, config.width, 5, padding=2)  # letters to syllables
        self.blocks = nn.ModuleList(EncoderBlock(config.width, config.heads) for _ in range(config.depth))
        self.norm = RMSNorm(config.width)
        self.head_width = config.width // config.heads

    def forward(self, text: Text) -> TextStates:
        """b m ids -> b m d. A caption of no bytes has no states to attend to; its mask says so."""
        mask = text.mask
        turns = rotary_turns(torch.arange(text.ids.shape[1], device=text.ids.device)[:, None], self.head_width)
        visible = mask | ~mask.any(1, keepdim=True)  # attention over nothing is not a number
        x: Tensor = self.embed(text.ids) * mask[..., None]
        words = self.words(x.transpose(1, 2)).transpose(1, 2)
        x = (x + words + self.place[: x.shape[1]]).to(words.dtype)  # bf16 under autocast: less to move
        for block in self.blocks:
            x = block(x, visible, turns)
        states = self.norm(x)
        return TextStates(states, mask, pool(states, mask))
