"""The cases of clips run at a small size, and are what they say they are at the full one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tessera.batches import TextStates
from tessera.bench import CASES, timing, videos
from tessera.bench.masked import Size
from tessera.bench.timing import count_operations
from tessera.bench.videos import CONV, CVIVIT, DRAW, GENERATOR, TOKENIZER, write_clips
from tessera.generators.masked.frames import FrameMaskConfig
from tessera.generators.masked.stage import MaskedStageConfig, build_nets
from tessera.media import clip_files
from tessera.media.clip_facts import AvMissing
from tessera.media.clips import read_facts
from tessera.tokenizers.video.critic import build_critic
from tessera.tokenizers.video.model import VideoTokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the full size runs there")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "limit", lambda: 1.0)
    monkeypatch.setattr(videos, "DRAW", DRAW.model_copy(update={"steps": 2}))


@pytest.mark.parametrize("name", [name for name in videos.CASES if name not in ("video.long", "video.loader")])
def test_a_case_counts_clips(name: str) -> None:
    row = CASES[name](None)
    assert row["reduced"]
    assert row["items"] == "clips"
    assert row["items_per_s"] == pytest.approx(row["batch"] / row["ms"] * 1e3, rel=0.05, abs=0.1)
    assert row["tflop_per_s"] >= 0
    assert row.get("tokens", 48) == 3 * 4 * 4
    assert (row.get("frames", 5), row.get("size", 32)) == (5, 32)


def test_frames_are_masked_in_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_BENCH", "frames eager")
    asked: list[object] = []
    real = videos.timed_training

    def timed_training(config: MaskedStageConfig, size: Size, share: int, *, graphs: bool) -> dict[str, object]:
        asked.append(config.loss.frames)
        return real(config, size, share, graphs=graphs)

    monkeypatch.setattr(videos, "timed_training", timed_training)
    assert CASES["video.maskgit.train"](None)["variant"] == "eager frames"
    assert asked == [FrameMaskConfig()]


def test_a_long_clip_takes_no_more_than_a_short_one() -> None:
    row = CASES["video.long"](None)
    (short, few), (long, many) = row["lengths"].items()
    assert (few["made"], many["made"]) == (short, long), "1 + 2 n frames are made as asked"
    assert few["kept_mib"] == many["kept_mib"] > 0
    assert row["items_per_s"] == many["frames_per_s"] > 0


def test_the_loader_reads_every_kind() -> None:
    pytest.importorskip("av")
    row = CASES["video.loader"](None)
    assert row["gif"]["samples"] == row["mp4"]["samples"] == 8
    assert row["items_per_s"] == row["gif"]["items_per_s"] > 0
    assert row["mp4"]["items_per_s"] > 0


def test_the_loader_without_av(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(what: str) -> None:
        raise AvMissing(what)

    monkeypatch.setattr(clip_files, "import_av", missing)
    assert write_clips(tmp_path, 1, 2) == ["gif"]
    assert read_facts(tmp_path / "gif" / "0-1.gif").num_frames == 48
    assert not (tmp_path / "mp4").exists()


def test_the_loader_reads_the_users_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos.os, "cpu_count", lambda: 1)
    write_clips(tmp_path, 1, 3)
    row = CASES["video.loader"](tmp_path / "gif")
    assert (row["samples"], row["workers"]) == (3, 1)
    assert row["items_per_s"] > 0


def test_tokenizers_are_as_large_as_the_peers() -> None:
    """phenaki-pytorch has 60.2 M parameters without its critic and VGG16, its critic 26.7 M."""
    assert TOKENIZER.critic is not None
    with torch.device("meta"):
        nets = [VideoTokenizer(CVIVIT, 3), VideoTokenizer(CONV, 3), build_critic(TOKENIZER.critic, 3)]
    sizes = [sum(p.numel() for p in net.parameters()) / 1e6 for net in nets]
    assert sizes == pytest.approx([60.2, 60.2, 26.7], rel=0.1)
    for config in (CVIVIT, CONV):
        assert (256 // config.stride, config.time_stride, config.quantizer.vocab_size) == (8, 2, 64_000)


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
