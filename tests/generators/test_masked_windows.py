"""Clips of any length by windows: which latents are drawn when, from what, and that nothing piles up."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tessera.generators.masked.windows import Piece, Plan, Span, Window, draw_long, plan
from tessera.randomness import mix

GRID, HIDDEN, SEEDS = (5, 2, 3), 1000, torch.tensor([4, 9])


class Counter:
    """Draws 0, 1, 2, ... as whole latents, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Window] = []
        self.drawn = 0

    def __call__(self, window: Window) -> Tensor:
        self.asked.append(window)
        ids = window.known.view(-1, *GRID).clone()
        for place in range(GRID[0]):
            if (window.frames is None or window.frames[0, place]) and (ids[:, place] == HIDDEN).any():
                ids[:, place] = torch.where(ids[:, place] == HIDDEN, self.drawn, ids[:, place])
                self.drawn += 1
        return ids.flatten(1)

    def seen(self) -> list[str]:
        """A window as one letter a place: a number that is known, ? to be drawn, - absent."""
        return ["".join(self.letter(window, place) for place in range(GRID[0])) for window in self.asked]

    @staticmethod
    def letter(window: Window, place: int) -> str:
        if window.frames is not None and not window.frames[0, place]:
            return "-"
        token = int(window.known.view(-1, *GRID)[0, place, 0, 0])
        return "?" if token == HIDDEN else str(token)


def drawn(counter: Counter, scenes: list[Span], overlap: int = 1, given: Tensor | None = None) -> list[Piece]:
    return list(draw_long(counter, GRID, HIDDEN, SEEDS, scenes, overlap, given))


def latents(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[None, :, None, None].expand(2, -1, *GRID[1:]).clone()


def numbers_of(pieces: list[Piece]) -> list[int]:
    return [int(latent) for piece in pieces for latent in piece.ids[0, :, 0, 0]]


@pytest.mark.parametrize(
    ("total", "overlap", "windows"),
    [
        (1, 1, ["?----"]),
        (4, 1, ["????-"]),
        (5, 1, ["?????"]),
        (6, 1, ["?????", "-4?--"]),
        (12, 1, ["?????", "-4???", "-7???", "-10?--"]),
        (9, 2, ["?????", "-34??", "-56??"]),
        (7, 3, ["?????", "-234?", "-345?"]),
    ],
)
def test_one_scene(total: int, overlap: int, windows: list[str]) -> None:
    counter = Counter()
    pieces = drawn(counter, [Span(total)], overlap)
    assert counter.seen() == windows
    assert numbers_of(pieces) == list(range(total))
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(windows) - 1)
    assert all(piece.ids.shape[2:] == GRID[1:] for piece in pieces)


@pytest.mark.parametrize(
    ("scenes", "windows", "owners", "begins"),
    [
        ([Span(5), Span(3, 0)], ["?????", "???--"], [0, 1], [True, True]),  # a hard cut
        ([Span(5), Span(3, 2)], ["?????", "-34??", "-6?--"], [0, 1, 1], [True, False, False]),
        ([Span(6), Span(3)], ["?????", "-4?--", "-5???"], [0, 0, 1], [True, False, False]),
        ([Span(1), Span(4)], ["?----", "0????"], [0, 1], [True, False]),  # goes on from a first latent: it stays one
        ([Span(2), Span(2, 3)], ["??---", "01??-"], [0, 1], [True, False]),
        ([Span(2), Span(2, 1)], ["??---", "-1??-"], [0, 1], [True, False]),
        ([Span(3), Span(1, 0), Span(2, 3)], ["???--", "?----", "3??--"], [0, 1, 2], [True, True, False]),  # not beyond the cut
    ],
)
def test_scenes(scenes: list[Span], windows: list[str], owners: list[int], begins: list[bool]) -> None:
    counter = Counter()
    pieces = drawn(counter, scenes)
    assert counter.seen() == windows
    assert [window.scene for window in counter.asked] == owners
    assert [piece.begins for piece in pieces] == begins
    assert numbers_of(pieces) == list(range(sum(scene.latents for scene in scenes)))
    for index, scene in enumerate(scenes):
        assert sum(piece.ids.shape[1] for piece, own in zip(pieces, owners, strict=True) if own == index) == scene.latents


