"""Small generators of clips, text for them, and what they draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.batches import TextStates, TokenBatch
from tessera.generators.autoregressive.grid_model import GridAutoregressive, GridConfig
from tessera.generators.autoregressive.grid_sample import GridSampleConfig, GridSampler, GridWriter, Plan, plans_of
from tessera.generators.autoregressive.model import LENGTHS
from tessera.nn.nearby import NearbyConfig
from tessera.recording import Lean

VOCABULARY, TEXT, GRID = 7, 12, (4, 3, 4)
CPU = torch.device("cpu")
NEAR = {
    "window": NearbyConfig(frames=2, height=3, width=3),
    "wide": NearbyConfig(frames=3, height=5, width=3),
    "dilated": NearbyConfig(frames=2, height=3, width=3, dilation=(1, 2)),
    "whole": NearbyConfig(frames=2, whole=True),
    "first": NearbyConfig(frames=2, height=3, width=3, first_whole=True),
    "first, dilated": NearbyConfig(frames=3, height=3, width=3, dilation=(1, 2), first_whole=True),
    "diagonals": NearbyConfig(frames=2, height=3, width=3, first_whole=True, first_step=2),
    "diagonals, dilated": NearbyConfig(frames=3, height=3, width=3, dilation=(1, 2), first_whole=True, first_step=1),
}


def generator(
    near: str = "window", codes: int | None = None, depth: int = 2, seed: int = 0, sketch: int = 0
) -> GridAutoregressive:
    torch.manual_seed(seed)
    sizes = {"width": 32, "depth": depth, "heads": 2, "inner_width": 16, "inner_depth": 1}
    net = GridAutoregressive(GridConfig(**sizes, nearby=NEAR[near], sketch_window=sketch), VOCABULARY, GRID, TEXT, codes)
    torch.nn.init.normal_(net.head.weight, std=0.3)  # or all guesses look alike
    torch.nn.init.normal_(net.kinds.weight, std=0.5)  # it starts at 0
    for block in net.blocks:
        if sketch:
            torch.nn.init.normal_(block.sketch.out.weight, std=0.2)  # as does this
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


def drawn(net: GridAutoregressive, text: TextStates, seeds: Tensor, frames: int, given: Any = None, **options: Any) -> Tensor:
    """b t h w or b t h w q"""
    sampler = GridSampler(GridWriter(Lean(net), GridSampleConfig(**options)))
    return torch.cat(list(sampler(text, seeds, frames, **(given or {}))), dim=1)


def watched(
    net: GridAutoregressive, text: TextStates, seeds: Tensor, frames: int, given: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """What is drawn, and the logits that it was drawn from, 2b t h w q v; found by what went through the head, pass by pass."""
    seen: list[Tensor] = []
    hook = net.head.register_forward_hook(lambda module, inputs, out: seen.append(out))
    ids = drawn(net, text, seeds, frames, given, **options)
    hook.remove()
    return ids, arranged(net, seen, frames, options["order"])


def arranged(net: GridAutoregressive, seen: list[Tensor], frames: int, order: str) -> Tensor:
    """What went through the head, pass by pass, as logits of cells: 2b t h w q v."""
    codes, (_, height, width) = len(net.sizes), net.grid
    logits = torch.full((len(seen[0]), frames, height, width, codes, VOCABULARY), torch.nan)
    passes = zip(*(seen[code::codes] for code in range(codes)), strict=True)
    for (plan, number, wanted), guesses in zip(passes_of(net, order, frames), passes, strict=True):
        newest, phase = divmod(number, plan.schedule.frame_step)
        for place in range(plan.table.there.shape[1]):
            back, row, column = (int(x[phase, place]) for x in (plan.table.back, plan.table.row, plan.table.column))
            frame = newest - back
            if plan.table.there[phase, place] and frame in wanted and column < width:
                assert logits[0, frame, row, column].isnan().all(), "every cell once"
                logits[:, frame, row, column] = torch.stack([guess[:, place] for guess in guesses], dim=1)
    assert not logits.isnan().any(), "every cell"
    return logits


def passes_of(net: GridAutoregressive, order: str, frames: int) -> list[tuple[Plan, int, range]]:
    """Of each pass the plan, the number and the frames that it is to draw: a first frame that is seen whole, with one pass more
    so that its last cell is seen, then the others."""
    later, first = plans_of(net, order, CPU)
    last = later.schedule.last(frames - 1, later.grid) + 1
    if first is None:
        return [(later, number, range(frames)) for number in range(last)]
    opening = [(first, number, range(1)) for number in range(first.schedule.last(0, first.grid) + 1 + (frames > 1))]
    return opening + [(later, number, range(1, frames)) for number in range(later.schedule.frame_step, last) if frames > 1]
