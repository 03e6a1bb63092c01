"""Nearby attention on a grid of frames (Wu et al. 2021, section 3.2): each place sees a window around itself in the last frames,
and only what comes before it. One definition, `Reach.sees`, and several ways to carry it out.

A row of w cells has w + 1 slots: slot 0 is where the row starts, slot c holds the token of cell c - 1, and slot c < w guesses
cell c. So what a slot holds is the cell to the left of the one that it guesses, and nothing of another row. Slots are in raster
order. The window lies around the guessed cell, the same to all sides: of earlier frames that cell itself is seen too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tessera.config import Config, UserError
from tessera.nn.attention import Attention, bias_of
from tessera.nn.positions import grid_coordinates

RASTER = 1 << 16  # more than any row has slots: rows of the first frame come one after another
LONG = 8192  # slots from which on no dense mask is made: there it begins to cost more than it saves (bench/RESULTS.md)
BLOCK = 128  # FlexAttention's tiles

Execution = Literal["auto", "dense", "bands", "blocks"]


class NearbyConfig(Config):
    """What a place sees of a grid of frames."""

    frames: int = Field(3, ge=1)
    """The last so many latent frames, its own among them."""
    height: int = Field(5, ge=1)
    """Rows of the window, an odd number: as many above as below."""
    width: int = Field(5, ge=1)
    """Columns of the window, an odd number: as many on the left as on the right."""
    whole: bool = False
    """Frames are seen whole, without a window. Then only one token at a time can be drawn."""
    first_whole: bool = False
    """The cells of the first frame see all of it that comes before them. Nothing lies before that frame that would hold its far
    parts together: with a window alone, two things that the text asks for once may be drawn alike, or twice. `whole` includes
    it."""
    first_step: int = Field(0, ge=0)
    """In which order the cells of a first frame come, if `first_whole` shows it. 0: one after another, row by row. Else each row
    goes this many cells behind the one above it, and cells on one diagonal come together: they see all earlier diagonals and not
    each other. With 2 a frame of 16 x 16 is drawn in 46 passes, in raster order in 256."""
    dilation: tuple[int, ...] = Field((1,), min_length=1)
    """Distance between rows and columns of the window, for one layer after another and again from the start: (1, 2) lets every
    second layer look twice as far."""
    execution: Execution = "auto"
    """How it is computed, always the same numbers: dense (a mask), bands (whole frames with a mask), blocks (FlexAttention, on a
    GPU); auto takes dense for short grids, and for long ones blocks in training on a GPU, bands elsewhere."""

    @model_validator(mode="after")
    def _odd(self) -> NearbyConfig:
        for name, size in (("height", self.height), ("width", self.width)):
            if size % 2 == 0:
                raise ValueError(f"{name} {size} has no middle; use {size - 1} or {size + 1}")
        if min(self.dilation) < 1:
            raise ValueError(f"dilation {self.dilation}; every number of it must be 1 or more")
        return self

    def reach(self, layer: int) -> Reach:
        """Of one layer."""
        dilation = self.dilation[layer % len(self.dilation)]
        first = (self.first_step or RASTER) if self.first_whole else 0
        return Reach(self.frames, 0, 0, 1) if self.whole else Reach(self.frames, self.height, self.width, dilation, first)


class Slot(NamedTuple):
    """Coordinates of slots; they broadcast."""

    frame: Tensor
    row: Tensor
    column: Tensor


class Reach(NamedTuple):
    """What the places of one layer see."""

    frames: int
    height: int  # 0: frames are seen whole
    width: int
    dilation: int
    first: int = 0  # how many slots a row of the first frame goes behind the one above it, RASTER: all; 0: it has a window

    @property
    def whole(self) -> bool:
        """Whether there is no window."""
        return self.height == 0

    def sees(self, query: Slot, key: Slot) -> Tensor:
        """The definition. Bool: the key is not later, in one of the last frames, and its token in the window around the cell that
        the query guesses, if there is one; or it is the query itself. In a first frame that is seen whole: its turn is not
        later, by the order of that frame."""
        back, down, right = query.frame - key.frame, key.row - query.row, key.column - query.column
        earlier = (back > 0) | ((back == 0) & ((down < 0) | ((down == 0) & (right <= 0))))
        near = earlier & (back < self.frames)
        if not self.whole:
            near = near & self._inside(down, self.height) & self._inside(right - 1, self.width)
        if self.first:
            near = torch.where(query.frame == 0, (back == 0) & (self.first * down + right <= 0), near)
        return near | ((back == 0) & (down == 0) & (right == 0))

    def _inside(self, offset: Tensor, size: int) -> Tensor:
        distance = offset.abs()
        return (distance <= size // 2 * self.dilation) & (distance % self.dilation == 0)


class Grid(NamedTuple):
    """Frames, rows, and slots of a row."""

    frames: int
    rows: int
    slots: int

    @property
    def area(self) -> int:
        """Slots of a frame."""
        return self.rows * self.slots

    @property
    def size(self) -> int:
        """All slots."""
        return self.frames * self.area

    def slot(self, index: Tensor) -> Slot:
        """Where the slots of these places in raster order are."""
        return Slot(index // self.area, index // self.slots % self.rows, index % self.slots)

    def coordinates(self, device: torch.device) -> Tensor:
        """n 3"""
        return grid_coordinates(self, device)


class Sight(Protocol):
    """One way to carry it out: queries, keys and values b h n k -> b h n k."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends."""


