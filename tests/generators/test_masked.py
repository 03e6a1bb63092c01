"""The masked generator: what is hidden, what the loss counts, what a sample depends on; and that it learns."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import TokenBatch
from tessera.contracts import Context
from tessera.generators.masked.losses import MaskedLossConfig, MaskedLosses
from tessera.generators.masked.masking import capacity, gather_hidden, hide, masking_times, num_hidden
from tessera.generators.masked.model import MaskedConfig, MaskedTransformer, digit_sizes
from tessera.generators.masked.order import halton_order, num_revealed
from tessera.generators.masked.sample import MaskedSampleConfig, sample
from tessera.text.bytes import ByteEncoder, ByteTextConfig, read_bytes

GRID, VOCABULARY = (3, 4), 20
WORDS = ("red", "green", "blue", "grey")


def nets(grid: tuple[int, ...] = GRID, vocabulary: int = VOCABULARY, width: int = 32) -> dict[str, torch.nn.Module]:
    """Small ones, off their start, where gates are 0."""
    torch.manual_seed(0)
    net = MaskedTransformer(MaskedConfig(width=width, depth=2, heads=2), vocabulary, grid, width)
    net.head.weight.data.mul_(50)
    for block in net.blocks:
        block.table.data.normal_(std=0.5)
    return {"generator": net, "text": ByteEncoder(ByteTextConfig(length=24, width=width, depth=1, heads=2))}


def batch(captions: list[str], ids: Tensor, first: int = 0) -> TokenBatch:
    size = len(captions)
    keys = tuple(str(index) for index in range(size))
    return TokenBatch(
        ids,
        read_bytes(captions, 24),
        torch.ones(size, dtype=torch.bool),
        torch.arange(first, first + size),
        keys,
        tuple(captions),
    )


def random_batch(size: int, grid: tuple[int, ...] = GRID, vocabulary: int = VOCABULARY) -> TokenBatch:
    ids = torch.randint(0, vocabulary, (size, *grid), generator=torch.Generator().manual_seed(3))
    return batch([f"{WORDS[index % 4]} thing" for index in range(size)], ids)


# ---- masks


def test_times_are_uniform_and_counts_follow_the_cosine() -> None:
    times = torch.cat([masking_times(0, step, torch.arange(64 * step, 64 * step + 64)) for step in range(200)])
    assert torch.histc(times.float(), 10, 0, 1).div(len(times)).sub(0.1).abs().max() < 0.005
    own = torch.stack([masking_times(0, step, torch.tensor([17]))[0] for step in range(2000)])
    assert torch.histc(own.float(), 10, 0, 1).div(2000).sub(0.1).abs().max() < 0.03, "of one sample, over steps"
    assert num_hidden(torch.tensor([0.0, 0.5, 1 - 1e-9]), 100).tolist() == [100, 71, 1]
    hidden = hide(0, 5, torch.arange(1000), 64)
    assert hidden.float().mean().item() == pytest.approx(2 / math.pi, abs=0.02)
    assert hidden.float().mean(0).sub(hidden.float().mean()).abs().max() < 0.06, "no place is hidden more often than others"


def test_masks_do_not_depend_on_how_batches_are_cut() -> None:
    whole = hide(3, 7, torch.arange(40, 72), 16)
    assert torch.equal(whole, torch.cat([hide(3, 7, torch.arange(start, start + 8), 16) for start in range(40, 72, 8)]))
    assert not torch.equal(whole, hide(3, 8, torch.arange(40, 72), 16))


@pytest.mark.parametrize(("size", "tokens"), [(1, 5), (3, 7), (8, 16), (64, 64), (100, 9)])
def test_the_room_is_enough_and_not_much_more(size: int, tokens: int) -> None:
    most = 0
    for step in range(150):
        hidden = hide(1, step, torch.arange(step * 1000, step * 1000 + size), tokens)
        most = max(most, int(hidden.sum()))
        places, real = gather_hidden(hidden, capacity(size, tokens))
        assert sorted(places[real].tolist()) == hidden.flatten().nonzero()[:, 0].tolist(), "nothing is dropped"
    assert capacity(size, tokens) - tokens <= most <= capacity(size, tokens)


# ---- the loss


@pytest.mark.parametrize("vocabulary", [20, 2**14])
def test_the_loss_is_cross_entropy_where_tokens_are_hidden(vocabulary: int) -> None:
    made, data = nets(vocabulary=vocabulary), random_batch(5, vocabulary=vocabulary)
    losses = MaskedLosses(MaskedLossConfig(label_smoothing=0.1, text_dropout_prob=0.0))
    found = losses.turn(made, data, Context(4, 9, data.positions))
    net, hidden = made["generator"], hide(9, 4, data.positions, 12)
    features = net(torch.where(hidden, net.mask_id, data.ids.flatten(1)), made["text"](data.text))
    wanted = torch.zeros(())
    for logits, digit in zip(net.logits(features), net.split(data.ids.flatten(1)), strict=True):
        each = F.cross_entropy(logits.flatten(0, 1), digit.flatten(), reduction="none", label_smoothing=0.1)
        wanted = wanted + (each * hidden.flatten()).sum()
    torch.testing.assert_close(found.total, wanted)
    assert found.weight.item() == hidden.sum().item()
    assert 0 <= found.parts["right"] <= found.weight


def test_first_loss_is_that_of_a_guess() -> None:
    torch.manual_seed(0)
    made = {"generator": MaskedTransformer(MaskedConfig(width=64, depth=2, heads=2), 500, GRID, 32), "text": nets()["text"]}
    data = random_batch(16, vocabulary=500)
    loss = MaskedLosses(MaskedLossConfig()).turn(made, data, Context(0, 0, data.positions))
    assert (loss.total / loss.weight).item() == pytest.approx(math.log(500), abs=0.05)


def test_hidden_tokens_do_not_leak() -> None:
    made, data = nets(), random_batch(4)
    hidden = hide(0, 0, data.positions, 12)
    other = torch.where(hidden.view(data.ids.shape), (data.ids + 7) % VOCABULARY, data.ids)
    net, text = made["generator"], made["text"](data.text)
    assert torch.equal(
        net(torch.where(hidden, net.mask_id, data.ids.flatten(1)), text),
        net(torch.where(hidden, net.mask_id, other.flatten(1)), text),
    )


def test_text_is_taken_away_as_often_as_asked_and_the_other_branch_is_trained() -> None:
    data = random_batch(32)
    for prob in (0.0, 1.0):
        made = nets()
        losses = MaskedLosses(MaskedLossConfig(text_dropout_prob=prob))
        losses.turn(made, data, Context(0, 0, data.positions)).total.backward()
        reached = made["text"].embed.weight.grad
        assert (reached is not None and bool(reached.abs().sum() > 0)) == (prob == 0.0)
        assert made["generator"].null.grad.abs().sum() > 0
    with_text = MaskedLosses(MaskedLossConfig(text_dropout_prob=0.0)).turn(made, data, Context(0, 0, data.positions))
    without = MaskedLosses(MaskedLossConfig(text_dropout_prob=1.0)).turn(made, data, Context(0, 0, data.positions))
    assert with_text.total.item() != without.total.item()


def test_samples_that_only_fill_up_do_not_count() -> None:
    made, data = nets(), random_batch(6)
    losses = MaskedLosses(MaskedLossConfig())
    whole = losses.measure(made, data, Context(0, 0, data.positions))
    half = [
        TokenBatch(
            data.ids, data.text, torch.arange(6) < 3 if first else torch.arange(6) >= 3, data.positions, data.keys, data.captions
        )
        for first in (True, False)
    ]
    parts = [losses.measure(made, part, Context(0, 0, data.positions)) for part in half]
    torch.testing.assert_close(parts[0].total + parts[1].total, whole.total)
    torch.testing.assert_close(parts[0].weight + parts[1].weight, whole.weight)


@pytest.mark.parametrize("vocabulary", [2, 1000, 2**14, 64_000, 65_536, 16_411])
def test_digits(vocabulary: int) -> None:
    sizes = digit_sizes(vocabulary)
    assert math.prod(sizes) == vocabulary
    assert len(sizes) == (2 if vocabulary >= 2**14 and vocabulary != 16_411 else 1)  # a prime stays whole
    net = MaskedTransformer(MaskedConfig(width=16, depth=1, heads=1), vocabulary, (2,), 8)
    ids = torch.randint(0, vocabulary, (3, 50), generator=torch.Generator().manual_seed(0))
    assert torch.equal(net.join(net.split(ids)), ids)
    assert [int(digit[0]) for digit in net.split(torch.tensor([vocabulary]))] == list(sizes), "hidden in every digit"


# ---- samples


@pytest.mark.parametrize("grid", [(7,), (4, 6), (8, 8), (2, 3, 5)])
def test_halton_visits_every_cell_once_and_spreads(grid: tuple[int, ...]) -> None:
    order = halton_order(grid)
    assert sorted(order.tolist()) == list(range(math.prod(grid)))
    if grid == (8, 8):
        rows, columns = order[:16] // 8, order[:16] % 8
        assert max(torch.bincount(rows // 4 * 2 + columns // 4, minlength=4)) <= 6, "sixteen cells, four quarters"


def test_a_grid_of_four_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="4 axes"):
        halton_order((2, 2, 2, 2))


@pytest.mark.parametrize(("steps", "tokens"), [(1, 16), (8, 16), (18, 64), (40, 16)])
def test_every_step_reveals_and_the_last_one_all(steps: int, tokens: int) -> None:
    some = torch.tensor([tokens, 3, 0])
    counts = num_revealed(steps, some)
    assert torch.equal(counts[0], torch.zeros(3, dtype=torch.long))
    assert torch.equal(counts[-1], some)
    assert (counts[1:] >= counts[:-1]).all()
    assert counts[1, 0] >= 1
    visible = [tokens - math.floor(math.cos((step + 1) / steps * math.pi / 2) * tokens + 1e-9) for step in range(steps)]
    assert counts[1:, 0].tolist() == [min(tokens, max(seen, step + 1)) for step, seen in enumerate(visible)]


@pytest.mark.parametrize("order", ["halton", "confidence"])
def test_a_sample_depends_on_its_own_seed_and_text_alone(order: str) -> None:
    made = nets()
    made["generator"].eval()
    config = MaskedSampleConfig(steps=5, order=order)
    captions = ["red", "green thing", "", "blue"]
    seeds = torch.tensor([5, 6, 7, 5])
    text = made["text"](read_bytes(captions, 24))
    whole = sample(made["generator"], text, seeds, config)
    assert whole.shape == (4, 12)
    assert whole.max() < VOCABULARY
    assert whole.min() >= 0
    for index, caption in enumerate(captions):
        alone = sample(made["generator"], made["text"](read_bytes([caption], 24)), seeds[index : index + 1], config)
        assert torch.equal(alone[0], whole[index])
    assert torch.equal(sample(made["generator"], text, seeds, config), whole)
    assert not torch.equal(sample(made["generator"], text, seeds + 100, config), whole)


def test_noise_on_the_confidence_does_not_hang_on_the_guidance_ramp() -> None:
    made = nets()
    text, seeds = made["text"](read_bytes(["red"] * 8, 24)), torch.arange(8)
    still, noisy = (MaskedSampleConfig(steps=5, order="confidence", noise=noise, guidance_ramp=False) for noise in (0.0, 50.0))
    assert not torch.equal(sample(made["generator"], text, seeds, still), sample(made["generator"], text, seeds, noisy))


def test_known_tokens_stay() -> None:
    made = nets()
    known = torch.full((2, 12), made["generator"].mask_id)
    known[:, :5] = torch.arange(5)
    found = sample(
        made["generator"],
        made["text"](read_bytes(["a", "b"], 24)),
        torch.tensor([1, 2]),
        MaskedSampleConfig(steps=4),
        known=known,
    )
    assert torch.equal(found[:, :5], known[:, :5])
    assert (found < VOCABULARY).all()


def test_a_negative_prompt_is_the_other_branch() -> None:
    made = nets()
    text, empty = (made["text"](read_bytes([caption], 24)) for caption in ("red", ""))
    seeds, config = torch.tensor([3]), MaskedSampleConfig(steps=3, guidance=4.0)
    plain = sample(made["generator"], text, seeds, config)
    assert torch.equal(sample(made["generator"], text, seeds, config, negative=empty), plain)
    assert not torch.equal(sample(made["generator"], text, seeds, config, negative=made["text"](read_bytes(["grey"], 24))), plain)
    same = sample(made["generator"], text, seeds, config, negative=text)
    assert torch.equal(same, sample(made["generator"], text, seeds, config.model_copy(update={"guidance": 1.0})))


# ---- learning


def scene(index: int) -> tuple[Tensor, str]:
    """Two colours side by side, named in the caption, in one of three styles, which it does not name."""
    draws = torch.Generator().manual_seed(index)
    left, right = torch.randint(4, (2,), generator=draws).tolist()
    ids = torch.full((4, 4), left)
    ids[:, 2:] = right + 4
    return ids + 10 * int(torch.randint(3, (1,), generator=draws)), f"{WORDS[left]} left of {WORDS[right]}"


@pytest.mark.slow
def test_it_learns_to_follow_captions_and_to_agree_with_itself() -> None:
    torch.manual_seed(0)
    net = MaskedTransformer(MaskedConfig(width=64, depth=3, heads=4), 50, (4, 4), 64)
    encoder = ByteEncoder(ByteTextConfig(length=24, width=64, depth=2, heads=4))
    made = {"generator": net, "text": encoder}
    losses, adam = (
        MaskedLosses(MaskedLossConfig()),
        torch.optim.AdamW([*net.parameters(), *encoder.parameters()], lr=1e-3, betas=(0.9, 0.98)),
    )
    for step in range(500):
        scenes = [scene(index) for index in range(32 * step, 32 * step + 32)]
        data = batch([caption for _, caption in scenes], torch.stack([ids for ids, _ in scenes]), 32 * step)
        loss = losses.turn(made, data, Context(step, 0, data.positions))
        (loss.total / loss.weight).backward()
        adam.step()
        adam.zero_grad()
    scenes = [scene(10**6 + index) for index in range(64)]
    text = encoder.eval()(read_bytes([caption for _, caption in scenes], 24))
    wanted = torch.stack([ids for ids, _ in scenes]).flatten(1) % 10
    for order in ("halton", "confidence"):
        config = MaskedSampleConfig(steps=8, order=order)
        found = sample(net.eval(), text, torch.arange(64), config, smoothing=0.1)
        followed = (found % 10 == wanted).all(1).float().mean()
        agreed = (found // 10 == found[:, :1] // 10).all(1).float().mean()
        assert followed > 0.8, order
        assert agreed > 0.8, order
        assert len(set((found[:, 0] // 10).tolist())) >= 3, "what the caption leaves open is drawn"
