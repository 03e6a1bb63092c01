"""Recorded nets: the same losses and gradients as launched ones. A stand-in for CUDA graphs launches again at every replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.contracts import frozen
from tessera.engine.replay import MOST_FLIGHTS, WARM_UP_CALLS, Graph, Replayed, copy_all, launched_one_by_one


@dataclass(frozen=True, slots=True)
class Given:
    x: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Made:
    y: Tensor
    ids: Tensor
    terms: dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.idle = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, given: Given, scale: float = 1.0, after: Tensor | None = None) -> Made:
        h = torch.tanh(self.into(given.x)) * given.mask[..., None]
        h = h if after is None else h + after
        y = self.out(h) * scale
        return Made(y, y.argmax(-1), {"size": h.square().sum(-1), "still": h.detach().sum(-1)})


class Again(Graph):
    """Records nothing, launches again."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.replays = 0

    def record(self, launch: Callable[[], None]) -> None:
        """Leaves no trace, as on a GPU: draws no random numbers and writes no gradients."""
        self.launch = launch
        gradients = launch.__self__.lane.gradients.values()  # type: ignore[attr-defined]
        kept = [gradient.clone() for gradient in gradients]
        with torch.random.fork_rng(devices=[]):
            launch()
        for gradient, before in zip(gradients, kept, strict=True):
            gradient.copy_(before)

    def replay(self) -> None:
        self.replays += 1
        with torch.enable_grad():
            self.launch()


class Names(TorchDispatchMode):
    """Of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Anywhere(Replayed):
    """Also on a CPU."""

    def follows(self, inputs: Any) -> bool:
        return bool(inputs)


@pytest.fixture
def pair() -> tuple[Net, Net, Replayed]:
    """A net, its twin, and the twin's stand-in."""
    torch.manual_seed(0)
    plain, twin = Net(), Net()
    twin.load_state_dict(plain.state_dict())
    replayed = Anywhere(twin, twin._call_impl, Again)
    twin._compiled_call_impl = replayed
    return plain, twin, replayed


def given(step: int, rows: int = 3) -> Given:
    generator = torch.Generator().manual_seed(step)
    return Given(torch.randn(rows, 4, generator=generator), torch.rand(rows, generator=generator) < 0.7)


def loss_of(made: Made) -> Tensor:
    return made.y.square().sum() + made.terms["size"].sum()


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def assert_equal_gradients(one: nn.Module, other: nn.Module) -> None:
    for first, second in zip(gradients(one), gradients(other), strict=True):
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            torch.testing.assert_close(first, second)


def test_it_trains_as_the_launched_one_does_and_is_replayed(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, replayed = pair
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, twin)]
    for step in range(8):
        for net, optimizer in zip((plain, twin), optimizers, strict=True):
            loss_of(net(given(step))).backward()
            optimizer.step()
        assert_equal_gradients(plain, twin)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
    for first, second in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(first, second)
    (recording,) = replayed.recordings.values()
    assert recording.there.replays == recording.back.replays == 8 - WARM_UP_CALLS  # type: ignore[attr-defined, union-attr]


