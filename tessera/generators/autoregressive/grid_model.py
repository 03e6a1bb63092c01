"""The network on clips: token grids t h w in raster order, with nearby attention and rotary positions over the three axes. A
second condition may stand beside the text: a sketch of the clip, which each cell sees at its own place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.generators.autoregressive.model import AutoregressiveConfig, Hourglass, Layer
from tessera.generators.masked.model import digit_sizes, join_digits, split_digits
from tessera.nn.attention import bias_of
from tessera.nn.nearby import Grid, NearbyAttention, NearbyConfig, Reach, Sight, Slot, View, alone, sight_of
from tessera.nn.nearby_cross import Beside, BesideSome, CrossWindow, NearbyCross, cell_turns, seen_cells, slot_turns
from tessera.nn.positions import refuse_narrow, rotary_turns


class GridConfig(AutoregressiveConfig):
    """A transformer over the cells of clips, each seeing what is near and came before, with a small decoder inside a cell."""

    nearby: NearbyConfig = NearbyConfig()
    """What each cell sees of the others."""
    sketch_window: int = Field(0, ge=0)
    """What each cell sees of a sketch of the clip: a square of so many cells around its own place, an odd number; 0: sketches are
    not taken."""

    @model_validator(mode="after")
    def _axes(self) -> GridConfig:
        refuse_narrow(self.width, self.heads, len(Grid._fields))
        return self

    @model_validator(mode="after")
    def _odd(self) -> GridConfig:
        if self.sketch_window and self.sketch_window % 2 == 0:
            raise ValueError(
                f"sketch_window {self.sketch_window} has no middle; use {self.sketch_window - 1} or {self.sketch_window + 1}"
            )
        return self


class GridBlock(Layer):
    """A layer whose places see those near them."""

    attention: NearbyAttention

    def __init__(self, config: GridConfig, text_width: int) -> None:
        super().__init__(config, text_width, NearbyAttention(config.width, config.heads))
        self.sketch = NearbyCross(config.width, config.heads, config.width) if config.sketch_window else None

    def forward(self, x: Tensor, text: Tensor, mask: Tensor, turns: Tensor, sight: Sight, beside: Beside | None = None) -> Tensor:
        """x b n d, text b m c, mask b m, turns 2 n k"""
        sketch = None if self.sketch is None or beside is None else partial(self.sketch.look, beside=beside)
        return self.along(x, lambda x: self.attention.look(x, turns, sight), lambda x: self.cross(x, text, mask), sketch)

    def step(
        self, x: Tensor, told: Tensor, bias: Tensor, turns: Tensor, kept: Tensor, places: Tensor, view: View,
        beside: BesideSome | None = None,
    ) -> Tensor:  # fmt: skip
        """Some slots, x b m d; told 2 b h m k and bias b 1 1 m, of the text; kept 2 b h n k."""
        sketch = None if self.sketch is None or beside is None else partial(self.sketch.step, beside=beside)
        attend = partial(self.attention.step, turns=turns, kept=kept, places=places, view=view)
        return self.along(x, attend, partial(self.cross.recall, kept=told, bias=bias), sketch)


class GridAutoregressive(Hourglass):
    """Cells of a grid t h w, of one token or of several (`codes`), each from those near and before it and the text. Frames may
    be fewer than the grid has, or more. Rotation only says where slots are to each other, so there is also a learned vector for
    each place of a frame.

    Inside, a cell has parts, guessed one after another: its codes, or the two digits of a token of a large vocabulary."""

    def __init__(
        self, config: GridConfig, vocab_size: int, grid: Sequence[int], text_width: int, codes: int | None = None
    ) -> None:
        sizes = digit_sizes(vocab_size) if codes is None else (vocab_size,) * codes
        group = (len(sizes),) if len(sizes) > 1 else ()
        super().__init__(config, max(sizes), group, text_width, lambda: GridBlock(config, text_width))
        self.vocab_size, self.grid, self.codes, self.sizes = vocab_size, tuple(grid), codes, sizes
        self.execution = config.nearby.execution
        reaches = (config.nearby.reach(layer) for layer in range(config.depth))
        self.layer_reaches = tuple(reach._replace(frames=min(reach.frames, self.most_frames(reach))) for reach in reaches)
        self.places = nn.Parameter(torch.randn(self.grid[1], self.grid[2] + 1, config.width) * 0.5)
        self.kinds = nn.Embedding(2, config.width)  # the first frame, and later ones
        nn.init.zeros_(self.kinds.weight)
        self.sketch_window, self.nothing = config.sketch_window, vocab_size  # the id where a sketch has no frame
        self.embed_sketch = nn.ModuleList(
            nn.Embedding(size + 1, config.width) for size in (sizes if config.sketch_window else ())
        )

    def most_frames(self, reach: Reach) -> int:
        """How many frames are seen at most: as in training. A first frame that is seen whole is unlike all others, so some frames
        of training must not see it: later ones never will. Of two the second sees it, or it would see nothing of the past."""
        frames = self.grid[0]
        return frames - 1 if reach.first and frames > 2 else frames

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """Those that differ."""
        return tuple(dict.fromkeys(self.layer_reaches))

    def slots(self, frames: int) -> Grid:
        """Of clips of so many frames."""
        return Grid(frames, self.grid[1], self.grid[2] + 1)

    def sights(self, frames: int, device: torch.device) -> tuple[Sight, ...]:
        """How clips of so many frames are looked at, for each of `reaches`. Made outside of what is compiled."""
        return tuple(sight_of(reach, self.slots(frames), device, self.execution) for reach in self.reaches)

    def forward(
        self, ids: Tensor, text: TextStates, lengths: Tensor, sights: Sequence[Sight] | None = None, sketch: Tensor | None = None
    ) -> Tensor:
        """ids b t h w, or b t h w q of several codes; lengths b, numbers of frames as `length_class` names them; sketch as ids,
        `nothing` where it has no frame -> logits b t h w p v of the parts of cells, fp32."""
        frames = ids.shape[1]
        sights = self.sights(frames, ids.device) if sights is None else sights
        parts = self.embed_parts(self.split(ids))
        coordinates = self.slots(frames).coordinates(ids.device)
        start = self.row_start(text, lengths)[:, None, None, None].expand(-1, *ids.shape[1:3], 1, -1)
        x = torch.cat([start, parts[0].to(start.dtype)], dim=3)  # under autocast bf16 from here on
        x = (x + self.places.to(x.dtype)).flatten(1, 3)
        states, mask = self.context_of(text)
        turns = rotary_turns(coordinates, self.head_width)
        beside = self.beside(sketch, ids)
        for block, reach in zip(self.blocks, self.layer_reaches, strict=True):
            x = block(x, states, mask, turns, sights[self.reaches.index(reach)], beside)
        x = x.unflatten(1, self.slots(frames))[:, :, :, :-1]
        context = self.known(x, torch.arange(frames, device=x.device)[:, None, None])
        for level, below in zip(self.levels, parts[1:], strict=True):
            context = level(context.flatten(0, 3), below.flatten(0, 3)).view(below.shape)
        logits = self.logits(context if self.group else context[..., None, :])
        return logits if len(set(self.sizes)) == 1 else logits.masked_fill(self.beyond(ids.device), -math.inf)

    def split(self, ids: Tensor) -> Tensor:
        """b t h w or b t h w q -> b t h w p, the parts of cells."""
        return split_digits(ids, self.sizes) if self.codes is None else ids

    def join(self, parts: Tensor) -> Tensor:
        """The inverse of `split`."""
        return join_digits(parts, self.sizes) if self.codes is None else parts

    def beyond(self, device: torch.device) -> Tensor:
        """p v bool: what is no part of any cell, because the sizes differ."""
        values = torch.arange(max(self.sizes), device=device)
        return torch.stack([values >= size for size in self.sizes])

    def row_start(self, text: TextStates, lengths: Tensor) -> Tensor:
        """b d: what stands in slot 0 of every row."""
        told = self.pooled(self.text_norm(text.pooled))
        return told + (self.start + self.lengths(lengths)).to(told.dtype)

    def known(self, x: Tensor, frame: Tensor) -> Tensor:
        """... d, and the frames that these places are in -> what is known of the cells that they guess. Only here is the first
        frame told apart from later ones: what others see must not say how long ago a clip began, or clips longer than those of
        training would look like nothing that was learned."""
        return self.norm(x + self.kinds((frame > 0).long()).to(x.dtype))

    def takes(self, sketch: Tensor | None) -> bool:
        """Whether sketches are looked at; one that would not be is refused."""
        if sketch is not None and not self.sketch_window:
            raise ValueError("this generator was built without sketches, and got one; build it with a sketch_window")
        return self.sketch_window > 0

    def beside(self, sketch: Tensor | None, ids: Tensor) -> Beside | None:
        """The sketch of clips, for all their slots; None if this generator takes none."""
        if not self.takes(sketch):
            return None
        sketch = torch.full_like(ids, self.nothing) if sketch is None else sketch
        cells = self.sketched(self.split_sketch(sketch)).flatten(2, 3)
        grid, columns, device = self.slots(1), self.grid[2], ids.device
        slot, cell = grid.slot(torch.arange(grid.area, device=device)), torch.arange(cells.shape[2], device=device)
        turns = slot_turns(slot, self.head_width), cell_turns(cell, columns, self.head_width)
        return Beside(cells, seen_cells(self.sketch_window, grid, device), *turns)

    def beside_some(self, sketch: Tensor, window: CrossWindow, slot: Slot) -> BesideSome:
        """The sketch b n p, cells of all its frames one after another, for some slots (m). It has nothing behind its end."""
        columns, area = self.grid[2], self.grid[1] * self.grid[2]
        place = slot.row * (columns + 1) + slot.column
        cell, seen = window.cell[place], window.there[place]
        index = slot.frame[:, None] * area + cell
        parts = sketch.index_select(1, index.clamp(max=sketch.shape[1] - 1).flatten()).unflatten(1, index.shape)
        gone = torch.stack([torch.where(index >= sketch.shape[1], size, -1) for size in self.sizes], dim=-1)
        parts = torch.where(gone < 0, parts, gone)
        turns = slot_turns(slot, self.head_width), cell_turns(cell, columns, self.head_width)
        sketched = self.sketched(parts)
        return BesideSome(sketched, alone(seen, self.heads, sketched.dtype), *turns)

    def split_sketch(self, ids: Tensor) -> Tensor:
        """b t h w or b t h w q -> b t h w p; nothing is one more value of each part."""
        nothing, parts = ids == self.nothing, self.split(ids).unbind(-1)
        gone = nothing.unbind(-1) if self.codes is not None else [nothing] * len(parts)
        filled = (part.masked_fill(none, size) for part, none, size in zip(parts, gone, self.sizes, strict=True))
        return torch.stack(list(filled), dim=-1)

    def sketched(self, parts: Tensor) -> Tensor:
        """... p -> ... d, of unit variance."""
        found = [table(part) for table, part in zip(self.embed_sketch, parts.unbind(-1), strict=True)]
        return torch.stack(found).sum(0) / math.sqrt(len(found))

    def step(
        self, x: Tensor, told: Tensor, mask: Tensor, slot: Slot, kept: Tensor, places: Tensor, views: Sequence[View],
        beside: BesideSome | None = None,
    ) -> Tensor:  # fmt: skip
        """Some slots, x b m d, with told l 2 b h m k and kept l 2 b h n k -> what is known of the cells that they guess,
        b m d."""
        turns = rotary_turns(torch.stack(slot, dim=-1), self.head_width).to(x.dtype)
        bias = bias_of(mask[:, None, None], x.dtype)
        for index, reach in enumerate(self.layer_reaches):
            block: Any = self.blocks[index]
            x = block.step(x, told[index], bias, turns, kept[index], places, views[self.reaches.index(reach)], beside)
        return self.known(x, slot.frame)
