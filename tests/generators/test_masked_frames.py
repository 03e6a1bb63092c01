"""Clips in the masked generator's training: frames that are not there, frames that are shown, and what the loss counts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import TokenBatch
from tessera.config import UserError
from tessera.contracts import Context
from tessera.generators.masked.critic import CriticHead, CriticNet
from tessera.generators.masked.frames import FrameMaskConfig, Frames, draw_frames, plain_frames
from tessera.generators.masked.losses import MaskedLossConfig, MaskedLosses
from tessera.generators.masked.masking import capacity, gather_hidden, hide, masking_times
from tessera.generators.masked.model import Low, MaskedConfig, MaskedTransformer
from tessera.generators.masked.stage import MaskedStageConfig, build_nets, build_stage
from tests.generators.masked_toys import encoder, generator, random_batch, random_text, stirred

CLIP = (5, 2, 2)
VOCABULARY = 20
ALL = FrameMaskConfig(prefix_prob=0.3, between_prob=0.3, later_prob=0.3, shorter_prob=0.3)


def clips(lengths: list[int], grid: tuple[int, ...] = CLIP) -> TokenBatch:
    return replace(random_batch(len(lengths), grid), lengths=torch.tensor(lengths))


def clip_critic(grid: tuple[int, ...] = CLIP) -> CriticNet:
    torch.manual_seed(1)
    net = CriticNet(MaskedConfig(width=16, depth=1, heads=2), VOCABULARY, grid, 32)
    net.head.head.weight.data.normal_()
    stirred(net.trunk)
    return net.eval()


def steps_of(frames: str) -> Tensor:
    """b t bool of rows like 01110."""
    return torch.tensor([[step == "1" for step in row] for row in frames.split()])


# ---- the network


def shifted_copy(net: MaskedTransformer, first: int, last: int, **options: object) -> MaskedTransformer:
    """The same network on the steps from first to last alone."""
    small = generator((last - first, *net.grid[1:]), **options)
    state = net.state_dict()
    state["places.0"] = state["places.0"][first:last]
    small.load_state_dict(state)
    return small


@pytest.mark.parametrize(("first", "last"), [(0, 3), (0, 1), (1, 5), (1, 4)])
def test_absent_frames_are_as_if_the_grid_were_smaller(first: int, last: int) -> None:
    """Also in the share of hidden tokens. Rotation tells differences alone, so a later start is no more than a shorter end."""
    net = generator(CLIP, recalls=True)
    small = shifted_copy(net, first, last, recalls=True)
    ids = torch.randint(VOCABULARY + 1, (3, 20), generator=torch.Generator().manual_seed(0))
    previous = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(1))
    inside = slice(4 * first, 4 * last)
    frames = torch.zeros(3, 5, dtype=torch.bool)
    frames[:, first:last] = True
    found = net(ids, random_text(3), None, previous, frames)[:, inside]
    wanted = small(ids[:, inside], random_text(3), None, previous[:, inside])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, net(ids, random_text(3), None, previous)[:, inside], atol=1e-3)


def test_absent_tokens_reach_nothing() -> None:
    net, judge = generator(CLIP, low=Low(9, (5, 1, 1)), recalls=True), clip_critic()
    frames = steps_of("11000 01110 11111")
    present = net.spread(frames)
    draws = torch.Generator().manual_seed(0)
    ids, low = torch.randint(VOCABULARY + 1, (3, 20), generator=draws), torch.randint(9, (3, 5), generator=draws)
    previous = torch.randn(3, 20, 32, generator=draws)
    found = net(ids, random_text(3), low, previous, frames)
    others = torch.where(present, ids, (ids + 5) % (VOCABULARY + 1)), torch.where(frames, low, (low + 1) % 9)
    changed = net(others[0], random_text(3), others[1], previous + ~present[..., None], frames)
    assert torch.equal(found[present], changed[present])
    assert torch.equal(
        judge(ids, random_text(3), frames=frames)[present], judge(others[0], random_text(3), frames=frames)[present]
    )
    seen: list[Tensor] = []
    net.embed.register_forward_hook(lambda _, arguments, vectors: seen.append(vectors.detach().requires_grad_()) or seen[-1])
    net(ids, random_text(3), low, previous, frames)[present].square().sum().backward()
    reached = seen[0].grad.abs().sum(-1)
    assert (reached[~present] == 0).all()
    assert (reached[present] > 0).all()


def test_pictures_are_given_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, flash attention is out of reach."""
    masks: list[Tensor | None] = []
    plain = F.scaled_dot_product_attention

    def spy(*arguments: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        masks.append(attn_mask)
        return plain(*arguments, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    net, data = generator(), random_batch(3)
    MaskedLosses(MaskedLossConfig()).turn({"generator": net, "text": encoder()}, data, Context(0, 0, data.positions))
    assert [mask is None for mask in masks[-4:]] == [True, False] * 2, "of tokens, of text"
    ids = torch.randint(21, (2, 20), generator=torch.Generator().manual_seed(0))
    net = generator(CLIP)
    unmasked = net(ids, random_text(2))
    assert [mask is None for mask in masks[-4:]] == [True, False] * 2
    torch.testing.assert_close(net(ids, random_text(2), frames=torch.ones(2, 5, dtype=torch.bool)), unmasked)
    assert [mask is None for mask in masks[-4:]] == [False] * 4


def test_frames_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected b 5"):
        generator(CLIP)(torch.zeros(2, 20, dtype=torch.long), random_text(2), frames=torch.ones(2, 4, dtype=torch.bool))


def test_small_heads_are_told_that_three_axes_need_more() -> None:
    with pytest.raises(ValueError, match="3 axes need at least one each"):
        MaskedTransformer(MaskedConfig(width=16, depth=1, heads=4), 9, CLIP, 8)
    turns = MaskedTransformer(MaskedConfig(depth=1), 9, CLIP, 8).turns
    for axis, place in enumerate((4, 2, 1)):  # raster strides of t h w
        turned = (turns[1, place] != 0).view(-1).nonzero()[:, 0].tolist()
        assert turned == [*range(10 * axis, 10 * axis + 10), *range(32 + 10 * axis, 42 + 10 * axis)], "a third of 32 pairs each"


# ---- which frames


def drawn_frames(config: FrameMaskConfig, length: int, size: int = 4000, num_steps: int = 6) -> Frames:
    return draw_frames(config, 3, 8, torch.arange(size), torch.full((size,), length), num_steps)


def rows(mask: Tensor) -> list[str]:
    return ["".join("1" if step else "0" for step in row) for row in mask.tolist()]


def shares(found: list[str]) -> dict[str, float]:
    return {row: found.count(row) / len(found) for row in set(found)}


@pytest.mark.parametrize(
    ("name", "length", "present", "shown"),
    [
        ("prefix_prob", 4, {"111100": 1}, {"100000": 1 / 3, "110000": 1 / 3, "111000": 1 / 3}),
        ("prefix_prob", 2, {"110000": 1}, {"100000": 1}),
        ("prefix_prob", 1, {"100000": 1}, {"000000": 1}),
        ("between_prob", 3, {"111000": 1}, {"101000": 1}),
        ("between_prob", 4, {"111100": 1}, {"100100": 1 / 2, "101100": 1 / 4, "110100": 1 / 4}),
        ("between_prob", 2, {"110000": 1}, {"000000": 1}),
        ("later_prob", 4, {"011100": 1}, {"010000": 1 / 2, "011000": 1 / 2}),
        ("later_prob", 3, {"011000": 1}, {"010000": 1}),
        ("later_prob", 2, {"110000": 1}, {"000000": 1}),
        ("shorter_prob", 4, {"100000": 1 / 3, "110000": 1 / 3, "111000": 1 / 3}, {"000000": 1}),
        ("shorter_prob", 1, {"100000": 1}, {"000000": 1}),
    ],
)
def test_each_kind_of_mask(name: str, length: int, present: dict[str, float], shown: dict[str, float]) -> None:
    nothing = dict.fromkeys(("prefix_prob", "between_prob", "later_prob", "shorter_prob"), 0.0)
    frames = drawn_frames(FrameMaskConfig(**{**nothing, name: 1.0}), length)
    assert shares(rows(frames.present)) == pytest.approx(present, abs=0.04)
    assert shares(rows(frames.shown)) == pytest.approx(shown, abs=0.04)


def test_kinds_come_as_often_as_asked_and_exclude_each_other() -> None:
    config = FrameMaskConfig(prefix_prob=0.2, between_prob=0.1, later_prob=0.3, shorter_prob=0.0)
    frames = drawn_frames(config, 6, size=20_000)
    found = list(zip(rows(frames.present), rows(frames.shown), strict=True))
    later = sum(present == "011111" for present, _ in found)
    between = sum(present == "111111" and shown[0] == shown[-1] == "1" for present, shown in found)
    prefix = sum(present == "111111" and shown[0] == "1" and shown[-1] == "0" for present, shown in found)
    for count, prob in ((later, 0.3), (between, 0.1), (prefix, 0.2)):
        assert abs(count - 20_000 * prob) < 4 * math.sqrt(20_000 * prob * (1 - prob))
    assert sum(shown == "000000" for _, shown in found) == 20_000 - later - between - prefix
    with pytest.raises(ValueError, match=r"add up to 1\.2"):
        FrameMaskConfig(prefix_prob=0.6, between_prob=0.3, later_prob=0.3)


def test_frames_do_not_depend_on_how_batches_are_cut() -> None:
    lengths = torch.arange(64) % 6 + 1
    whole = draw_frames(ALL, 1, 5, torch.arange(64), lengths, 6)
    parts = [draw_frames(ALL, 1, 5, torch.arange(64)[cut], lengths[cut], 6) for cut in (slice(0, 11), slice(11, 64))]
    assert torch.equal(whole.shown, torch.cat([part.shown for part in parts]))
    assert torch.equal(whole.present, torch.cat([part.present for part in parts]))
    assert not torch.equal(whole.shown, draw_frames(ALL, 1, 6, torch.arange(64), lengths, 6).shown)
    left = whole.present & ~whole.shown
    assert left.any(1).all(), "something is always left to hide"
    assert not (whole.shown & ~whole.present).any()
    assert not (whole.present & (torch.arange(6) >= lengths[:, None])).any()


# ---- which tokens


@pytest.mark.parametrize("size", [1, 7, 32])
def test_hidden_tokens_lie_among_what_may_be_hidden_and_fit(size: int) -> None:
    for step in range(60):
        positions = torch.arange(step * 1000, step * 1000 + size)
        frames = draw_frames(ALL, 1, step, positions, positions % 5 + 1, 5)
        among = (frames.present & ~frames.shown).repeat_interleave(4, dim=1)
        hidden = hide(1, step, positions, 20, among)
        assert not (hidden & ~among).any()
        cosine = np.cos(masking_times(1, step, positions).numpy() * np.pi / 2)
        assert hidden.sum(1).tolist() == np.maximum(1, np.ceil(cosine * among.sum(1).numpy())).astype(int).tolist()
        places, real = gather_hidden(hidden, capacity(size, 20))
        assert sorted(places[real].tolist()) == hidden.flatten().nonzero()[:, 0].tolist(), "nothing is dropped"
    everything = torch.ones(size, 20, dtype=torch.bool)
    assert torch.equal(hide(1, 3, positions, 20, everything), hide(1, 3, positions, 20))


def test_no_token_that_may_be_hidden_is_hidden_more_often() -> None:
    among = steps_of("0110").repeat(4000, 1).repeat_interleave(4, dim=1)
    rate = hide(0, 5, torch.arange(4000), 16, among).float().mean(0)[4:12]
    wanted = np.ceil(8 * np.cos(np.linspace(0, np.pi / 2, 10_000, endpoint=False))).mean() / 8
    assert rate.sub(wanted).abs().max() < 4 * math.sqrt(wanted * (1 - wanted) / 4000)


# ---- the loss


def seen_by(losses: MaskedLosses, data: TokenBatch, context: Context) -> tuple[Frames, Tensor]:
    """What is there, and b n what is hidden."""
    frames = losses.frames(data, context)
    assert frames is not None
    among = (frames.present & ~frames.shown).repeat_interleave(4, dim=1)
    return frames, hide(context.seed, context.step, data.positions, 20, among)


def test_the_loss_by_hand() -> None:
    """Sample by sample, on a network that has just the frames that are there; the last sample is no valid one."""
    made = {"generator": generator(CLIP), "text": encoder()}
    data = clips([5, 1, 3, 4, 5, 2])
    data = replace(data, valid=torch.tensor([True] * 5 + [False]))
    losses, total, weight, starts = MaskedLosses(MaskedLossConfig(text_dropout_prob=0.0, frames=ALL)), 0.0, 0, set()
    for step in range(8):
        context = Context(step, 9, data.positions)
        frames, hidden = seen_by(losses, data, context)
        total, weight = 0.0, 0
        for row in range(5):
            steps = frames.present[row].nonzero()[:, 0].tolist()
            first, last = steps[0], steps[-1] + 1
            starts.add((first, last))
            net, inside = shifted_copy(made["generator"], first, last), slice(4 * first, 4 * last)
            truth, gone = data.ids[row].flatten()[inside], hidden[row, inside]
            text = made["text"](type(data.text)(data.text.ids[row : row + 1]))
            logs = net.logits(net(truth.masked_fill(gone, VOCABULARY)[None], text))[0][0].log_softmax(-1)
            total -= sum(logs[place, truth[place]].item() for place in gone.nonzero()[:, 0].tolist())
            weight += int(gone.sum())
        found = losses.turn(made, data, context)
        assert found.total.item() == pytest.approx(total, rel=1e-4)
        assert found.weight.item() == weight
    assert len(starts) > 6


def test_what_is_hidden_or_absent_does_not_leak_and_what_is_shown_is_seen() -> None:
    made = {"generator": generator(CLIP, recalls=True), "text": encoder(), "critic": clip_critic()}
    data, losses = clips([5, 5, 4, 3, 2, 1, 5, 5]), MaskedLosses(MaskedLossConfig(frames=ALL))
    features: list[Tensor] = []
    made["generator"].norm.register_forward_hook(lambda _, arguments, found: features.append(found.detach()))
    looked = 0
    for step in range(6):
        context = Context(step, 0, data.positions)
        frames, hidden = seen_by(losses, data, context)
        present, shown = (part.repeat_interleave(4, dim=1) for part in (frames.present, frames.shown))

        def turn(where: Tensor, context: Context = context, hidden: Tensor = hidden) -> tuple[Tensor, Tensor, Tensor]:
            other = torch.where(where, (data.ids.flatten(1) + 7) % VOCABULARY, data.ids.flatten(1)).view(data.ids.shape)
            loss = losses.turn(made, replace(data, ids=other), context)
            judged = losses.critic_turn(made, data, replace(context, handed={"generator": loss.hand}))
            return loss.total, features[-1], torch.stack([judged.total, judged.weight, loss.hand.ids[hidden].sum()])

        nothing, gone, absent, told = (turn(where) for where in (hidden & ~hidden, hidden, ~present, shown))
        assert gone[0] != nothing[0], "held against other truths"
        assert torch.equal(gone[1][present], nothing[1][present]), "but the same guesses"
        assert gone[2][2] == nothing[2][2]
        assert absent[0] == nothing[0]
        assert torch.equal(absent[1][present], nothing[1][present])
        assert torch.equal(absent[2], nothing[2])
        for row in shown.any(1).nonzero()[:, 0].tolist():
            assert not torch.equal(told[1][row][present[row]], nothing[1][row][present[row]])
            looked += 1
    assert looked > 15


def test_gradients_come_from_hidden_tokens_that_are_there() -> None:
    net, data = generator(CLIP), clips([5, 2, 1, 4])
    made, losses = {"generator": net, "text": encoder()}, MaskedLosses(MaskedLossConfig(frames=ALL))
    context = Context(1, 0, data.positions)
    _, hidden = seen_by(losses, data, context)
    outs: list[Tensor] = []
    net.norm.register_forward_hook(lambda _, arguments, found: (found.retain_grad(), outs.append(found))[0])
    losses.turn(made, data, context).total.backward()
    assert torch.equal(outs[0].grad.abs().sum(-1) > 0, hidden)


def test_pictures_among_clips() -> None:
    """A clip of length 1 is the picture on a grid of one step."""
    net, data = generator(CLIP), clips([1, 1, 1])
    losses = MaskedLosses(MaskedLossConfig(text_dropout_prob=0.0, frames=ALL))
    context = Context(2, 0, data.positions)
    frames, hidden = seen_by(losses, data, context)
    assert rows(frames.present) == ["10000"] * 3
    assert 3 <= hidden.sum() == hidden[:, :4].sum() <= 12
    found = losses.turn({"generator": net, "text": encoder()}, data, context)
    assert found.weight == hidden.sum()
    assert torch.isfinite(found.total)


def test_validation_is_plain() -> None:
    data, net = clips([5, 3, 1, 4]), generator(CLIP)
    made, given = {"generator": net, "text": encoder()}, []
    net.register_forward_pre_hook(lambda _, some, named: given.append((some[0], named["frames"])), with_kwargs=True)
    found = [
        MaskedLosses(MaskedLossConfig(frames=config)).measure(made, data, Context(step, 0, data.positions))
        for config, step in ((None, 0), (ALL, 0), (ALL, 7))
    ]
    assert found[0].total == found[1].total == found[2].total
    assert rows(given[1][1]) == ["11111", "11100", "10000", "11110"]
    assert torch.equal(given[1][0] == VOCABULARY, hide(0, 0, data.positions, 20, net.spread(given[1][1])))
    whole = MaskedLosses(MaskedLossConfig(frames=ALL)).measure(made, replace(data, lengths=None), Context(0, 0, data.positions))
    assert given[-1][1] is None
    assert whole.weight == hide(0, 0, data.positions, 20).sum()


def test_clips_that_are_all_as_long_need_no_lengths() -> None:
    data, made = clips([5] * 6), {"generator": generator(CLIP), "text": encoder()}
    losses, context = MaskedLosses(MaskedLossConfig(frames=ALL)), Context(3, 0, data.positions)
    assert losses.turn(made, data, context).total == losses.turn(made, replace(data, lengths=None), context).total
    plain = MaskedLosses(MaskedLossConfig())
    torch.testing.assert_close(
        plain.turn(made, data, context).total, plain.turn(made, replace(data, lengths=None), context).total
    )


def test_a_critic_of_clips_counts_what_was_guessed() -> None:
    data = clips([5, 3, 1, 4])
    context = Context(4, 0, data.positions)
    losses = MaskedLosses(MaskedLossConfig(frames=ALL))
    _, hidden = seen_by(losses, data, context)
    for judge in (clip_critic(), CriticHead(32)):
        made = {"generator": generator(CLIP), "text": encoder(), "critic": judge}
        judged = losses.critic_turn(made, data, replace(context, handed={"generator": losses.turn(made, data, context).hand}))
        assert judged.weight == hidden.sum()
        if isinstance(judge, CriticHead):
            assert judged.total.item() == pytest.approx(math.log(2) * hidden.sum().item(), rel=1e-5), "a head starts at 0"


def test_captions_of_clips_are_dropped_as_often_as_asked() -> None:
    made, given = {"generator": generator(CLIP), "text": encoder()}, []
    made["generator"].register_forward_pre_hook(lambda _, arguments: given.append(arguments[1].mask.any(1)))
    config = MaskedLossConfig(text_dropout_prob=0.25, frames=FrameMaskConfig())
    data, losses = clips([5, 4, 1, 3] * 16), MaskedLosses(config)
    with torch.no_grad():
        for step in range(30):
            losses.turn(made, data, Context(step, 0, data.positions))
        count = 30 * 64
        dropped = count - int(torch.cat(given).sum())
        assert abs(dropped - 0.25 * count) < 4 * math.sqrt(count * 0.25 * 0.75)
        always, never = (
            MaskedLosses(config.model_copy(update={"text_dropout_prob": prob})).turn(made, data, Context(0, 0, data.positions))
            for prob in (1.0, 0.0)
        )
    assert not given[-2].any()
    assert given[-1].all()
    assert always.weight == never.weight
    assert abs(always.total - never.total) > 1e-3 * never.total, "the branch without text is another one"


def test_frame_masks_of_pictures_are_refused() -> None:
    config = MaskedStageConfig(model=MaskedConfig(width=32, depth=1, heads=2), loss=MaskedLossConfig(frames=FrameMaskConfig()))
    nets = {grid: build_nets(config, vocab_size=9, grid=grid, text_width=8) for grid in ((4, 4), (3, 4, 4))}
    with pytest.raises(UserError, match="without time"):
        build_stage(config, nets[4, 4])
    assert build_stage(config, nets[3, 4, 4]).turns


def test_plain_frames() -> None:
    frames = plain_frames(torch.tensor([1, 3]), 3)
    assert rows(frames.present) == ["100", "111"]
    assert not frames.shown.any()
