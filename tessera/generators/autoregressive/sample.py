"""Sampling: one group after another, each token drawn among those that may come next. A sample is a function of its own seed,
text and known groups.

Keys and values of groups that are written lie in a buffer of fixed size, which doubles when it is full; rows that have ended
leave the batch, which shrinks to the next power of two. Between such changes shapes are the same from group to group: one group
is recorded once for each size and replayed on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tessera.batches import TextStates
from tessera.config import Config
from tessera.contracts import Constraint
from tessera.generators.autoregressive.model import PREFIX, Autoregressive, length_class
from tessera.nn.drawing import draw, implausible
from tessera.randomness import mix_tensors, uniform
from tessera.recording import Lean, Recording, mapped, sampling_precision, shapes_of

CHOICE = 41  # stream of random numbers
FIRST_ROOM = 64  # groups that the first buffer holds
LOOK_EVERY = 8  # groups from one look at which rows have ended to the next


class ChoiceConfig(Config):
    """How tokens are chosen."""

    guidance: float = Field(2.0, ge=0, le=1000)
    """Pull towards the text: logits of the unconditional branch plus this times the difference. 1 is none, at half the cost."""
    temperature: float = Field(1.0, ge=0, le=1000)
    """Of the choice of tokens; 0 takes the most probable."""
    top_k: int = Field(0, ge=0)
    """Choose only among so many of the most probable tokens; 0: among all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Choose only among the most probable tokens that together have this probability."""
    min_share: float = Field(0.0, ge=0, lt=1)
    """Leave out tokens that, given the text, are less than this share as probable as the most probable one."""

    @property
    def guided(self) -> bool:
        """Whether there is a second branch."""
        return self.guidance != 1

    def choose(self, logits: Tensor, numbers: Tensor, allowed: Tensor | None = None) -> Tensor:
        """b ... v or, of two branches with text and without, 2b ... v -> b ...: one token a place, of the allowed ones.
        What is implausible given the text is left out, or guidance would lift it where it is still less so without."""
        with_text, without = logits.chunk(2) if self.guided else (logits, None)
        logits = with_text if without is None else without + self.guidance * (with_text - without)
        if allowed is not None:
            with_text, logits = with_text.masked_fill(~allowed, -math.inf), logits.masked_fill(~allowed, -math.inf)
        if self.min_share:
            logits = logits.masked_fill(implausible(with_text, self.min_share), -math.inf)
        return draw(logits, numbers, self.temperature, self.top_p, self.top_k)


class AutoregressiveSampleConfig(ChoiceConfig):
    """How an autoregressive generator draws."""

    leave: bool = True
    """Samples that have ended leave the batch, and those that only fill it up never enter. Then the others are computed in a
    smaller one, whose rounding differs in the last bit; without it a sample never depends on what else is asked."""


@dataclass(frozen=True, slots=True)
class Known:
    """Groups that samples begin with."""

    ids: Tensor  # b n t
    lengths: Tensor  # b


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same from group to group, and buffers that are written in place. Two branches, with text and without,
    are one batch of twice the size."""

    seeds: Tensor  # b int64
    told: Tensor  # l 2 (b or 2b) h m k: keys and values of the text
    mask: Tensor  # b or 2b, m bool
    kept: Tensor  # l 2 (b or 2b) h n k: keys and values
    out: Tensor  # b n t: groups that are written
    known: Known


@dataclass(frozen=True, slots=True)
class State:
    """What a group changes."""

    place: Tensor  # 1 int64: of the next input in the outer sequence
    x: Tensor  # b or 2b, 1 d: that input
    ended: Tensor  # b bool
    lengths: Tensor  # b int64: groups so far
    begun: Any  # of the constraint, before a group
    allowed: Tensor  # b v bool


