"""Recorded groups are the plain ones, whatever size the batch and the buffer have become."""

from __future__ import annotations

import pytest
import torch

from tessera.batches import TextStates
from tessera.generators.autoregressive import sample as sampling
from tessera.generators.autoregressive.model import Autoregressive, AutoregressiveConfig
from tessera.generators.autoregressive.sample import AutoregressiveSampleConfig, Known, Sampler, Stepper, Writer
from tessera.recording import Lean
from tessera.tokenizers.mesh.coordinates import FaceOrder
from tessera.tokenizers.mesh.corners import DistinctCorners

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BINS, TEXT = 16, 12
DEVICE = torch.device("cuda")


class Plain(Sampler):
    """Without recordings."""

    def stepper(self, setup: sampling.Setup, state: sampling.State) -> Stepper:
        return Stepper(self.writer, setup, state)


def generator() -> Autoregressive:
    torch.manual_seed(0)
    net = Autoregressive(AutoregressiveConfig(width=64, depth=2, heads=2, inner_width=32, inner_depth=1), BINS, (3, 3), TEXT)
    torch.nn.init.normal_(net.head.weight, std=0.3)
    net.head.bias.data[:2] = 3.0  # meshes that do not climb at once, so that some end early and some late
    return net.to(DEVICE).eval()


def words(num: int) -> TextStates:
    states = torch.randn(num, 4, TEXT, generator=torch.Generator().manual_seed(7))
    return TextStates(states, torch.ones(num, 4, dtype=torch.bool), states.mean(1)).to(DEVICE)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("exact", [True, False])
def test_replay_is_the_plain_loop(guidance: float, leave: bool, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FIRST_ROOM", 3)
    monkeypatch.setattr(sampling, "LOOK_EVERY", 2)
    config = AutoregressiveSampleConfig(guidance=guidance, leave=leave)
    writer = Writer(Lean(generator()), config, FaceOrder(BINS) if exact else DistinctCorners(3, (BINS,) * 3))
    text, seeds = words(9), torch.arange(9, device=DEVICE)
    wanted, ends = Plain(writer)(text, seeds, 40)
    sampler = Sampler(writer)
    counts = []
    for _ in range(2):
        found, same_ends = sampler(text, seeds, 40)
        assert torch.equal(ends, same_ends)
        assert torch.equal(found, wanted)
        counts.append(len(sampler.recordings))
    assert counts[0] == counts[1] >= 2, "one for each size, and nothing anew the second time"
    assert len(set(ends.tolist())) > 2


def test_known_groups_are_replayed_too() -> None:
    writer = Writer(Lean(generator()), AutoregressiveSampleConfig(guidance=2.0), FaceOrder(BINS))
    text, seeds = words(2), torch.arange(2, device=DEVICE)
    begun, _ = Plain(writer)(text, seeds + 5, 3)
    known = Known(begun, torch.tensor([3, 1], device=DEVICE))
    found, ends = Sampler(writer)(text, seeds, 12, known=known)
    wanted, same = Plain(writer)(text, seeds, 12, known=known)
    assert torch.equal(found, wanted)
    assert torch.equal(ends, same)
    assert torch.equal(found[0, :3], begun[0])


def test_bf16_draws_canonical_meshes() -> None:
    writer = Writer(Lean(generator(), bf16=True), AutoregressiveSampleConfig(), FaceOrder(BINS))
    found, ends = Sampler(writer)(words(4), torch.arange(4, device=DEVICE), 20)
    order = FaceOrder(BINS)
    for mesh, length in zip(found.cpu(), ends.tolist(), strict=True):
        faces = [order.vertices(face.unbind()).tolist() for face in mesh[:length]]
        assert faces == sorted(faces)
