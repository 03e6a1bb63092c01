"""Recomputation and compilation change speed and memory, not gradients and not names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import PLAIN, WIDTH, Judge, cut, gan, placed, points, setting, snapshot

from tessera.engine.state import TrainState
from tessera.engine.step import train_step

SHARP = PLAIN.model_copy(update={"betas": (0.0, 0.0)})  # the first moment is then the gradient itself


class Block(nn.Module):
    """Counts its calls."""

    calls = 0

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not torch.compiler.is_compiling():
            type(self).calls += 1
        return x + scale * self.dropout(torch.tanh(self.linear(x)))


class Deep(nn.Module):
    """Two blocks and the buffer that the toy stage keeps."""

    seen: Tensor

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def steps(num_steps: int, dropout: float, kinds: dict[str, Any], **engine: bool) -> tuple[TrainState, list[dict[str, float]]]:
    """A few steps of the toy stage around deep nets; its reports."""
    stage = gan(SHARP)
    torch.manual_seed(1)
    stage = gan(SHARP, nets={"maker": Deep(dropout), "judge": stage.nets["judge"]}, **kinds)
    state = placed(stage, **engine)
    reports = []
    for number in range(num_steps):
        report = train_step(state, stage, cut(points(number * 8, 8), 2), setting())
        reports.append({name: value for turn in report.turns for name, value in turn.numbers().items()})
    return state, reports


def test_recomputation_changes_no_bit_and_no_name() -> None:
    kinds = {"checkpointed": (Block,)}
    Block.calls = 0
    plain, reports = steps(3, 0.3, kinds)
    assert Block.calls == 3 * 2 * 2, "steps, micro-batches, blocks"
    Block.calls = 0
    again, others = steps(3, 0.3, kinds, activation_checkpointing=True)
    assert Block.calls == 2 * 3 * 2 * 2, "every block once more in the backward pass"
    first, second = snapshot(plain), snapshot(again)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert reports == others
    assert list(again.nets["maker"].state_dict()) == list(Deep().state_dict())


def test_averages_are_not_sped_up() -> None:
    state, _ = steps(1, 0.3, {"checkpointed": (Block,), "compiled": (Deep,)}, activation_checkpointing=True)
    (block, _) = state.averages["maker"].blocks
    assert "forward" not in vars(block)
    assert "forward" in vars(state.nets["maker"].blocks[0])


def test_recomputation_is_harmless_without_gradients() -> None:
    state, _ = steps(1, 0.3, {"checkpointed": (Block,)}, activation_checkpointing=True)
    maker = state.nets["maker"].eval()
    Block.calls = 0
    with torch.no_grad():
        made = maker(points(0, 4).x)
    assert Block.calls == 2
    plain = Deep().eval()
    plain.load_state_dict(maker.state_dict())
    assert torch.equal(made, plain(points(0, 4).x).detach())


def test_only_named_classes_are_touched() -> None:
    state, _ = steps(1, 0.3, {"checkpointed": (nn.Conv2d,)}, activation_checkpointing=True, compile=True)
    assert not any("forward" in vars(module) for module in state.nets["maker"].modules())
    assert all(module._compiled_call_impl is None for module in state.nets["maker"].modules())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiled", [Deep, Block])
def test_compiled_gradients_equal_eager_ones(compiled: type[nn.Module], recompute: bool) -> None:
    torch._dynamo.reset()
    kinds = {"compiled": (compiled, Judge), "checkpointed": (Block,)}
    plain, reports = steps(3, 0.0, kinds)
    fast, others = steps(3, 0.0, kinds, compile=True, activation_checkpointing=recompute)
    modules = [module for net in fast.nets.values() for module in net.modules()]
    assert all((module._compiled_call_impl is not None) == isinstance(module, (compiled, Judge)) for module in modules)
    first, second = snapshot(plain), snapshot(fast)
    assert list(first) == list(second), "no name says that it was compiled"
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for wanted, found in zip(reports, others, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
