"""The masked generator: what is hidden, what the loss counts, what a sample depends on; and that it learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import TextStates, TokenBatch
from tessera.contracts import Context
from tessera.generators.masked.losses import MaskedLossConfig, MaskedLosses
from tessera.generators.masked.masking import capacity, gather_hidden, hide, masking_times, num_hidden
from tessera.generators.masked.model import MaskedConfig, MaskedTransformer, digit_sizes
from tessera.generators.masked.sample import MaskedSampleConfig, sample
from tessera.generators.masked.stage import MaskedStageConfig, build_nets, build_stage
from tessera.nn.positions import rotary_turns
from tessera.text.bytes import ByteEncoder, ByteTextConfig, read_bytes
from tests.generators.masked_toys import GRID, VOCABULARY, WORDS, batch, critic, encoder, generator, random_batch, wordless


def nets(grid: tuple[int, ...] = GRID, vocabulary: int = VOCABULARY) -> dict[str, torch.nn.Module]:
    return {"generator": generator(grid, vocabulary), "text": encoder()}


def test_queries_keys_and_values_are_of_normalised_tokens() -> None:
    """What self-attention adds does not grow with what it reads, from layer to layer."""
    block = generator().blocks[0].double()
    block.table.data[[5, 8]] = 0  # text and feed-forward add nothing
    x, text, mask = torch.randn(2, 12, 32).double(), torch.randn(2, 3, 32).double(), torch.ones(2, 3, dtype=torch.bool)

    def added(x: Tensor) -> Tensor:
        return block(x, text, mask, torch.zeros(2, 9, 32).double(), rotary_turns(torch.zeros(12, 1), 16)) - x

    torch.testing.assert_close(added(1000 * x), added(x), rtol=1e-6, atol=1e-6)
    assert added(x).abs().max() > 0.01


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


@pytest.mark.parametrize("recalls", [False, True])
def test_hidden_tokens_do_not_leak(recalls: bool) -> None:
    """Other truths under the masks change what guesses are held against, not the guesses: those of the critic's draws tell."""
    made = {"generator": generator(recalls=recalls), "text": encoder(), "critic": critic()}
    data, losses, seen = random_batch(4), MaskedLosses(MaskedLossConfig()), []
    made["generator"].norm.register_forward_hook(lambda _, arguments, features: seen.append(features.detach()))
    hidden = hide(0, 0, data.positions, 12).view(data.ids.shape)
    other = replace(data, ids=torch.where(hidden, (data.ids + 7) % VOCABULARY, data.ids))
    first, second = (losses.turn(made, each, Context(0, 0, data.positions)) for each in (data, other))
    assert first.total != second.total
    assert len(seen) == (4 if recalls else 2)
    assert torch.equal(seen[0], seen[len(seen) // 2])
    assert torch.equal(seen[-1], seen[len(seen) // 2 - 1])
    assert torch.equal(first.hand.ids, second.hand.ids)
    visible = replace(data, ids=torch.where(hidden, data.ids, (data.ids + 7) % VOCABULARY))
    losses.turn(made, visible, Context(0, 0, data.positions))
    assert not torch.equal(seen[-1], seen[0]), "while visible ones are seen"


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


# ---- without captions


def stripes(first: int, size: int) -> Tensor:
    """b 3 4: three tokens in a row of four, the same in every row; the first and last follow from the middle ones."""
    draws = torch.randint(4, (size, 2), generator=torch.Generator().manual_seed(first))
    row = torch.stack([draws[:, 0] + 4, draws[:, 0], draws[:, 1], draws[:, 1] + 8], dim=1)
    return row[:, None].expand(-1, 3, -1).contiguous()


def test_an_unconditional_generator_trains_and_samples_without_a_text_net() -> None:
    torch.manual_seed(0)
    stage = build_stage(MaskedStageConfig(), build_nets(MaskedStageConfig(model=SMALL), vocab_size=20, grid=GRID, text_width=8))
    assert set(stage.nets) == {"generator"}
    net, losses = stage.nets["generator"], MaskedLosses(MaskedLossConfig(label_smoothing=0.0))
    start, end = fit({"generator": net}, losses, lambda step: wordless(stripes(step, 32), 8, 32 * step), 350)
    assert end < 0.45 * start
    found = sample(net.eval(), TextStates.none(32, 8), torch.arange(32), MaskedSampleConfig(steps=8, guidance=1.0)).view(32, 3, 4)
    lawful = (found[..., 0] == found[..., 1] + 4) & (found[..., 3] == found[..., 2] + 8)
    assert lawful.float().mean() > 0.8
    assert len(set(found[:, 0, 1].tolist())) == 4


def test_the_branch_without_text_is_trained_by_text_dropout_alone() -> None:
    """Tokens follow from the caption. Taken away half of the time, the branch without learns their frequencies, ln 4; never taken
    away, it is left to what a network makes of a caption it never saw missing."""
    ends = {}
    for prob in (0.0, 0.5):
        made = {"generator": generator(), "text": encoder()}
        losses = MaskedLosses(MaskedLossConfig(label_smoothing=0.0, text_dropout_prob=prob))
        fit(made, losses, lambda step: coloured(32 * step), 200)
        empty, data = MaskedLosses(MaskedLossConfig(label_smoothing=0.0, text_dropout_prob=1.0)), coloured(10**6)
        found = empty.turn(made, data, Context(0, 0, data.positions))
        full = losses.measure(made, data, Context(0, 0, data.positions))
        assert full.total / full.weight < 0.2
        ends[prob] = (found.total / found.weight).item()
    assert ends[0.5] < 0.7  # one visible token tells all others; ln 4 where none is: 39 % of hidden tokens
    assert ends[0.0] > 2 * ends[0.5]


def coloured(first: int) -> TokenBatch:
    picks = torch.randint(4, (32,), generator=torch.Generator().manual_seed(first)).tolist()
    return batch([WORDS[pick] for pick in picks], torch.tensor(picks)[:, None, None].expand(32, *GRID) * 3, first)


SMALL = MaskedConfig(width=32, depth=2, heads=2)


def fit(
    made: dict[str, torch.nn.Module], losses: MaskedLosses, data: Callable[[int], TokenBatch], steps: int
) -> tuple[float, float]:
    """The first loss, and the mean of the last ten."""
    adam = torch.optim.AdamW([p for net in made.values() for p in net.parameters()], lr=3e-3, betas=(0.9, 0.98))
    seen = []
    for step in range(steps):
        given = data(step)
        loss = losses.turn(made, given, Context(step, 0, given.positions))
        (loss.total / loss.weight).backward()
        adam.step()
        adam.zero_grad()
        seen.append((loss.total / loss.weight).item())
    return seen[0], sum(seen[-10:]) / 10


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
    for options in ({}, {"order": "confidence"}, {"remask": 0.1}, {"top_p": 0.9}):
        config = MaskedSampleConfig(steps=8, **options)
        found = sample(net.eval(), text, torch.arange(64), config)
        followed = (found % 10 == wanted).all(1).float().mean()
        agreed = (found // 10 == found[:, :1] // 10).all(1).float().mean()
        assert followed > 0.8, options
        assert agreed > 0.8, options
        assert len(set((found[:, 0] // 10).tolist())) >= 3, "what the caption leaves open is drawn"
