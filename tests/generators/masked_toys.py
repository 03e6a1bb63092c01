"""Small nets and batches for the tests of the masked generator."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tessera.batches import TextStates, TokenBatch
from tessera.generators.masked.critic import CriticNet
from tessera.generators.masked.model import Low, MaskedConfig, MaskedTransformer
from tessera.text.bytes import ByteEncoder, ByteTextConfig, read_bytes

GRID, VOCABULARY = (3, 4), 20
WORDS = ("red", "green", "blue", "grey")


def generator(
    grid: tuple[int, ...] = GRID, vocabulary: int = VOCABULARY, width: int = 32, low: Low | None = None, recalls: bool = False
) -> MaskedTransformer:
    """A small one, off its start, where gates are 0."""
    torch.manual_seed(0)
    config = MaskedConfig(width=width, depth=2, heads=2, self_conditioning=recalls)
    net = MaskedTransformer(config, vocabulary, grid, width, low)
    net.head.weight.data.mul_(50)
    if net.recall is not None:
        net.recall.weight.data.normal_(std=0.2)
    return stirred(net).eval()


def critic(width: int = 32, low: Low | None = None) -> CriticNet:
    torch.manual_seed(1)
    net = CriticNet(MaskedConfig(width=16, depth=1, heads=2), VOCABULARY, GRID, width, low)
    net.head.head.weight.data.normal_()
    stirred(net.trunk)
    return net.eval()


def stirred(net: torch.nn.Module) -> torch.nn.Module:
    for block in net.blocks:
        block.table.data.normal_(std=0.5)
    return net


def encoder(width: int = 32) -> ByteEncoder:
    torch.manual_seed(2)
    return ByteEncoder(ByteTextConfig(length=24, width=width, depth=1, heads=2)).eval()


def batch(captions: list[str], ids: Tensor, first: int = 0, low: Tensor | None = None) -> TokenBatch:
    size = len(captions)
    keys = tuple(str(index) for index in range(size))
    valid, positions = torch.ones(size, dtype=torch.bool), torch.arange(first, first + size)
    return TokenBatch(ids, read_bytes(captions, 24), valid, positions, keys, tuple(captions), low)


def random_batch(size: int, grid: tuple[int, ...] = GRID, vocabulary: int = VOCABULARY) -> TokenBatch:
    ids = torch.randint(0, vocabulary, (size, *grid), generator=torch.Generator().manual_seed(3))
    return batch([f"{WORDS[index % 4]} thing" for index in range(size)], ids)


def wordless(ids: Tensor, width: int, first: int = 0, low: Tensor | None = None) -> TokenBatch:
    """Without captions, as an unconditional generator is trained."""
    return replace(batch([""] * len(ids), ids, first, low), text=TextStates.none(len(ids), width))


def random_text(size: int, width: int = 32, length: int = 5, seed: int = 0) -> TextStates:
    draws = torch.Generator().manual_seed(seed)
    states = torch.randn(size, length, width, generator=draws)
    return TextStates(
        states, torch.arange(length)[None] < torch.randint(1, length + 1, (size, 1), generator=draws), states.mean(1)
    )