@dataclass(frozen=True, slots=True)
class Writer:
    """One way to sample from one generator."""

    lean: Lean[Autoregressive]
    config: AutoregressiveSampleConfig
    constraint: Constraint

    @property
    def net(self) -> Autoregressive:
        """The generator itself."""
        return self.lean.net

    @property
    def tokens(self) -> int:
        """Of a group."""
        return math.prod(self.net.group)

    def prepare(
        self, text: TextStates, seeds: Tensor, negative: TextStates | None, lengths: Tensor, known: Known | None
    ) -> tuple[Setup, State]:
        """Everything on the device, up to the last place before the first group."""
        self.lean.refresh()
        net, device, size = self.net, seeds.device, len(seeds)
        if self.config.guided:
            none = text.without(torch.ones(size, dtype=torch.bool, device=device)) if negative is None else negative
            text, lengths = text.joined(none), torch.cat([lengths, lengths])
        with sampling_precision(device, self.lean.bf16):
            states, mask = net.context_of(text)
            told, prefix = net.told(states), net.prefix(text, length_class(lengths))
        if known is None:
            known = Known(torch.zeros(size, 1, self.tokens, dtype=torch.long, device=device), torch.zeros_like(seeds))
        kind = torch.bfloat16 if self.lean.bf16 else torch.float32
        room = FIRST_ROOM + PREFIX
        kept = torch.zeros(len(net.blocks), 2, len(mask), net.heads, room, net.head_width, dtype=kind, device=device)
        out = torch.zeros(size, room, self.tokens, dtype=torch.long, device=device)
        setup = Setup(seeds, told.to(kind), mask, kept, out, known)
        place = torch.zeros(1, dtype=torch.long, device=device)
        prefix = prefix.to(kind)
        for index in range(PREFIX - 1):
            self.lean.passes.step(prefix[:, index : index + 1], setup.told, mask, kept, place + index)
        begun, allowed = self.constraint.init(size, device)
        ended = torch.zeros(size, dtype=torch.bool, device=device)
        return setup, State(place + PREFIX - 1, prefix[:, -1:], ended, torch.zeros_like(seeds), begun, allowed)

    def step_once(self, setup: Setup, state: State) -> State:
        """Writes one group of every sample."""
        net, group = self.lean.passes, Group(self, setup, state)
        context = net.step(state.x, setup.told, setup.mask, setup.kept, state.place)
        vector = net.write(context, group.choose)
        ids = torch.stack(group.ids, dim=-1)
        setup.out.index_copy_(1, state.place - (PREFIX - 1), ids[:, None])
        lengths = state.lengths + ~group.ended
        return State(state.place + 1, vector[:, None].to(state.x.dtype), group.ended, lengths, group.begun, group.allowed)


class Group:
    """One group while it is written."""

    def __init__(self, writer: Writer, setup: Setup, state: State) -> None:
        self.writer, self.known = writer, setup.known
        self.ended, self.begun, self.allowed = state.ended, state.begun, state.allowed
        index = state.place - (PREFIX - 1)
        self.numbers = uniform(CHOICE, mix_tensors(setup.seeds, index), writer.tokens)
        self.given = index < self.known.lengths
        self.known_ids = self.known.ids.index_select(1, index.clamp(max=self.known.ids.shape[1] - 1))[:, 0]
        self.ids: list[Tensor] = []

    def choose(self, logits: Tensor) -> Tensor:
        """logits b v or 2b v -> ids, the same in both branches."""
        writer, place = self.writer, len(self.ids)
        ids = writer.config.choose(logits, self.numbers[:, place], self.allowed)
        ids = torch.where(self.given, self.known_ids[:, place], ids)
        ids = ids.masked_fill(self.ended, 0)
        self.begun, self.allowed = writer.constraint.step(self.begun, ids)
        if place == 0:
            self.ended = self.ended | (ids == writer.net.end)
            ids = ids.masked_fill(self.ended, 0)
        self.ids.append(ids)
        return torch.cat([ids, ids]) if writer.config.guided else ids