def test_outputs_are_what_the_module_returns_and_its_own(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, _ = pair
    kept = [twin(given(step)) for step in range(3) if not loss_of(twin(given(step))).backward()]
    for step, made in enumerate(kept):
        wanted = plain(given(step))
        torch.testing.assert_close(made.y, wanted.y)
        assert torch.equal(made.ids, wanted.ids)
        assert made.terms.keys() == wanted.terms.keys()
        grown = [made.y.requires_grad, made.ids.requires_grad, *(made.terms[name].requires_grad for name in ("size", "still"))]
        assert grown == [True, False, True, False]


def test_batches_add_up(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, replayed = pair
    for step in range(5):
        for net in (plain, twin):
            net.zero_grad(set_to_none=True)
            for micro in range(3):
                loss_of(net(given(10 * step + micro))).backward()
        assert_equal_gradients(plain, twin)
    assert len(replayed.recordings) == 1


def test_two_calls_before_one_backward_pass_have_memory_of_their_own(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, replayed = pair
    for step in range(8):
        for net in (plain, twin):
            net.zero_grad(set_to_none=True)
            (loss_of(net(given(step))) * 2 - loss_of(net(given(100 + step)))).backward()
        assert_equal_gradients(plain, twin)
    assert sorted(key[0] for key in replayed.recordings) == [0, 1]  # type: ignore[index]


def test_more_calls_than_lanes_are_launched(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, replayed = pair
    for step in range(4 + WARM_UP_CALLS * MOST_FLIGHTS):
        for net in (plain, twin):
            net.zero_grad(set_to_none=True)
            sum((loss_of(net(given(step + 50 * i))) for i in range(MOST_FLIGHTS + 2)), torch.zeros(())).backward()
        assert_equal_gradients(plain, twin)
    assert len(replayed.recordings) == MOST_FLIGHTS


def test_a_call_that_never_goes_back_gives_its_lane_free(pair: tuple[Net, Net, Replayed]) -> None:
    _, twin, replayed = pair
    for step in range(6):
        made = twin(given(step))
        del made
    assert [key[0] for key in replayed.recordings] == [0]  # type: ignore[index]
    assert all(lane.free for lane in replayed.lanes)


def test_shapes_constants_frozen_parameters_and_inputs_with_gradients_are_told_apart(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, replayed = pair
    for step in range(5):
        for rows in (2, 5):
            for scale in (1.0, 3.0):
                for held in (False, True):
                    ins = []
                    for net in (plain, twin):
                        net.zero_grad(set_to_none=True)
                        x = given(step, rows).x.requires_grad_(held)
                        with frozen(net.into.parameters() if held else []):
                            loss_of(net(Given(x, given(step, rows).mask), scale, after=torch.ones(rows, 8))).backward()
                        ins.append(torch.zeros(0) if x.grad is None else x.grad)
                    assert_equal_gradients(plain, twin)
                    torch.testing.assert_close(ins[0], ins[1])
    assert len(replayed.recordings) == 8


class Two(nn.Module):
    def forward(self, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        return x + (0 if low is None else low) + (0 if high is None else 10 * high)


def test_the_same_tensors_at_other_places_are_another_call() -> None:
    net = Two()
    replayed = Anywhere(net, net._call_impl, Again)
    one = torch.ones(2)
    for _ in range(4):
        assert replayed(one, low=one).tolist() == replayed(one, one).tolist() == [2, 2]
        assert replayed(one, high=one).tolist() == replayed(one, None, one).tolist() == [11, 11]
        assert replayed(one, high=one, low=2 * one).tolist() == replayed(one, low=2 * one, high=one).tolist() == [13, 13]
    assert len(replayed.recordings) == 6


def test_recordings_share_rooms_and_a_larger_one_leaves_the_others_theirs(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, replayed = pair
    for rows in (3, 4, 9, 3, 9, 4) * 4:
        made, wanted = twin(given(rows, rows)), plain(given(rows, rows))
        torch.testing.assert_close(made.y, wanted.y)
        loss_of(made).backward()
    few, more, many = (recording.outputs[0] for recording in replayed.recordings.values())
    assert few.data_ptr() == more.data_ptr() != many.data_ptr()  # 48 and 64 bytes, then 144
    assert few.is_contiguous()


def test_what_cannot_be_recorded_is_named(pair: tuple[Net, Net, Replayed]) -> None:
    class Broken(Again):
        def record(self, launch: Callable[[], None]) -> None:
            raise ValueError("no such luck")

    _, twin, replayed = pair
    replayed.graph = Broken
    for step in range(WARM_UP_CALLS):
        twin(given(step))
    with pytest.raises(RuntimeError, match=r"Net could not be .* \[\[3, 4\], \[3\]\]: no such luck; set engine.cuda_graphs"):
        twin(given(9))


def test_without_gradients_it_is_recorded_too(pair: tuple[Net, Net, Replayed]) -> None:
    plain, twin, replayed = pair
    for step in range(5):
        with torch.no_grad():
            first, wanted = twin(given(step)), plain(given(step))
        torch.testing.assert_close(first.y, wanted.y)
        loss_of(twin(given(step), after=first.y.sum(-1, keepdim=True).expand(-1, 8))).backward()
    assert sorted(key[1] for key in replayed.recordings) == [False, True]  # type: ignore[index]


def test_gradients_that_lie_alike_are_copied_in_one_launch_whatever_the_others_do() -> None:
    kernel = torch.randn(4, 3, 1, 1)  # a kernel of one pixel: in either layout the same
    made = [torch.randn(3, 2), torch.randn(2, 3).t(), torch.randn(4), torch.randn(5).double(), kernel]
    own = [torch.zeros(tensor.shape) for tensor in made[:-1]] + [kernel.to(memory_format=torch.channels_last).clone()]
    assert own[-1].stride() != kernel.stride()
    with Names() as names:
        copy_all(list(zip(own, made, strict=True)))
    assert [name for name in names.seen if "copy_" in name] == ["_foreach_copy_", "copy_", "copy_"]
    for kept, tensor in zip(own, made, strict=True):
        torch.testing.assert_close(kept, tensor.float())


def test_going_back_twice_is_refused(pair: tuple[Net, Net, Replayed]) -> None:
    _, twin, _ = pair
    for step in range(WARM_UP_CALLS):
        loss_of(twin(given(step))).backward()
    loss = loss_of(twin(given(9)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes back once a call"):
        loss.backward()


def test_one_by_one_nothing_is_replayed(pair: tuple[Net, Net, Replayed]) -> None:
    _, twin, replayed = pair
    with launched_one_by_one():
        for step in range(5):
            twin(given(step))
    assert not replayed.recordings
    on_a_cpu = Replayed(twin, twin._call_impl, Again)
    for step in range(5):
        on_a_cpu(given(step))
    assert not on_a_cpu.recordings