@dataclass(frozen=True, slots=True)
class Causal:
    """Everything before."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@dataclass(frozen=True, slots=True)
class Dense:
    """The reference: all pairs, and a mask."""

    mask: Tensor  # n n bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)


@dataclass(frozen=True, slots=True)
class Bands:
    """Each frame against the last ones as a whole, and a mask."""

    mask: Tensor  # t s k bool: s slots of a frame, k of the last frames

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends."""
        (steps, area, band), batch = self.mask.shape, len(query)
        query = rearrange(query, "b h (t s) k -> t (b h) s k", t=steps)
        padded = (F.pad(x, (0, 0, band - area, 0)).unfold(2, band, area) for x in (key, value))
        key, value = (rearrange(x, "b h t k s -> t (b h) s k") for x in padded)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask[:, None])
        return rearrange(seen, "t (b h) s k -> b h (t s) k", b=batch)


@dataclass(frozen=True, slots=True)
class Blocks:
    """FlexAttention: tiles in which nothing is seen are left out."""

    mask: BlockMask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends. Not compiled it would compute all pairs, which is only good for a small test on a CPU."""
        attend: Any = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else compiled_flex()
        value = value.contiguous()  # compiled for a CPU (torch 2.13), a view into a larger tensor is read from that one's start
        found: Tensor = attend(query, key, value, block_mask=self.mask)
        return found


@functools.cache
def compiled_flex() -> Any:
    """For layers that are not compiled themselves."""
    return torch.compile(flex_attention, dynamic=False)


def sight_of(reach: Reach, grid: Grid, device: torch.device, execution: Execution = "auto") -> Sight:
    """The way asked for, or the best one. Made once for each shape; call it outside of what is compiled."""
    if execution == "auto":
        if grid.frames <= (reach.frames if reach.whole else int(reach.first == RASTER)):
            return Causal()
        flex = device.type == "cuda" and torch.is_grad_enabled()
        execution = "dense" if grid.size < LONG else "blocks" if flex else "bands"
    if torch.is_grad_enabled():
        refuse_untrainable(execution, device)
    return _made(reach, grid, device, execution)


def refuse_untrainable(execution: Execution, device: torch.device) -> None:
    """FlexAttention has no gradients there."""
    if execution == "blocks" and device.type == "cpu":
        raise UserError(
            "base.model.nearby.execution blocks (FlexAttention) cannot train on a CPU; set base.model.nearby.execution to auto"
        )


@functools.lru_cache(maxsize=32)
def _made(reach: Reach, grid: Grid, device: torch.device, execution: Execution) -> Sight:
    if execution == "dense":
        index = torch.arange(grid.size, device=device)
        return Dense(reach.sees(grid.slot(index[:, None]), grid.slot(index[None])))
    return Bands(band_mask(reach, grid, device)) if execution == "bands" else Blocks(block_mask(reach, grid, device))


def band_mask(reach: Reach, grid: Grid, device: torch.device) -> Tensor:
    """t s k: of each frame, the last ones; those before the first are not there."""
    frames = min(reach.frames, grid.frames)
    newest = torch.arange(grid.frames, device=device)[:, None, None]
    query = grid.slot(torch.arange(grid.area, device=device)[:, None])
    key = grid.slot(torch.arange(frames * grid.area, device=device))
    key = key._replace(frame=newest - (frames - 1) + key.frame)
    return reach.sees(query._replace(frame=newest), key) & (key.frame >= 0)


def block_mask(reach: Reach, grid: Grid, device: torch.device) -> BlockMask:
    """Row of tiles by row of tiles, so that memory stays small whatever the length."""
    count, keys = math.ceil(grid.size / BLOCK), torch.arange(grid.size, device=device)
    some, full = torch.zeros(2, count, count, dtype=torch.bool, device=device)
    for index in range(count):
        rows = keys[index * BLOCK : (index + 1) * BLOCK]
        seen = F.pad(reach.sees(grid.slot(rows[:, None]), grid.slot(keys[None])), (0, count * BLOCK - grid.size))
        tiles = seen.unflatten(1, (count, BLOCK)).transpose(0, 1).flatten(1)
        some[index], full[index] = tiles.any(1), tiles.all(1)

    def seen_at(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reach.sees(grid.slot(query), grid.slot(key))

    partial = some & ~full
    numbers = [tiles.sum(-1, dtype=torch.int32)[None, None] for tiles in (partial, full)]
    orders = [tiles.int().argsort(dim=-1, descending=True, stable=True).int()[None, None] for tiles in (partial, full)]
    return BlockMask.from_kv_blocks(
        numbers[0], orders[0], numbers[1], orders[1], BLOCK_SIZE=BLOCK, mask_mod=seen_at, seq_lengths=(grid.size, grid.size)
    )


class NearbyAttention(Attention):
    """Attention of a grid to itself."""

    def look(self, x: Tensor, turns: Tensor, sight: Sight) -> Tensor:
        """x b n d, all slots of a grid; turns 2 n k"""
        return self.join(sight(*self.project(x, None, turns)))

    def step(self, x: Tensor, turns: Tensor, kept: Tensor, places: Tensor, view: View) -> Tensor:
        """x b m d, some slots whose turns are 2 m k; kept 2 b h n k is written at their places (m) before anything is seen."""
        query, key, value = self.project(x, None, turns)
        kept.index_copy_(3, places, torch.stack([key, value]).to(kept.dtype))
        return self.join(view(query, kept))


@dataclass(frozen=True, slots=True)
class View:
    """What some slots see of what is kept."""

    bias: Tensor  # m k where all places are looked at, else (h m) 1 k
    index: Tensor | None  # m k: places of what is kept; None: all of them

    def __call__(self, query: Tensor, kept: Tensor) -> Tensor:
        """query b h m k -> b h m k"""
        if self.index is None:
            key, value = kept.to(query.dtype).unbind(0)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)
        key, value = kept.index_select(3, self.index.flatten()).to(query.dtype).unflatten(3, self.index.shape).unbind(0)
        return attend_alone(query, key, value, self.bias)


def alone(seen: Tensor, heads: int, kind: torch.dtype) -> Tensor:
    """m k bool -> (h m) 1 k: the bias of `attend_alone`."""
    return bias_of(seen.repeat(heads, 1)[:, None], kind)


def attend_alone(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Each query has keys of its own: query b h m d, key and value b h m k d, bias (h m) 1 k -> b h m d."""
    parts = rearrange(query, "b h m d -> b (h m) 1 d"), key.flatten(1, 2), value.flatten(1, 2)
    return rearrange(F.scaled_dot_product_attention(*parts, attn_mask=bias), "b (h m) 1 d -> b h m d", h=query.shape[1])


