"""What only a GPU shows: compiled and recorded steps, a refusal that is read late, exact resume, memory. `pytest -m gpu`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.batches import ImageBatch
from tessera.contracts import Context
from tessera.data.synth.shapes import write_shapes
from tessera.engine import loop
from tessera.engine.checkpoint import list_checkpoints, read_weights
from tessera.engine.loop import NonFinite
from tessera.engine.track import read_metrics
from tessera.pipeline import resolve, resume, train
from tessera.recipes import RECIPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = [
    "tokenizer.model.widths=[16,32]",
    "tokenizer.model.blocks=[1,1]",
    "tokenizer.critic.widths=[16,32]",
    "tokenizer.critic.penalty={every: 4}",
    "tokenizer.batch_size=8",
    "tokenizer.critic.start_step=4",
    "tokenizer.critic.warmup_steps=2",
    "text={kind: bytes, length: 32, width: 32, depth: 1, heads: 2}",
    "base.batch_size=8",
    "base.model={width: 32, depth: 2, heads: 2, dropout: 0}",
    "engine.log_every_steps=1",
    "engine.device=cuda",
]


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "shapes"
    write_shapes(folder, 64, 0, image_size=32)
    return folder


def fitted(run: Path, data: Path, steps: int, *sets: str) -> list[dict[str, Any]]:
    """A whole run; its training lines."""
    chosen = {item.split("=")[0]: item for item in (*SMALL, *sets)}  # the later one wins
    train(resolve("muse", preset="tiny", data=str(data), steps=steps, sets=list(chosen.values())), run=run, stage="tokenizer")
    return [line for line in read_metrics(run / "tokenizer" / "metrics.jsonl") if line["kind"] == "train"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_and_recorded_steps_lose_what_eager_ones_lose(precision: str, shapes: Path, tmp_path: Path) -> None:
    kinds = {"eager": (), "compiled": ("engine.compile=true",), "graphs": ("engine.compile=true", "engine.cuda_graphs=true")}
    lines = {
        name: fitted(tmp_path / name, shapes, 12, f"engine.precision={precision}", "engine.compile=false", *sets)
        for name, sets in kinds.items()
    }
    names = ["tokenizer/loss", "tokenizer/l1", "tokenizer/grad_norm", "critic/loss", "critic/penalty", "critic/hinge"]
    rel, absolute = (2e-3, 1e-4) if precision == "fp32" else (5e-2, 2e-2)
    for kind in ("compiled", "graphs"):
        for wanted, found in zip(lines["eager"], lines[kind], strict=True):
            for name in names:
                if name in wanted:
                    assert found[name] == pytest.approx(wanted[name], rel=rel, abs=absolute), (kind, wanted["step"], name)
    assert any("critic/penalty" in line for line in lines["eager"])


def test_a_break_is_read_late_and_nothing_of_it_is_saved(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = loop.train_step, {}

    def poisoned(state: Any, stage: Any, batches: list[Any], *rest: Any, **options: Any) -> Any:
        if state.step == 6:
            before.update({name: value.clone() for name, value in state.nets["tokenizer"].state_dict().items()})
            images = batches[0].images.clone()
            images[0] = float("nan")
            batches = [replace(batches[0], images=images), *batches[1:]]
        kept.append(state)
        return real(state, stage, batches, *rest, **options)

    kept: list[Any] = []
    monkeypatch.setattr(loop, "train_step", poisoned)
    with pytest.raises(NonFinite, match="step 7, turn 'tokenizer'"):
        fitted(tmp_path / "run", shapes, 20, "engine.save_every_steps=3", "engine.compile=false")
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "tokenizer" / "checkpoints")] == [
        "step-000003",
        "step-000006",
    ]
    after = kept[-1].nets["tokenizer"].state_dict()
    trained = [name for name, _ in kept[-1].nets["tokenizer"].named_parameters()]
    assert all(torch.equal(before[name], after[name]) for name in trained)


def test_a_deterministic_run_resumes_bit_for_bit(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sets = ("engine.deterministic=true", "engine.compile=false", "engine.save_every_steps=10", "tokenizer.model.dropout=0.1")
    lines = fitted(tmp_path / "unbroken", shapes, 20, *sets)
    shutil.copytree(tmp_path / "unbroken", tmp_path / "broken")
    home = tmp_path / "broken" / "tokenizer"
    shutil.rmtree(home / "checkpoints" / "step-000020")
    resume(tmp_path / "broken", stage="tokenizer")
    again = [line for line in read_metrics(home / "metrics.jsonl") if line["kind"] == "train"]
    for wanted, found in zip(lines, again, strict=True):
        assert {name: value for name, value in found.items() if name.startswith(("tokenizer/", "critic/", "lr/"))} == {
            name: value for name, value in wanted.items() if name.startswith(("tokenizer/", "critic/", "lr/"))
        }
    for file in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        place = Path("tokenizer") / "checkpoints" / "step-000020" / file
        assert (tmp_path / "unbroken" / place).read_bytes() == (tmp_path / "broken" / place).read_bytes()


def test_a_checkpoint_of_a_gpu_opens_on_the_cpu(shapes: Path, tmp_path: Path) -> None:
    fitted(tmp_path / "run", shapes, 4, "engine.compile=false")
    weights = read_weights(tmp_path / "run" / "tokenizer" / "checkpoints" / "step-000004")["tokenizer"]
    assert all(value.device.type == "cpu" and value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize("graphs", [False, True])
def test_device_memory_is_flat_over_two_thousand_steps(
    graphs: bool, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = loop.train_step, {}

    def watched(state: Any, *rest: Any, **options: Any) -> Any:
        if (state.step + 1) % 400 == 0:
            torch.cuda.synchronize()
            seen[state.step + 1] = (torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20)
        return real(state, *rest, **options)

    monkeypatch.setattr(loop, "train_step", watched)
    sets = ["engine.log_every_steps=50", "engine.save_every_steps=500", "engine.validate_every_steps=500"]
    fitted(tmp_path / "run", shapes, 2000, *sets, f"engine.compile={graphs}", f"engine.cuda_graphs={graphs}")
    print(f"graphs {graphs}: allocated and reserved MiB by step: {seen}")
    assert seen[2000][0] - seen[400][0] < 1
    assert seen[2000][1] - seen[400][1] < 8


QUANTIZERS = ["{kind: fsq}", "{kind: lfq}", "{kind: vq}", "{kind: residual, num_quantizers: 2, quantizer: {kind: vq}}"]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_learns_compiled_and_recorded(quantizer: str, shapes: Path, tmp_path: Path) -> None:
    fast = ("engine.precision=bf16", "engine.compile=true", "engine.cuda_graphs=true", "tokenizer.critic.lecam={}")
    lines = fitted(tmp_path / "run", shapes, 100, f"tokenizer.model.quantizer={quantizer}", *fast)
    assert lines[-1]["tokenizer/l1"] < 0.6 * lines[0]["tokenizer/l1"]
    assert lines[-1]["codes_used"] > 0.02
    assert any(line.get("critic/lecam", 0) > 0 for line in lines)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_neither_turn_nor_the_codebook_waits_for_the_device(quantizer: str, shapes: Path) -> None:
    config = resolve("muse", preset="tiny", sets=[*SMALL, f"tokenizer.model.quantizer={quantizer}", "tokenizer.critic.lecam={}"])
    stage, device = RECIPES["muse"].steps(config)[0].build(), torch.device("cuda")
    for net in stage.nets.values():
        net.to(device)
    images = (torch.rand(8, 3, 32, 32) * 255).byte()
    batch = ImageBatch(images, torch.ones(8, dtype=torch.bool), torch.arange(8), ("",) * 8, (None,) * 8).to(device)
    positions = batch.positions.to(device)
    for mode in ("default", "error"):  # the first time, libraries set themselves up
        torch.cuda.set_sync_debug_mode(mode)
        try:
            first = stage.turns[0].loss(stage.nets, batch, Context(8, 0, positions))
            second = stage.turns[1].loss(stage.nets, batch, Context(8, 0, positions, {"tokenizer": first.hand}))
            stage.after(stage.nets, {**first.stats, **second.stats}, 8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
