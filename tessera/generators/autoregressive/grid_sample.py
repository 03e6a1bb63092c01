"""Sampling of clips: pass after pass, each drawing all cells whose turn it is. A clip is a function of its own seed, text and
known frames, whatever the order.

Keys and values of the last frames lie in a ring, so memory does not grow with a clip's length, and frames leave as soon as they
are finished. Shapes never change: one pass is recorded once and replayed on a GPU; one more, where the first frame is seen whole
and drawn in an order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import TextStates
from tessera.generators.autoregressive.grid_model import GridAutoregressive
from tessera.generators.autoregressive.grid_schedule import Schedule, Table, frame_by_frame, sequential, table_of, wavefront
from tessera.generators.autoregressive.model import length_class
from tessera.generators.autoregressive.sample import CHOICE, ChoiceConfig
from tessera.nn.nearby import Grid, Reach, Ring, Slot, View, Window, window_of
from tessera.nn.nearby_cross import CrossWindow, cross_window
from tessera.randomness import mix_tensors, uniform
from tessera.recording import Lean, Recording, sampling_precision, shapes_of


class GridSampleConfig(ChoiceConfig):
    """How an autoregressive generator draws clips. Of a large vocabulary, top_k, top_p and min_share are for each digit."""

    order: Literal["auto", "sequential", "wavefront"] = "auto"
    """One cell after another, or all at once that do not see each other: the same clips in fewer passes, where the generator sees
    a window. auto takes the wavefront wherever there is one. A first frame that is seen whole has the order of its training."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is looked up in every pass."""

    schedule: Schedule
    grid: Grid  # as many frames as a cell sees
    ring: Ring  # of slots
    table: Table
    reaches: tuple[Reach, ...]  # as the network's `reaches` are here
    windows: tuple[Window | None, ...]  # for each of them; None: frames are seen whole
    sketch: CrossWindow | None  # where the network takes sketches

    def views(self, slot: Slot, newest: Tensor, kept: Tensor) -> list[View]:
        """What slots (m) see of what any layer keeps (2 b h n k), for each of `reaches`; equal ones are looked up once."""
        kinds = dict(zip(self.reaches, self.windows, strict=True))
        found = {reach: self.ring.view(reach, window, slot, newest, kept) for reach, window in kinds.items()}
        return [found[reach] for reach in self.reaches]


