"""Samples of the masked generator: what they depend on, how tokens are drawn, which are revealed and which taken back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tessera.batches import TextStates
from tessera.generators.masked.model import Low
from tessera.generators.masked.order import halton_order, lowest, num_revealed
from tessera.generators.masked.replay import GraphedSampler
from tessera.generators.masked.sample import Drawer, MaskedSampleConfig, Setup, State, sample
from tessera.nn.drawing import draw, implausible, nucleus
from tessera.recording import cloned, copy_tensors, tensors_of
from tessera.text.bytes import read_bytes
from tests.generators.masked_toys import GRID, VOCABULARY, critic, encoder, generator, random_text


def nets() -> dict[str, torch.nn.Module]:
    return {"generator": generator(), "text": encoder()}


# ---- samples


@pytest.mark.parametrize("grid", [(7,), (4, 6), (8, 8), (2, 3, 5), (5, 4, 4, 2)])
def test_halton_visits_every_cell_once_and_spreads(grid: tuple[int, ...]) -> None:
    order = halton_order(grid)
    assert sorted(order.tolist()) == list(range(math.prod(grid)))
    if grid == (8, 8):
        rows, columns = order[:16] // 8, order[:16] % 8
        assert max(torch.bincount(rows // 4 * 2 + columns // 4, minlength=4)) <= 6, "sixteen cells, four quarters"


def test_a_grid_of_five_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="5 axes"):
        halton_order((2, 2, 2, 2, 2))


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


# ---- drawing


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(0)) * 2
    logits[..., 3] = -math.inf
    count = 40_000
    numbers = torch.rand(1, count, generator=torch.Generator().manual_seed(1))
    for temperature in (0.5, 1.0, 2.0):
        found = torch.bincount(draw(logits.expand(1, count, 12), numbers, temperature)[0], minlength=12)
        wanted = (logits[0, 0] / temperature).exp() / (logits[0, 0] / temperature).exp().sum() * count
        assert found[3] == 0
        kept = wanted > 0
        chi_square = ((found - wanted)[kept].square() / wanted[kept]).sum()
        assert chi_square < 29.6, "the 0.1 % point of 10 degrees of freedom"
    for coldest in (0.0, 1e-40, 1e-9, 2e-6):  # divided by it, logits may overflow
        assert torch.equal(draw(100 * logits, numbers[:, :1], coldest), logits.argmax(-1))


def test_the_ends_of_the_unit_interval_stay_inside_the_vocabulary() -> None:
    logits = torch.tensor([-math.inf, 0.0, 1.0, -math.inf]).expand(1, 2, 4)
    assert draw(logits, torch.tensor([[0.0, 1 - 2**-24]])).tolist() == [[1, 2]]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_the_nucleus_is_the_smallest_set_that_has_the_probability(top_p: float) -> None:
    for seed in range(20):
        probs = torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).softmax(-1)
        sets = [set(some) for size in range(1, 8) for some in itertools.combinations(range(7), size)]
        enough = [some for some in sets if sum(probs[index].item() for index in some) >= top_p]
        size = min(len(some) for some in enough)
        wanted = max((some for some in enough if len(some) == size), key=lambda some: sum(probs[index].item() for index in some))
        kept = nucleus(probs, top_p)
        assert set(kept.nonzero()[:, 0].tolist()) == wanted
        assert torch.equal(kept[kept > 0], probs[kept > 0])
    many = draw(probs.log().expand(1, 500, 7), torch.rand(1, 500), top_p=top_p)
    assert set(many.flatten().tolist()) <= wanted


def test_implausible_tokens_are_left_out_and_never_all() -> None:
    assert implausible(torch.zeros(1, 2), 0.9).sum() == 0
    assert implausible(torch.tensor([[0.01, 0.89, 0.1]]).log(), 0.1).tolist() == [[True, False, False]]
    assert implausible(torch.tensor([[0.01, 0.89, 0.1]]).log(), 0.2).tolist() == [[True, False, True]]
    assert implausible(torch.tensor([[0.01, 0.89, 0.1]]).log(), 0.01).sum() == 0


# ---- batches


@pytest.mark.parametrize("order", ["halton", "confidence", "critic"])
@pytest.mark.parametrize("recalls", [False, True])
def test_companions_do_not_change_a_sample(order: str, recalls: bool) -> None:
    low = Low(9, (2, 2))
    net, judge = generator(low=low, recalls=recalls), critic(low=low)
    config = MaskedSampleConfig(steps=5, order=order, remask=0.0 if order == "critic" else 0.3, top_p=0.95)
    text, seeds, below = random_text(4), torch.tensor([5, 6, 7, 5]), torch.randint(9, (4, 4))
    known = torch.full((4, 12), net.mask_id)
    known[1, :6], known[2] = 3, 4
    whole = sample(net, text, seeds, config, known=known, low=below, critic=judge)
    for order_of in ([2, 0, 3, 1], [1, 1, 2, 2]):
        moved = type(text)(text.states[order_of], text.mask[order_of], text.pooled[order_of])
        found = sample(net, moved, seeds[order_of], config, known=known[order_of], low=below[order_of], critic=judge)
        assert torch.equal(found, whole[order_of])
    assert not torch.equal(whole[0], whole[3]), "one seed, two texts"


def test_a_grid_without_hidden_tokens_comes_back_unchanged() -> None:
    known = torch.randint(VOCABULARY, (3, 12))
    for order in ("halton", "confidence", "critic"):
        config = MaskedSampleConfig(steps=3, order=order, remask=0.0 if order == "critic" else 0.5)
        assert torch.equal(sample(generator(), random_text(3), torch.arange(3), config, known=known, critic=critic()), known)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="expected \\(2, 12\\)"):
        sample(generator(), random_text(2), torch.arange(2), MaskedSampleConfig(), known=torch.zeros(2, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="needs a critic"):
        sample(generator(), random_text(2), torch.arange(2), MaskedSampleConfig(order="critic"))


def test_a_negative_text_may_be_longer_than_the_text() -> None:
    net, config = generator(), MaskedSampleConfig(steps=3)
    long = random_text(2, length=9, seed=4)
    found = sample(net, random_text(2), torch.arange(2), config, negative=long)
    swapped = sample(net, long, torch.arange(2), config, negative=random_text(2))
    assert found.shape == swapped.shape == (2, 12)


def test_guidance_1_needs_one_branch_and_gives_what_two_give() -> None:
    net, sizes = generator(), []
    net.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    one = sample(net, random_text(3), torch.arange(3), MaskedSampleConfig(steps=4, guidance=1.0))
    two = sample(net, random_text(3), torch.arange(3), MaskedSampleConfig(steps=4, guidance=1.0 + 1e-7))
    assert sizes == [3] * 4 + [6] * 4
    assert torch.equal(one, two)


# ---- what is visible when


def visible_by_step(config: MaskedSampleConfig, known: Tensor) -> list[State]:
    drawer = Drawer(generator(), config, critic())
    setup, state = drawer.prepare(random_text(len(known)), torch.arange(len(known)), None, known, None)
    states = [state]
    with torch.no_grad():
        for _ in range(config.steps):
            states.append(drawer.step_once(setup, states[-1]))
    return states


@pytest.mark.parametrize(("order", "remask"), [("halton", 0.0), ("halton", 0.4), ("confidence", 0.4), ("critic", 0.0)])
def test_counts_follow_what_was_hidden_at_the_start(order: str, remask: float) -> None:
    known = torch.full((3, 12), VOCABULARY)
    known[1, ::2], known[2, 1:] = 5, 7  # all hidden, half hidden, one hidden
    states = visible_by_step(MaskedSampleConfig(steps=6, order=order, remask=remask), known)
    counts = torch.stack([(state.ids != VOCABULARY).sum(1) - (known != VOCABULARY).sum(1) for state in states])
    assert torch.equal(counts, num_revealed(6, torch.tensor([12, 6, 1])))
    assert (counts[1:] > counts[:-1])[:, 1].all(), "of the half-known grid something is revealed at every step"
    for state in states:
        assert torch.equal(state.ids[known != VOCABULARY], known[known != VOCABULARY])


@pytest.mark.parametrize("order", ["halton", "confidence"])
def test_the_least_sure_go_back(order: str) -> None:
    known = torch.full((4, 12), VOCABULARY)
    known[:, 3] = 1
    states = visible_by_step(MaskedSampleConfig(steps=6, order=order, remask=0.4), known)
    retaken = 0
    for before, after in itertools.pairwise(states):
        shown = (before.ids != VOCABULARY) & (known == VOCABULARY)
        for row in range(4):
            gone = shown[row] & (after.ids[row] == VOCABULARY)
            count, left = int(shown[row].sum()), int((after.ids[row] == VOCABULARY).sum())
            assert gone.sum() == min(math.floor(0.4 * count + 1e-6), left)
            if gone.any() and (shown[row] & ~gone).any():
                assert before.sure[row][gone].max() <= before.sure[row][shown[row] & ~gone].min()
            retaken += int(gone.sum())
            stays = shown[row] & ~gone
            assert torch.equal(after.ids[row][stays], before.ids[row][stays])
    assert retaken > 0
    assert (states[-1].ids != VOCABULARY).all()


def test_the_critic_keeps_what_it_believes_in() -> None:
    known = torch.full((16, 12), VOCABULARY)
    known[:, 0] = 1
    drawer = Drawer(generator(), MaskedSampleConfig(steps=6, order="critic", noise=0.0, min_share=0.0), critic())
    text = random_text(16)
    setup, state = drawer.prepare(text, torch.arange(16), None, known, None)
    taken_back = False
    with torch.no_grad():
        for step in range(6):
            after = drawer.step_once(setup, state)
            shown = state.ids != VOCABULARY
            full = grid_judged(drawer, setup, state)
            wrong = critic()(full, text).masked_fill(known != VOCABULARY, -math.inf)
            for row in range(16):
                kept = after.ids[row] != VOCABULARY
                assert int(kept.sum()) == 1 + int(setup.counts[step + 1, row])
                assert torch.equal(after.ids[row][kept], full[row][kept])
                if not kept.all():
                    assert wrong[row][kept].max() <= wrong[row][~kept].min()
            taken_back |= bool((shown & (after.ids == VOCABULARY)).any())
            state = after
    assert taken_back


def grid_judged(drawer: Drawer, setup: Setup, state: State) -> Tensor:
    """What the critic is given in a step."""
    seen: list[Tensor] = []
    hook = drawer.critic.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    drawer.step_once(setup, state)
    hook.remove()
    return seen[0]


def test_lowest_is_a_sort() -> None:
    scores = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    scores[2, 4:] = math.inf
    found = lowest(scores, torch.arange(5))
    for row, count in enumerate(range(5)):
        assert set(found[row].nonzero()[:, 0].tolist()) == set(
            sorted(range(9), key=lambda cell: scores[row, cell].item())[:count]
        )


# ---- self-conditioning, coarse tokens, no text, replay


def test_each_step_is_given_the_features_of_the_last() -> None:
    net, calls = generator(recalls=True), []

    def keep(_: object, arguments: tuple[Tensor, ...], features: Tensor) -> None:
        calls.append((arguments[3], features))

    net.register_forward_hook(keep)
    sample(net, random_text(2), torch.arange(2), MaskedSampleConfig(steps=4))
    assert (calls[0][0] == 0).all()
    assert all(torch.equal(later[0], earlier[1]) for earlier, later in itertools.pairwise(calls))


def test_both_branches_see_the_coarse_tokens() -> None:
    net, seen = generator(low=Low(9, (2, 2))), []
    net.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[2]))
    below = torch.randint(9, (2, 4), generator=torch.Generator().manual_seed(0))
    sample(net, random_text(2), torch.arange(2), MaskedSampleConfig(steps=1), low=below)
    assert torch.equal(seen[0], torch.cat([below, below]))


def test_without_text_guidance_changes_nothing() -> None:
    net = generator()
    plain, pulled = (
        sample(net, TextStates.none(3, 32), torch.arange(3), MaskedSampleConfig(steps=4, guidance=guidance))
        for guidance in (1.0, 5.0)
    )
    assert torch.equal(plain, pulled)
    assert (plain < VOCABULARY).all()


@pytest.mark.parametrize("bf16", [False, True])
def test_on_a_cpu_the_graphed_sampler_is_the_plain_loop(bf16: bool) -> None:
    net, config = generator(recalls=True), MaskedSampleConfig(steps=4, order="confidence", remask=0.2)
    sampler = GraphedSampler(net, config, bf16=bf16)
    found = sampler(random_text(3), torch.arange(3))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert torch.equal(found, sample(net, random_text(3), torch.arange(3), config))
    assert not sampler.recordings


@pytest.mark.parametrize(("order", "remask"), [("halton", 0.3), ("confidence", 0.0), ("critic", 0.0)])
def test_one_recorded_step_serves_all(order: str, remask: float) -> None:
    """Recorded as a list of tensor operations, in which every number of Python's is fixed: what a CUDA graph does."""
    low = Low(9, (2, 2))
    drawer = Drawer(
        generator(low=low, recalls=True),
        MaskedSampleConfig(steps=5, order=order, remask=remask, top_p=0.9),
        critic(low=low),
    )
    arguments = (random_text(3), torch.arange(3), None, None, torch.randint(9, (3, 4)))
    setup, state = drawer.prepare(*arguments)

    def step(*tensors: Tensor) -> list[Tensor]:
        parts = iter(tensors)
        return tensors_of(drawer.step_once(filled_with(setup, parts), filled_with(state, parts)))

    with torch.no_grad():
        recorded = make_fx(step)(*tensors_of(setup), *tensors_of(state))
        now = tensors_of(state)
        for _ in range(5):
            now = recorded(*tensors_of(setup), *now)
    text, seeds, *_, below = arguments
    wanted = sample(drawer.net, text, seeds, drawer.config, low=below, critic=drawer.critic)
    assert torch.equal(filled_with(state, iter(now)).ids, wanted)