@dataclass(frozen=True, slots=True)
class Window:
    """The keys of every slot of a frame, filled up to one number."""

    back: Tensor  # s k int64: how many frames before
    place: Tensor  # s k int64: place in that frame
    there: Tensor  # s k bool


def window_of(reach: Reach, grid: Grid, device: torch.device) -> Window:
    """As seen from a frame with enough others before it."""
    reach, frames = reach._replace(first=0), min(reach.frames, grid.frames)
    own = torch.arange(grid.area, device=device)[:, None] + (frames - 1) * grid.area
    seen = reach.sees(grid.slot(own), grid.slot(torch.arange(frames * grid.area, device=device)[None]))
    order, there = listed(seen)
    return Window(frames - 1 - order // grid.area, order % grid.area, there)


def listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """n m bool -> n k: of each row the places that are True, filled up to one number; and which are not filling."""
    order = seen.int().argsort(dim=1, descending=True, stable=True)[:, : int(seen.sum(1).max())]
    return order, seen.gather(1, order)


class Ring(NamedTuple):
    """Room for the last frames: a frame takes the place of the one `frames` before it. One place more, behind all others, is for
    what nobody is to see."""

    frames: int
    rows: int
    slots: int

    @property
    def size(self) -> int:
        """All places."""
        return self.frames * self.rows * self.slots + 1

    def at(self, frame: Tensor, place: Tensor) -> Tensor:
        """Where a slot lies."""
        return frame % self.frames * (self.rows * self.slots) + place

    def view(self, reach: Reach, window: Window | None, slot: Slot, last: Tensor, kept: Tensor) -> View:
        """What slots (m) see of what is kept (2 b h n k) while `last` (1) is the newest frame. Without a window all places are
        looked at."""
        if window is None:
            grid, index = Grid(*self), torch.arange(self.size - 1, device=last.device)
            key = grid.slot(index)
            key = key._replace(frame=last - (last - key.frame) % self.frames)  # the newest frame that lies there
            seen = reach.sees(Slot(*(part[:, None] for part in slot)), key) & (key.frame >= 0)
            return View(bias_of(F.pad(seen, (0, 1)), kept.dtype), None)
        place = slot.row * self.slots + slot.column
        back = window.back[place]
        seen = window.there[place] & (back <= slot.frame[:, None])
        index = self.at(slot.frame[:, None] - back, window.place[place])
        return View(alone(seen, kept.shape[2], kept.dtype), torch.where(seen, index, self.size - 1))
