"""`tessera evaluate` on two ranks gives the report of one: each makes a share of the pictures, and all measure all of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tessera import pipeline
from tessera.data.synth.digits import write_digits
from tessera.data.synth.shapes import write_shapes
from tests.cascade import settings
from tests.nn.public_nets import write_lpips
from tests.processes import check, start
from tests.small import generated, pictures

__all__ = ["generated", "pictures"]


def judged(run: Path, data: Path, folder: Path, ranks: int, *more: str, n: int = 70) -> dict[str, Any]:
    """The report that was printed, once, and written."""
    sets = ["evaluate.fit_steps=2", "evaluate.resamples=2", "evaluate.train_samples=40", f"data.path={data}", *more]
    command = ["evaluate", str(run), "--n", str(n), "--json", "--set", *sets]
    with start(command, folder, ranks=ranks, CUDA_VISIBLE_DEVICES="") as running:
        output = check(running.wait()).output
    printed: dict[str, Any] = json.loads(output[output.index("{\n") :])  # messages come before it; a second one would be no JSON
    assert printed == json.loads((run / f"evaluation-00{ranks}" / "evaluation.json").read_text())
    return printed


@pytest.mark.slow
def test_two_ranks_report_of_a_cascade_what_one_does(tmp_path: Path) -> None:
    """With the row of what the decoder draws of real embeddings."""
    write_shapes(tmp_path / "data", 300, 0, image_size=32)
    config = pipeline.resolve("dalle2", preset="tiny", data=str(tmp_path / "data"), steps=2, sets=settings())
    run = pipeline.train(config, run=tmp_path / "run")
    one, two = (judged(run, tmp_path / "data", tmp_path, ranks) for ranks in (1, 2))
    assert one == two
    assert "reconstruction" in one["oracle"]["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "autoregressive"])
def test_two_ranks_report_of_clips_what_one_does(kind: str, tmp_path: Path) -> None:
    write_digits(tmp_path / "data", 120, 0, image_size=32, frames=5)
    sets = ["data.frames=5", "data.validation_fraction=0.3", "tokenizer.model.widths=[8, 8, 8]", "sample.chunk=8"]
    sets += [f"base.model.kind={kind}", "base.model.width=32", "base.model.depth=1", "tokenizer.model.time_downsamples=1"]
    config = pipeline.resolve("nuwa", preset="tiny", data=str(tmp_path / "data"), steps=2, sets=sets)
    run = pipeline.train(config, run=tmp_path / "run")
    one, two = (judged(run, tmp_path / "data", tmp_path, ranks, "evaluate.stories=3", n=20) for ranks in (1, 2))
    assert one == two
    assert {"samples", "reconstruction", "still", "real"} <= one["oracle"]["rows"].keys()
    assert one["oracle"]["n"] == 15
    assert one["identity"]["n"] == 3


def test_two_ranks_report_what_one_does(generated: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(generated, tmp_path / "run"))
    write_shapes(tmp_path / "data", 560, 0, image_size=32)  # 70 held out: two chunks, so both ranks draw
    _, _, files = write_lpips(tmp_path, "vgg")
    lpips = f"evaluate.lpips={{net: vgg, path: {files.path}, heads: {files.heads}}}"
    one, two = (judged(run, tmp_path / "data", tmp_path, ranks, lpips) for ranks in (1, 2))
    assert one == two
    assert one["oracle"]["n"] == 70
    assert one["fd"]["n"] == 35
    assert one["is"]["n"] == one["lpips"]["rows"]["reconstruction"]["n"] == 70
