"""Ranks without processes: a fake collective stands for the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import ALONE, Points, cut, gan, placed, points

from tessera.config import EngineConfig, UserError
from tessera.contracts import Context, Loss, Nets, Turn
from tessera.engine import dist
from tessera.engine.dist import World, join, pick_device, sum_gradients
from tessera.engine.step import Setting, train_step


class Landed:
    """A collective that is done."""

    def wait(self) -> None:
        """At once."""


@pytest.fixture
def collective(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """all_reduce as if every rank held `factor` times our share; the sizes it was called with are recorded."""

    def install(factor: float) -> list[int]:
        sizes: list[int] = []

        def all_reduce(tensor: Tensor, async_op: bool = False) -> Landed | None:
            sizes.append(tensor.numel())
            tensor.mul_(factor)
            return Landed() if async_op else None

        monkeypatch.setattr(dist.torch_dist, "all_reduce", all_reduce)
        return sizes

    return install


def test_gradients_are_summed_in_buckets(collective: Callable[[float], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "BUCKET_BYTES", 100)
    sizes = collective(3.0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((4, 4), (3,), (30,), (2, 3, 3, 2), ())]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn_like(parameter)
    parameters[3].grad = torch.randn(2, 3, 3, 2).to(memory_format=torch.channels_last)
    wanted = [torch.zeros(()) if p.grad is None else 3 * p.grad.clone() for p in parameters]
    sum_gradients(World(0, 2, ALONE.device), parameters)
    for parameter, grad in zip(parameters, wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0)
    assert sizes == [49, 36, 1]


def test_one_rank_needs_no_collective_but_fills_in_zeros(collective: Callable[[float], list[int]]) -> None:
    sizes = collective(2.0)
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    used.grad = torch.full((2,), 5.0)
    sum_gradients(ALONE, [used, unused])
    assert sizes == []
    assert torch.equal(used.grad, torch.full((2,), 5.0))
    assert unused.grad is not None
    assert torch.equal(unused.grad, torch.zeros(3))


def drawn_by(rank: int) -> list[Tensor]:
    """Dropout of the turn, then what `Stage.after` draws, on one of two ranks."""
    drawn: list[Tensor] = []

    def loss(nets: Nets, batch: Points, context: Context) -> Loss:
        drawn.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
        return Loss(nets["maker"](batch.x).sum(), torch.tensor(1.0))

    turn = Turn(name="maker", trains=("maker",), loss=loss)
    stage = gan(turns=[turn], after=lambda nets, stats, step: drawn.append(torch.rand(64)))
    train_step(placed(stage), stage, [points(0, 4)], Setting(World(rank, 2, ALONE.device), 10))
    return drawn


def test_dropout_differs_between_ranks_and_what_after_draws_does_not(collective: Callable[[float], list[int]]) -> None:
    """Dead codes are replaced at random: another choice on each rank would let the replicas drift apart."""
    collective(2.0)
    first, second = drawn_by(0), drawn_by(1)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_two_equal_ranks_update_as_one(collective: Callable[[float], list[int]]) -> None:
    """Twice the sum over twice the weight; a stop of either rank reaches both in the same collective."""
    stage = gan()
    alone = placed(stage)
    train_step(alone, stage, cut(points(0, 8), 2), Setting(ALONE, 10))
    sizes = collective(2.0)
    stage = gan()
    state = placed(stage)
    report = train_step(state, stage, cut(points(0, 8), 2), Setting(World(1, 2, ALONE.device), 10), asked=(0, 1, 0))
    for name, net in alone.nets.items():
        for key, value in net.named_parameters():
            torch.testing.assert_close(value, dict(state.nets[name].named_parameters())[key], rtol=0, atol=1e-6)
    assert report.turns[0].sums.asked.tolist() == [0, 2, 0]
    assert report.turns[0].numbers()["maker/weight"] == 2 * points(0, 8).count.sum()
    assert len(sizes) == 4, "one collective for the numbers and one for the gradients of each turn"


def test_together_fails_everywhere_if_it_fails_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALONE.together(lambda: 7) == 7
    assert ALONE.gather("x") == ["x"]
    world = World(0, 2, ALONE.device)
    monkeypatch.setattr(World, "gather", lambda self, item: [item, "OSError: no space left"])
    with pytest.raises(RuntimeError, match="another rank failed: OSError: no space left"):
        world.together(lambda: 1)
    with pytest.raises(KeyError, match="mine"):
        world.together(lambda: {}["mine"])


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("cpu") == pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="0 are visible"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto") == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"rank 1 .* 1 is visible"):
        pick_device("cuda", local_rank=1)


def test_alone_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = join(EngineConfig(device="cpu"))
    assert (world.rank, world.size, world.main, world.device.type) == (0, 1, True, "cpu")