class Plans(NamedTuple):
    """Of all frames, or of those after the first, where that one is seen whole and has a plan of its own."""

    later: Plan
    first: Plan | None

    @property
    def begin(self) -> Plan:
        """Of the first frame."""
        return self.later if self.first is None else self.first

    def num_passes(self, frames: int) -> int:
        """Of a clip of so many frames."""
        schedule, grid = self.later.schedule, self.later.grid
        every = schedule.last(frames - 1, grid) + 1
        if self.first is None:
            return every
        alone = self.first.schedule.last(0, grid) + 1
        return alone if frames == 1 else alone + 1 + every - schedule.frame_step


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same from pass to pass, and buffers that are written in place. Two branches, with text and without, are one
    batch of twice the size."""

    plan: Plan
    seeds: Tensor  # b int64
    first: Tensor  # 1 int64: frames before this one are finished
    start: Tensor  # b or 2b, d: what rows start with
    told: Tensor  # l 2 (b or 2b) h m k: keys and values of the text
    mask: Tensor  # b or 2b, m bool
    kept: Tensor  # l 2 (b or 2b) h n k: keys and values, in the ring
    parts: Tensor  # b n p: parts of cells, in a ring of as many frames
    known: Tensor  # b k p: those of the first frames, filled up; k may be 0
    num_known: Tensor  # 1 int64: how many of those are given
    sketch: Tensor | None  # b or 2b, k p: those of the sketch's frames, at least of one; nothing in the branch without text


@dataclass(frozen=True, slots=True)
class State:
    """What a pass changes."""

    number: Tensor  # 1 int64: of the pass


def plans_of(net: GridAutoregressive, order: str, device: torch.device) -> Plans:
    """The tables of one way to draw from a generator."""
    reach = net.reaches[0]
    grid = net.slots(reach.frames)
    if reach.whole and order == "wavefront":
        raise ValueError("order wavefront needs a window, and this generator sees whole frames; use order sequential")
    windows = tuple(None if reach.whole else window_of(reach, grid, device) for reach in net.reaches)
    local = [window for window in windows if window is not None]
    schedule = wavefront(local, grid) if local and order != "sequential" else sequential(grid)
    ring = Ring(reach.frames + schedule.others_in_flight(grid), grid.rows, grid.slots)
    sketch = cross_window(net.sketch_window, grid, device) if net.sketch_window else None
    later = Plan(schedule, grid, ring, table_of(schedule, grid, device), net.reaches, windows, sketch)
    if not reach.first:
        return Plans(later, None)
    alone = frame_by_frame(grid, min(reach.first, grid.slots - 1))
    room = ring._replace(frames=2)  # the pass that shows the last cell begins another frame
    same, whole = (reach,) * len(windows), (None,) * len(windows)  # in the first frame all layers see the same
    return Plans(later, Plan(alone, grid, room, table_of(alone, grid, device), same, whole, sketch))


class GridWriter:
    """One way to sample from one generator."""

    def __init__(self, lean: Lean[GridAutoregressive], config: GridSampleConfig) -> None:
        self.lean, self.net, self.config = lean, lean.net, config
        self.made: dict[torch.device, Plans] = {}

    def plans(self, device: torch.device) -> Plans:
        """Made once for each device."""
        if device not in self.made:
            self.made[device] = plans_of(self.net, self.config.order, device)
        return self.made[device]

    def prepare(
        self, text: TextStates, seeds: Tensor, negative: TextStates | None, lengths: Tensor, known: Tensor | None,
        sketch: Tensor | None = None,
    ) -> tuple[Setup, State]:  # fmt: skip
        """Everything on the device, before the first pass."""
        self.lean.refresh()
        net, device, size = self.net, seeds.device, len(seeds)
        plan, zero = self.plans(device).begin, torch.zeros(1, dtype=torch.long, device=device)
        start, told, mask = self.told(text, negative, lengths)
        rows, kind = len(mask), told.dtype
        kept = torch.zeros(len(net.blocks), 2, rows, net.heads, plan.ring.size, net.head_width, dtype=kind, device=device)
        parts = torch.zeros(size, self.cells(plan).size, len(net.sizes), dtype=torch.long, device=device)
        given = parts[:, :0] if known is None else net.split(filled_up(known, 0)).flatten(1, 3)
        num_known = torch.full_like(zero, 0 if known is None else math.prod(known.shape[1:4]))
        setup = Setup(plan, seeds, zero, start, told, mask, kept, parts, given, num_known, self.sketch(sketch, seeds))
        return setup, State(zero.clone())

    def told(self, text: TextStates, negative: TextStates | None, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What rows start with, keys and values of the text and its mask, of all branches."""
        if self.config.guided:
            none = text.without(torch.ones_like(text.mask[:, 0])) if negative is None else negative
            text, lengths = text.joined(none), torch.cat([lengths, lengths])
        with sampling_precision(lengths.device, self.lean.bf16):
            states, mask = self.net.context_of(text)
            told, start = self.net.told(states), self.net.row_start(text, length_class(lengths))
        kind = torch.bfloat16 if self.lean.bf16 else torch.float32
        return start.to(kind), told.to(kind), mask

    def go_on(self, setup: Setup, first: int, told: tuple[Tensor, Tensor, Tensor]) -> tuple[Setup, State]:
        """The same clips from frame `first` on, one after the first, under another text. What was drawn ahead of it is drawn
        again; what lies before it is seen as it was."""
        (start, text, mask), plan = told, self.plans(setup.seeds.device).later
        number = torch.full_like(setup.first, plan.schedule.frame_step * first)
        changed = replace(setup, plan=plan, first=torch.full_like(setup.first, first), start=start, told=text, mask=mask)
        if setup.plan.ring != plan.ring:  # frames lie at the same places in both
            kept, parts = grown(setup.kept, plan.ring.size), grown(setup.parts, self.cells(plan).size)
            changed = replace(changed, kept=kept, parts=parts)
        return changed, State(number)

    def sketch(self, sketch: Tensor | None, seeds: Tensor) -> Tensor | None:
        """As cells one after another, of all branches."""
        net = self.net
        if not net.takes(sketch):
            return None
        if sketch is None:
            sketch = seeds.new_full((len(seeds), 1, *net.grid[1:], *((net.codes,) if net.codes else ())), net.nothing)
        sketch = filled_up(sketch, net.nothing)
        both = torch.cat([sketch, torch.full_like(sketch, net.nothing)]) if self.config.guided else sketch
        return net.split_sketch(both).flatten(1, 3)

    def cells(self, plan: Plan) -> Ring:
        """The ring of tokens: rows have no start."""
        return plan.ring._replace(slots=plan.ring.slots - 1)

    def step_once(self, setup: Setup, state: State) -> State:
        """Goes through the slots of one pass."""
        plan, net, cells = setup.plan, self.lean.passes, self.cells(setup.plan)
        newest, phase = state.number // plan.schedule.frame_step, state.number % plan.schedule.frame_step
        back, row, column, there = (
            part.index_select(0, phase)[0] for part in (plan.table.back, plan.table.row, plan.table.column, plan.table.there)
        )
        there = there & (back <= newest) & (newest - back >= setup.first)
        slot = Slot((newest - back).clamp(min=0), row, column)
        cell = row * cells.slots + column
        before = torch.where(column > 0, cells.at(slot.frame, cell - 1), cells.size - 1)
        x = self.embed(setup, setup.parts.index_select(1, before), slot)
        places = torch.where(there, plan.ring.at(slot.frame, row * plan.ring.slots + column), plan.ring.size - 1)
        beside = None
        if setup.sketch is not None and plan.sketch is not None:
            beside = net.beside_some(setup.sketch, plan.sketch, slot)
        views = plan.views(slot, newest, setup.kept[0])
        context = net.step(x, setup.told, setup.mask, slot, setup.kept, places, views, beside)
        choice = Choice(self, setup, slot)
        net.write(context, choice)
        guesses = there & (column < cells.slots)
        into = torch.where(guesses, cells.at(slot.frame, cell), cells.size - 1)
        setup.parts.index_copy_(1, into, torch.stack(choice.parts, dim=-1))
        return State(state.number + 1)

    def embed(self, setup: Setup, parts: Tensor, slot: Slot) -> Tensor:
        """b m p, the cells to the left -> b or 2b, m d."""
        net = self.lean.passes
        vectors = net.embed_parts(parts)[0].to(setup.start.dtype)
        vectors = torch.cat([vectors, vectors]) if self.config.guided else vectors
        x = torch.where((slot.column > 0)[:, None], vectors, setup.start[:, None])
        return x + net.places[slot.row, slot.column].to(x.dtype)


