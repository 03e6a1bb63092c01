"""Clips of any length: one window after another, each going on from the last tokens of the one before. In: a function that draws
one window. Out: pieces of a clip, never more of it in memory than a window.

Counted are latent frames. The first latent of a clip holds its first frame alone and is unlike all others, so a window that goes
on has none: its place 0 is absent, and the tokens that it goes on from stand at places 1, 2, and on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.randomness import mix_tensors

WINDOW = 23  # stream of random numbers


class NoRoom(ValueError):
    """A window would hold nothing new."""


@dataclass(frozen=True, slots=True)
class Span:
    """A scene, in latent frames."""

    latents: int  # how many it adds
    overlap: int | None = None  # of what came before, how many it goes on from; 0 is a hard cut; None: as within a scene


@dataclass(frozen=True, slots=True)
class Window:
    """What is to be drawn at once."""

    scene: int  # which one, for its text
    known: Tensor  # b n, `mask_id` where something is to be drawn
    frames: Tensor | None  # b t bool: the steps that are there; None: all
    seeds: Tensor  # b int64


@dataclass(frozen=True, slots=True)
class Piece:
    """The next latent frames of a clip."""

    ids: Tensor  # b k h w
    begins: bool  # the first of them is a first latent: after a hard cut, and where the clip starts


@dataclass(frozen=True, slots=True)
class Plan:
    """A window before anything is drawn."""

    scene: int
    first: int  # place of the first token that is there: 0, or 1 where it goes on
    kept: int  # latents from there on that were drawn before
    new: int  # and those that follow


DrawWindow = Callable[[Window], Tensor]
"""ids b n, as `sample` returns them."""


def draw_long(
    draw_window: DrawWindow, grid: Sequence[int], mask_id: int, seeds: Tensor, scenes: Sequence[Span], overlap: int,
    given: Tensor | None = None,
) -> Iterator[Piece]:  # fmt: skip
    """Pieces of clips, a row for each seed (b int64), that together have exactly the latents that the scenes ask for.

    Windows of one scene share `overlap` latents. `given` b k h w are the first latents, counted in the scenes' lengths and among
    what comes out, with `mask_id` where something is to be drawn, which is how gaps are filled: a window sees those that lie in
    it. They reach no further than the first hard cut. Noise is a function of a row's seed and the window's number.
    """
    grid = tuple(grid)
    if given is None:
        return _draw(draw_window, grid, mask_id, seeds, plan(grid[0], scenes, overlap), None, 0)
    count = given.shape[1]
    if given.shape != (len(seeds), count, *grid[1:]):
        raise ValueError(f"given latents of shape {tuple(given.shape)}; expected {(len(seeds), count, *grid[1:])}")
    if count > (room := before_cut(scenes)):
        raise ValueError(f"{count} given latents, and the scenes before a cut have {room}; ask for more or give fewer")
    gaps = (given == mask_id).flatten(2).any(2).any(0).nonzero()
    whole = min(int(gaps[0]) if len(gaps) else count, scenes[0].latents)  # of the first scene, without anything to draw
    ahead = whole if whole >= min(grid[0], scenes[0].latents) else 0
    return _draw(draw_window, grid, mask_id, seeds, plan(grid[0], scenes, overlap, ahead), given, ahead)


def before_cut(scenes: Sequence[Span]) -> int:
    """Latents of the scenes that go on from the first one."""
    going_on = itertools.takewhile(lambda scene: scene.overlap != 0, scenes[1:])
    return sum(scene.latents for scene in (*scenes[:1], *going_on))


def plan(steps: int, scenes: Sequence[Span], overlap: int, ahead: int = 0) -> list[Plan]:
    """Windows of so many steps, one after another; of the first scene so many latents are there already. The overlap of a first
    scene with nothing before it is not read."""
    if not scenes or any(scene.latents < 1 for scene in scenes):
        raise ValueError(
            f"scenes of {[scene.latents for scene in scenes]} latents; expected one scene or more, of 1 latent or more"
        )
    windows, past = [], ahead  # latents since the last beginning
    for index, scene in enumerate(scenes):
        left = scene.latents - (0 if index else ahead)
        begun = index == 0 and ahead > 0
        keep = overlap if begun or scene.overlap is None else scene.overlap
        while left:
            if keep < 0 or (begun and keep == 0):
                raise ValueError(
                    f"an overlap of {keep} within a scene of {scene.latents} latents, more than a window of {steps}; at least 1"
                )
            past = past if keep else 0
            kept = min(past, keep)
            first = 0 if kept == past else 1  # what is kept reaches back to a first latent, or it does not
            new = min(left, steps - first - kept)
            if new < 1:
                raise NoRoom(f"an overlap of {keep} leaves no room for anything new in a window of {steps}; at most {steps - 2}")
            windows.append(Plan(index, first, kept, new))
            past, left, keep, begun = past + new, left - new, overlap, True
    return windows


def _draw(
    draw_window: DrawWindow, grid: tuple[int, ...], mask_id: int, seeds: Tensor, windows: Sequence[Plan],
    given: Tensor | None, ahead: int,
) -> Iterator[Piece]:  # fmt: skip
    """`draw_long`, once all is checked."""
    most = max((part.kept for part in windows), default=0)
    tail = seeds.new_zeros(len(seeds), 0, *grid[1:])  # the last latents, as many as a window goes on from
    if given is not None and ahead:
        yield Piece(given[:, :ahead], begins=True)
        tail = given[:, ahead - min(most, ahead) : ahead]
    done = ahead
    for index, part in enumerate(windows):
        known = torch.full((len(seeds), *grid), mask_id, device=seeds.device)
        start, end = part.first + part.kept, part.first + part.kept + part.new
        known[:, part.first : start] = tail[:, tail.shape[1] - part.kept :]
        if given is not None and done < given.shape[1]:
            here = given[:, done : done + part.new]
            known[:, start : start + here.shape[1]] = here
        done += part.new
        places = torch.arange(grid[0], device=seeds.device)
        whole = part.first == 0 and end == grid[0]
        frames = None if whole else ((places >= part.first) & (places < end)).expand(len(seeds), -1)
        noise = mix_tensors(seeds, *(torch.full_like(seeds, number) for number in (WINDOW, index)))
        ids = draw_window(Window(part.scene, known.flatten(1), frames, noise)).view(known.shape)[:, start:end]
        yield Piece(ids, begins=start == 0)
        tail = torch.cat([tail, ids], dim=1)
        tail = tail[:, tail.shape[1] - min(most, tail.shape[1]) :].clone()
