"""Which graphs a turn may have, and what stays untouched around it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toys import WIDTH, Judge, Maker, Points, gan, judge_turn, maker_turn, placed, points, setting, simple_turn, single, snapshot

from tessera.contracts import Best, Context, Loss, Nets, Stage, Turn
from tessera.engine.checkpoint import read_tensors, save_checkpoint
from tessera.engine.step import train_step
from tessera.engine.trace import leaves

ONE = torch.tensor(1.0)


def attempt(stage: Stage) -> None:
    train_step(placed(stage), stage, [points(0, 4)], setting())


def test_an_unfrozen_stranger_is_refused_by_shape() -> None:
    stranger = nn.Linear(WIDTH, 5)

    def loss(nets: Nets, batch: Points, context: Context) -> Loss:
        return Loss(stranger(nets["maker"](batch.x)).sum(), ONE)

    with pytest.raises(ValueError, match=r"'maker' sends gradients into 2 tensors .*\(5, 3\).*Stage\.frozen") as caught:
        attempt(single(loss))
    assert "(5,)" in str(caught.value)
    assert stranger.weight.grad is None, "refused before any gradient is made"


def test_the_same_net_in_frozen_is_accepted() -> None:
    stranger = nn.Linear(WIDTH, 5)

    def loss(nets: Nets, batch: Points, context: Context) -> Loss:
        return Loss(nets["known"](nets["maker"](batch.x)).sum(), ONE)

    attempt(single(loss, frozen={"known": stranger}))
    assert stranger.weight.grad is None


def test_a_hand_that_was_not_detached_is_refused() -> None:
    def attached(nets: Nets, batch: Points, context: Context) -> Loss:
        loss = maker_turn(nets, batch, context)
        return replace(loss, hand=nets["maker"](batch.x))

    stage = gan()
    stage = replace(stage, turns=[replace(stage.turns[0], loss=attached), stage.turns[1]])
    with pytest.raises(ValueError, match="'judge' sends gradients into"):
        attempt(stage)


@pytest.mark.parametrize("detached", [True, False])
def test_a_net_without_gradient_is_refused(detached: bool) -> None:
    def loss(nets: Nets, batch: Points, context: Context) -> Loss:
        value = nets["maker"](batch.x)
        return Loss(value.detach().sum() if detached else value.sum(), ONE)

    stage = single(loss)
    if not detached:  # one of two nets is reached
        turn = replace(stage.turns[0], trains=("maker", "judge"))
        stage = replace(
            stage,
            nets={**stage.nets, "judge": Judge()},
            turns=[turn],
            optim=dict.fromkeys(("maker", "judge"), stage.optim["maker"]),
        )
    with pytest.raises(ValueError, match=r"no gradient reaches it") as caught:
        attempt(stage)
    assert ("'maker'" if detached else "'judge'") in str(caught.value).split("trains")[1]


def test_a_net_whose_author_froze_all_of_it_is_refused() -> None:
    stage = single(simple_turn)
    stage.nets["maker"].requires_grad_(False)
    with pytest.raises(ValueError, match="no gradient reaches it"):
        attempt(stage)


@pytest.mark.parametrize("where", ["total", "weight"])
def test_sums_must_be_scalars(where: str) -> None:
    def loss(nets: Nets, batch: Points, context: Context) -> Loss:
        value = nets["maker"](batch.x)
        return Loss(value.sum(1), ONE) if where == "total" else Loss(value.sum(), torch.ones(4))

    with pytest.raises(ValueError, match=r"must be scalars \(sums\), got shapes .*\(4,\)"):
        attempt(single(loss))


def penalised(nets: Nets, batch: Points, context: Context) -> Loss:
    """R1: the squared slope at real samples."""
    y = batch.y.detach().requires_grad_(True)
    real = nets["judge"](y)
    (slope,) = torch.autograd.grad(real.sum(), y, create_graph=True)
    hinge = torch.relu(1 - real) + torch.relu(1 + nets["judge"](context.handed["maker"]))
    return Loss((hinge + 5 * slope.square().sum(1)).sum(), torch.tensor(float(len(y))))


def test_a_gradient_penalty_is_accepted_and_right() -> None:
    stage = gan()
    stage = replace(stage, turns=[stage.turns[0], replace(stage.turns[1], loss=penalised)])
    state = placed(stage)
    judge, maker = copy.deepcopy(state.nets["judge"]), copy.deepcopy(state.nets["maker"])
    batch = points(0, 8)
    report = train_step(state, stage, [batch[:4], batch[4:]], setting())
    # A leaky ReLU net of two layers has slope W1^T (s * W2), with s in {0.2, 1}: no autograd needed.
    first, last = judge.first, judge.last
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    hidden = batch.y @ first.weight.T + first.bias
    slope = (torch.where(hidden > 0, 1.0, 0.2) * last.weight) @ first.weight
    mean = (5 * slope.square().sum(1) + torch.relu(1 - judge(batch.y)) + torch.relu(1 + judge(maker(batch.x).detach()))).mean()
    assert report.turns[1].numbers()["judge/loss"] == pytest.approx(mean.item(), rel=1e-6)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in torch.autograd.grad(mean, list(judge.parameters()))]))
    assert report.turns[1].numbers()["judge/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_leaves_of_a_deep_and_shared_graph() -> None:
    weight, other, plain = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    value = weight * plain
    for _ in range(2000):  # a recursion would overflow
        value = value + weight.detach() * value
    assert leaves(value.sum()) == [weight]
    both = leaves((value * other + other).sum())
    assert {id(leaf) for leaf in both} == {id(weight), id(other)}
    assert len(both) == 2
    assert leaves(torch.ones(())) == []


# ---- frozen nets


def teacher_turn(nets: Nets, batch: Points, context: Context) -> Loss:
    assert not nets["teacher"].training
    assert nets["maker"].training
    error = (nets["maker"](batch.x) - nets["teacher"](batch.x)).square().mean(1)
    return Loss(error.sum(), torch.tensor(float(len(error))))


def test_frozen_nets_stay_as_they_are(tmp_path: Path) -> None:
    teacher = Maker(dropout=0.5)
    stage = single(teacher_turn, frozen={"teacher": teacher}, averaged=("maker",))
    state = placed(stage)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    for number in range(20):
        train_step(state, stage, [points(number * 8, 4), points(number * 8 + 4, 4)], setting())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert not teacher.training
    assert not any(module.training for module in teacher.modules())
    path = save_checkpoint(tmp_path, state, {})
    names = [name for file in path.glob("*.safetensors") for name in read_tensors(file)]
    assert names
    assert not [name for name in names if name.startswith("teacher")]
    assert set(state.nets) == set(state.optimizers) == set(state.averages) == {"maker"}
    assert not any(name.split("/")[1] == "teacher" for name in snapshot(state))


def test_a_frozen_net_that_is_also_trained_is_refused() -> None:
    maker = Maker()
    with pytest.raises(ValueError, match="both trained and frozen"):
        single(simple_turn, nets={"maker": maker}, frozen={"maker": maker})
    with pytest.raises(ValueError, match="share the parameter"):
        placed(single(simple_turn, nets={"maker": maker}, frozen={"copy": maker}))


# ---- the stage's own checks


def turn(name: str, *trains: str) -> Turn:
    return Turn(name=name, trains=trains, loss=judge_turn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {}}, r"optim names \[\], the stage trains \['judge', 'maker'\]"),
        ({"averaged": ("nobody",)}, "averaged names unknown nets"),
        ({"turns": [turn("a", "nobody")]}, "turn 'a' trains"),
        ({"turns": [turn("a")]}, "turn 'a' trains"),
        ({"turns": [turn("a", "maker"), turn("a", "judge")]}, "two turns share a name"),
    ],
)
def test_a_stage_checks_its_names(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gan(**changes)


def test_turns_are_due_from_their_start_on() -> None:
    late = Turn(name="late", trains=("maker",), loss=maker_turn, start=3, every=4)
    assert [step for step in range(16) if late.due(step)] == [3, 7, 11, 15]


@pytest.mark.parametrize(
    ("value", "record", "higher", "lower"),
    [(1.0, None, True, True), (2.0, 1.0, True, False), (1.0, 1.0, False, False), (float("nan"), 1.0, False, False),
     (float("nan"), None, False, False), (float("inf"), 1.0, False, False), (float("-inf"), 1.0, False, False),
     (float("inf"), None, False, False)],
)  # fmt: skip
def test_best_takes_finite_records_only(value: float, record: float | None, higher: bool, lower: bool) -> None:
    """Infinity could never be beaten, and JSON has no word for it."""
    assert Best("x", higher_is_better=True).improves(value, record) == higher
    assert Best("x", higher_is_better=False).improves(value, record) == lower


def test_gradients_reach_through_a_custom_function() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return 2 * grad

    attempt(single(lambda nets, batch, context: Loss(Double.apply(nets["maker"](batch.x)).sum(), ONE)))
