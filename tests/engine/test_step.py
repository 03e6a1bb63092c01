"""The step against a loop written by hand with plain torch: same losses, gradients, moments and weights."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from toys import ALONE, PLAIN, Judge, Maker, Points, cut, differing, gan, judge_turn, placed, points, setting, single, snapshot

from tessera.config import OptimConfig
from tessera.contracts import Context, Loss, Nets, Turn
from tessera.engine.dist import World
from tessera.engine.state import TrainState
from tessera.engine.step import Setting, seed_generators, train_step

MAKER = OptimConfig(
    lr=3e-3,
    betas=(0.8, 0.95),
    weight_decay=0.1,
    eps=1e-4,
    warmup_steps=3,
    schedule="cosine",
    final_lr_share=0.1,
    max_grad_norm=0.2,
)
JUDGE = OptimConfig(lr=5e-3, betas=(0.5, 0.9), weight_decay=0.0, eps=1e-4, warmup_steps=2, schedule="linear", max_grad_norm=0.5)
STEPS = 8


class Reference:
    """A GAN trained by hand on whole batches."""

    def __init__(self, maker: nn.Module, judge: nn.Module, start: int, every: int) -> None:
        self.maker, self.judge, self.start, self.every = copy.deepcopy(maker), copy.deepcopy(judge), start, every
        self.maker_adam, self.judge_adam = self.adam(self.maker, MAKER), self.adam(self.judge, JUDGE)

    @staticmethod
    def adam(net: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
        matrices = [p for p in net.parameters() if p.ndim > 1]
        rest = [p for p in net.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=123.0, betas=config.betas, eps=config.eps, foreach=False, fused=False)

    def update(self, net: nn.Module, adam: torch.optim.AdamW, loss: Tensor, lr: float, most: float) -> float:
        net.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), most)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        return float(norm)

    def step(self, number: int, batch: Points) -> dict[str, float]:
        found = {}
        count = batch.count / batch.count.sum()
        made = self.maker(batch.x)
        loss = (((made - batch.y) ** 2).mean(1) * count).sum() - 0.1 * (self.judge(made) * count).sum()
        rises = (number + 1) / 3
        falls = 0.1 + 0.9 * (1 + math.cos(math.pi * (number - 3) / (STEPS - 3))) / 2
        norm = self.update(self.maker, self.maker_adam, loss, 3e-3 * (rises if number < 3 else falls), 0.2)
        found |= {"maker/loss": loss.item(), "maker/grad_norm": norm, "lr/maker": 3e-3 * (rises if number < 3 else falls)}
        late = number - self.start
        if late < 0 or late % self.every:
            return found
        loss = (torch.relu(1 - self.judge(batch.y)) * count).sum() + (torch.relu(1 + self.judge(made.detach())) * count).sum()
        lr = 5e-3 * ((late + 1) / 2 if late < 2 else 0.05 + 0.95 * (1 - (late - 2) / (STEPS - self.start - 2)))
        norm = self.update(self.judge, self.judge_adam, loss, lr, 0.5)
        return found | {"judge/loss": loss.item(), "judge/grad_norm": norm, "lr/judge": lr}


def assert_same(state: TrainState, reference: Reference) -> None:
    """Weights, and the moments, which hold every gradient so far."""
    for name, theirs, adam in (
        ("maker", reference.maker, reference.maker_adam),
        ("judge", reference.judge, reference.judge_adam),
    ):
        wanted = dict(theirs.named_parameters())
        for key, parameter in state.nets[name].named_parameters():
            torch.testing.assert_close(parameter, wanted[key], rtol=0, atol=1e-6)
            ours, other = state.optimizers[name].state.get(parameter, {}), adam.state.get(wanted[key], {})
            assert set(ours) == set(other)
            for moment in ours:
                torch.testing.assert_close(ours[moment], other[moment], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_micro", [1, 2, 4])
@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (1, 2)])
def test_equals_a_loop_written_by_hand(num_micro: int, start: int, every: int) -> None:
    stage = gan(MAKER, JUDGE, start=start, every=every, after=lambda nets, stats, step: None)
    reference = Reference(stage.nets["maker"], stage.nets["judge"], start, every)
    state = placed(stage)
    for number in range(STEPS):
        batch = points(number * 8, 8)
        report = train_step(state, stage, cut(batch, num_micro), setting(STEPS))
        numbers = {name: value for turn in report.turns for name, value in turn.numbers().items()}
        wanted = reference.step(number, batch)
        assert {name: numbers[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-7)
        assert ("judge/loss" in numbers) == ("judge/loss" in wanted)
        assert_same(state, reference)
    assert state.step == report.step == STEPS
    assert numbers["maker/grad_norm"] > 0.2, "the test must clip"


def test_delayed_critic_warms_up_from_its_own_start() -> None:
    config = OptimConfig(lr=1.0e-2, warmup_steps=4, schedule="constant", max_grad_norm=None)
    stage = gan(config, start=5)
    state = placed(stage)
    rates = []
    for number in range(11):
        report = train_step(state, stage, [points(number * 8, 8)], setting(11))
        rates.append({net: lr for turn in report.turns for net, lr in turn.update.lrs.items()})
    assert [rate["maker"] for rate in rates] == pytest.approx([0.0025, 0.005, 0.0075] + [0.01] * 8)
    assert all("judge" not in rate for rate in rates[:5])
    assert [rate["judge"] for rate in rates[5:]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


@pytest.mark.parametrize(("trained", "other"), [("maker", "judge"), ("judge", "maker")])
def test_a_turn_touches_only_what_it_trains(trained: str, other: str) -> None:
    stage = gan()
    state = placed(stage)
    train_step(state, stage, [points(0, 8)], setting())  # both optimizers have moments now

    def judge_alone(nets: Nets, batch: Points, context: Context) -> Loss:
        return judge_turn(nets, batch, replace(context, handed={"maker": batch.x}))

    turns = {"maker": stage.turns[0], "judge": replace(stage.turns[1], loss=judge_alone)}
    alone = replace(stage, turns=[turns[trained]], after=lambda nets, stats, step: None)
    before = {name: snapshot(state, name) for name in state.nets}
    train_step(state, alone, cut(points(8, 8), 2), setting())
    after = {name: snapshot(state, name) for name in state.nets}
    assert {name for name in differing(before[other], after[other]) if not name.startswith("ema/")} == set()
    assert {f"raw/{trained}/first.weight", f"raw/{trained}/last.weight"} <= set(differing(before[trained], after[trained]))
    assert all(p.grad is None and p.requires_grad for net in state.nets.values() for p in net.parameters())


def test_gradients_are_off_for_the_other_net_while_a_turn_runs() -> None:
    seen: dict[str, list[bool]] = {}

    def spy(turn: Turn) -> Turn:
        def loss(nets: Nets, batch: Points, context: Context) -> Loss:
            seen[turn.name] = [all(p.requires_grad for p in nets[name].parameters()) for name in ("maker", "judge")]
            return turn.loss(nets, batch, context)

        return replace(turn, loss=loss)

    stage = gan()
    stage.nets["maker"].first.bias.requires_grad_(False)  # frozen by its author
    stage = replace(stage, turns=[spy(turn) for turn in stage.turns])
    state = placed(stage)
    bias = state.nets["maker"].first.bias.clone()
    train_step(state, stage, [points(0, 8)], setting())
    assert seen == {"maker": [False, False], "judge": [False, True]}
    assert torch.equal(bias, state.nets["maker"].first.bias)
    assert not state.nets["maker"].first.bias.requires_grad
    assert all(p.requires_grad for p in state.nets["judge"].parameters())


def test_turns_see_their_own_micro_batch_and_what_was_handed_on() -> None:
    seen: list[tuple[str, int, int, list[int], list[str]]] = []

    def record(nets: Nets, batch: Points, context: Context) -> None:
        torch.testing.assert_close(context.handed["maker"], batch.x * 2, rtol=0, atol=0)
        seen.append(("judge", context.step, context.seed, context.positions.tolist(), sorted(context.handed)))

    def maker(nets: Nets, batch: Points, context: Context) -> Loss:
        assert dict(context.handed) == {}
        return Loss(nets["maker"](batch.x).sum(), torch.tensor(1.0), hand=batch.x * 2)

    def judge(nets: Nets, batch: Points, context: Context) -> Loss:
        record(nets, batch, context)
        return Loss(nets["judge"](batch.x).sum(), torch.tensor(1.0))

    stage = gan(after=lambda nets, stats, step: None)
    stage = replace(stage, turns=[replace(stage.turns[0], loss=maker), replace(stage.turns[1], loss=judge)])
    state = placed(stage, seed=11)
    state.step = 4
    train_step(state, stage, cut(points(32, 4), 2), setting())
    assert seen == [("judge", 4, 11, [32, 33], ["maker"]), ("judge", 4, 11, [34, 35], ["maker"])]


# ---- accumulation


SHARP = PLAIN.model_copy(update={"betas": (0.0, 0.0)})  # the first moment is then the gradient itself


@pytest.mark.parametrize("num_micro", [1, 2, 8])
def test_accumulation_gives_the_gradient_of_the_whole_batch(num_micro: int) -> None:
    stage = gan(SHARP)
    state = placed(stage)
    maker = copy.deepcopy(state.nets["maker"])
    batch = points(3, 8)
    assert len(set(batch.count.tolist())) > 1
    report = train_step(state, stage, cut(batch, num_micro), setting())
    judge = gan(SHARP).nets["judge"]
    each = ((maker(batch.x) - batch.y) ** 2).mean(1) - 0.1 * judge(maker(batch.x))
    mean = sum(value * count for value, count in zip(each, batch.count.tolist(), strict=True)) / sum(batch.count.tolist())
    grads = dict(zip(dict(maker.named_parameters()), torch.autograd.grad(mean, list(maker.parameters())), strict=True))
    for name, parameter in state.nets["maker"].named_parameters():
        torch.testing.assert_close(state.optimizers["maker"].state[parameter]["exp_avg"], grads[name], rtol=0, atol=1e-6)
    numbers = report.turns[0].numbers()
    assert numbers["maker/loss"] == pytest.approx(mean.item(), abs=1e-6)
    assert numbers["maker/weight"] == batch.count.sum()


def test_stats_and_parts_are_summed_over_micro_batches() -> None:
    got: list[dict[str, Tensor]] = []
    for num_micro in (1, 4):
        stage = gan(after=lambda nets, stats, step: got.append(dict(stats)))
        report = train_step(placed(stage), stage, cut(points(0, 8), num_micro), setting())
        got[-1]["error"] = torch.tensor(report.turns[0].numbers()["maker/error"], dtype=torch.float64)
    assert got[0]["made"].dtype == torch.float64
    torch.testing.assert_close(got[0], got[1], rtol=1e-6, atol=1e-6)


def test_weight_survives_a_half_precision_total() -> None:
    """1,001 targets are 1,000 in bf16: the sum must not take the type of the loss."""

    def half(nets: Nets, batch: Points, context: Context) -> Loss:
        return Loss(nets["maker"](batch.x).sum().bfloat16(), torch.tensor(1001))

    stage = single(half)
    report = train_step(placed(stage), stage, [points(0, 4)], setting())
    assert report.turns[0].numbers()["maker/weight"] == 1001


def test_parts_are_summed_by_name() -> None:
    def reordered(nets: Nets, batch: Points, context: Context) -> Loss:
        total = nets["maker"](batch.x).sum()
        parts = {"one": torch.tensor(1.0), "ten": torch.tensor(10.0)}
        if "sample-0" not in batch.keys:
            parts = dict(reversed(parts.items()))
        return Loss(total, torch.tensor(1.0), parts)

    stage = single(reordered)
    report = train_step(placed(stage), stage, cut(points(0, 4), 2), setting())
    numbers = report.turns[0].numbers()
    assert (numbers["maker/one"], numbers["maker/ten"]) == (1.0, 10.0)


@pytest.mark.parametrize("name", ["loss", "weight"])
def test_a_part_cannot_take_the_name_of_the_divisor(name: str) -> None:
    def clash(nets: Nets, batch: Points, context: Context) -> Loss:
        return Loss(nets["maker"](batch.x).sum(), torch.tensor(4.0), {name: torch.tensor(99.0)})

    stage = single(clash)
    with pytest.raises(ValueError, match=name):
        train_step(placed(stage), stage, [points(0, 4)], setting())


def test_parts_that_differ_between_micro_batches_are_refused() -> None:
    def uneven(nets: Nets, batch: Points, context: Context) -> Loss:
        name = "first" if "sample-0" in batch.keys else "second"
        return Loss(nets["maker"](batch.x).sum(), torch.tensor(4.0), {name: torch.tensor(99.0)})

    stage = single(uneven)
    with pytest.raises(ValueError, match=r"first.*second"):
        train_step(placed(stage), stage, cut(points(0, 4), 2), setting())


# ---- dropout and the random numbers of `after`


def masks(world: World, step: int, seed: int) -> list[Tensor]:
    """The dropout of every turn and micro-batch of a step."""
    drawn: list[Tensor] = []

    def draw(net: str) -> Turn:
        def loss(nets: Nets, batch: Points, context: Context) -> Loss:
            drawn.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
            return Loss(nets[net](batch.x).sum(), torch.tensor(1.0))

        return Turn(name=net, trains=(net,), loss=loss)

    torch.manual_seed(torch.seed())  # what was drawn before must not matter
    stage = gan(turns=[draw("maker"), draw("judge")], after=lambda nets, stats, step: drawn.append(torch.rand(64)))
    state = placed(stage, seed=seed)
    state.step = step
    train_step(state, stage, cut(points(0, 4), 2), Setting(world, 10))
    return drawn


def test_dropout_is_a_function_of_seed_step_turn_and_micro_batch() -> None:
    drawn = masks(ALONE, 3, 5)
    assert [torch.equal(a, b) for a, b in zip(drawn, masks(ALONE, 3, 5), strict=True)] == [True] * 5
    others = [*drawn, *masks(ALONE, 4, 5), *masks(ALONE, 3, 6)]
    assert len({tuple(mask.tolist()) for mask in others}) == 15


def test_seeding_is_that_of_torch() -> None:
    torch.manual_seed(2**62 + 7)
    theirs = torch.rand(8)
    seed_generators(2**62 + 7, torch.device("cpu"))
    assert torch.equal(torch.rand(8), theirs)


def test_no_turn_due_is_refused() -> None:
    stage = gan()
    stage = replace(stage, turns=[replace(stage.turns[0], every=2)], after=lambda nets, stats, step: None)
    state = placed(stage)
    train_step(state, stage, [points(0, 4)], setting())
    with pytest.raises(ValueError, match="step 1"):
        train_step(state, stage, [points(0, 4)], setting())


def test_nets_that_share_a_parameter_are_refused() -> None:
    """Each turn freezes the other net, so a shared parameter would never be trained by either."""
    maker, judge = Maker(), Judge()
    judge.first.weight = nn.Parameter(torch.zeros(6, 3))
    maker.extra = judge.first
    with pytest.raises(ValueError, match=r"judge.*maker|maker.*judge"):
        placed(gan(nets={"maker": maker, "judge": judge}))


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    """As it does on several ranks, where one of them may have used it: the result must not depend on the number of ranks."""
    stage = single(lambda nets, batch, context: Loss(nets["maker"].last(torch.ones(1, 8)).sum(), torch.tensor(1.0)))
    state = placed(stage)
    before = snapshot(state)
    train_step(state, stage, [points(0, 4)], setting())
    first = state.nets["maker"].first.weight
    assert torch.equal(before["raw/maker/first.weight"], first)
    moments = state.optimizers["maker"].state[first]
    assert moments["step"] == 1
    assert not moments["exp_avg"].any()
