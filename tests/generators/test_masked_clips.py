"""Drawing clips with the masked generator: frames that are not there, known frames, and the distribution of what follows them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tessera.batches import TextStates
from tessera.contracts import Context
from tessera.generators.masked.frames import FrameMaskConfig
from tessera.generators.masked.losses import MaskedLossConfig, MaskedLosses
from tessera.generators.masked.model import MaskedConfig, MaskedTransformer
from tessera.generators.masked.order import halton_ranks, num_revealed
from tessera.generators.masked.replay import GraphedSampler
from tessera.generators.masked.sample import Drawer, MaskedSampleConfig, sample
from tessera.generators.masked.windows import Span, Window, draw_long
from tessera.recording import tensors_of
from tests.generators.masked_toys import generator, random_text, wordless
from tests.generators.test_masked_frames import CLIP, VOCABULARY, clip_critic, shifted_copy, steps_of
from tests.generators.test_masked_sample import filled_with

ORDERS = [("halton", 0.3), ("confidence", 0.3), ("critic", 0.0)]
FRAMES = "11111 11000 01110 10000"


def known_prefix() -> Tensor:
    """4 n: nothing, one frame, the first one that is there, and half of the only one; 3 in places that are absent."""
    known = torch.full((4, *CLIP), VOCABULARY)
    known[~steps_of(FRAMES)] = 3
    known[1, 0], known[2, 1], known[3, 0, 0] = 5, 6, 7
    return known.flatten(1)


@pytest.mark.parametrize(("order", "remask"), ORDERS)
@pytest.mark.parametrize("recalls", [False, True])
def test_absent_tokens_are_not_drawn_and_known_ones_stay(order: str, remask: float, recalls: bool) -> None:
    net, frames, known = generator(CLIP, recalls=recalls), steps_of(FRAMES), known_prefix()
    config = MaskedSampleConfig(steps=5, order=order, remask=remask, top_p=0.95)
    drawer = Drawer(net, config, clip_critic())
    setup, state = drawer.prepare(random_text(4), torch.arange(4), None, known, None, frames)
    present = frames.repeat_interleave(4, dim=1)
    unknown = present & (known == VOCABULARY)
    assert torch.equal(setup.open, unknown)
    assert unknown.sum(1).tolist() == [20, 4, 8, 2]
    with torch.no_grad():
        for step in range(6):
            hidden = state.ids == VOCABULARY
            assert not (hidden & ~unknown).any()
            assert torch.equal((unknown & ~hidden).sum(1), num_revealed(5, unknown.sum(1))[step])
            assert torch.equal(state.ids[present & ~unknown], known[present & ~unknown])
            assert (state.ids[~present] == 0).all()
            state = drawer.step_once(setup, state) if step < 5 else state
    assert (state.ids < VOCABULARY).all()
    found = GraphedSampler(net, config, clip_critic())(random_text(4), torch.arange(4), known=known, frames=frames)
    assert torch.equal(found, state.ids)


@pytest.mark.parametrize(("order", "remask"), ORDERS)
def test_a_clip_depends_on_its_own_frames_alone(order: str, remask: float) -> None:
    net, frames, known = generator(CLIP), steps_of(FRAMES), known_prefix()
    config, text, seeds = MaskedSampleConfig(steps=5, order=order, remask=remask), random_text(4), torch.arange(4)
    whole = sample(net, text, seeds, config, known=known, critic=clip_critic(), frames=frames)
    other = torch.where(frames.repeat_interleave(4, dim=1), known, 11)
    assert torch.equal(sample(net, text, seeds, config, known=other, critic=clip_critic(), frames=frames), whole)
    moved = [2, 0, 3, 1]
    turned = TextStates(text.states[moved], text.mask[moved], text.pooled[moved])
    found = sample(net, turned, seeds[moved], config, known=known[moved], critic=clip_critic(), frames=frames[moved])
    assert torch.equal(found, whole[moved])
    primed = known.clone()
    primed[1, :4], primed[2, 4:8] = 8, 9
    again = sample(net, text, seeds, config, known=primed, critic=clip_critic(), frames=frames)
    assert not torch.equal(torch.cat([again[1, 4:8], again[2, 8:16]]), torch.cat([whole[1, 4:8], whole[2, 8:16]])), "is seen"


def test_a_shorter_clip_is_drawn_as_by_a_smaller_generator() -> None:
    """In one step, in which order does not matter; noise is by place."""
    net, config = generator(CLIP), MaskedSampleConfig(steps=1)
    frames = steps_of("11100 11100")
    found = sample(net, random_text(2), torch.arange(2), config, frames=frames)
    assert torch.equal(found[:, :12], sample(shifted_copy(net, 0, 3), random_text(2), torch.arange(2), config))


def test_all_frames_are_no_frames() -> None:
    net, config = generator(CLIP), MaskedSampleConfig(steps=4)
    found = sample(net, random_text(3), torch.arange(3), config, frames=torch.ones(3, 5, dtype=torch.bool))
    assert torch.equal(found, sample(net, random_text(3), torch.arange(3), config))
    with pytest.raises(ValueError, match="expected b 5"):
        sample(net, random_text(3), torch.arange(3), config, frames=torch.ones(3, 3, dtype=torch.bool))


def test_one_recorded_step_of_clips_serves_all() -> None:
    """Frames and known tokens are data of the recording: recorded with some, it draws others."""
    config = MaskedSampleConfig(steps=5, order="critic")
    drawer = Drawer(generator(CLIP), config, clip_critic())
    first = drawer.prepare(random_text(4), torch.arange(4), None, None, None, steps_of("11111 " * 4))
    second = drawer.prepare(random_text(4, seed=1), torch.arange(4) + 9, None, known_prefix(), None, steps_of(FRAMES))

    def step(*tensors: Tensor) -> list[Tensor]:
        parts = iter(tensors)
        return tensors_of(drawer.step_once(filled_with(first[0], parts), filled_with(first[1], parts)))

    with torch.no_grad():
        recorded = make_fx(step)(*tensors_of(first[0]), *tensors_of(first[1]))
        now = tensors_of(second[1])
        for _ in range(5):
            now = recorded(*tensors_of(second[0]), *now)
    wanted = sample(
        drawer.net, random_text(4, seed=1), torch.arange(4) + 9, config,
        known=known_prefix(), critic=drawer.critic, frames=steps_of(FRAMES),
    )  # fmt: skip
    assert torch.equal(filled_with(first[1], iter(now)).ids, wanted)


def test_nothing_waits_for_the_device() -> None:
    net, judge = generator(CLIP).to("meta"), clip_critic().to("meta")
    text, meta = TextStates.none(2, 32).to(torch.device("meta")), {"device": "meta"}
    for order, remask in ORDERS:
        config = MaskedSampleConfig(steps=2, order=order, remask=remask)
        frames, known = torch.ones(2, 5, dtype=torch.bool, **meta), torch.zeros(2, 20, dtype=torch.long, **meta)
        seeds = torch.zeros(2, dtype=torch.long, **meta)
        assert sample(net, text, seeds, config, known=known, critic=judge, frames=frames).shape == (2, 20)


# ---- continuation is the conditional


PURE = {"guidance": 1.0, "min_share": 0.0, "remask": 0.0, "temperature": 1.0}


def enumerated(net: MaskedTransformer, known: list[int], frames: str) -> dict[tuple[int, ...], float]:
    """The probability of every grid: places one by one in Halton order, each given those before it, absent ones 0."""
    there = steps_of(frames)
    present = net.spread(there)[0].tolist()
    start = tuple(token if here else 0 for token, here in zip(known, present, strict=True))
    grids = {start: 1.0}
    for place in halton_ranks(net.grid).argsort().tolist():
        if start[place] != net.mask_id:
            continue
        further: dict[tuple[int, ...], float] = {}
        for grid, chance in grids.items():
            logits = net.logits(net(torch.tensor([grid]), TextStates.none(1, 16), frames=there))[0][0, place]
            for token, prob in enumerate(logits.double().softmax(-1).tolist()):
                further[(*grid[:place], token, *grid[place + 1 :])] = chance * prob
        grids = further
    return grids


@pytest.mark.parametrize(
    ("grid", "known", "frames"),
    [
        ((3, 1, 1), [1, 3, 3], "111"),
        ((3, 1, 1), [2, 3, 0], "111"),  # in between
        ((2, 1, 2), [0, 2, 3, 3], "11"),
        ((4, 1, 1), [3, 1, 3, 3], "0111"),  # a later window
        ((4, 1, 1), [2, 3, 3, 3], "1110"),  # a shorter clip
    ],
)
@torch.no_grad()
def test_what_follows_has_the_networks_own_conditional(grid: tuple[int, ...], known: list[int], frames: str) -> None:
    net, count = generator(grid, vocabulary=3, width=16), 20_000
    net.head.weight.data.mul_(0.1)
    wanted = enumerated(net, known, frames)
    unknown = round(math.log(len(wanted), 3))
    assert sum(wanted.values()) == pytest.approx(1)
    found = sample(
        net, TextStates.none(count, 16), torch.arange(count), MaskedSampleConfig(steps=unknown, **PURE),
        known=torch.tensor([known]).expand(count, -1), frames=steps_of(frames).expand(count, -1),
    )  # fmt: skip
    rows = [tuple(row) for row in found.tolist()]
    assert set(rows) <= set(wanted)
    for row, prob in wanted.items():
        assert abs(rows.count(row) - count * prob) < 4 * math.sqrt(count * prob * (1 - prob)) + 1, row
    assert max(wanted.values()) < 0.95, "something to choose"


# ---- trained on a table: first latents are tokens 3 to 5, all others 0 to 2

NEXT = torch.tensor([[0.7, 0.2, 0.1], [0.05, 0.25, 0.7], [0.4, 0.55, 0.05]])  # a row for each token; any first is as likely
TABLE = torch.einsum("ab,bc,cd->abcd", NEXT, NEXT, NEXT) / 3


def chain(size: int, seed: int) -> Tensor:
    """b 4 1 1: tokens of the table, in numbers that are off its probabilities by less than one (systematic sampling)."""
    draws = torch.Generator().manual_seed(seed)
    points = (torch.arange(size) + torch.rand(1, generator=draws)) / size
    cells = torch.searchsorted(TABLE.flatten().cumsum(0), points).clamp(max=80)[torch.randperm(size, generator=draws)]
    tokens = torch.stack([cells // 27 + 3, cells // 9 % 3, cells // 3 % 3, cells % 3], dim=1)
    return tokens[..., None, None]


@pytest.fixture(scope="module")
def trained() -> MaskedTransformer:
    torch.manual_seed(0)
    net = MaskedTransformer(MaskedConfig(width=32, depth=2, heads=2), 6, (4, 1, 1), 8)
    masks, steps = FrameMaskConfig(prefix_prob=0.4, between_prob=0.3, later_prob=0.3), 300
    losses, adam = MaskedLosses(MaskedLossConfig(frames=masks)), torch.optim.AdamW(net.parameters(), betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-2, steps)
    for step in range(steps):
        data = wordless(chain(192, step), 8, 192 * step)
        loss = losses.turn({"generator": net}, data, Context(step, 0, data.positions))
        (loss.total / loss.weight).backward()
        adam.step()
        adam.zero_grad()
        rate.step()
    return net.eval()


def drawing(net: MaskedTransformer, seen: list[Window] | None = None) -> Any:
    def window(asked: Window) -> Tensor:
        if seen is not None:
            seen.append(asked)
        size, config = len(asked.seeds), MaskedSampleConfig(steps=4, **PURE)
        return sample(net, TextStates.none(size, 8), asked.seeds, config, known=asked.known, frames=asked.frames)

    return window


def far(found: Tensor, wanted: Tensor) -> float:
    """Total variation between drawn tokens (b k) and probabilities, an axis for each of the k; other tokens are all wrong."""
    size = len(wanted)
    flat = sum(column * size**power for power, column in enumerate(reversed(found.unbind(1))))
    counts = torch.bincount(flat[((found >= 0) & (found < size)).all(1)], minlength=wanted.numel()) / len(found)
    return ((counts - wanted.flatten()).abs().sum().item() + 1 - counts.sum().item()) / 2


def follow(net: MaskedTransformer, known: list[int], frames: str, count: int = 2000) -> Tensor:
    """b n, drawn one by one."""
    there, tokens = steps_of(frames).expand(count, -1), torch.tensor([known]).expand(count, -1)
    config = MaskedSampleConfig(steps=known.count(6), **PURE)
    return sample(net, TextStates.none(count, 8), torch.arange(count), config, known=tokens, frames=there)


def test_a_trained_one_continues_as_the_table_does(trained: MaskedTransformer) -> None:
    """In a first window and in a later one, where place 0 is absent. The rows of the table are 0.35 and more apart."""
    pairs = torch.einsum("ab,bc->abc", NEXT, NEXT)
    for token in range(3):
        first = follow(trained, [token + 3, 6, 6, 6], "1111")[:, 1:3]
        later = follow(trained, [0, token, 6, 6], "0111")[:, 2:]
        for found in (first, later):
            assert far(found, pairs[token]) < 0.16
            assert min(far(found, pairs[other]) for other in range(3) if other != token) > 0.22
        both = follow(trained, [3, token, 6, 6], "1111")[:, 2:]
        assert far(both, pairs[token]) < 0.16, "of two given ones the second decides"


def test_a_trained_one_fills_what_lies_between(trained: MaskedTransformer) -> None:
    for first, last in itertools.product(range(3), range(3)):
        wanted = TABLE[first, :, :, last] / TABLE[first, :, :, last].sum()
        assert far(follow(trained, [first + 3, 6, 6, last], "1111")[:, 1:3], wanted) < 0.18


def test_window_after_window_follows_the_table(trained: MaskedTransformer) -> None:
    """From a first latent 13 by windows of 4: every transition, within a window and across, is one of the table."""
    seen: list[Window] = []
    first = (torch.arange(1500) % 3 + 3).view(-1, 1, 1, 1)
    pieces = list(draw_long(drawing(trained, seen), (4, 1, 1), 6, torch.arange(1500), [Span(13)], overlap=1, given=first))
    assert [piece.ids.shape[1] for piece in pieces] == [4, 2, 2, 2, 2, 1]
    tokens = torch.cat([piece.ids for piece in pieces], dim=1).flatten(1)
    assert torch.equal(tokens[:, :1], first.flatten(1))
    tokens[:, 0] -= 3
    for place in range(12):
        for token in range(3):
            assert far(tokens[tokens[:, place] == token, place + 1, None], NEXT[token]) < 0.18, f"from place {place}"
    later = [window for window in seen if window.frames is not None and not window.frames[0, 0]]
    assert len(later) == 5
