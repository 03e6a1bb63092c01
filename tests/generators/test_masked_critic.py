"""The token critic: what it is shown, what it is asked, who learns from it; and that it tells wrong tokens from right ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.config import EngineConfig
from tessera.contracts import Context, Stage
from tessera.engine.dist import World
from tessera.engine.state import place
from tessera.engine.step import Setting, train_step
from tessera.generators.masked.critic import CriticHead, CriticNet, judge
from tessera.generators.masked.losses import Filled, MaskedLosses
from tessera.generators.masked.masking import hide
from tessera.generators.masked.model import Low
from tessera.generators.masked.stage import MaskedStageConfig, build_nets, build_stage
from tests.generators.masked_toys import random_batch, stirred, wordless

NET = {"kind": "net", "model": {"width": 32, "depth": 2, "heads": 2}}
HEAD, HEAD_ALONE = {"kind": "head"}, {"kind": "head", "weight": 0.0}


def stage_of(critic: dict[str, Any], grid: tuple[int, ...] = (3, 4), low: Low | None = None, seed: int = 0) -> Stage:
    torch.manual_seed(seed)
    config = MaskedStageConfig.model_validate(
        {"model": {"width": 32, "depth": 2, "heads": 2}, "critic": critic, "loss": {"label_smoothing": 0.0}}
    )
    nets = build_nets(config, vocab_size=30, grid=grid, text_width=16, low=low)
    stirred(nets["generator"])
    return build_stage(config, nets)


def grids(first: int, size: int) -> Tensor:
    """b 4 4: two halves, either of one of four tokens, all of one of three styles."""
    draws = torch.randint(12, (size, 3), generator=torch.Generator().manual_seed(first))
    ids = (draws[:, 0] % 4)[:, None, None].expand(size, 4, 4).clone()
    ids[:, :, 2:] = (draws[:, 1] % 4 + 4)[:, None, None]
    return ids + 10 * (draws[:, 2] % 3)[:, None, None]


def area(scores: Tensor, wrong: Tensor) -> float:
    """Under the curve: how often a wrong token scores above a right one."""
    return (scores[wrong][:, None] > scores[~wrong][None]).float().mean().item()


# ---- what is handed on


def test_the_critic_is_shown_draws_of_the_generator_in_place_of_hidden_tokens() -> None:
    stage, data = stage_of(NET), wordless(torch.randint(30, (64, 3, 4), generator=torch.Generator().manual_seed(0)), 16)
    data = replace(data, valid=torch.arange(64) != 5)
    losses = MaskedLosses(MaskedStageConfig().loss)
    filled = losses.turn(stage.nets, data, Context(3, 1, data.positions)).hand
    assert isinstance(filled, Filled)
    ids, hidden = data.ids.flatten(1), hide(1, 3, data.positions, 12)
    assert torch.equal(filled.ids[~hidden], ids[~hidden])
    assert filled.ids.max() < 30
    assert torch.equal(filled.wrong, filled.ids != ids)
    assert torch.equal(filled.guessed, hidden & (torch.arange(64) != 5)[:, None])
    assert not filled.given.text.states.requires_grad
    same = losses.turn(stage.nets, data, Context(3, 1, data.positions)).hand
    assert torch.equal(same.ids, filled.ids)
    later = losses.turn(stage.nets, data, Context(4, 1, data.positions)).hand
    assert not torch.equal(later.ids, filled.ids)


@pytest.mark.parametrize("vocabulary", [30, 2**14])
def test_draws_are_those_of_the_generators_distribution(vocabulary: int) -> None:
    """A generator that is sure draws what it is sure of, whichever digits tokens have."""
    torch.manual_seed(0)
    config = MaskedStageConfig.model_validate({"model": {"width": 16, "depth": 1, "heads": 1}, "critic": NET})
    nets = build_nets(config, vocab_size=vocabulary, grid=(3, 4), text_width=32)
    net, wanted = nets["generator"], vocabulary - 7
    net.head.weight.data.zero_()
    start = 0
    for size, digit in zip(net.digits, net.split(torch.tensor(wanted)), strict=True):
        net.head.bias.data[start + int(digit)] = 50.0
        start += size
    data = replace(random_batch(4, vocabulary=vocabulary), text=wordless(torch.zeros(4, 3, 4), 32).text)
    filled = MaskedLosses(config.loss).turn(nets, data, Context(0, 0, data.positions)).hand
    assert (filled.ids[filled.guessed] == wanted).all()


def test_the_loss_asks_for_wrong_tokens_among_the_guessed() -> None:
    stage, data = stage_of(NET), wordless(grids(0, 8)[:, :3], 16)
    stage.nets["critic"].head.head.weight.data.normal_()
    losses = MaskedLosses(MaskedStageConfig().loss)
    filled = losses.turn(stage.nets, data, Context(0, 0, data.positions)).hand
    found = losses.critic_turn(stage.nets, data, Context(0, 0, data.positions, {"generator": filled}))
    logits = judge(stage.nets["critic"], stage.nets["generator"], filled.ids, filled.given.text, None)
    chances = logits.sigmoid()[filled.guessed]
    wrong = filled.wrong[filled.guessed].float()
    torch.testing.assert_close(found.total, -(wrong * chances.log() + (1 - wrong) * (1 - chances).log()).sum())
    assert found.weight == filled.guessed.sum()
    torch.testing.assert_close(found.total, F.binary_cross_entropy(chances, wrong, reduction="sum"))


# ---- who learns


@pytest.mark.parametrize(
    ("critic", "kind", "turns"),
    [
        (NET, CriticNet, {"generator": ("generator",), "critic": ("critic",)}),
        (HEAD_ALONE, CriticHead, {"generator": ("generator",), "critic": ("critic",)}),
        (HEAD, CriticHead, {"generator": ("generator", "critic")}),
    ],
)
def test_the_engine_trains_the_critic(critic: dict[str, Any], kind: type, turns: dict[str, tuple[str, ...]]) -> None:
    """By the engine's own step, which refuses turns that reach other nets than they say."""
    stage = stage_of(critic, (4, 4))
    assert isinstance(stage.nets["critic"], kind)
    assert {turn.name: turn.trains for turn in stage.turns} == turns
    assert set(stage.averaged) == {"generator", "critic"}
    world = World(0, 1, torch.device("cpu"))
    state = place(stage, 0, EngineConfig(), world.device)
    before = {net: [p.detach().clone() for p in stage.nets[net].parameters()] for net in stage.nets}
    for step in range(3):
        report = train_step(state, stage, [wordless(grids(step, 8), 16, 8 * step)], Setting(world, 100))
        assert [turn.turn.name for turn in report.turns] == list(turns)
    for net, parameters in before.items():
        moved = [not torch.equal(old, new) for old, new in zip(parameters, stage.nets[net].parameters(), strict=True)]
        assert sum(moved) >= 0.75 * len(moved), net  # without text, what reads it stays


