"""The cases of clips run at a small size, and are what they say they are at the full one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tessera.batches import TextStates
from tessera.bench import CASES, timing
from tessera.bench.timing import count_operations
from tessera.bench.videos import GENERATOR
from tessera.generators.masked.stage import build_nets

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the full size runs there")


@pytest.fixture(autouse=True)
def without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "limit", lambda: 1.0)


def test_a_case_counts_clips() -> None:
    row = CASES["video.maskgit.train"](None)
    assert row["reduced"]
    assert row["items"] == "clips"
    assert row["items_per_s"] == pytest.approx(row["batch"] / row["ms"] * 1e3, rel=0.02)
    assert row["tokens"] == 3 * 4 * 4


def test_the_generator_has_the_layers_of_the_peer() -> None:
    with torch.device("meta"):
        net = build_nets(GENERATOR, vocab_size=65_536, grid=(9, 8, 8), text_width=768)["generator"]
    layers = sum(p.numel() for p in net.get_submodule("blocks").parameters())
    assert layers == pytest.approx(26_855_936, rel=0.01)  # those of phenaki-pytorch's transformer, its embedding and head aside


def test_operations_are_counted_in_full() -> None:
    """A forward pass: every linear layer by its shape, and attention by its own."""
    model = GENERATOR.model.model_copy(update={"width": 64, "depth": 2, "heads": 2})
    grid, text = (3, 4, 4), TextStates(torch.randn(2, 7, 32), torch.ones(2, 7, dtype=torch.bool), torch.randn(2, 32))
    net = build_nets(GENERATOR.model_copy(update={"model": model}), vocab_size=100, grid=grid, text_width=32)["generator"]
    products: list[int] = []

    def note(layer: nn.Linear, _: object, out: torch.Tensor) -> None:
        products.append(2 * layer.in_features * out.numel())

    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    tokens = math.prod(grid)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # a CPU's own kernel has no formula
        counted = count_operations(lambda: net(torch.zeros(2, tokens, dtype=torch.long), text))
    attention = model.depth * 2 * 4 * tokens * (tokens + 7 + 1) * model.width
    assert counted == sum(products) + attention
