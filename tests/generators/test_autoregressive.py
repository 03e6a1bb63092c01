"""The autoregressive generator: what it sees, what it counts, that keeping keys changes nothing, and that it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.batches import SequenceBatch, TextStates
from tessera.contracts import Context
from tessera.generators.autoregressive import sample as sampling
from tessera.generators.autoregressive.losses import AutoregressiveLossConfig, AutoregressiveLosses, digest, guess, targets_of
from tessera.generators.autoregressive.model import LENGTHS, Autoregressive, AutoregressiveConfig, Layer, length_class
from tessera.generators.autoregressive.sample import AutoregressiveSampleConfig, Known, Sampler, Writer
from tessera.generators.autoregressive.stage import AutoregressiveStageConfig, build_nets, build_stage
from tessera.nn.attention import CausalAttention
from tessera.randomness import mix_tensors, uniform
from tessera.recording import Lean
from tessera.tokenizers.mesh.coordinates import Coordinates, FaceOrder

BINS, TEXT = 16, 12
SMALL = AutoregressiveConfig(width=32, depth=2, heads=2, inner_width=16, inner_depth=1)


def generator(group: tuple[int, ...] = (3, 3), seed: int = 0) -> Autoregressive:
    torch.manual_seed(seed)
    net = Autoregressive(SMALL, BINS, group, TEXT)
    torch.nn.init.normal_(net.head.weight, std=0.3)  # or all guesses look alike
    return net.eval()


def words(num: int, length: int = 4, seed: int = 7) -> TextStates:
    states = torch.randn(num, length, TEXT, generator=torch.Generator().manual_seed(seed))
    return TextStates(states, torch.ones(num, length, dtype=torch.bool), states.mean(1))


def rows_of(text: TextStates, picked: list[int]) -> TextStates:
    return TextStates(text.states[picked], text.mask[picked], text.pooled[picked])


def canonical(num: int, faces: int, seed: int = 0) -> Tensor:
    """b f 9: random meshes in canonical order."""
    order, rng = FaceOrder(BINS), torch.Generator().manual_seed(seed)
    state, allowed = order.init(num, torch.device("cpu"))
    drawn = []
    for _ in range(9 * faces):
        drawn.append(
            torch.multinomial(allowed[:, :-1].float() + 1e-9 * (~allowed[:, :-1].any(1, keepdim=True)), 1, generator=rng)[:, 0]
        )
        state, allowed = order.step(state, drawn[-1])
    return torch.stack(drawn, dim=1).view(num, faces, 9)


def batch_of(ids: Tensor, lengths: list[int], text: TextStates) -> SequenceBatch:
    num = len(ids)
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    return SequenceBatch(
        ids=ids * mask[..., None], lengths=torch.tensor(lengths), text=text, valid=torch.ones(num, dtype=torch.bool),
        positions=torch.arange(num), keys=tuple(map(str, range(num))), captions=(None,) * num,
    )  # fmt: skip


def anything(num: int) -> Tensor:
    return torch.full((num,), LENGTHS - 1)


@pytest.mark.parametrize("group", [(3, 3), (2,), (2, 3, 2), ()])
def test_no_token_sees_itself_or_a_later_one(group: tuple[int, ...]) -> None:
    net, size = generator(group), math.prod(group)
    ids, seen = torch.randint(0, BINS, (1, 4, size)), {}
    net.embed.register_forward_hook(lambda module, given, out: seen.update(embedded=out.requires_grad_().retain_grad() or out))
    logits = net(ids, words(1), anything(1)).flatten(1, 2)[0]
    for place in range(5 * size):
        grad = torch.autograd.grad(logits[place].square().sum(), seen["embedded"], retain_graph=True, allow_unused=True)[0]
        felt = [] if grad is None else grad.reshape(4 * size, -1).abs().sum(1).nonzero()[:, 0].tolist()
        assert felt == list(range(min(place, 4 * size))), place


def test_what_is_behind_a_sample_in_a_batch_changes_nothing() -> None:
    net, ids, text = generator(), canonical(3, 6), words(3)
    losses = [guess({"generator": net}, batch_of(ids, [6, 2, 4], text), text, torch.zeros(3, dtype=torch.long))]
    for row, length in enumerate((6, 2, 4)):
        alone = TextStates(text.states[row : row + 1], text.mask[row : row + 1], text.pooled[row : row + 1])
        single = batch_of(ids[row : row + 1, :length], [length], alone)
        losses.append(guess({"generator": net}, single, alone, torch.zeros(1, dtype=torch.long)))
    assert losses[0].total.item() == pytest.approx(sum(loss.total.item() for loss in losses[1:]), rel=1e-5)
    assert losses[0].weight.item() == 9 * 12 + 3 == sum(loss.weight.item() for loss in losses[1:])
    assert losses[0].stats["groups"].item() == 12


def test_loss_and_bits_are_those_of_a_sum_by_hand() -> None:
    net, ids, text = generator(), canonical(2, 3), words(2)
    batch = batch_of(ids, [3, 1], text)
    loss = guess({"generator": net}, batch, text, torch.zeros(2, dtype=torch.long))
    logs = net(batch.ids, text, anything(2)).log_softmax(-1).detach().numpy()
    total = 0.0
    for row, length in enumerate((3, 1)):
        for face in range(length):
            total -= sum(logs[row, face, k, int(ids[row, face, k])] for k in range(9))
        total -= logs[row, length, 0, BINS]
    assert loss.total.item() == pytest.approx(total, rel=1e-5)
    numbers = digest(loss.stats)
    assert numbers["bits_per_group"] == pytest.approx(total / 4 / np.log(2), rel=1e-5)
    assert numbers["bits_per_sample"] == pytest.approx(total / 2 / np.log(2), rel=1e-5)
    first = -sum(logs[row, 0, k, int(ids[row, 0, k])] for row in range(2) for k in range(9)) / 2 / np.log(2)
    assert numbers["bits_of_group_1"] == pytest.approx(first, rel=1e-5)
    assert "bits_of_group_8" not in numbers
    wanted = targets_of(batch, BINS)
    assert wanted.ids[1, 1, 0] == BINS
    assert wanted.counts.sum((1, 2)).tolist() == [28, 10]


def test_a_sample_that_does_not_count_counts_nowhere() -> None:
    net, ids, text = generator(), canonical(3, 4), words(3)
    batch, few = batch_of(ids, [3, 4, 1], text), batch_of(ids[[0, 2]], [3, 1], rows_of(text, [0, 2]))
    found = guess({"generator": net}, replace(batch, valid=torch.tensor([True, False, True])), text, batch.lengths)
    kept = guess({"generator": net}, few, few.text, few.lengths)
    assert found.weight == kept.weight == 9 * 4 + 2
    torch.testing.assert_close(found.total, kept.total)
    assert found.parts["right"] == kept.parts["right"]
    assert digest(found.stats) == pytest.approx(digest(kept.stats))


def test_validation_tells_captions_and_no_lengths() -> None:
    nets, text = {"generator": generator()}, words(2)
    batch = batch_of(canonical(2, 4), [2, 4], text)
    found = AutoregressiveLosses(AutoregressiveLossConfig(text_dropout_prob=1)).measure(
        nets, batch, Context(0, 0, batch.positions)
    )
    assert torch.equal(found.total, guess(nets, batch, text, torch.tensor([0, 0])).total)
    for others in (
        guess(nets, batch, text, batch.lengths),
        guess(nets, batch, text.without(torch.ones(2, dtype=torch.bool)), 0 * batch.lengths),
    ):
        assert found.total != others.total


def test_sampling_with_kept_keys_is_sampling_from_the_whole_network() -> None:
    """Without keys and values of earlier groups: the whole forward pass for every token, and the constraint by hand. Texts are
    four words long, one, and none; alone they have no padding."""
    net, text, seeds, sizes = generator(), words(3), torch.tensor([5, 6, 7]), (4, 1, 0)
    text = replace(text, mask=torch.arange(4) < torch.tensor(sizes)[:, None])
    config = AutoregressiveSampleConfig(guidance=1.0, temperature=0)
    found, lengths = Sampler(Writer(Lean(net), config, Coordinates(BINS).constraint))(text, seeds, 10)
    order = FaceOrder(BINS)
    for row, size in enumerate(sizes):
        alone = TextStates(text.states[[row], :size], text.mask[[row], :size], text.pooled[[row]])
        ids = torch.zeros(1, 0, 9, dtype=torch.long)
        state, allowed = order.init(1, torch.device("cpu"))
        while ids.shape[1] < 10:
            face = torch.zeros(1, 1, 9, dtype=torch.long)
            for place in range(9):
                logits = net(torch.cat([ids, face], dim=1), alone, anything(1))[0, -2, place]
                token = int(logits.masked_fill(~allowed[0], -math.inf).argmax())
                if token == BINS:
                    break
                face[0, 0, place] = token
                state, allowed = order.step(state, torch.tensor([token]))
            if token == BINS:
                break
            ids = torch.cat([ids, face], dim=1)
        assert lengths[row] == ids.shape[1]
        assert torch.equal(found[row, : ids.shape[1]], ids[0])


def by_hand(logits: Tensor, number: float, temperature: float, top_k: int, top_p: float) -> int:
    """Of the tokens that are left, the one in whose share of the line from 0 to 1 the number lies."""
    order = np.argsort(-logits.double().numpy(), kind="stable")
    best = order[: top_k or None]
    probs = np.exp((logits.double().numpy()[best] - logits.max().item()) / temperature)
    probs /= probs.sum()
    count = int(np.searchsorted(np.cumsum(probs), top_p)) + 1 if top_p < 1 else len(best)
    left = sorted(zip(best[:count].tolist(), probs[:count], strict=True))
    shares = np.cumsum([share for _, share in left])
    return left[int(np.searchsorted(shares, number * shares[-1], side="right"))][0]


@pytest.mark.parametrize(
    ("options", "negated"),
    [
        ({}, False), ({"guidance": 2.5}, False), ({"guidance": 2.5}, True), ({"guidance": 0.0}, True),
        ({"temperature": 0.3}, False), ({"temperature": 3.0}, False), ({"top_k": 2}, False), ({"top_p": 0.5}, False),
        ({"guidance": 2.5, "temperature": 1.4, "top_k": 5, "top_p": 0.9}, True),
        ({"min_share": 0.6}, False), ({"min_share": 0.99, "guidance": 4.0}, False), ({"min_share": 0.6, "guidance": 0.0}, True),
        ({"min_share": 0.5, "guidance": 2.5, "top_k": 5, "top_p": 0.9}, True),
    ],
    ids=str,
)  # fmt: skip
def test_every_token_is_chosen_as_asked(options: dict[str, Any], negated: bool) -> None:
    """Groups as they were drawn once more through the whole network, with each text: what should have come next, by hand."""
    net, text, other, seeds = generator(), words(3), words(3, seed=8), torch.tensor([5, 6, 7])
    config = AutoregressiveSampleConfig(**{"guidance": 1.0} | options)
    writer, asked = Writer(Lean(net), config, Coordinates(BINS).constraint), torch.tensor([0, 4, 9])
    found, ends = Sampler(writer)(text, seeds, 6, negative=other if negated else None, lengths=asked)
    nothing = text.without(torch.ones(3, dtype=torch.bool))
    with torch.no_grad():
        yes, no = (net(found, some, length_class(asked)) for some in (text, other if negated else nothing))
    logits = config.guidance * yes + (1 - config.guidance) * no
    order, checked = FaceOrder(BINS), 0
    for row, length in enumerate(ends.tolist()):
        state, allowed = order.init(1, torch.device("cpu"))
        for face in range(min(length + 1, 6)):
            index = torch.tensor([face])
            numbers = uniform(sampling.CHOICE, mix_tensors(seeds[row : row + 1], index), 9)[0].tolist()
            for place in range(9):
                sure = yes[row, face, place].double().masked_fill(~allowed[0], -math.inf).softmax(-1)  # without guidance
                possible = logits[row, face, place].masked_fill((sure < config.min_share * sure.max()) | ~allowed[0], -math.inf)
                token = by_hand(possible, numbers[place], config.temperature, config.top_k, config.top_p)
                assert token == (BINS if face == length else found[row, face, place]), (row, face, place)
                if face == length:
                    break
                state, allowed = order.step(state, torch.tensor([token]))
                checked += 1
    assert checked > 30


@pytest.mark.parametrize("part", ["pooled", "states"])
def test_the_first_guess_hears_the_text_both_ways(part: str) -> None:
    net, text = generator(), words(2)
    heard = getattr(text, part).detach().clone().requires_grad_()
    logits = net(torch.zeros(2, 0, 9, dtype=torch.long), replace(text, **{part: heard}), anything(2))
    (grad,) = torch.autograd.grad(logits[:, 0, 0].square().sum(), heard)
    assert grad.flatten(1).abs().amax(1).min() > 1e-4


@dataclass(frozen=True, slots=True)
class EndAt:
    """Each row ends after so many groups of one token."""

    groups: Tensor

    def init(self, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.groups, self.allowed(self.groups)

    def step(self, state: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return state - 1, self.allowed(state - 1)

    def allowed(self, left: Tensor) -> Tensor:
        return (left == 0)[:, None] == (torch.arange(BINS + 1) == BINS)


@pytest.mark.parametrize(
    ("alive", "wanted"),
    [([24, 16, 8], [24, 16, 8]), ([24, 17, 15, 9, 8, 3, 1], [24, 24, 16, 16, 8, 4, 1]), ([16, 9, 8, 5], [16, 16, 8, 8])],
    ids=str,
)
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_rows_that_have_ended_leave_the_batch(
    alive: list[int], wanted: list[int], guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alive` rows in one look after another; passes have the next power of two that holds them."""
    monkeypatch.setattr(sampling, "LOOK_EVERY", 2)
    net, size, sizes = generator(()), alive[0], list[int]()
    step = net.step

    def spied(x: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(x))
        return step(x, *rest)

    monkeypatch.setattr(net, "step", spied)
    ends = torch.tensor([2 * sum(count > row for count in alive) - 1 for row in range(size)]).roll(5)
    config = AutoregressiveSampleConfig(guidance=guidance)
    found, lengths = Sampler(Writer(Lean(net), config, EndAt(ends)))(words(size), torch.arange(size), 50)
    assert torch.equal(lengths, ends)
    branches = 2 if guidance != 1 else 1
    assert sizes[1:] == [branches * count for count in wanted for _ in range(2)]  # the first pass is the prefix
    stay, _ = Sampler(Writer(Lean(net), config.model_copy(update={"leave": False}), EndAt(ends)))(
        words(size), torch.arange(size), 50
    )
    assert torch.equal(found, stay)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_sample_depends_on_its_own_seed_alone_and_leaving_rows_change_nothing(
    guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "FIRST_ROOM", 3)
    monkeypatch.setattr(sampling, "LOOK_EVERY", 2)
    net, text, seeds = generator(), words(9), torch.arange(9)
    net.head.bias.data[:2] = 3.0  # meshes that do not climb at once, so that some end early and some late
    constraint = Coordinates(BINS).constraint
    stay, leave = (AutoregressiveSampleConfig(guidance=guidance, leave=leave) for leave in (False, True))
    whole, ends = Sampler(Writer(Lean(net), stay, constraint))(text, seeds, 100)
    assert len(set(ends.tolist())) > 3
    assert ends.max() > 8, "twice as long as the first buffer"
    shrunk, same_ends = Sampler(Writer(Lean(net), leave, constraint))(text, seeds, 100)
    assert torch.equal(ends, same_ends)
    assert torch.equal(whole, shrunk)
    picked = [7, 2]
    alone, alone_ends = Sampler(Writer(Lean(net), stay, constraint))(rows_of(text, picked), seeds[picked], 100)
    assert torch.equal(alone_ends, ends[picked])
    assert torch.equal(alone, whole[picked])


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize(("num_asked", "size"), [(1, 1), (3, 4), (6, 8), (9, 9)])
def test_rows_that_only_fill_up_never_enter(num_asked: int, size: int, guidance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    net, text, seeds, sizes = generator(), words(9), torch.arange(9), list[int]()
    writer = Writer(Lean(net), AutoregressiveSampleConfig(guidance=guidance), Coordinates(BINS).constraint)
    whole, ends = Sampler(writer)(text, seeds, 12)
    plain = Writer.step_once
    monkeypatch.setattr(Writer, "step_once", lambda self, setup, state: sizes.append(len(state.x)) or plain(self, setup, state))
    found, same_ends = Sampler(writer)(text, seeds, 12, num_asked=num_asked)
    assert sizes[0] == size * (1 if guidance == 1 else 2)
    assert torch.equal(found[:num_asked], whole[:num_asked])
    assert torch.equal(same_ends[:num_asked], ends[:num_asked])
    assert not same_ends[num_asked:].any()
    stays = Writer(Lean(net), AutoregressiveSampleConfig(guidance=guidance, leave=False), Coordinates(BINS).constraint)
    assert torch.equal(Sampler(stays)(text, seeds, 12, num_asked=num_asked)[0], whole)


def test_every_sample_is_a_canonical_mesh_and_begins_with_what_is_known() -> None:
    net, text, given = generator(), words(3), canonical(3, 4)
    config = AutoregressiveSampleConfig(guidance=2.0)
    known = Known(given, torch.tensor([4, 0, 2]))
    found, ends = Sampler(Writer(Lean(net), config, Coordinates(BINS).constraint))(text, torch.arange(3), 12, known=known)
    order = FaceOrder(BINS)
    for row, (length, kept) in enumerate(zip(ends.tolist(), (4, 0, 2), strict=True)):
        assert torch.equal(found[row, :kept], given[row, :kept])
        faces = [order.vertices(face.unbind()).tolist() for face in found[row, :length]]
        assert faces == sorted(faces)
        assert length >= max(1, kept)
        assert not found[row, length:].any()


def test_lengths_are_told_by_quarters_of_an_octave_and_change_the_guess() -> None:
    classes = length_class(torch.tensor([0, 1, 2, 4, 100, 101, 2**20]))
    assert classes.tolist() == [LENGTHS - 1, 0, 4, 8, 26, 26, 63]
    net, ids = generator(), canonical(1, 2)
    asked = [net(ids, words(1), torch.tensor([value])) for value in (3, 30)]
    assert not torch.allclose(asked[0], asked[1])


def test_captions_and_lengths_are_taken_away_as_often_as_asked() -> None:
    net, ids = generator(), canonical(64, 1)
    seen: dict[str, Tensor] = {}
    net.register_forward_hook(lambda module, given, out: seen.update(mask=given[1].mask, lengths=given[2]))
    losses = AutoregressiveLosses(AutoregressiveLossConfig(text_dropout_prob=0.25, length_dropout_prob=0.5))
    losses.turn({"generator": net}, batch_of(ids, [1] * 64, words(64)), Context(3, 0, torch.arange(64)))
    assert 0.1 < (~seen["mask"].any(1)).float().mean() < 0.4
    assert 0.3 < (seen["lengths"] == LENGTHS - 1).float().mean() < 0.7


def test_dropout_is_of_training_alone() -> None:
    plain, ids, text = generator(), canonical(2, 3), words(2)
    net = Autoregressive(SMALL.model_copy(update={"dropout": 0.3}), BINS, (3, 3), TEXT)
    net.load_state_dict(plain.state_dict())
    wanted = plain(ids, text, anything(2))
    assert torch.equal(plain.train()(ids, text, anything(2)), wanted), "none is asked for"
    assert torch.equal(net.eval()(ids, text, anything(2)), wanted)
    first, second = (net.train()(ids, text, anything(2)) for _ in range(2))
    assert (first - wanted).abs().mean() > 0.01
    assert (first - second).abs().mean() > 0.01


def test_every_part_of_a_layer_is_dropped_by_itself_and_as_often_as_asked() -> None:
    """Attention, text, sketch and feed-forward add 1, 10, 100 and 1,000, or nothing; what stays is made louder by 1 / (1 - p)."""
    torch.manual_seed(0)
    config = SMALL.model_copy(update={"dropout": 0.25})
    layer = Layer(config, TEXT, CausalAttention(config.width, config.heads))
    layer.feed_forward.forward = lambda x: torch.full_like(x, 1000)  # type: ignore[method-assign]
    parts = [lambda x, own=own: torch.full_like(x, own) for own in (1, 10, 100)]
    found = 0.75 * layer.along(torch.zeros(8, 64, 32), *parts).double()
    digits = [(found / own).round() % 10 for own in (1, 10, 100, 1000)]
    assert set(torch.stack(digits).flatten().tolist()) == {0, 1}
    assert torch.allclose(found, sum(digit * own for digit, own in zip(digits, (1, 10, 100, 1000), strict=True)))
    assert torch.stack(digits).mean((1, 2, 3)).tolist() == pytest.approx([0.75] * 4, abs=0.02)
    pairs = torch.corrcoef(torch.stack(digits).flatten(1))
    assert (pairs - torch.eye(4)).abs().max() < 0.03, "each by itself"


def trained(batch: SequenceBatch, steps: int, **loss: float) -> Autoregressive:
    torch.manual_seed(0)
    config = AutoregressiveStageConfig(model=SMALL, loss=AutoregressiveLossConfig(**loss))
    stage = build_stage(config, build_nets(config, vocab_size=BINS, group=(3, 3), text_width=TEXT))
    net = stage.nets["generator"]
    assert isinstance(net, Autoregressive)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(steps):
        made = stage.turns[0].loss(stage.all_nets, batch, Context(step, 0, batch.positions))
        optimizer.zero_grad()
        (made.total / made.weight).backward()
        optimizer.step()
    return net.eval()


def test_meshes_are_learned_by_heart_and_told_apart_by_their_text() -> None:
    text, lengths = words(4), [5, 3, 4, 5]
    batch = batch_of(canonical(4, 5, seed=3), lengths, text)
    net, config = trained(batch, 250, text_dropout_prob=0.1), AutoregressiveSampleConfig(guidance=1.0, temperature=0)
    found, ends = Sampler(Writer(Lean(net), config, Coordinates(BINS).constraint))(text, torch.arange(4), 8)
    assert ends.tolist() == lengths
    assert torch.equal(found[:, :5], batch.ids)


def test_meshes_are_told_apart_by_the_number_of_faces_that_is_asked_for() -> None:
    """Of one text."""
    text, lengths = rows_of(words(1), [0, 0]), [2, 5]
    batch = batch_of(canonical(2, 5, seed=3), lengths, text)
    net, config = trained(batch, 300), AutoregressiveSampleConfig(guidance=1.0, temperature=0)
    sampler = Sampler(Writer(Lean(net), config, Coordinates(BINS).constraint))
    found, ends = sampler(text, torch.arange(2), 8, lengths=torch.tensor(lengths))
    assert ends.tolist() == lengths
    assert torch.equal(found[:, :5], batch.ids)
    _, others = sampler(text, torch.arange(2), 8, lengths=torch.tensor(lengths[::-1]))
    assert others.tolist() == lengths[::-1]
