"""In which order the slots of a grid are gone through. Slot (t, h, c) has its turn in pass a t + b h + c.

A pass may hold a slot and others that it sees, because keys are written before anything is looked at; but slot c holds the token
that slot c - 1 guessed, which takes an earlier pass. With b = w and a = h w it is one cell after another. Where a slot only sees
a window, smaller steps do: cells of one pass do not depend on each other, given what was drawn before, so drawing them together
is drawing from the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.nn.nearby import Grid, Window


class Schedule(NamedTuple):
    """Passes from one frame to the next, and from one row to the next."""

    frame_step: int
    row_step: int

    def last(self, frame: int, grid: Grid) -> int:
        """The pass in which the last cell of a frame is guessed."""
        return self.frame_step * frame + self.row_step * (grid.rows - 1) + grid.slots - 2

    def others_in_flight(self, grid: Grid) -> int:
        """How many frames are not finished when the newest one begins."""
        return (self.row_step * (grid.rows - 1) + grid.slots - 1) // self.frame_step


def sequential(grid: Grid) -> Schedule:
    """One cell after another. The last slot of a row guesses nothing, and shares its pass with the first one of the next."""
    return frame_by_frame(grid, grid.slots - 1)


def frame_by_frame(grid: Grid, row_step: int) -> Schedule:
    """A frame begins when the last cell of the one before it has been guessed. Rows overlap where their step is small."""
    return Schedule(row_step * (grid.rows - 1) + grid.slots - 1, row_step)


def wavefront(windows: Sequence[Window], grid: Grid) -> Schedule:
    """The smallest steps at which nothing is seen before its turn, in any layer."""
    ahead = [differences(window, grid) for window in windows]
    back, down, right = (torch.cat(parts) for parts in zip(*ahead, strict=True))
    above = (back == 0) & (down < 0)
    row_step = largest(ceil_div(right[above], -down[above]), 0)
    before = back > 0
    return Schedule(largest(ceil_div(row_step * down[before] + right[before], back[before]), 1), row_step)


def differences(window: Window, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Of every slot of a frame and all that it sees: frames back, rows down, slots to the right."""
    own = torch.arange(len(window.place), device=window.place.device)[:, None]
    down = window.place // grid.slots - own // grid.slots
    right = window.place % grid.slots - own % grid.slots
    return window.back[window.there], down[window.there], right[window.there]


def ceil_div(number: Tensor, by: Tensor) -> Tensor:
    """Rounded up."""
    return -(-number).div(by, rounding_mode="floor")


def largest(numbers: Tensor, least: int) -> int:
    """Of them, and of a least one."""
    return max([least, *numbers.tolist()])


@dataclass(frozen=True, slots=True)
class Table:
    """The slots of each pass. It repeats with every frame: pass p has those of p mod a, of frames p // a and before."""

    back: Tensor  # a m int64: how many frames before the newest one
    row: Tensor  # a m int64
    column: Tensor  # a m int64
    there: Tensor  # a m bool: False fills up


def table_of(schedule: Schedule, grid: Grid, device: torch.device) -> Table:
    """All slots of a frame, by pass."""
    passes: list[list[tuple[int, int, int]]] = [[] for _ in range(schedule.frame_step)]
    for row in range(grid.rows):
        for column in range(grid.slots):
            back, phase = divmod(schedule.row_step * row + column, schedule.frame_step)
            passes[phase].append((back, row, column))
    most = max(map(len, passes))
    filled = torch.tensor([[*slots, *[(0, 0, 0)] * (most - len(slots))] for slots in passes], device=device)
    there = torch.tensor([[place < len(slots) for place in range(most)] for slots in passes], device=device)
    return Table(filled[..., 0], filled[..., 1], filled[..., 2], there)