def test_a_head_alone_leaves_the_generator_alone() -> None:
    stage, data = stage_of(HEAD_ALONE), wordless(grids(0, 8)[:, :3], 16)
    losses = MaskedLosses(MaskedStageConfig().loss)
    filled = losses.turn(stage.nets, data, Context(0, 0, data.positions)).hand
    losses.critic_turn(stage.nets, data, Context(0, 0, data.positions, {"generator": filled})).total.backward()
    assert all(p.grad is None for p in stage.nets["generator"].parameters())
    assert stage.nets["critic"].head.weight.grad.abs().sum() > 0


def test_a_weighted_head_adds_to_the_generators_loss() -> None:
    stage, data = stage_of(HEAD), wordless(grids(0, 8)[:, :3], 16)
    stage.nets["critic"].head.weight.data.normal_()
    plain, joint = (MaskedLosses(MaskedStageConfig().loss, weight) for weight in (0.0, 0.5))
    context = Context(0, 0, data.positions)
    first, second = plain.turn(stage.nets, data, context), joint.turn(stage.nets, data, context)
    judged = plain.critic_turn(stage.nets, data, replace(context, handed={"generator": first.hand}))
    torch.testing.assert_close(second.total, first.total + 0.5 * judged.total)
    torch.testing.assert_close(second.parts["critic"], judged.total.detach())
    assert first.weight == second.weight == judged.weight


def test_validation_measures_the_critic_and_repeats() -> None:
    stage, data = stage_of(NET), wordless(grids(0, 8)[:, :3], 16)
    assert stage.measure is not None
    first, second = (stage.measure(stage.nets, data, Context(step, 0, data.positions)) for step in (3, 900))
    assert first.parts.keys() == {"right", "critic", "critic_right"}
    for name, value in first.parts.items():
        assert torch.equal(value, second.parts[name])
    assert torch.equal(first.total, second.total)
    without = MaskedLosses(MaskedStageConfig().loss).measure(
        {"generator": stage.nets["generator"]}, data, Context(0, 0, data.positions)
    )
    torch.testing.assert_close(without.total, first.total)


def test_a_critic_of_a_refining_generator_sees_the_coarse_tokens() -> None:
    stage = stage_of(NET, (4, 4), Low(9, (2, 2)))
    data = wordless(grids(0, 4), 16, low=torch.randint(9, (4, 2, 2)))
    context = Context(0, 0, data.positions)
    loss = stage.turns[0].loss(stage.nets, data, context)
    assert stage.turns[1].loss(stage.nets, data, replace(context, handed={"generator": loss.hand})).total > 0


def test_a_critic_with_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="one pass"):
        MaskedStageConfig.model_validate({"critic": {"kind": "net", "model": {"self_conditioning": True}}})


# ---- learning


@pytest.mark.parametrize("critic", [pytest.param(NET, id="net"), pytest.param(HEAD, id="head", marks=pytest.mark.slow)])
def test_it_tells_wrong_tokens_from_right_ones(critic: dict[str, Any]) -> None:
    stage = stage_of(critic, (4, 4))
    adams = [torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.98)) for net in stage.nets.values()]
    for step in range(350):
        data, handed = wordless(grids(step, 32), 16, 32 * step), {}
        for turn in stage.turns:
            loss = turn.loss(stage.nets, data, Context(step, 0, data.positions, handed))
            (loss.total / loss.weight).backward()
            handed[turn.name] = loss.hand
        for adam in adams:
            adam.step()
            adam.zero_grad()
    data = wordless(grids(10**6, 128), 16)
    filled = stage.turns[0].loss(stage.nets, data, Context(0, 1, data.positions)).hand
    with torch.no_grad():
        scores = judge(stage.nets["critic"], stage.nets["generator"], filled.ids, filled.given.text, None)
    wrong = filled.wrong[filled.guessed]
    assert 0.2 < wrong.float().mean() < 0.8
    assert area(scores[filled.guessed], wrong) > 0.8
