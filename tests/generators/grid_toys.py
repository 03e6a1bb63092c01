"""Small generators of clips, and text for them."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.batches import TextStates, TokenBatch
from tessera.generators.autoregressive.grid_model import GridAutoregressive, GridConfig
from tessera.generators.autoregressive.model import LENGTHS
from tessera.nn.nearby import NearbyConfig

VOCABULARY, TEXT, GRID = 7, 12, (4, 3, 4)
NEAR = {
    "window": NearbyConfig(frames=2, height=3, width=3),
    "wide": NearbyConfig(frames=3, height=5, width=3),
    "dilated": NearbyConfig(frames=2, height=3, width=3, dilation=(1, 2)),
    "whole": NearbyConfig(frames=2, whole=True),
}


def generator(near: str = "window", codes: int | None = None, depth: int = 2, seed: int = 0) -> GridAutoregressive:
    torch.manual_seed(seed)
    config = GridConfig(width=32, depth=depth, heads=2, inner_width=16, inner_depth=1, nearby=NEAR[near])
    net = GridAutoregressive(config, VOCABULARY, GRID, TEXT, codes)
    torch.nn.init.normal_(net.head.weight, std=0.3)  # or all guesses look alike
    return net.eval()


def words(num: int, length: int = 4, seed: int = 7) -> TextStates:
    states = torch.randn(num, length, TEXT, generator=torch.Generator().manual_seed(seed))
    return TextStates(states, torch.ones(num, length, dtype=torch.bool), states.mean(1))


def rows(text: TextStates, picked: list[int]) -> TextStates:
    return TextStates(text.states[picked], text.mask[picked], text.pooled[picked])


def clips(num: int, frames: int = GRID[0], codes: int | None = None, seed: int = 3) -> Tensor:
    shape = (num, frames, *GRID[1:], *(() if codes is None else (codes,)))
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def batch_of(ids: Tensor, text: TextStates, lengths: list[int] | None = None) -> TokenBatch:
    num = len(ids)
    return TokenBatch(
        ids=ids, text=text, valid=torch.ones(num, dtype=torch.bool), positions=torch.arange(num),
        keys=tuple(map(str, range(num))), captions=(None,) * num, lengths=None if lengths is None else torch.tensor(lengths),
    )  # fmt: skip


def anything(num: int) -> Tensor:
    """No number of frames is told."""
    return torch.full((num,), LENGTHS - 1)
