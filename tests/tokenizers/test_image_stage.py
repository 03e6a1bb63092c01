"""The stage inside the real step: one forward for both turns, turns at their boundaries, and a batch learned by heart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.batches import ImageBatch
from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Stage
from tessera.engine.dist import World
from tessera.engine.state import TrainState, place
from tessera.engine.step import Setting, StepReport, train_step
from tessera.nn.perceptual import VGG16Distance
from tessera.tokenizers.image.critic import CriticConfig, PenaltyConfig
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig
from tessera.tokenizers.image.stage import ImageTokenizerStageConfig, build_stage

CPU = torch.device("cpu")
CRITIC = CriticConfig(widths=(8, 8), start_step=3, warmup_steps=2)


def config(critic: CriticConfig | None = CRITIC, lr: float = 1e-3) -> ImageTokenizerStageConfig:
    optim = OptimConfig(lr=lr, warmup_steps=0, schedule="constant")
    return ImageTokenizerStageConfig(
        model=ImageTokenizerConfig(widths=(16, 16), blocks=(1, 1)), critic=critic, optim=optim, critic_optim=optim
    )


def start(stage_config: ImageTokenizerStageConfig, perceptual: nn.Module | None = None) -> tuple[Stage, TrainState]:
    torch.manual_seed(0)
    stage = build_stage(stage_config, 3, perceptual)
    return stage, place(stage, 0, EngineConfig(), CPU)


def step(stage: Stage, state: TrainState, batches: Sequence[ImageBatch]) -> StepReport:
    return train_step(state, stage, batches, Setting(World(0, 1, CPU), 1000))


def batch(num: int = 4, first: int = 0) -> ImageBatch:
    """Smooth pictures, so that a small net can learn them."""
    rng = torch.Generator().manual_seed(first)
    coarse = torch.rand(num, 3, 3, 3, generator=rng) * 2 - 1
    images = nn.functional.interpolate(coarse, size=16, mode="bilinear")
    names = tuple(str(first + index) for index in range(num))
    return ImageBatch(images, torch.ones(num, dtype=torch.bool), torch.arange(first, first + num), names, (None,) * num)


@contextmanager
def watched(net: nn.Module) -> Iterator[list[tuple[Tensor, Any]]]:
    """Inputs and outputs of every call."""
    calls: list[tuple[Tensor, Any]] = []
    hook = net.register_forward_hook(lambda module, inputs, output: calls.append((inputs[0].detach().clone(), output)))
    yield calls
    hook.remove()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


# ---- one forward


@pytest.mark.parametrize("num_micro", [1, 3])
def test_both_turns_share_one_forward(num_micro: int) -> None:
    stage, state = start(config())
    state.step = 3
    nn.init.normal_(stage.nets["tokenizer"].get_parameter("decoder.out.weight"), std=0.1)  # not grey any more
    batches = [batch(2, 2 * index) for index in range(num_micro)]
    with watched(stage.nets["tokenizer"]) as made, watched(stage.nets["critic"]) as judged:
        report = step(stage, state, batches)
    assert [turn.turn.name for turn in report.turns] == ["tokenizer", "critic"]
    assert len(made) == num_micro
    assert len(judged) == 2 * num_micro  # the plea; the made and the real ones together
    for index in range(num_micro):
        picture = made[index][1].images
        assert torch.equal(judged[index][0], picture)  # the plea
        both = torch.cat([picture, batches[index].images])  # the same, though the tokenizer was updated in between
        assert torch.equal(judged[num_micro + index][0], both)


def test_a_turn_sends_no_gradient_into_the_other_net() -> None:
    stage, state = start(config())
    state.step = 3
    before = {name: weights(net) for name, net in stage.nets.items()}
    step(stage, state, [batch()])
    assert all(not torch.equal(before[name], weights(net)) for name, net in stage.nets.items())
    assert all(p.grad is None for net in stage.nets.values() for p in net.parameters())
    assert all(p.requires_grad for net in stage.nets.values() for p in net.parameters())


# ---- turns at their boundaries


def test_turns_begin_where_the_config_says() -> None:
    stage, state = start(config())  # the critic learns from step 1 on, the tokenizer hears it from step 3 on
    seen = []
    for _ in range(5):
        critic, tokenizer = weights(stage.nets["critic"]), weights(stage.nets["tokenizer"])
        report = step(stage, state, [batch()])
        parts = report.turns[0].sums.numbers
        assert not torch.equal(tokenizer, weights(stage.nets["tokenizer"]))
        seen.append(("plea" in parts, len(report.turns) == 2, not torch.equal(critic, weights(stage.nets["critic"]))))
    assert seen == [(False, False, False), (False, True, True), (False, True, True), (True, True, True), (True, True, True)]


@pytest.mark.parametrize(("start_step", "warmup_steps", "first"), [(0, 0, 0), (0, 10, 0), (5, 10, 0), (10, 4, 6)])
def test_first_step_of_the_critic(start_step: int, warmup_steps: int, first: int) -> None:
    critic = CriticConfig(widths=(8, 8), start_step=start_step, warmup_steps=warmup_steps)
    stage, _ = start(config(critic))
    assert stage.turns[1].start == critic.first_step == first


def test_the_plea_changes_the_update_only_from_its_start_on() -> None:
    """With and without a critic the tokenizer goes the same way until it hears it."""
    both = [start(config(critic)) for critic in (CRITIC, None)]
    for index in range(5):
        for stage, state in both:
            step(stage, state, [batch()])
        equal = torch.equal(*(weights(stage.nets["tokenizer"]) for stage, _ in both))
        assert equal is (index < 3)


def test_without_a_critic_there_is_one_net_and_one_turn() -> None:
    stage, state = start(config(None))
    assert list(stage.nets) == list(stage.optim) == ["tokenizer"]
    assert len(step(stage, state, [batch()]).turns) == 1


def test_the_perceptual_net_is_frozen_and_outside_of_everything() -> None:
    stage, state = start(config(None), perceptual=VGG16Distance().train())
    eyes = stage.frozen["perceptual"]
    before = weights(eyes)
    report = step(stage, state, [batch(1)])
    assert report.turns[0].sums.numbers["perceptual"] > 0
    assert torch.equal(before, weights(eyes))
    assert not eyes.training
    assert all(p.grad is None and not p.requires_grad for p in eyes.parameters())
    assert set(state.nets) == set(state.optimizers) == set(state.averages) == {"tokenizer"}


# ---- running statistics of the latents


@pytest.mark.parametrize("num", [1, 4])
def test_latents_are_standardised_over_batches_too(num: int) -> None:
    """Flat pictures, one or four a batch: what varies is mostly between batches, and counts as much as what varies within."""
    stage, state = start(config(None, lr=1e-7))
    flat = [torch.full((num, 3, 16, 16), level) + 0.3 * torch.rand(num, 3, 1, 1) for level in (-0.9, -0.3, 0.2, 0.6)]
    every = []
    for index in range(60):
        data = batch(num, index)
        images = flat[index % 4]
        step(stage, state, [ImageBatch(images, data.valid, data.positions, data.keys, data.captions)])
        every.append(images)
    net = stage.nets["tokenizer"]
    assert isinstance(net, ImageTokenizer)
    latents = net.latent(torch.cat(every[-4:])).detach().flatten(0, 2)
    torch.testing.assert_close(net.latent_mean, latents.mean(0), rtol=0.05, atol=0.02)
    torch.testing.assert_close(net.latent_variance, latents.var(0, unbiased=False), rtol=0.1, atol=0.01)
    average = state.averages["tokenizer"]
    assert isinstance(average, ImageTokenizer)
    torch.testing.assert_close(average.latent_variance, net.latent_variance, rtol=0.2, atol=0.02)  # the averaged net has its own


# ---- learning


@pytest.mark.parametrize(
    "critic",
    [
        None,
        CriticConfig(widths=(8, 8), start_step=0, adaptive=True, weight=0.05, penalty=PenaltyConfig(every=4)),
    ],
    ids=["alone", "with a critic"],
)
def test_a_batch_is_learned_by_heart(critic: CriticConfig | None) -> None:
    stage, state = start(config(critic, lr=3e-3))
    data = [batch(2)]
    errors = []
    for _ in range(150):
        numbers = step(stage, state, data).turns[0].sums.numbers
        errors.append((numbers["l1"] + numbers["l2"]).item())
    assert min(errors[-10:]) * 5 < errors[0]
