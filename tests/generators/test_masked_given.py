"""What the masked generator is given besides text: a coarser grid to refine, and features of an earlier pass."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tessera.contracts import Context
from tessera.generators.masked.losses import MaskedLossConfig, MaskedLosses
from tessera.generators.masked.masking import RECALL, chance, disturb, hide
from tessera.generators.masked.model import Low, MaskedConfig, MaskedTransformer, cells_below
from tests.generators.masked_toys import generator, random_text, stirred, wordless

LOSS = MaskedLossConfig(label_smoothing=0.0, low_noise=0.0)

# ---- a coarser grid


@pytest.mark.parametrize(
    ("grid", "low"), [((4, 4), (2, 2)), ((6, 9), (2, 3)), ((5, 7), (3, 4)), ((4, 6, 6), (2, 3, 6)), ((8,), (3,))]
)
def test_every_cell_takes_the_coarse_one_under_its_middle(grid: tuple[int, ...], low: tuple[int, ...]) -> None:
    ids = torch.arange(math.prod(low)).view(1, 1, *low)
    wanted = torch.nn.functional.interpolate(ids.double(), size=grid, mode="nearest-exact").long().flatten()
    assert torch.equal(cells_below(grid, low), wanted)


@pytest.mark.parametrize("low", [(2,), (2, 9), (2, 2, 2)])
def test_a_grid_that_does_not_lie_below_is_refused(low: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not lie under"):
        cells_below((4, 8), low)


def test_missing_and_unexpected_coarse_tokens_are_refused() -> None:
    ids, text = torch.zeros(2, 12, dtype=torch.long), random_text(2)
    with pytest.raises(ValueError, match="got none"):
        generator(low=Low(9, (2, 2)))(ids, text)
    with pytest.raises(ValueError, match="of 4 tokens, and got 5"):
        generator(low=Low(9, (2, 2)))(ids, text, torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="built without a coarser grid"):
        generator()(ids, text, torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("vocabulary", [9, 2**14])
def test_a_coarse_token_enters_where_it_lies(vocabulary: int) -> None:
    net = generator((4, 4), low=Low(vocabulary, (2, 2)))
    for block in net.blocks:
        block.table.data.zero_()  # gates shut: no token hears of another
    ids, low = torch.zeros(1, 16, dtype=torch.long), torch.tensor([[1, 2, 3, 4]])
    other = torch.tensor([[1, 2, vocabulary - 1, 4]])
    moved = (net(ids, random_text(1), low) != net(ids, random_text(1), other)).any(-1).view(4, 4)
    assert moved.tolist() == [[False] * 4] * 2 + [[True, True, False, False]] * 2
    assert len(net.embed_low.tables) == (1 if vocabulary == 9 else 2)


def test_noise_replaces_a_share_between_0_and_the_most() -> None:
    low, positions = torch.zeros(2000, 50, dtype=torch.long), torch.arange(2000)
    noisy = disturb(low, 1000, 0.4, seed=1, step=3, positions=positions)
    shares = (noisy != 0).float().mean(1)
    assert shares.mean().item() == pytest.approx(0.2, abs=0.01)
    assert shares.max() < 0.7
    spread = shares.sub(0.2).square().mean().item()
    assert spread == pytest.approx(0.4**2 / 12 + (0.2 - 0.4**2 / 3) / 50, rel=0.1), "uniform share, then one draw a token"
    assert noisy.min() >= 0
    assert noisy.max() < 1000
    assert noisy[noisy != 0].float().mean().item() == pytest.approx(500, abs=15)
    assert torch.equal(disturb(low, 1000, 0.0, 1, 3, positions), low)
    parts = [disturb(low[cut], 1000, 0.4, 1, 3, positions[cut]) for cut in (slice(0, 700), slice(700, 2000))]
    assert torch.equal(torch.cat(parts), noisy), "however batches are cut"
    assert not torch.equal(disturb(low, 1000, 0.4, 1, 4, positions), noisy)


def test_training_is_noisy_and_validation_is_not() -> None:
    net = generator((4, 4), low=Low(9, (2, 2)))
    seen: list[torch.Tensor] = []
    net.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[2]))
    low = torch.randint(9, (8, 2, 2), generator=torch.Generator().manual_seed(0))
    data = wordless(torch.zeros(8, 4, 4, dtype=torch.long), 32, low=low)
    losses = MaskedLosses(MaskedLossConfig(low_noise=1.0))
    losses.measure({"generator": net}, data, Context(5, 0, data.positions))
    losses.turn({"generator": net}, data, Context(5, 0, data.positions))
    assert torch.equal(seen[0], low.flatten(1))
    assert not torch.equal(seen[1], low.flatten(1))


def test_it_learns_to_refine_and_a_shuffled_condition_hurts() -> None:
    """A fine cell is its coarse token, times four, plus its place in the block: nothing else to learn, and no neighbour helps."""
    torch.manual_seed(0)
    net = MaskedTransformer(MaskedConfig(width=32, depth=2, heads=2), 32, (4, 4), 8, Low(8, (2, 2)))
    losses, adam = MaskedLosses(LOSS), torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.98))
    places = torch.tensor([[0, 1], [2, 3]]).repeat(2, 2)

    def data(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        low = torch.randint(8, (32, 2, 2), generator=torch.Generator().manual_seed(first))
        return low.repeat_interleave(2, 1).repeat_interleave(2, 2) * 4 + places, low

    for step in range(150):
        ids, low = data(step)
        given = wordless(ids, 8, 32 * step, low)
        loss = losses.turn({"generator": net}, given, Context(step, 0, given.positions))
        (loss.total / loss.weight).backward()
        adam.step()
        adam.zero_grad()
    ids, low = data(10**6)
    given = wordless(ids, 8, low=low)
    context = Context(0, 0, given.positions)
    clean, shuffled = (
        losses.measure({"generator": net}, replace(given, low=some), context) for some in (low, low.flatten(1)[:, [1, 3, 0, 2]])
    )
    assert clean.total / clean.weight < 0.1
    assert shuffled.total / shuffled.weight > 1.0


# ---- self-conditioning


def test_it_starts_as_if_there_were_no_earlier_pass() -> None:
    torch.manual_seed(0)
    net = stirred(MaskedTransformer(MaskedConfig(width=32, depth=1, heads=2, self_conditioning=True), 20, (3, 4), 32))
    ids, previous = torch.randint(21, (2, 12)), torch.randn(2, 12, 32)
    plain = net(ids, random_text(2))
    assert torch.equal(net(ids, random_text(2), None, previous), plain)
    net.recall.weight.data.normal_()
    assert not torch.allclose(net(ids, random_text(2), None, previous), plain)
    assert torch.equal(net(ids, random_text(2), None, torch.zeros_like(previous)), plain)
    with pytest.raises(ValueError, match="self_conditioning is off"):
        generator()(ids, random_text(2), None, previous)


def test_half_of_the_samples_are_shown_the_first_pass_and_gradients_stop_there() -> None:
    net, calls = generator(recalls=True), []
    net.register_forward_hook(lambda _, given, features: calls.append((given, features)))
    data = wordless(torch.randint(20, (16, 3, 4), generator=torch.Generator().manual_seed(0)), 32)
    context = Context(7, 1, data.positions)
    loss = MaskedLosses(LOSS).turn({"generator": net}, data, context)
    (first, features), (second, _) = calls
    shown = chance(0.5, 1, 7, data.positions, RECALL)
    assert 3 < shown.sum() < 13
    assert len(first) == 3
    assert not features.requires_grad
    assert torch.equal(second[3], features * shown[:, None, None])
    hidden = hide(1, 7, data.positions, 12)
    assert torch.equal(first[0], data.ids.flatten(1).masked_fill(hidden, 20))
    loss.total.backward()
    assert net.recall.weight.grad.abs().sum() > 0
    calls.clear()
    MaskedLosses(LOSS).measure({"generator": net}, data, context)
    assert torch.equal(calls[1][0][3], calls[0][1]), "validation shows it to all"


@pytest.mark.slow
def test_training_with_an_earlier_pass_compiles_to_the_same_loss() -> None:
    net = generator(recalls=True)
    data = wordless(torch.randint(20, (4, 3, 4), generator=torch.Generator().manual_seed(0)), 32)
    losses, context = MaskedLosses(LOSS), Context(7, 1, data.positions)
    plain = losses.turn({"generator": net}, data, context).total
    plain.backward()
    wanted = net.recall.weight.grad.clone()
    net.zero_grad()
    for block in net.blocks:
        block.compile()
    found = losses.turn({"generator": net}, data, context).total
    found.backward()
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(net.recall.weight.grad, wanted, rtol=1e-3, atol=1e-4)
