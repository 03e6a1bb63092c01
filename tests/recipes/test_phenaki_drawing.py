"""Scenes and given frames in latents: by hand, and against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

from tessera.config import UserError
from tessera.contracts import Scene
from tessera.generators.masked.windows import Span
from tessera.recipes.clips.given import hold, kept_frames, refuse_between_places
from tessera.recipes.clips.scenes import spans_of, takes_of


def scene(frames: int, overlap: int | None = None) -> Scene:
    return Scene("x", frames, overlap)


def test_a_hard_cut_begins_another_take() -> None:
    takes = takes_of([scene(9, 4), scene(8), scene(5, 0), scene(8, 4)])
    assert [[each.frames for each in take] for take in takes] == [[9, 8], [5, 8]]
    assert [take[0].overlap for take in takes] == [0, 0]  # the first of all has nothing to go on from


def test_scenes_in_latents() -> None:
    takes = takes_of([scene(17), scene(20, 8), scene(23, 5), scene(6, 0)])
    assert spans_of(takes, 4) == [Span(5, 0), Span(5, 2), Span(6, 2), Span(3, 0)]


@pytest.mark.parametrize("time_stride", [1, 2, 4])
def test_every_take_has_at_least_its_frames_and_less_than_a_latent_more(time_stride: int) -> None:
    for lengths in itertools.product((4, 5, 7, 9, 18), repeat=3):
        spans = spans_of([[scene(length) for length in lengths]], time_stride)
        made = 1 + time_stride * (sum(span.latents for span in spans) - 1)
        assert 0 <= made - sum(lengths) < time_stride
        ends = [1 + time_stride * (sum(span.latents for span in spans[:k]) - 1) for k in (1, 2)]
        for end, asked in zip(ends, itertools.accumulate(lengths), strict=False):
            assert 0 <= end - asked < time_stride


def test_a_scene_shorter_than_a_latent_is_refused() -> None:
    with pytest.raises(UserError, match="at least 4 frames"):
        spans_of([[scene(6), scene(2)]], 4)


def mask(length: int, *given: int) -> torch.Tensor:
    found = torch.zeros(length, dtype=torch.bool)
    found[list(given)] = True
    return found


def kept(length: int, *given: int) -> list[int]:
    return kept_frames(mask(length, *given), 4).nonzero().flatten().tolist()


def test_frames_of_latents_that_end_with_a_given_one_are_kept() -> None:
    assert kept(17, 0) == [0]
    assert kept(17, 0, 1, 2, 3, 4, 5, 6) == [0, 1, 2, 3, 4]  # the second latent is 1 to 4, the third is not complete
    assert kept(17, 0, 16) == [0, 16]
    assert kept(10, 0, 9) == [0, 9]  # the clip ends before its last latent does
    assert kept(17, 7) == []


def test_a_keyframe_inside_a_latent_is_refused_with_its_neighbours() -> None:
    refuse_between_places(mask(17, *range(7), 12), 4)
    with pytest.raises(UserError, match=r"frame 7: .* use 4 or 8"):
        refuse_between_places(mask(17, 0, 7), 4)
    with pytest.raises(UserError, match="none of the given frames"):
        refuse_between_places(mask(17, *()), 4)


def test_missing_frames_are_the_next_given_one_or_the_last() -> None:
    frames = torch.arange(10.0).view(1, 1, 10, 1, 1)
    held = hold(frames, mask(10, 0, 4, 9), 13).flatten().tolist()
    assert held == [0, 4, 4, 4, 4, 9, 9, 9, 9, 9, 9, 9, 9]
    assert hold(frames, mask(10, 0, 1, 2), 5).flatten().tolist() == [0, 1, 2, 2, 2]