@pytest.mark.parametrize(
    ("given", "scenes", "windows", "wanted"),
    [
        ([70], [Span(6)], ["70????", "-3?--"], [70, 0, 1, 2, 3, 4]),
        ([70, 71], [Span(3)], ["7071?--"], [70, 71, 0]),
        ([70, 71], [Span(2), Span(2)], ["-71??-"], [70, 71, 0, 1]),
        ([70, 71, 72, 73, 74], [Span(6)], ["-74?--"], [70, 71, 72, 73, 74, 0]),
        ([70, 71, 72, 73, 74, 75, 76], [Span(9)], ["-76??-"], [70, 71, 72, 73, 74, 75, 76, 0, 1]),
        ([70, 71], [Span(2), Span(2, 0)], ["??---"], [70, 71, 0, 1]),
        ([70, HIDDEN, HIDDEN, HIDDEN, 71], [Span(5)], ["70???71"], [70, 0, 1, 2, 71]),  # in between
        ([70, HIDDEN, 71], [Span(6)], ["70?71??", "-2?--"], [70, 0, 71, 1, 2, 3]),
        ([HIDDEN, HIDDEN, 71], [Span(3)], ["??71--"], [0, 1, 71]),
        ([70, *[HIDDEN] * 6, 71], [Span(9)], ["70????", "-3??71", "-71?--"], [70, 0, 1, 2, 3, 4, 5, 71, 6]),  # further off
        ([70, 71, 72, 73, 74, HIDDEN, 75], [Span(8)], ["-74?75?"], [70, 71, 72, 73, 74, 0, 75, 1]),
        ([70, HIDDEN, 71], [Span(2), Span(3)], ["70?---", "-071??"], [70, 0, 71, 1, 2]),  # in the next scene
        ([70, 71, 72], [Span(2), Span(2)], ["-7172?-"], [70, 71, 72, 0]),
        ([70, 71, 72, 73], [Span(2), Span(2)], ["-717273-"], [70, 71, 72, 73]),
    ],
)
def test_given_latents(given: list[int], scenes: list[Span], windows: list[str], wanted: list[int]) -> None:
    counter = Counter()
    pieces = drawn(counter, scenes, given=latents(*given))
    assert counter.seen() == windows
    assert numbers_of(pieces) == wanted
    assert pieces[0].begins


def test_any_story_has_what_was_asked_and_every_window_fits() -> None:
    draws = random.Random(0)
    for _ in range(500):
        steps = draws.randint(3, 7)
        overlap, count = draws.randint(1, steps - 2), draws.randint(1, 4)
        scenes = [Span(draws.randint(1, 20), draws.choice([None, *range(steps - 1)])) for _ in range(count)]
        windows = plan(steps, scenes, overlap)
        made: list[tuple[int, int]] = []  # of every latent: its scene, and the number of its beginning
        beginning = -1
        for window in windows:
            beginning += window.first + window.kept == 0
            fresh = made and window.scene != made[-1][0]
            asked = overlap if not fresh or scenes[window.scene].overlap is None else scenes[window.scene].overlap
            past = [latent for latent in made if latent[1] == beginning]
            assert window.new >= 1
            assert window.first + window.kept + window.new <= steps
            assert window.kept == (min(asked, len(past)) if made else 0)
            assert (window.first == 0) == (window.kept == len(past)), "place 0 is a first latent or absent"
            made += [(window.scene, beginning)] * window.new
        assert [sum(scene == index for scene, _ in made) for index in range(count)] == [scene.latents for scene in scenes]
        cuts = {made[0][1]} | {latent[1] for latent in made}
        assert len(cuts) == 1 + sum(scene.overlap == 0 for scene in scenes[1:])


@pytest.mark.parametrize(
    ("scenes", "overlap", "message"),
    [
        ([Span(6)], 4, "overlap of 4 leaves no room .* at most 3"),
        ([Span(6)], 0, "overlap of 0 within a scene of 6 latents"),
        ([Span(6)], -1, "overlap of -1"),
        ([Span(5), Span(2, 4)], 1, "overlap of 4 leaves no room"),
        ([Span(5), Span(2, -1)], 1, "overlap of -1"),
        ([], 1, "at least one scene|one scene or more"),
        ([Span(3), Span(0)], 1, r"\[3, 0\] latents"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is(scenes: list[Span], overlap: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_long(Counter(), GRID, HIDDEN, SEEDS, scenes, overlap)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (latents(1, 2, 3, 4), "4 given latents, and the scenes before a cut have 3"),
        (latents(1, 2)[:1], r"expected \(2, 2, 2, 3\)"),
    ],
)
def test_given_latents_that_do_not_fit_are_refused(given: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_long(Counter(), GRID, HIDDEN, SEEDS, [Span(2), Span(1), Span(4, 0)], 1, given)


def test_a_short_clip_needs_no_overlap() -> None:
    assert plan(5, [Span(5), Span(4, 0)], 0) == [Plan(0, 0, 0, 5), Plan(1, 0, 0, 4)]
    assert plan(1, [Span(1)], 3) == [Plan(0, 0, 0, 1)]


def test_noise_is_a_function_of_seed_and_window() -> None:
    counter = Counter()
    drawn(counter, [Span(9), Span(2, 0)])
    found = [window.seeds.tolist() for window in counter.asked]
    assert [[seed % 2**64 for seed in row] for row in found] == [[mix(seed, 23, index) for seed in (4, 9)] for index in range(4)]
    assert len({seed for row in found for seed in row}) == 8
    alone = Counter()
    list(draw_long(alone, GRID, HIDDEN, SEEDS[1:], [Span(9), Span(2, 0)], 1))
    assert [window.seeds.tolist()[0] for window in alone.asked] == [row[1] for row in found], "whoever else is in the batch"


def test_windows_are_drawn_when_asked_for_and_let_go() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def window(asked: Window) -> Tensor:
        ids = asked.known.masked_fill(asked.known == HIDDEN, 0)
        alive.append(weakref.ref(ids))
        return ids

    pieces: Iterator[Piece] = draw_long(window, GRID, HIDDEN, SEEDS, [Span(400)], 2)
    assert not alive
    most = 0
    for count, _ in enumerate(pieces, 1):
        assert len(alive) == count
        if count % 50 == 0:
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))
    assert len(alive) == 1 + -(-395 // 2)
    assert most <= 2
