"""The counter hash: the same bits in three forms, permutations that are permutations, noise that is noise."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera.randomness import (
    _mix_tensor,
    _signed,
    fraction,
    mix,
    mix_array,
    mix_tensors,
    mix_text,
    normal,
    permute,
    permute_one,
    uniform,
)

WORD = st.integers(-(2**63), 2**63 - 1)


# ---- one hash


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood 2014, as published: the output for a state that was already advanced."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_first_outputs_are_those_of_splitmix64() -> None:
    """The reference generator seeded with 1234567 starts with these (Vigna's splitmix64.c)."""
    golden = 0x9E3779B97F4A7C15
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [splitmix64((1234567 + golden * (k + 1)) % 2**64) for k in range(5)] == wanted
    assert [mix((1234567 + golden * k) % 2**64) for k in range(5)] == wanted


@given(WORD, st.lists(WORD, min_size=1, max_size=20))
@example(0, [0, -1, 2**63 - 1, -(2**63), 1])
@settings(max_examples=100, deadline=None)
def test_python_numpy_and_torch_give_the_same_bits(start: int, values: list[int]) -> None:
    wanted = [mix(start, value) for value in values]
    assert mix_array(mix(start), np.array(values, dtype=np.int64)).tolist() == wanted
    found = _mix_tensor(_signed(mix(start)), torch.tensor(values, dtype=torch.int64))
    assert found.numpy().view(np.uint64).tolist() == wanted
    starts = torch.full((len(values),), _signed(mix(start)), dtype=torch.int64)
    assert torch.equal(_mix_tensor(starts, torch.tensor(values, dtype=torch.int64)), found)


@given(st.lists(WORD, min_size=1, max_size=4), WORD)
@settings(max_examples=50, deadline=None)
def test_tensors_mix_as_numbers_do(values: list[int], other: int) -> None:
    columns = [torch.tensor([value, other]) for value in values[:-1]] + [torch.tensor(values[-1])]  # the last one broadcasts
    found = mix_tensors(*columns).view(-1).numpy().view(np.uint64).tolist()
    assert found == [mix(*values), mix(*[other] * (len(values) - 1), values[-1])][: len(found)]


def test_order_and_number_of_values_matter() -> None:
    words = [mix(), mix(0), mix(0, 0), mix(0, 0, 0), mix(1, 2), mix(2, 1), mix(1, 2, 0), mix(3), mix(-1), mix(2**64)]
    assert len(set(words)) == len(words) - 1, "2**64 is 0 again, everything else differs"
    assert mix(2**64) == mix(0)


def test_every_input_bit_flips_half_of_the_output() -> None:
    for bit in range(64):
        flips = [(mix(value) ^ mix(value ^ (1 << bit))).bit_count() for value in range(200)]
        assert 29 < sum(flips) / 200 < 35, bit


def test_text_is_hashed_by_blake2b() -> None:
    assert mix_text("tokenizer") == int(hashlib.blake2b(b"tokenizer", digest_size=8).hexdigest(), 16)
    assert len({mix_text(text) for text in ("", "a", "b", "ä", "ab", "ba")}) == 6


def test_fractions_fill_the_unit_interval() -> None:
    assert fraction(0) == 0.0
    assert fraction(2**64 - 1) == 1 - 2**-53 < 1
    values = np.array([fraction(mix(7, k)) for k in range(20_000)])
    assert abs(values.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 20_000)
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert chi_square(counts, 400) < bound(49)


# ---- permutations


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(freedom: int) -> float:
    """Five deviations above the mean of a chi-square distribution: fixed keys, so it fails for ever or never."""
    return freedom + 5 * math.sqrt(2 * freedom)


def test_permutes_every_small_range() -> None:
    for size in range(1, 301):
        places = np.arange(size)
        for key in (0, 1, 2**64 - 1):
            assert np.array_equal(np.sort(permute(places, size, key)), places), (size, key)


@pytest.mark.parametrize("size", [4**5 - 1, 4**5, 4**5 + 1, 65_537, 2 * 4**8 + 3, 1_000_003])
def test_permutes_large_ranges(size: int) -> None:
    values = permute(np.arange(size), size, 9)
    assert values.dtype == np.int64
    assert np.array_equal(np.bincount(values, minlength=size), np.ones(size, dtype=np.int64))
    some = np.array([0, 5, size - 1, 77])
    assert np.array_equal(permute(some, size, 9), values[some]), "evaluated only where asked"


@pytest.mark.parametrize("size", [2**33 + 5, 10**12, 2**40])
def test_permutes_ranges_that_no_memory_holds(size: int) -> None:
    places = np.random.default_rng(0).integers(0, size, 20_000)
    values = permute(places, size, 3)
    assert ((values >= 0) & (values < size)).all()
    assert len(set(values.tolist())) == len(set(places.tolist()))


def test_keys_give_different_orders() -> None:
    orders = {tuple(permute(np.arange(50), 50, key)) for key in range(200)}
    assert len(orders) == 200
    assert not any(np.array_equal(permute(np.arange(50), 50, key), np.arange(50)) for key in range(200))


@pytest.mark.parametrize("size", [2, 3, 5, 16, 17, 30])
def test_every_sample_comes_to_every_place_equally_often(size: int) -> None:
    num_keys = 2000
    orders = np.stack([permute(np.arange(size), size, mix(11, key)) for key in range(num_keys)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    assert chi_square(counts, num_keys / size) < bound((size - 1) ** 2)


@pytest.mark.parametrize("size", [17, 40])
def test_neighbours_are_independent(size: int) -> None:
    """Pairs of samples in two places, over many keys: all size * (size - 1) of them equally often."""
    num_keys = 3000
    orders = np.stack([permute(np.array([0, 1, size - 1]), size, mix(12, key)) for key in range(num_keys)])
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = np.bincount(orders[:, first] * size + orders[:, second], minlength=size * size).reshape(size, size)
        assert not pairs.diagonal().any()
        away = pairs[~np.eye(size, dtype=bool)]
        assert chi_square(away, num_keys / (size * (size - 1))) < bound(len(away) - 1)


@pytest.mark.parametrize("size", [4, 5])
def test_neighbours_of_a_handful_are_roughly_independent(size: int) -> None:
    """Two bits a half are few for a Feistel network: some pairs of so few samples are half as frequent again."""
    num_keys = 2000
    orders = np.stack([permute(np.arange(2), size, mix(12, key)) for key in range(num_keys)])
    pairs = np.bincount(orders[:, 0] * size + orders[:, 1], minlength=size * size).reshape(size, size)
    shares = pairs[~np.eye(size, dtype=bool)] / (num_keys / (size * (size - 1)))
    assert shares.min() > 0.5
    assert shares.max() < 1.6


def test_small_permutations_all_occur() -> None:
    orders = {tuple(permute(np.arange(4), 4, mix(13, key))) for key in range(3000)}
    assert len(orders) == 24


def test_consecutive_epochs_do_not_repeat_places() -> None:
    """On average one sample of a thousand keeps its place, as for independent orders."""
    orders = [permute(np.arange(1000), 1000, mix(0, epoch)) for epoch in range(60)]
    kept = [int((first == second).sum()) for first, second in pairwise(orders)]
    assert 0.4 < np.mean(kept) < 1.8
    assert max(kept) < 8


# ---- noise


def test_noise_depends_on_the_position_alone() -> None:
    positions = torch.arange(100, 164)
    for draw in (uniform, normal):
        whole = draw(3, positions, 12)
        parts = torch.cat([draw(3, part, 12) for part in positions.split([1, 7, 40, 16])])
        assert torch.equal(whole, parts), "however batches are cut"
        order = torch.randperm(64)
        assert torch.equal(whole[order], draw(3, positions[order], 12)), "whatever else is in the batch"
        assert torch.equal(whole[:, :5], draw(3, positions, 5)), "a longer draw only adds"
        for other in (draw(4, positions, 12), draw(3, positions + 64, 12), draw(3, positions, 12, stream=1)):
            assert (whole == other).float().mean() < 0.01


def test_uniform_is_the_hash_of_seed_stream_position_and_index() -> None:
    found = uniform(5, torch.tensor([0, 9, 10**12]), 3, stream=2)
    for row, position in enumerate((0, 9, 10**12)):
        for column in range(3):
            assert found[row, column].item() == (mix(5, 2, position, column) >> 40) / 2**24


def test_uniform_is_uniform() -> None:
    values = uniform(0, torch.arange(2000), 100).double()
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values.numpy().ravel(), bins=100, range=(0, 1))[0]
    assert chi_square(counts, 2000) < bound(99)
    assert abs(float(values.var()) - 1 / 12) < 1e-3


def test_normal_is_normal() -> None:
    values = normal(0, torch.arange(2000), 100).double()
    count = values.numel()
    assert torch.isfinite(values).all()
    for power, wanted, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((values**power).mean()) - wanted) < 5 * math.sqrt(spread / count), power
    edges = [-math.inf, *torch.erfinv(torch.linspace(-1, 1, 41, dtype=torch.float64)[1:-1]).mul(math.sqrt(2)).tolist(), math.inf]
    counts = np.histogram(values.numpy().ravel(), bins=np.array(edges))[0]
    assert chi_square(counts, count / 40) < bound(39)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (normal(0, torch.arange(500), 200), normal(1, torch.arange(500), 200)),
        (normal(0, torch.arange(500), 200), normal(0, torch.arange(500), 200, stream=1)),
        (normal(0, torch.arange(500), 200), normal(0, torch.arange(1, 501), 200)),
        (normal(0, torch.arange(500), 200)[:, 1:], normal(0, torch.arange(500), 200)[:, :-1]),
        (uniform(0, torch.arange(500), 200), uniform(0, torch.arange(500), 200, stream=1)),
    ],
    ids=["seeds", "streams", "samples", "values", "uniform streams"],
)
def test_no_correlation(first: torch.Tensor, second: torch.Tensor) -> None:
    for one, other in ((first, second), (first.square(), second.square())):
        both = torch.stack([one.double().flatten(), other.double().flatten()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / math.sqrt(both.shape[1])


def test_normal_and_uniform_of_one_stream_are_independent() -> None:
    """A diffusion loss draws its time and its noise for the same position: the size of the noise must not tell the time."""
    positions = torch.arange(2000)
    for stream in range(3):
        noise = normal(0, positions, 50, stream).abs().double().flatten()
        for other in range(8):
            level = uniform(0, positions, 50, other).double().flatten()
            assert abs(float(torch.corrcoef(torch.stack([noise, level]))[0, 1])) < 5 / math.sqrt(len(noise)), (stream, other)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 1000, 2**20 + 1])
def test_a_single_position_is_permuted_as_in_an_array(size: int) -> None:
    places = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    for key in (0, 5, 2**64 - 1):
        assert [permute_one(int(place), size, key) for place in places] == permute(places, size, key).tolist()
