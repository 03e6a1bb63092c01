"""Learning rates, parameter groups, optimizer state by name, and the moving average, against formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from toys import PLAIN, WIDTH, Maker, cut, gan, placed, points, setting

from tessera.config import OptimConfig
from tessera.engine.ema import average_of, decay_at, pairs_of, update_average
from tessera.engine.optim import build_optimizer, learning_rate, named_state, restore_state
from tessera.engine.step import train_step

# ---- learning rate


def rates(first_step: int = 0, steps: int = 10, **settings: object) -> list[float]:
    config = OptimConfig.model_validate({"lr": 2.0, "warmup_steps": 0, "final_lr_share": 0.1, **settings})
    return [learning_rate(config, step, first_step, steps) for step in range(first_step, steps)]


def test_constant() -> None:
    assert rates(schedule="constant") == [2.0] * 10
    assert rates(schedule="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_linear() -> None:
    assert rates(schedule="linear") == pytest.approx([2.0, 1.82, 1.64, 1.46, 1.28, 1.10, 0.92, 0.74, 0.56, 0.38])
    assert rates(schedule="linear", warmup_steps=5, steps=9) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0, 1.55, 1.1, 0.65])


def test_cosine() -> None:
    assert rates(schedule="cosine", steps=4, final_lr_share=0.0) == pytest.approx(
        [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]
    )
    assert rates(schedule="cosine", steps=5, warmup_steps=1, final_lr_share=0.5) == pytest.approx(
        [2.0, 2.0, 1.5 + 0.5 * math.sqrt(0.5), 1.5, 1.5 - 0.5 * math.sqrt(0.5)]
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_ends_at_the_final_share_and_stays_there(schedule: str, warmup: int) -> None:
    config = OptimConfig.model_validate({"lr": 2.0, "warmup_steps": warmup, "schedule": schedule, "final_lr_share": 0.25})
    assert learning_rate(config, 10, 0, 10) == pytest.approx(0.5)
    assert learning_rate(config, 99, 0, 10) == pytest.approx(0.5)
    assert learning_rate(config, warmup, 0, 10) == 2.0
    inside = [learning_rate(config, step, 0, 10) for step in range(warmup, 11)]
    assert inside == sorted(inside, reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_later_start_shifts_the_whole_curve(schedule: str) -> None:
    assert rates(7, 17, schedule=schedule, warmup_steps=3) == rates(0, 10, schedule=schedule, warmup_steps=3)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (5, 5), (100, 5)])
def test_short_runs_have_sane_rates(schedule: str, warmup: int, steps: int) -> None:
    assert all(0 < rate <= 2.0 for rate in rates(0, steps, schedule=schedule, warmup_steps=warmup))


# ---- groups and state


class Odd(nn.Module):
    """Parameters of 0 to 4 axes, and a tied one."""

    def __init__(self, order: int = 1) -> None:
        super().__init__()
        shapes = {"scale": (), "bias": (3,), "matrix": (3, 3), "kernel": (2, 3, 1, 1), "cube": (2, 2, 2)}
        for name in list(shapes)[::order]:
            setattr(self, name, nn.Parameter(torch.randn(shapes[name])))
        self.twin = nn.Linear(3, 3)
        self.twin.weight = self.matrix


def test_only_two_axes_and_more_decay() -> None:
    net = Odd()
    optimizer = build_optimizer(net, OptimConfig(weight_decay=0.3, lr=0.5, betas=(0.1, 0.2), eps=1e-3))
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = {group["weight_decay"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}
    assert groups == {0.3: ["cube", "kernel", "matrix"], 0.0: ["bias", "scale", "twin.bias"]}
    assert all((group["betas"], group["eps"], group["fused"]) == ((0.1, 0.2), 1e-3, True) for group in optimizer.param_groups)
    assert len(build_optimizer(nn.LayerNorm(4), PLAIN).param_groups) == 1


def test_decay_shrinks_matrices_by_lr_times_decay() -> None:
    net = nn.Linear(2, 2)
    before = net.weight.detach().clone(), net.bias.detach().clone()
    optimizer = build_optimizer(net, OptimConfig(weight_decay=0.5, lr=0.1))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(net.weight.detach(), before[0] * 0.95)
    torch.testing.assert_close(net.bias.detach(), before[1], rtol=0, atol=0)


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """An update with gradients that depend on the name alone."""
    for name, parameter in sorted(net.named_parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + len(name)))
    optimizer.step()


def test_state_finds_its_parameter_by_name() -> None:
    torch.manual_seed(0)
    first, second = Odd(), Odd(order=-1)
    assert [name for name, _ in first.named_parameters()] != [name for name, _ in second.named_parameters()]
    config = OptimConfig(lr=0.1, weight_decay=0.1)
    adam, other = build_optimizer(first, config), build_optimizer(second, config)
    stepped(first, adam, 1)
    saved = {name: value.clone() for name, value in named_state(list(first.named_parameters()), adam)}
    assert set(saved) == {f"{name}/{key}" for name, _ in first.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")}
    second.load_state_dict(first.state_dict())
    stepped(second, other, 99)  # an older state that must be gone afterwards
    second.load_state_dict(first.state_dict())
    shuffled = dict(reversed(saved.items()))
    restore_state(list(second.named_parameters()), other, shuffled)
    assert all(torch.equal(value, saved[name]) for name, value in named_state(list(second.named_parameters()), other))
    stepped(first, adam, 2)
    stepped(second, other, 2)
    theirs = dict(second.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in first.named_parameters())


def test_restored_state_is_a_copy_in_the_layout_of_its_parameter() -> None:
    net = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(net, PLAIN)
    moment = torch.randn(4, 4, 3, 3)
    restore_state(
        list(net.named_parameters()),
        optimizer,
        {"weight/exp_avg": moment, "weight/exp_avg_sq": moment.abs(), "weight/step": torch.tensor(3.0)},
    )
    held = optimizer.state[net.weight]
    assert held["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(held["exp_avg"], moment)
    assert (held["step"].shape, held["step"].item()) == ((), 3.0)
    held["exp_avg"].zero_()
    assert moment.any()
    restore_state(list(net.named_parameters()), optimizer, {})
    assert not optimizer.state


# ---- moving average


def test_average_equals_the_closed_form() -> None:
    """a_n = sum_k (1 - d_k) prod_{j > k} d_j w_k, plus what is left of the initial weights."""
    stage = gan(ema_decay=0.5)
    state = placed(stage)
    history: list[dict[str, Tensor]] = [{k: v.double().clone() for k, v in state.nets["maker"].named_parameters()}]
    for number in range(12):
        train_step(state, stage, cut(points(number * 8, 8), 2), setting())
        history.append({k: v.detach().double().clone() for k, v in state.nets["maker"].named_parameters()})
    decays = [min(0.5, (1 + step) / (10 + step)) for step in range(12)]
    assert (decays[0], decays[7] < 0.5, decays[8]) == (0.1, True, 0.5)
    shares = [math.prod(decays)] + [(1 - decays[k]) * math.prod(decays[k + 1 :]) for k in range(12)]
    assert sum(shares) == pytest.approx(1)
    for name, value in state.averages["maker"].named_parameters():
        wanted = sum(share * weights[name] for share, weights in zip(shares, history, strict=True))
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=1e-6)


def test_decay_rises_to_its_limit() -> None:
    assert [decay_at(step, 0.9) for step in (0, 8, 79, 80, 81, 10**9)] == pytest.approx([0.1, 0.5, 80 / 89, 0.9, 0.9, 0.9])
    assert decay_at(10**9, 0.0) == 0.0


def test_average_is_a_copy_for_use_only_and_averages_buffers_too() -> None:
    net = Maker(dropout=0.5)
    average = average_of(net)
    assert not average.training
    assert not any(p.requires_grad for p in average.parameters())
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    with torch.no_grad():
        net.seen.fill_(7.0)
        for parameter in net.parameters():
            parameter.fill_(3.0)
    start = {name: value.clone() for name, value in average.named_parameters()}
    update_average(pairs_of(average, net), 0.75)
    torch.testing.assert_close(average.seen, torch.full((WIDTH,), 0.25 * 7.0))
    for name, value in average.named_parameters():
        torch.testing.assert_close(value, 0.75 * start[name] + 0.75)


def test_averages_are_bound_to_the_nets_that_have_one() -> None:
    stage = gan()
    state = placed(stage)
    assert set(state.averages) == {"maker"}
    assert state.averaged_nets["maker"] is state.averages["maker"] is not state.nets["maker"]
    assert state.averaged_nets["judge"] is state.nets["judge"]
