"""Attention against its formula, masks by gradient, rotation by what it promises."""

from __future__ import annotations

import math

import pytest
import torch
from einops import rearrange

from tessera.nn.attention import Attention, CausalAttention, FeedForward, bias_of, frequencies_of, pool
from tessera.nn.positions import grid_coordinates, rotary_turns, rotate


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_coordinates_are_in_raster_order() -> None:
    shape = (2, 3, 4)
    found = grid_coordinates(shape)
    assert found.shape == (24, 3)
    assert [tuple(row) for row in found.tolist()] == [(a, b, c) for a in range(2) for b in range(3) for c in range(4)]
    assert grid_coordinates((5,)).tolist() == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_rotated_products_depend_on_differences_alone(axes: int) -> None:
    query, key = noise(1, 16), noise(1, 16, seed=1)
    places = torch.randint(0, 9, (40, axes), generator=torch.Generator().manual_seed(2))
    shift = torch.tensor([[3, 1, 2][:axes]])

    def product(at: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (rotate(query, rotary_turns(at, 16)) * rotate(key, rotary_turns(other, 16))).sum(-1)

    here = product(places, places.flip(0))
    torch.testing.assert_close(product(places + shift, places.flip(0) + shift), here, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(product(places + shift, places.flip(0)), here, atol=1e-2)
    length = rotate(query, rotary_turns(places, 16)).norm(dim=-1)
    torch.testing.assert_close(length, query.norm(dim=-1).expand(40), rtol=1e-6, atol=0)


def test_too_narrow_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="3 axes need at least one each"):
        rotary_turns(torch.zeros(1, 3), 4)
    with pytest.raises(ValueError, match="does not split into 3 heads"):
        Attention(16, 3)


def test_attention_is_its_formula() -> None:
    torch.manual_seed(0)
    layer = Attention(24, 3, context_width=10).double()
    x, context = noise(2, 5, 24), noise(2, 7, 10, seed=1)
    mask = torch.tensor([[True] * 7, [True, False, True, False, False, True, False]])
    query = rearrange(x @ layer.query.weight.T, "b n (h k) -> b h n k", h=3)
    key, value = (rearrange(part, "b m (h k) -> b h m k", h=3) for part in (context @ layer.key_value.weight.T).chunk(2, dim=-1))
    query, key = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps) for y in (query, key))
    logits = torch.einsum("bhnk,bhmk->bhnm", query, key) / math.sqrt(8)
    weights = logits.masked_fill(~mask[:, None, None], -math.inf).softmax(-1)
    wanted = rearrange(weights @ value, "b h n k -> b n (h k)") @ layer.out.weight.T
    torch.testing.assert_close(layer(x, context, mask), wanted, rtol=1e-9, atol=1e-9)


def test_what_is_masked_gets_no_gradient() -> None:
    torch.manual_seed(0)
    layer, context = Attention(16, 2, 16).double(), noise(1, 6, 16).requires_grad_(True)
    mask = torch.tensor([[True, False, True, True, False, False]])
    layer(noise(1, 4, 16, seed=1), context, mask).square().sum().backward()
    assert context.grad is not None
    reached = context.grad.abs().sum(-1)[0] > 0
    assert reached.tolist() == mask[0].tolist()


@pytest.mark.parametrize("num", [1, 15, 16, 33])
def test_a_bias_is_its_mask(num: int) -> None:
    torch.manual_seed(0)
    seen = torch.rand(3, 1, 1, num) < 0.5
    seen[..., 0] = True
    bias = bias_of(seen, torch.float32)
    assert bias.shape == seen.shape
    assert bias.stride(0) % 16 == 0, "kernels for GPUs copy other rows"
    torch.testing.assert_close(bias.exp(), seen.float(), rtol=0, atol=0)
    layer, x, context = Attention(16, 2, context_width=6), torch.randn(3, 4, 16), torch.randn(3, num, 6)
    found = layer.recall(x, torch.stack(layer.offered(context)), bias)
    torch.testing.assert_close(found, layer(x, context, seen[:, 0, 0]), rtol=0, atol=1e-6)


def test_one_place_at_a_time_is_all_of_them() -> None:
    torch.manual_seed(0)
    layer, x, turns = CausalAttention(16, 2), torch.randn(3, 7, 16), rotary_turns(torch.arange(7)[:, None], 8)
    kept, whole = torch.full((2, 3, 2, 7, 8), 100.0), layer(x, turns=turns)
    for index in range(7):
        place = torch.tensor([index])
        before = bias_of(torch.arange(7)[None] <= place, x.dtype)
        with torch.no_grad():
            found = layer.step(x[:, place], turns[:, place], kept, place, before)
        torch.testing.assert_close(found[:, 0], whole[:, index], rtol=0, atol=1e-5)


def test_feed_forward_and_means() -> None:
    torch.manual_seed(0)
    layer, x = FeedForward(12).double(), noise(2, 3, 12)
    gate, value = (x @ layer.up.weight.T).chunk(2, dim=-1)
    torch.testing.assert_close(layer(x), (gate * gate.sigmoid() * value) @ layer.down.weight.T)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    torch.testing.assert_close(pool(x, mask), torch.stack([x[0, :2].mean(0), torch.zeros(12, dtype=torch.float64)]))
    codes = frequencies_of(torch.linspace(0, 1, 50), 64)
    distances = torch.cdist(codes, codes) + 10 * torch.eye(50)
    assert distances.min() > 0.1, "every value has its own code"