def grown(ring: Tensor, size: int) -> Tensor:
    """... n k -> ... size k: room for more frames; what nobody is to see stays behind all others."""
    return F.pad(ring[..., :-1, :], (0, 0, 0, size - ring.shape[-2] + 1))


def filled_up(ids: Tensor, value: int) -> Tensor:
    """b k ... -> b n ..., n the next power of two: passes are recorded anew for every shape, and a recording stays."""
    num = ids.shape[1]
    more = (1 << (num - 1).bit_length()) - num
    return torch.cat([ids, ids.new_full((len(ids), more, *ids.shape[2:]), value)], dim=1)


class Choice:
    """The cells of one pass, one part of each after another."""

    def __init__(self, writer: GridWriter, setup: Setup, slot: Slot) -> None:
        self.writer, self.parts, count = writer, list[Tensor](), setup.parts.shape[2]
        keys = mix_tensors(setup.seeds[:, None], *slot)  # of the cell alone: its turn is not asked
        self.numbers = uniform(CHOICE, keys.flatten(), count).view(*keys.shape, count)
        ring, room = setup.plan.ring, setup.known.shape[1]
        place = (slot.frame * ring.rows + slot.row) * (ring.slots - 1) + slot.column
        self.given = place < setup.num_known if room else None
        self.known = setup.known.index_select(1, place.clamp(max=room - 1)) if room else setup.known

    def __call__(self, logits: Tensor) -> Tensor:
        """logits b m v or 2b m v -> one part of each cell, the same in both branches."""
        index = len(self.parts)
        part = self.writer.config.choose(logits[..., : self.writer.net.sizes[index]], self.numbers[..., index])
        if self.given is not None:
            part = torch.where(self.given, self.known[..., index], part)
        self.parts.append(part)
        return torch.cat([part, part]) if self.writer.config.guided else part


