"""FSQ against an independent implementation and by hand; counting codes."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from vector_quantize_pytorch import finite_scalar_quantization as peer  # type: ignore[import-untyped]

from tessera.nn.quantizers import FSQ, FSQConfig, code_counts, code_use

LEVELS = [(8, 5, 5, 5), (3,), (4,), (7, 6), (5, 8, 3), (15, 16), (8, 8, 8, 5, 5, 5)]
WITH_TWO = [*LEVELS, (2,), (2, 3, 2)]  # the peer refuses 2 levels without another bound


def fsq(levels: tuple[int, ...]) -> FSQ:
    return FSQ(FSQConfig(levels=levels))


def vectors(levels: tuple[int, ...], num: int = 4000, spread: float = 2.0) -> Tensor:
    return torch.randn(num, len(levels), generator=torch.Generator().manual_seed(0)) * spread


# ---- against vector-quantize-pytorch. Both number codes alike: the first channel changes fastest.


@pytest.mark.parametrize("levels", LEVELS)
def test_codes_ids_and_gradients_are_those_of_the_peer(levels: tuple[int, ...]) -> None:
    ours, peers = vectors(levels).requires_grad_(True), vectors(levels).requires_grad_(True)
    made = fsq(levels)(ours)
    codes, ids = peer.FSQ(list(levels))(peers[None])
    torch.testing.assert_close(made.codes, codes[0], rtol=0, atol=1e-6)
    assert torch.equal(made.ids, ids[0].long())
    pull = torch.randn(made.codes.shape, generator=torch.Generator().manual_seed(1))
    (made.codes * pull).sum().backward()
    (codes[0] * pull).sum().backward()
    assert ours.grad is not None
    assert peers.grad is not None
    torch.testing.assert_close(ours.grad, peers.grad, rtol=1e-5, atol=1e-7)
    assert ours.grad.abs().max() > 0


@pytest.mark.parametrize("levels", LEVELS)
def test_decoded_ids_are_the_codes_of_the_peer(levels: tuple[int, ...]) -> None:
    ids = torch.arange(min(math.prod(levels), 5000))
    torch.testing.assert_close(fsq(levels).decode(ids), peer.FSQ(list(levels)).indices_to_codes(ids), rtol=0, atol=1e-6)


# ---- by hand


@pytest.mark.parametrize("levels", WITH_TWO)
def test_every_id_survives_the_way_to_its_code_and_back(levels: tuple[int, ...]) -> None:
    quantizer, ids = fsq(levels), torch.arange(math.prod(levels))
    codes = quantizer.decode(ids)
    assert len(torch.unique(codes, dim=0)) == len(ids)
    assert codes.min() >= -1
    assert codes.max() <= 1
    half = quantizer.levels // 2  # the input whose bound is the code: invert tanh
    scale = (quantizer.levels - 1) * 1.001 / 2
    offset = torch.where(quantizer.levels % 2 == 0, 0.5, 0.0)
    z = torch.atanh((codes * half + offset) / scale) - torch.atanh(offset / scale)
    made = quantizer(z)
    assert torch.equal(made.ids, ids)
    assert torch.equal(made.codes, codes)


@pytest.mark.parametrize("levels", [*WITH_TWO, (1000,), (999,)])
def test_ids_cover_exactly_the_vocabulary(levels: tuple[int, ...]) -> None:
    quantizer = fsq(levels)
    axes = [torch.cat([torch.tensor([-1e30, -30.0, 30.0, 1e30]), torch.linspace(-6, 6, 20 * size)]) for size in levels]
    reached = []
    for channel, axis in enumerate(axes):  # one channel at a time reaches each of its levels and no other
        z = torch.zeros(len(axis), len(levels))
        z[:, channel] = axis
        digits = quantizer(z).ids // quantizer.basis[channel] % quantizer.levels[channel]
        reached.append(set(digits.tolist()))
    assert reached == [set(range(size)) for size in levels]
    corners = torch.tensor([[-1e30] * len(levels), [1e30] * len(levels), [math.inf] * len(levels)])
    assert quantizer(corners).ids.tolist() == [0, math.prod(levels) - 1, math.prod(levels) - 1]


@pytest.mark.parametrize("levels", [(1001,), (4096, 2), (1,), (0, 5)])
def test_levels_that_would_leave_the_vocabulary_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="each channel needs 2 to 1000 levels"):
        FSQConfig(levels=levels)


def test_too_many_codes_are_refused() -> None:
    with pytest.raises(ValidationError, match="can be numbered"):
        FSQConfig(levels=(1000, 1000, 1000, 1000))


def test_codes_of_three_levels_by_hand() -> None:
    made = fsq((3, 4))(torch.tensor([[-9.0, -9.0], [0.0, 0.0], [9.0, 9.0]]))
    assert made.codes.tolist() == [[-1, -1], [0, 0], [1, 0.5]]  # four levels are -2, -1, 0, 1 of 2
    assert made.ids.tolist() == [0, 1 + 2 * 3, 2 + 3 * 3]


@pytest.mark.parametrize("levels", LEVELS)
def test_half_precision_changes_no_id(levels: tuple[int, ...]) -> None:
    z = vectors(levels).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = fsq(levels)(z)
    assert torch.equal(inside.ids, fsq(levels)(z.float()).ids)
    assert inside.codes.dtype == torch.float32


@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (4, 3)])
def test_gradients_are_those_of_the_bound_alone(levels: tuple[int, ...]) -> None:
    quantizer, z = fsq(levels), vectors(levels).double().requires_grad_(True)
    scale = (quantizer.levels - 1) * 1.001 / 2
    offset = torch.where(quantizer.levels % 2 == 0, 0.5, 0.0)
    by_hand = scale * (1 - torch.tanh(z + torch.atanh(offset / scale)).square()) / (quantizer.levels // 2)
    (grad,) = torch.autograd.grad(quantizer(z).codes.sum(), z)
    torch.testing.assert_close(grad, by_hand.detach(), rtol=1e-4, atol=1e-6, check_dtype=False)


def test_not_a_number_stays_one_in_the_code_and_is_in_range_as_an_id() -> None:
    made = fsq((8, 5))(torch.tensor([[math.nan, 0.0], [0.0, 0.0]], requires_grad=True))
    assert bool(made.codes[0].isnan().any())
    assert bool(((made.ids >= 0) & (made.ids < 40)).all())
    assert code_counts(made.ids, 40).sum() == 2


def test_any_shape_in_front() -> None:
    made = fsq((8, 5))(torch.randn(2, 3, 4, 2))
    assert made.ids.shape == (2, 3, 4)
    assert made.codes.shape == (2, 3, 4, 2)
    assert not fsq((8, 5)).state_dict()  # nothing to save


# ---- counting


def test_counts_are_those_of_bincount() -> None:
    ids = torch.randint(0, 50, (6, 7, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(code_counts(ids, 60), torch.bincount(ids.flatten(), minlength=60).float())
    valid = torch.tensor([True, False, True, True, False, False])
    assert torch.equal(code_counts(ids, 60, valid), torch.bincount(ids[valid].flatten(), minlength=60).float())
    assert code_counts(ids, 60, torch.zeros(6, dtype=torch.bool)).sum() == 0


def test_use_of_codes_by_hand() -> None:
    uniform = code_use(torch.tensor([3.0, 3.0, 3.0, 3.0, 0, 0, 0, 0]))
    assert uniform == {"codes_used": 0.5, "perplexity": pytest.approx(4)}
    skew = code_use(torch.tensor([1.0, 3.0]))  # entropy of (1/4, 3/4)
    assert skew["perplexity"] == pytest.approx(math.exp(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75))))
    assert code_use(torch.tensor([0.0, 7.0, 0.0])) == {"codes_used": pytest.approx(1 / 3), "perplexity": pytest.approx(1)}
    assert code_use(torch.zeros(4)) == {"codes_used": 0.0, "perplexity": pytest.approx(1)}
