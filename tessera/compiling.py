"""torch.compile, as all rooms call it."""

from __future__ import annotations

import functools

import einops
import torch
from torch import nn


def compile_module(module: nn.Module, *, recorded: bool = False, varied: bool = False) -> None:
    """In place. `recorded`: as CUDA graphs, too; `varied`: its inputs differ in shape, so one code is made for all of them."""
    settle_einops()
    module.compile(mode="reduce-overhead" if recorded else None, dynamic=True if varied else None)


@functools.cache
def settle_einops() -> None:
    """A rearrangement is one node of the graph. Torch would otherwise follow einops into its parser at every call, which was more
    than half of the time that the video tokenizer's two halves took to be traced (44 s instead of 18 s on one core)."""
    torch._dynamo.allow_in_graph(einops.rearrange)