class Sampler:
    """Whole samples. On a GPU groups are recorded, once for each size of batch and buffer; weights are read where they lie."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.recordings: dict[tuple[Any, ...], Recording[Setup, State]] = {}

    @torch.no_grad()
    def __call__(
        self, text: TextStates, seeds: Tensor, most: int, *, negative: TextStates | None = None, lengths: Tensor | None = None,
        known: Known | None = None, num_asked: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """ids b n t and how many groups each sample has: at most `most`, where it is cut. `lengths` b are groups to ask for,
        0 for any. Where samples may leave, those behind `num_asked` have left before the first group."""
        wanted = torch.zeros_like(seeds) if lengths is None else lengths
        setup, state = self.writer.prepare(text, seeds, negative, wanted, known)
        found = torch.zeros(len(seeds), most, self.writer.tokens, dtype=torch.long, device=seeds.device)
        ends, rows = torch.zeros_like(seeds), torch.arange(len(seeds), device=seeds.device)
        if num_asked is not None and self.writer.config.leave:
            rows, setup, state = self.changed(setup, replace(state, ended=rows >= num_asked), rows, 0)
        step = self.stepper(setup, state)
        for count in range(1, most + 1):
            step.once()
            last = count == most
            if not last and count % LOOK_EVERY and count + PREFIX < step.setup.kept.shape[4]:
                continue
            keep = ~step.state.ended
            done = last or not bool(keep.any())
            if done or self.writer.config.leave:
                written = min(count, most)
                found[rows, :written], ends[rows] = step.setup.out[: len(rows), :written], step.state.lengths[: len(rows)]
            if done:
                break
            rows, setup, state = self.changed(step.setup, step.state, rows, count)
            if shapes_of(setup, state) != shapes_of(step.setup, step.state):
                step = self.stepper(setup, state)
        return found, ends

    def stepper(self, setup: Setup, state: State) -> Stepper:
        """What goes on from here: a recording, or the plain step."""
        if state.x.device.type != "cuda":
            return Stepper(self.writer, setup, state)
        shapes = shapes_of(setup, state)
        if shapes not in self.recordings:
            self.recordings[shapes] = Recording(self.writer.step_once, setup, state)
        recording = self.recordings[shapes]
        recording.load(setup, state)
        return Stepper(self.writer, recording.setup, recording.state, recording)

    def changed(self, setup: Setup, state: State, rows: Tensor, count: int) -> tuple[Tensor, Setup, State]:
        """With a buffer that has room for the next groups, and without rows that have ended where a smaller power of two holds
        the others: so there are few sizes to record."""
        if count + LOOK_EVERY + PREFIX > setup.kept.shape[4]:
            more = setup.kept.shape[4]
            setup = replace(
                setup,
                kept=torch.nn.functional.pad(setup.kept, (0, 0, 0, more)),
                out=torch.nn.functional.pad(setup.out, (0, 0, 0, more)),
            )
        size = len(state.ended)
        if not self.writer.config.leave:
            return rows, setup, state
        alive = (~state.ended[: len(rows)]).nonzero()[:, 0]
        smaller = 1 << (max(1, len(alive)) - 1).bit_length()
        if smaller >= size:
            return rows, setup, state
        kept = torch.cat([alive, alive[:1].expand(smaller - len(alive))])
        both = torch.cat([kept, kept + size]) if self.writer.config.guided else kept
        ended = torch.arange(smaller, device=kept.device) >= len(alive)  # copies that fill up
        setup = replace(
            setup,
            seeds=setup.seeds[kept], told=setup.told[:, :, both], mask=setup.mask[both], kept=setup.kept[:, :, both],
            out=setup.out[kept], known=Known(setup.known.ids[kept], setup.known.lengths[kept]),
        )  # fmt: skip
        begun = mapped(state.begun, lambda tensor: tensor[kept])
        state = State(state.place, state.x[both], ended, state.lengths[kept], begun, state.allowed[kept])
        return rows[alive], setup, state


class Stepper:
    """Goes from group to group at one size."""

    def __init__(self, writer: Writer, setup: Setup, state: State, recording: Recording[Setup, State] | None = None) -> None:
        self.writer, self.setup, self.state, self.recording = writer, setup, state, recording

    def once(self) -> None:
        """One group."""
        if self.recording is None:
            self.state = self.writer.step_once(self.setup, self.state)
        else:
            self.recording.play()
