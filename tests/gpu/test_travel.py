"""What only a GPU shows of exports and of the doctor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tessera
from tessera.cli import main
from tessera.data.synth.shapes import write_shapes
from tessera.doctor.report import examine
from tessera.sampling.package import export_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_an_export_of_a_compiled_run_opens_on_both_devices(tmp_path: Path) -> None:
    write_shapes(tmp_path / "photos", 60, 0, image_size=64)
    sets = ["tokenizer.batch_size=16", "tokenizer.model={widths: [16, 32], blocks: [1, 1]}", "data.workers=2"]
    run = tessera.train(
        "muse", preset="small", data=tmp_path / "photos", steps=20, sets=sets, run=tmp_path / "run", stage="tokenizer"
    )
    model = export_run(run, tmp_path / "model")
    pictures = sorted((tmp_path / "photos" / "train").glob("*.png"))[:16]
    on_gpu, on_cpu = (tessera.load(model, device=device) for device in ("auto", "cpu"))
    assert on_gpu.device.type == "cuda"
    same = (on_gpu.encode(*pictures) == on_cpu.encode(*pictures)).float().mean()
    assert same > 0.98  # rounding may tip a value that lies between two codes
    ids = on_cpu.encode(*pictures)
    a, b = (np.stack([np.asarray(p, np.int16) for p in session.decode(ids)]) for session in (on_gpu, on_cpu))
    assert np.abs(a - b).max() <= 2


def test_the_doctor_sees_the_gpu() -> None:
    found = examine(Path())
    assert "GiB" in found.sections["torch"]["device cuda:0"]
    assert found.sections["torch"]["nccl version"] != "none"


def test_resume_is_exact_in_deterministic_mode(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--resume-test"])
    out = capsys.readouterr().out
    print(out)
    assert ended.value.code == 0, out
    assert "deterministic mode" in out
