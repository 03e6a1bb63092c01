"""Compiled and recorded steps of both mesh stages lose what eager ones lose, over batches of several lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.data.synth.furniture import write_furniture
from tessera.engine.track import read_metrics
from tessera.pipeline import resolve, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = [
    "tokenizer={kind: graph, batch_size: 8, optim: {lr: 1.0e-3, warmup_steps: 2}}",
    "tokenizer.model={encoder_width: 48, encoder_layers: 2, decoder_width: 48, decoder_blocks: 2, heads: 4}",
    "text={kind: bytes, length: 32, width: 32, depth: 1, heads: 2}",
    "base.batch_size=8",
    "base.model={width: 64, depth: 2, heads: 2, inner_width: 32, inner_depth: 1}",
    "engine.log_every_steps=1",
    "engine.device=cuda",
    "engine.precision=fp32",
]


def test_compiled_and_recorded_steps_lose_what_eager_ones_lose(tmp_path: Path) -> None:
    write_furniture(tmp_path / "data", 64, 0)
    kinds = {
        "eager": ["engine.compile=false"],
        "compiled": ["engine.compile=true"],
        "graphs": ["engine.compile=true", "engine.cuda_graphs=true"],
    }
    lines = {}
    for name, sets in kinds.items():
        config = resolve("meshgpt", preset="tiny", data=str(tmp_path / "data"), steps=16, sets=[*SMALL, *sets])
        train(config, run=tmp_path / name)
        for stage in ("tokenizer", "base"):
            found = read_metrics(tmp_path / name / stage / "metrics.jsonl")
            lines[name, stage] = [line for line in found if line["kind"] == "train"]
    for stage, turn in (("tokenizer", "tokenizer"), ("base", "generator")):
        assert len(lines["eager", stage]) == 16
        for kind in ("compiled", "graphs"):
            for wanted, found in zip(lines["eager", stage], lines[kind, stage], strict=True):
                for part in ("loss", "grad_norm"):
                    name = f"{turn}/{part}"
                    assert found[name] == pytest.approx(wanted[name], rel=5e-3, abs=1e-4), (kind, stage, wanted["step"], name)
