"""The order of samples: every one once an epoch, whatever the ranks and micro-batches, from any step on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.order import Cut, Order


def samples(order: Order, first: int, stop: int) -> list[int]:
    return [order.locate(position)[1] for position in range(first, stop)]


@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_every_sample_once_an_epoch(size: int, seed: int) -> None:
    order = Order(size, seed)
    for epoch in (0, 7):
        located = [order.locate(position) for position in range(epoch * size, (epoch + 1) * size)]
        assert {found for found, _ in located} == {epoch}
        assert sorted(sample for _, sample in located) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    epochs = [tuple(samples(Order(50, 0), 50 * epoch, 50 * epoch + 50)) for epoch in range(5)]
    seeds = [tuple(samples(Order(50, seed), 0, 50)) for seed in range(5)]
    assert len({*epochs, *seeds}) == 9  # the first is in both
    assert tuple(range(50)) not in epochs


def test_no_place_is_preferred() -> None:
    """Which sample comes first in an epoch, over many: about uniform (chi-squared, 15 degrees of freedom, p = 0.001 at 37.7)."""
    counts = np.zeros(16)
    for epoch in range(800):
        counts[Order(16, 3).locate(16 * epoch)[1]] += 1
    assert ((counts - 50) ** 2 / 50).sum() < 37.7


def test_far_along_the_stream_is_as_cheap_as_the_start() -> None:
    epoch, sample = Order(7, 0).locate(7 * 10**15 + 3)
    assert epoch == 10**15
    assert 0 <= sample < 7


AWKWARD = [(7, 3, None), (7, 3, 2), (5, 8, 3), (5, 8, None), (1, 4, 1), (12, 4, 3), (30, 7, 5), (30, 9, 4)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("size", "batch_size", "micro"), AWKWARD)
def test_ranks_and_micro_batches_only_cut(size: int, batch_size: int, micro: int | None, world_size: int) -> None:
    order, steps = Order(size, 11), 3 * size
    cuts = [Cut(batch_size, micro, rank, world_size) for rank in range(world_size)]
    stream = []
    for step in range(steps):
        parts = [cut.micro_batches(step) for cut in cuts]
        positions = np.concatenate([part for rank in parts for part in rank])
        assert positions.tolist() == list(range(step * batch_size, (step + 1) * batch_size))
        stream += [order.locate(int(position))[1] for position in positions]
        sizes = [sum(map(len, rank)) for rank in parts]
        assert max(sizes) - min(sizes) <= 1  # equal shares
        for rank in parts:
            assert all(1 <= len(part) <= (micro or batch_size) for part in rank)
            assert max(map(len, rank)) - min(map(len, rank)) <= 1
        assert max(map(len, parts)) == -(-max(sizes) // (micro or batch_size))  # as few as fit
        if micro != 1:
            assert len(set(map(len, parts))) == 1  # and as many on every rank
    for epoch in range(len(stream) // size):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@pytest.mark.parametrize(("batch_size", "micro"), [(3, None), (8, 3), (7, 2)])
@pytest.mark.parametrize("first_step", [0, 1, 5, 1000])
def test_starting_anywhere_is_the_tail_of_the_whole(batch_size: int, micro: int | None, first_step: int) -> None:
    cut = Cut(batch_size, micro, 1, 2)
    num_micro = len(cut.micro_batches(0))
    late = list(itertools.islice(cut.all_micro_batches(first_step), 20))
    whole = itertools.islice(cut.all_micro_batches(0), first_step * num_micro, first_step * num_micro + 20)
    assert late == list(whole)