class GridSampler:
    """Whole clips, of any length. On a GPU passes are recorded, once for each plan and size of batch, text, known frames and
    sketch, of which the last two come in powers of two; weights are read where they lie."""

    def __init__(self, writer: GridWriter, recorded: bool = True) -> None:
        self.writer, self.records = writer, recorded
        self.recordings: dict[tuple[Any, ...], Recording[Setup, State]] = {}
        self.drawing: object = None  # the clips that are being drawn

    def __call__(
        self, text: TextStates, seeds: Tensor, frames: int, *, negative: TextStates | None = None, lengths: Tensor | None = None,
        known: Tensor | None = None, sketch: Tensor | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """ids b 1 h w, or b 1 h w q of several codes: one latent frame after another, the known ones (b k h w or b k h w q)
        among them. `lengths` b are numbers of frames to tell the network, 0 for any. A sketch has the shape of known frames; the
        network's `nothing` stands where it has none, and those behind its end have none. What is drawn first must be finished
        before the same sampler draws more."""
        return self.story([(text, frames)], seeds, negative=negative, lengths=lengths, known=known, sketch=sketch)

    def story(
        self, scenes: Sequence[tuple[TextStates, int]], seeds: Tensor, *, negative: TextStates | None = None,
        lengths: Tensor | None = None, known: Tensor | None = None, sketch: Tensor | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """The same with scenes: texts, and the frames that each adds. A scene sees the frames before it, and they do not see its
        text."""
        for _, count in scenes:
            if count < 1:
                raise ValueError(f"{count} frames; ask for 1 or more")
        self.check(sum(count for _, count in scenes), seeds, known, sketch)
        wanted = torch.zeros_like(seeds) if lengths is None else lengths
        with torch.no_grad():
            setup, state = self.writer.prepare(scenes[0][0], seeds, negative, wanted, known, sketch)
        (text, frames), *others = scenes
        if self.writer.plans(seeds.device).first is not None and frames > 1:  # another plan after the first one
            scenes = [(text, 1), (text, frames - 1), *others]
        return self.frames(setup, state, scenes, partial(self.writer.told, negative=negative, lengths=wanted))

    @torch.no_grad()
    def frames(
        self, setup: Setup, state: State, scenes: Sequence[tuple[TextStates, int]],
        told: Callable[[TextStates], tuple[Tensor, Tensor, Tensor]],
    ) -> Iterator[Tensor]:  # fmt: skip
        """Those of each scene, once all is prepared. Keys and values of a text are many times as large as its states, so they
        are made when its scene begins."""
        grid, done, area = setup.plan.grid, 0, math.prod(self.writer.net.grid[1:])
        self.drawing = own = object()
        for scene, (text, count) in enumerate(scenes):
            if scene:
                same = text is scenes[scene - 1][0]
                setup, state = self.writer.go_on(setup, done, (setup.start, setup.told, setup.mask) if same else told(text))
            schedule, ring, end = setup.plan.schedule, self.writer.cells(setup.plan), done + count
            recording = self.recorded(setup, state)
            last = schedule.last(end - 1, grid) + (scene + 1 < len(scenes))  # its last cell must be seen by others
            for number in range(schedule.frame_step * done, last + 1):
                if self.drawing is not own:
                    raise RuntimeError("this sampler has begun other clips before these were finished; use a sampler for each")
                if recording is None:
                    state = self.writer.step_once(setup, state)
                else:
                    recording.play()
                    setup = recording.setup
                if done < end and number == schedule.last(done, grid):  # the next frame is finished
                    first = done % ring.frames * area
                    parts = setup.parts[:, first : first + area].clone().unflatten(1, (1, ring.rows, ring.slots))
                    done += 1
                    yield self.writer.net.join(parts)

    def recorded(self, setup: Setup, state: State) -> Recording[Setup, State] | None:
        """One pass, ready to play; None where there is no GPU, or nothing is to be recorded."""
        if not self.records or state.number.device.type != "cuda":
            return None
        shapes = shapes_of(setup, state)
        if shapes not in self.recordings:
            self.recordings[shapes] = Recording(self.writer.step_once, setup, state)
        self.recordings[shapes].load(setup, state)
        return self.recordings[shapes]

    def check(self, frames: int, seeds: Tensor, known: Tensor | None, sketch: Tensor | None) -> None:
        """What is asked for, before anything is drawn."""
        net = self.writer.net
        for name, given in (("known frames", known), ("sketch", sketch)):
            if given is None:
                continue
            expected = (len(seeds), given.shape[1], *net.grid[1:], *((net.codes,) if net.codes else ()))
            if tuple(given.shape) != expected:
                raise ValueError(f"{name} of shape {tuple(given.shape)}; expected {expected}")
        if known is not None and known.shape[1] > frames:
            raise ValueError(f"{known.shape[1]} known frames of {frames}; ask for more frames, or give fewer")
