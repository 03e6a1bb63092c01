"""What is compiled, and how often."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.utils import counters

from tessera.compiling import DYNAMIC, MOST_VARIANTS, compile_module, outermost
from tessera.engine.state import recomputed


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Outer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Inner(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def test_what_lies_inside_is_compiled_with_what_surrounds_it() -> None:
    net = nn.Sequential(Outer(2), Inner(2))
    assert outermost(net, (Inner, Outer)) == [net[0], net[1]]


def test_what_is_recomputed_is_compiled_all_the_same() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layers = [Inner(4) for _ in range(3)]
    x = torch.randn(2, 4)
    wanted = [torch.autograd.grad(layer(x).sum(), layer.linear.weight)[0] for layer in layers]
    for layer in layers:
        layer.forward = recomputed(layer.forward)  # type: ignore[method-assign]
        layer.compile(backend="aot_eager")
    found = [torch.autograd.grad(layer(x).sum(), layer.linear.weight)[0] for layer in layers]
    assert counters["stats"]["unique_graphs"] >= 1
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one)
    torch._dynamo.reset()


def test_layers_of_many_widths_are_all_compiled_and_equal_ones_once() -> None:
    torch._dynamo.reset()
    counters.clear()
    compile_module(Inner(1), shapes="few")  # allows so many; compiles nothing yet
    layers = [Inner(width) for width in range(2, 14) for _ in range(2)]
    for layer in layers:
        layer.compile(backend="eager", dynamic=DYNAMIC["few"])
        layer(torch.zeros(1, layer.linear.in_features))
    assert counters["stats"]["unique_graphs"] == len(layers) // 2 <= MOST_VARIANTS
    torch._dynamo.reset()
