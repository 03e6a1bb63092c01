"""Nearby cross-attention: each slot of a grid sees the same place of another grid, of the same frame, and what is around it there
(Wu et al. 2021, section 3.2, with another grid as the condition). Both grids have the same frames, rows and cells of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tessera.nn.attention import Attention, RMSNorm
from tessera.nn.nearby import Grid, Slot, attend_alone, listed
from tessera.nn.positions import rotary_turns, rotate


@dataclass(frozen=True, slots=True)
class Beside:
    """The other grid, for all slots."""

    cells: Tensor  # b t n c: n cells of a frame
    seen: Tensor  # s n bool: s slots of a frame
    slot_turns: Tensor  # 2 s k
    cell_turns: Tensor  # 2 n k


@dataclass(frozen=True, slots=True)
class BesideSome:
    """The other grid, for some slots: what each of them sees."""

    cells: Tensor  # b m k c
    bias: Tensor  # (h m) 1 k
    slot_turns: Tensor  # 2 m k
    cell_turns: Tensor  # 2 m k k


@dataclass(frozen=True, slots=True)
class CrossWindow:
    """The cells that every slot of a frame sees, filled up to one number."""

    cell: Tensor  # s k int64
    there: Tensor  # s k bool


def seen_cells(size: int, grid: Grid, device: torch.device) -> Tensor:
    """s n bool: a square of so many cells around the one that a slot guesses; the last slot of a row guesses none, and sees what
    the one before it sees."""
    slot, columns = grid.slot(torch.arange(grid.area, device=device)[:, None]), grid.slots - 1
    cell = torch.arange(grid.rows * columns, device=device)[None]
    down, right = cell // columns - slot.row, cell % columns - slot.column.clamp(max=columns - 1)
    return (down.abs() <= size // 2) & (right.abs() <= size // 2)


def cross_window(size: int, grid: Grid, device: torch.device) -> CrossWindow:
    """`seen_cells` as lists."""
    return CrossWindow(*listed(seen_cells(size, grid, device)))


def slot_turns(slot: Slot, width: int) -> Tensor:
    """... -> 2 ... k: of a slot, where the cell is that it guesses."""
    return rotary_turns(torch.stack([slot.row, slot.column], dim=-1), width)


def cell_turns(cell: Tensor, columns: int, width: int) -> Tensor:
    """... -> 2 ... k"""
    return rotary_turns(torch.stack([cell // columns, cell % columns], dim=-1), width)


class NearbyCross(Attention):
    """Attention of a grid to another one. It reads its stream normalised, and starts by adding nothing to it."""

    def __init__(self, width: int, heads: int, context_width: int) -> None:
        super().__init__(width, heads, context_width)
        self.norm = RMSNorm(width)
        nn.init.zeros_(self.out.weight)

    def look(self, x: Tensor, beside: Beside) -> Tensor:
        """x b n d, all slots of a grid."""
        batch, steps = beside.cells.shape[:2]
        parts = self.project(self.norm(x), beside.cells.flatten(1, 2), None)
        query, key, value = (rearrange(part, "b h (t n) k -> (b t) h n k", t=steps) for part in parts)
        query, key = rotate(query, beside.slot_turns), rotate(key, beside.cell_turns)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=beside.seen)
        return self.join(rearrange(found, "(b t) h n k -> b h (t n) k", b=batch))

    def step(self, x: Tensor, beside: BesideSome) -> Tensor:
        """x b m d, some slots."""
        query, key, value = self.project(self.norm(x), beside.cells.flatten(1, 2), None)
        key, value = (part.unflatten(2, beside.cells.shape[1:3]) for part in (key, value))
        query, key = rotate(query, beside.slot_turns), rotate(key, beside.cell_turns)
        return self.join(attend_alone(query, key, value, beside.bias))
