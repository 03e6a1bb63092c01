"""The cases of clips made token by token run at a small size, and are what they say they are at the full one."""

from __future__ import annotations

import json

import pytest
import torch

from tessera.bench import CASES, grids, timing
from tessera.bench.grids import DRAW, GENERATOR, TEXT, TOKENIZER, crossover, fitted
from tessera.generators.autoregressive.grid_model import GridAutoregressive
from tessera.generators.autoregressive.grid_sample import GridWriter
from tessera.generators.autoregressive.grid_stage import build_nets
from tessera.nn.nearby import RASTER, Bands, Causal, Dense, sight_of
from tessera.recording import Lean
from tessera.text.bytes import ByteEncoder
from tessera.tokenizers.video.model import VideoTokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the full size runs there")


@pytest.fixture(autouse=True)
def without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "limit", lambda: 1.0)


@pytest.mark.parametrize("name", ["video.ar.train", "video.ar.train.tokens", "video.ar.sample"])
def test_a_case_counts_tokens(name: str) -> None:
    row = CASES[name](None)
    assert row["reduced"]
    assert row["items"] == "tokens"
    assert row["tokens"] == (16 if name == "video.ar.sample" else 48)
    assert row["items_per_s"] == pytest.approx(row["batch"] * row["tokens"] / row["ms"] * 1e3, rel=0.01)


def test_only_one_training_encodes_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    real = VideoTokenizer.encode

    def encode(self: VideoTokenizer, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return real(self, x)

    monkeypatch.setattr(VideoTokenizer, "encode", encode)
    CASES["video.ar.train.tokens"](None)
    assert seen == []
    CASES["video.ar.train"](None)
    assert set(seen) == {(2, 3, 3, 32, 32)}
    assert len(seen) == 4, "warming up, counting, and twice to be timed"


def test_every_order_draws_the_same_clips_in_its_own_number_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[tuple[int, int, int], torch.Tensor] = {}
    real = grids.time_call

    def time_call(call, items, **how):  # type: ignore[no-untyped-def]
        ids = call()
        drawn[len(drawn), len(ids), ids.shape[1]] = ids
        return real(call, items, **how)

    monkeypatch.setattr(grids, "time_call", time_call)
    row = CASES["video.ar.decode"](None)
    passes = {name: {num: found["passes"] for num, found in rows.items()} for name, rows in row["orders"].items()}
    assert passes == {"sequential, eager": {1: 16, 2: 16}, "sequential": {1: 48, 2: 48}, "wavefront": {1: 24, 2: 24}}
    first, _, slow, slow_two, fast, fast_two = drawn.values()
    assert slow.shape == (1, 3, 4, 4)
    assert torch.equal(slow, fast)
    assert torch.equal(slow_two, fast_two)
    assert torch.equal(slow[:, :1], first)
    for rows in row["orders"].values():
        for num, found in rows.items():
            assert found["items_per_s"] == pytest.approx(num * found["frames"] * 16 / found["ms"] * 1e3, rel=0.01)


def test_lengths_have_as_many_tokens_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    real = grids.build_nets

    def build(config, **how):  # type: ignore[no-untyped-def]
        nets = real(config, **how)
        net = nets["generator"]
        looked.append(sight_of(net.reaches[0], net.slots(how["grid"][0]), torch.device("cpu"), net.execution))
        return nets

    monkeypatch.setattr(grids, "build_nets", build)
    row = CASES["video.ar.lengths"](None)
    assert [type(sight) for sight in looked] == [Dense, Causal, Bands] * 2
    for rows in row["lengths"].values():
        assert {length: found["batch"] for length, found in rows.items()} == {32: 2, 64: 1}
        assert all(found["items_per_s"] == pytest.approx(64 / found["ms"] * 1e3, rel=0.01) for found in rows.values())
    assert row["items_per_s"] == row["lengths"]["nearby"][64]["items_per_s"]
    assert set(row["crossover"]) == {"dense", "causal"}


def test_one_way_without_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TESSERA_BENCH", "dense")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(grids, "time_steps", full)
    row = CASES["video.ar.lengths"](None)
    assert row["lengths"] == {"dense": {32: None, 64: None}}
    assert row["items_per_s"] is None
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert told == [{"way": "dense", "tokens": length, "row": None} for length in (32, 64)], "as soon as it is known"


def test_where_ways_cross() -> None:
    def rows(*times: float | None) -> dict[int, dict[str, float] | None]:
        return {2**place: None if ms is None else {"ms": ms} for place, ms in enumerate(times)}

    near = rows(5, 5, 5, 5)
    assert crossover({"dense": rows(4, 6, 8, None), "nearby": near}, "dense") == 2
    assert crossover({"dense": rows(6, 4, 6, 8), "nearby": near}, "dense") == 4, "it stays faster only from there"
    assert crossover({"dense": rows(6, 6, 6, 4), "nearby": near}, "dense") is None
    assert crossover({"dense": rows(6, 6), "nearby": rows(5, None)}, "dense") is None
    assert crossover({"dense": rows(6)}, "dense") is None


def test_networks_have_the_layers_of_the_peer() -> None:
    """Parameters of nuwa-pytorch at this size, counted there."""
    with torch.device("meta"):
        nets = build_nets(GENERATOR, vocab_size=8192, grid=(10, 16, 16), text_width=512, encoder=ByteEncoder(TEXT))
        tokens = VideoTokenizer(TOKENIZER, 3)
    layers = [sum(p.numel() for p in net.get_submodule("blocks").parameters()) / 1e6 for net in nets.values()]
    assert layers == pytest.approx([50.40, 18.90], rel=0.01)
    assert sum(p.numel() for p in tokens.encoder.parameters()) / 1e6 == pytest.approx(13.93 - 1.07, rel=0.05)  # less attention
    assert (128 // TOKENIZER.stride, TOKENIZER.time_stride, tokens.vocab_size) == (16, 1, 8192)
    assert DRAW.top_k == 8192 // 10


def test_layers_of_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "reduced", lambda: False)
    assert fitted(GENERATOR).model.depth == 12
    monkeypatch.setenv("TESSERA_BENCH", "layers8")
    assert fitted(GENERATOR).model == GENERATOR.model.model_copy(update={"depth": 8})


@pytest.mark.parametrize(("word", "passes", "first"), [("", 2 * 3 + 4, 2), ("raster", 4 * 4, RASTER), ("window", 2 * 3 + 4, 0)])
def test_how_a_frame_is_drawn(word: str, passes: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_BENCH", word)
    row = CASES["video.ar.sample"](None)
    assert (row["passes"], row["variant"]) == (passes, word)
    assert fitted(GENERATOR).model.nearby.reach(0).first == first


def test_a_frame_takes_46_passes_at_the_full_size() -> None:
    with torch.device("meta"):
        nets = build_nets(GENERATOR, vocab_size=8192, grid=(10, 16, 16), text_width=512)
    net = nets["generator"]
    assert isinstance(net, GridAutoregressive)
    assert GridWriter(Lean(net), DRAW).plans(torch.device("cpu")).num_passes(1) == 2 * 15 + 16
