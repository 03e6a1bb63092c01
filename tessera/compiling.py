"""torch.compile, as all rooms call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import einops
import torch
from torch import nn

Shapes = Literal["one", "few", "many"]
"""How many different shapes a module's inputs have: with few, code is made for each; with many, once for all of them."""

MOST_VARIANTS = 64  # of one piece of code; torch stops at 8, and runs what comes after uncompiled

DYNAMIC: dict[Shapes, bool | None] = {"one": None, "few": False, "many": True}
"""What torch calls it."""


def compile_module(module: nn.Module, *, recorded: bool = False, shapes: Shapes = "one") -> None:
    """In place. `recorded`: as CUDA graphs, too, one for each shape."""
    settle_einops()
    if shapes == "few":
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    options: dict[str, str | int | bool | Callable[..., object]] = {"triton.cudagraphs": recorded}
    if shapes == "many":
        options["triton.coalesce_tiling_analysis"] = False  # torch 2.11 fails in it where shapes are unknown
    module.compile(options=options, dynamic=DYNAMIC[shapes])


def compile_parts(net: nn.Module, kinds: tuple[type[nn.Module], ...], *, recorded: bool = False, shapes: Shapes = "few") -> None:
    """Each part by itself: equal ones are compiled once, so many layers take seconds where the whole would take minutes."""
    for module in outermost(net, kinds):
        compile_module(module, recorded=recorded, shapes=shapes)


def outermost(net: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Modules of these kinds that lie in no other of them."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in net.modules():
        if isinstance(module, kinds) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


@functools.cache
def settle_einops() -> None:
    """A rearrangement is one node of the graph. Torch would otherwise follow einops into its parser at every call, which was more
    than half of the time that the video tokenizer's two halves took to be traced (44 s instead of 18 s on one core)."""
    torch._dynamo.allow_in_graph(einops.rearrange)
