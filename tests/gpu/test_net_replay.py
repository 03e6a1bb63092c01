"""Recorded nets on a GPU: losses and gradients of launched ones, over shapes, adding batches, two calls at once, dropout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.compiling import compile_module
from tessera.engine.replay import Replayed, replay

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.RMSNorm(64), nn.Linear(64, 256), nn.Linear(256, 64), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(32, 64),
            nn.ModuleList(Layer(dropout) for _ in range(3)),
            nn.Linear(64, 32),
        )

    def forward(self, ids: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids) + text
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits, logits.argmax(-1)


def twins(dropout: float = 0.0, compiled: bool = False) -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net(dropout).cuda()
    twin = copy.deepcopy(plain)
    if compiled:
        for layer in twin.layers:
            compile_module(layer, shapes="many")
    replay(twin)
    return plain, twin


def batch(step: int, rows: int, places: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 32, (rows, places), generator=generator)
    return ids.cuda(), torch.randn(rows, places, 64, generator=generator).cuda()


def go(net: Net, step: int, rows: int, places: int) -> Tensor:
    ids, text = batch(step, rows, places)
    return F.cross_entropy(net(ids, text)[0].flatten(0, 1).float(), ids.flatten())


@pytest.mark.parametrize(("compiled", "bf16"), [(False, False), (False, True), (True, True)])
def test_gradients_over_shapes_and_adding_batches(compiled: bool, bf16: bool) -> None:
    plain, twin = twins(compiled=compiled)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True) for net in (plain, twin)]
    for step in range(24):
        norms = []
        for net, optimizer in zip((plain, twin), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for micro in range(3):
                with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                    loss = go(net, 3 * step + micro, 4, (8, 16, 24)[(step + micro) % 3])
                loss.backward()
            norms.append([p.grad.norm().item() for p in net.parameters() if p.grad is not None] + [loss.item()])
            optimizer.step()
        assert norms[1] == pytest.approx(norms[0], rel=0.05 if bf16 else 1e-3, abs=1e-3 if bf16 else 1e-5), step
    call = twin._compiled_call_impl
    assert isinstance(call, Replayed)
    assert len(call.recordings) == 3


def test_two_calls_at_once_and_one_without_gradients() -> None:
    plain, twin = twins()
    for step in range(10):
        for net in (plain, twin):
            net.zero_grad(set_to_none=True)
            with torch.no_grad():
                hint = net(*batch(500 + step, 4, 8))[0].mean()
            ((go(net, step, 4, 8) - 0.5 * go(net, 100 + step, 4, 16)) * hint.abs() + go(net, 200 + step, 4, 8)).backward()
        for wanted, found in zip(plain.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-5)


def test_dropout_is_that_of_launched_layers() -> None:
    plain, twin = twins(dropout=0.3)
    for step in range(8):
        losses = []
        for net in (plain, twin):
            torch.manual_seed(step)
            losses.append(go(net, step % 2, 4, 8).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4), step