def filled_with(item: Any, tensors: Iterator[Tensor]) -> Any:
    """The same dataclass with other tensors, in the order of `tensors_of`."""
    if isinstance(item, Tensor):
        return next(tensors)
    if not is_dataclass(item):
        return item
    return replace(item, **{part.name: filled_with(getattr(item, part.name), tensors) for part in fields(item)})


def test_buffers_are_copies() -> None:
    setup, state = Drawer(generator(), MaskedSampleConfig()).prepare(random_text(2), torch.arange(2), None, None, None)
    copy = cloned(setup)
    assert [tensor.data_ptr() for tensor in tensors_of(copy)] != [tensor.data_ptr() for tensor in tensors_of(setup)]
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(copy), tensors_of(setup), strict=True))
    other = replace(state, ids=state.ids * 0 + 3)
    copy_tensors(state, other)
    assert (state.ids == 3).all()


def test_nothing_waits_for_the_device() -> None:
    """Meta tensors have shapes and no values: whatever asked for one would fail."""
    low = Low(9, (2, 2))
    net, judge = generator(low=low, recalls=True).to("meta"), critic(low=low).to("meta")
    for order, remask in (("halton", 0.3), ("confidence", 0.0), ("critic", 0.0)):
        config = MaskedSampleConfig(steps=3, order=order, remask=remask, top_p=0.9)
        text = TextStates.none(2, 32).to(torch.device("meta"))
        seeds, below = torch.zeros(2, dtype=torch.long, device="meta"), torch.zeros(2, 4, dtype=torch.long, device="meta")
        assert sample(net, text, seeds, config, low=below, critic=judge).shape == (2, math.prod(GRID))
