"""Nets for many small passes. How steps are recorded is shown on a GPU (tests/gpu)."""

from __future__ import annotations

import torch

from tessera.nn.attention import FeedForward
from tessera.recording import Kept, Lean


def test_in_its_own_precision_passes_go_through_the_net_itself() -> None:
    net = FeedForward(16)
    assert Lean(net).passes is net


def test_passes_in_bf16_read_the_weights_of_the_net_as_they_are_now_and_where_they_were() -> None:
    net, x = FeedForward(16), torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    lean = Lean(net, bf16=True)
    places = [weight.data_ptr() for weight in lean.passes.parameters()]
    with torch.no_grad():
        net.up.weight.mul_(2)
    lean.refresh()
    assert [weight.data_ptr() for weight in lean.passes.parameters()] == places, "recordings read there"
    with torch.autocast("cpu", torch.bfloat16):
        wanted = net(x)
    assert torch.equal(lean.passes(x.bfloat16()), wanted)
    assert all(weight.dtype == torch.float32 for weight in net.parameters())
    assert not any(weight.requires_grad for weight in lean.passes.parameters())


def test_what_was_asked_for_last_is_kept_and_the_oldest_goes() -> None:
    kept, made = Kept[str](most=2), []

    def ask(key: str) -> str:
        return kept.find(key, lambda: made.append(key) or f"{key}{len(made)}")

    assert [ask(key) for key in "abab"] == ["a1", "b2", "a1", "b2"]
    assert [ask(key) for key in "acab"] == ["a1", "c3", "a1", "b4"], "b had not been asked for the longest"
    kept.clear()
    assert ask("a") == "a5"
