"""The prior's network: what it sees and what it does not, to the bit; and what is done with its embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.batches import TextStates
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.prior import Prior, PriorConfig, best_of, cosine_scores, other_rows, spread, unit

E, C, P = 6, 10, 8  # channels of embeddings, text states and pooled text


def prior(seed: int = 0, **config: bool) -> Prior:
    """Away from its start, at which it says 0."""
    torch.manual_seed(seed)
    net = Prior(PriorConfig(width=16, depth=2, heads=2, **config), E, C, P)
    for parameter in net.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return net


def text(lengths: tuple[int, ...] = (4, 2, 0), longest: int = 4) -> TextStates:
    rng = torch.Generator().manual_seed(1)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return TextStates(torch.randn(len(lengths), longest, C, generator=rng), mask, torch.randn(len(lengths), P, generator=rng))


def noised(num: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    return torch.randn(num, E, generator=rng), torch.tensor([-3.0, 0.5, 7.0])[:num]


def test_it_starts_by_saying_nothing_and_learns_from_there() -> None:
    torch.manual_seed(0)
    net = Prior(PriorConfig(width=16, depth=2, heads=2, self_conditioning=True), E, C, P)
    x, level = noised()
    out = net(x, level, Condition(text=text(), before=torch.ones_like(x)))
    assert out.shape == x.shape
    assert out.abs().sum() == 0
    (out - 1).square().sum().backward()
    assert net.out.weight.grad is not None
    assert net.out.weight.grad.abs().sum() > 0


def test_every_parameter_is_reached() -> None:
    net = prior(self_conditioning=True)
    x, level = noised()
    net(x, level, Condition(text=text(), before=x)).square().sum().backward()
    untouched = [name for name, parameter in net.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert untouched == []


def test_text_behind_the_mask_is_not_seen() -> None:
    """Neither its values nor a gradient: exactly."""
    net, (x, level), told = prior(), noised(), text()
    told.states.requires_grad_()
    told.pooled.requires_grad_()
    out = net(x, level, Condition(text=told))
    out.square().sum().backward()
    assert told.states.grad is not None
    assert told.pooled.grad is not None
    assert (told.states.grad[~told.mask] == 0).all()
    assert (told.states.grad[told.mask].abs().sum(-1) > 0).all()
    assert (told.pooled.grad[2] == 0).all(), "an empty caption has no vector"
    assert (told.pooled.grad[:2].abs().sum(-1) > 0).all()
    changed = replace(told, states=torch.where(told.mask[..., None], told.states, 1e6), pooled=told.pooled.clone())
    changed.pooled.data[2] = 1e6
    assert torch.equal(net(x, level, Condition(text=changed)), out)


def test_longer_padding_changes_nothing() -> None:
    net, (x, level), told = prior(), noised(), text()
    assert torch.allclose(
        net(x, level, Condition(text=told)), net(x, level, Condition(text=told.lengthened(9))), atol=1e-6, rtol=1e-5
    )


def test_rows_do_not_mix() -> None:
    net, (x, level), told = prior(), noised(), text()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(net(x, level, Condition(text=told))[0].sum(), x)
    assert gradient[0].abs().sum() > 0
    assert (gradient[1:] == 0).all()


def test_a_caption_that_is_taken_away_is_a_learned_vector() -> None:
    """Whatever the caption was; and that vector is learned from such rows alone."""
    net, (x, level), told = prior(), noised(), text((4, 2, 3))
    gone = torch.tensor([True, False, True])
    out = net(x, level, Condition(text=told.without(gone)))
    other = TextStates(-told.states, told.mask, -told.pooled)
    again = net(x, level, Condition(text=other.without(gone)))
    assert torch.equal(out[gone], again[gone])
    assert not torch.allclose(out[~gone], again[~gone])
    for rows, learned in ((gone, True), (~gone, False)):
        net.zero_grad()
        net(x, level, Condition(text=told.without(gone)))[rows].square().sum().backward()
        assert net.untold.grad is not None
        assert bool(net.untold.grad.any()) == learned


def test_it_is_told_the_level_the_text_and_its_order() -> None:
    net, (x, level), told = prior(), noised(), text((4, 4, 4))
    out = net(x, level, Condition(text=told))
    assert not torch.allclose(out, net(x, level + 0.5, Condition(text=told)), atol=1e-4)
    assert not torch.allclose(out, net(x, level, Condition(text=replace(told, pooled=told.pooled.flip(1)))), atol=1e-4)
    assert not torch.allclose(out, net(x, level, Condition(text=replace(told, states=told.states.flip(1)))), atol=1e-4)
    ends = torch.tensor([-math.inf, math.inf, math.inf])
    assert torch.equal(net(x, ends, Condition(text=told)), net(x, torch.tensor([-20.0, 20.0, 20.0]), Condition(text=told)))
    with pytest.raises(ValueError, match="the prior is told nothing"):
        net(x, level, Condition())


def test_an_earlier_guess_counts_where_it_is_taken() -> None:
    x, level = noised()
    net, told = prior(self_conditioning=True), text()
    none, zeros, some = (net(x, level, Condition(text=told, before=before)) for before in (None, torch.zeros_like(x), x))
    assert torch.equal(none, zeros)
    assert not torch.allclose(none, some)


def test_bf16_goes_in_and_out_as_fp32() -> None:
    net, (x, level) = prior(), noised()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x, level, Condition(text=text()))
    assert out.dtype == torch.float32
    assert torch.allclose(out, net(x, level, Condition(text=text())), atol=0.5)


def test_it_learns_whose_embedding_is_asked_for() -> None:
    """Four captions, each with an embedding of its own, out of much noise: it must listen."""
    torch.manual_seed(0)
    net = Prior(PriorConfig(width=32, depth=1, heads=2), E, C, P)
    told, real, level = text((4, 4, 4, 4)), spread(torch.randn(4, E)), torch.full((4,), -3.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    alpha, sigma = torch.sigmoid(level).sqrt()[:, None], torch.sigmoid(-level).sqrt()[:, None]
    for _ in range(150):
        optimizer.zero_grad()
        (net(alpha * real + sigma * torch.randn(4, E), level, Condition(text=told)) - real).square().mean().backward()
        optimizer.step()
    rows, x = other_rows(["a", "b", "c", "d"]), alpha * real + sigma * torch.randn(4, E)
    other = TextStates(told.states[rows], told.mask[rows], told.pooled[rows])
    with torch.no_grad():
        predicted, misled = (net(x, level, Condition(text=states)) for states in (told, other))
    scores = cosine_scores(predicted, misled, real, None, torch.ones(4))
    assert scores["cosine"] / 4 > 0.95
    assert scores["cosine_misled"] / 4 < 0.5


def test_widths_that_do_not_split() -> None:
    with pytest.raises(ValueError, match="width 384 does not split into 5 heads"):
        PriorConfig(heads=5)


def test_embeddings_are_spread_without_being_touched() -> None:
    given = torch.randn(5, 64)
    kept = given.clone()
    assert spread(given).norm(dim=1).tolist() == pytest.approx([8.0] * 5)
    assert torch.allclose(unit(spread(given)), unit(given))
    assert torch.equal(given, kept)


def test_the_best_of_several_is_the_nearest_by_angle() -> None:
    rng = np.random.default_rng(0)
    candidates, wanted = rng.normal(size=(7, 5, E)) * rng.uniform(0.1, 9, (7, 5, 1)), rng.normal(size=(7, E))
    found = best_of(torch.from_numpy(candidates), torch.from_numpy(wanted)).numpy()
    for row in range(7):
        cosines = [c @ wanted[row] / np.linalg.norm(c) for c in candidates[row]]
        assert np.array_equal(found[row], candidates[row, int(np.argmax(cosines))])
    first = best_of(torch.from_numpy(candidates), torch.zeros(7, E, dtype=torch.float64))
    assert np.array_equal(first.numpy(), candidates[:, 0])


def test_cosine_scores_are_sums_over_valid_rows() -> None:
    rng = np.random.default_rng(0)
    predicted, misled, real, words = (rng.normal(size=(4, E)) for _ in range(4))
    valid = np.array([True, False, True, True])

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        each = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        return float(each[valid].sum())

    tensors = [torch.from_numpy(part) for part in (predicted, misled, real)]
    found = cosine_scores(*tensors, torch.from_numpy(words), torch.from_numpy(valid))
    expected = {
        "cosine": cosine(predicted, real), "cosine_misled": cosine(misled, real),
        "cosine_text": cosine(predicted, words), "cosine_text_real": cosine(real, words),
    }  # fmt: skip
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, abs=1e-5)
    assert set(cosine_scores(*tensors, None, torch.from_numpy(valid))) == {"cosine", "cosine_misled"}


def test_other_rows_have_other_captions() -> None:
    assert other_rows(["a", "a", "b", None, "a"]).tolist() == [2, 2, 3, 4, 2]
    assert other_rows(["a", "a"]).tolist() == [0, 1]
    assert other_rows(["a"]).tolist() == [0]
