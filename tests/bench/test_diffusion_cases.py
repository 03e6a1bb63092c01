"""The cases of diffusion run at a small size, and are what they say they are at the full one; so does the peer, where it is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tessera.batches import TextStates
from tessera.bench import CASES, diffusion, timing
from tessera.bench.timing import count_operations
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.denoisers import build_denoiser
from tessera.generators.diffusion.dit import DiTConfig
from tessera.generators.diffusion.unet import UNetConfig

BENCH = Path(__file__).parents[2] / "bench"
NEEDS = ("dalle2_pytorch", "resize_right", "rotary_embedding_torch", "vector_quantize_pytorch", "ftfy", "regex")
PEER_PARAMETERS, PEER_FORWARD = 187.5e6, 68.0e9  # of dalle2-pytorch 1.15.6 at this size, its operations of one picture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the full size runs there")


@pytest.fixture(autouse=True)
def without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "limit", lambda: 1.0)


@pytest.mark.parametrize("word", ["", "dit"])
@pytest.mark.parametrize("name", ["image.diffusion.train", "image.diffusion.sample"])
def test_a_case_runs_at_a_small_size(name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_BENCH", word)
    row = CASES[name](None)
    assert row["variant"] == word
    assert row["reduced"]
    assert row["items_per_s"] == pytest.approx(row["batch"] / row["ms"] * 1e3, rel=0.05)
    assert row["tflop"] > 0
    assert row["size"] == 16


@pytest.mark.parametrize(("config", "share"), [(diffusion.NET, 1.0), (diffusion.OTHER, 0.81)], ids=["unet", "dit"])
def test_the_network_is_as_large_as_the_peers_and_does_as_much(config: UNetConfig | DiTConfig, share: float) -> None:
    with torch.device("meta"):
        net = build_denoiser(config, channels=3, size=(64, 64), text_width=512, embedding_width=512)
        text = TextStates(torch.zeros(1, 77, 512), torch.ones(1, 77, dtype=torch.bool), torch.zeros(1, 512))
        told, x, level = Condition(text=text, embedding=torch.zeros(1, 512)), torch.zeros(1, 3, 64, 64), torch.zeros(1)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(share * PEER_PARAMETERS, rel=0.03)
    with torch.no_grad():
        assert count_operations(lambda: net(x, level, told)) == pytest.approx(PEER_FORWARD, rel=0.04)


def test_drawing_is_counted_by_the_passes_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    net, rows = diffusion.denoiser(), []
    net.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    monkeypatch.setattr(diffusion, "denoiser", lambda: net)
    row = diffusion.sample_case(None)
    assert set(rows) == {2 * row["batch"]}, "two branches, one batch"
    assert len(rows) == (1 + 3) * row["steps"] + 1, "warm-up and repeats, and one pass that is counted"


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("peers.dalle2")


@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in NEEDS), reason="dalle2-pytorch is not installed")
@pytest.mark.parametrize("name", ["image.diffusion.train", "image.diffusion.sample"])
def test_the_peer_runs(peer: ModuleType, name: str) -> None:
    row = peer.CASES[name](peer.Peer())
    assert row["items_per_s"] > 0
    assert row["tflop"] > 0


def test_stand_ins_are_gone_afterwards(peer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "UNUSED", {"torch": ("Nothing",), "nowhere": (), "nowhere.parts": ("Part",)})
    with peer.stand_ins():
        assert importlib.import_module("nowhere.parts").Part
        assert sys.modules["torch"] is torch, "what is installed stays"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nowhere.parts")
