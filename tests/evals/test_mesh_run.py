"""`tessera evaluate` on runs of meshes: exact coordinates, and a graph tokenizer alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import pipeline
from tessera.config import UserError
from tessera.data.canonical import quantise
from tessera.data.synth.furniture import write_furniture
from tessera.evals.lines import lines
from tessera.evals.mesh_material import load_meshes
from tessera.evals.mesh_run import in_faces, in_quads
from tessera.evals.run import evaluate_run

QUICK = ("evaluate.points=64",)
SETS = (
    "engine.device=cpu", "engine.preview_samples=2", "engine.validate_every_steps=2", "engine.save_every_steps=2",
    "engine.preview_every_steps=2", "data.bins=32", "data.max_faces=260", "data.validation_fraction=0.2", "base.batch_size=4",
    "base.steps=2", "base.model={width: 16, depth: 1, heads: 2, inner_width: 16, inner_depth: 1}",
    "text={kind: bytes, length: 24, width: 16, depth: 1, heads: 2}", "sample.max_faces=6", "sample.chunk=4",
)  # fmt: skip
GRAPH = (
    "tokenizer={kind: graph, steps: 2, batch_size: 4, model: {coordinate_width: 8, encoder_width: 16, encoder_layers: 1, "
    "decoder_width: 16, decoder_blocks: 1, heads: 2}}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("meshes") / "furniture"
    write_furniture(path, 64, 0)
    return path


def train(data: Path, run: Path, *sets: str, **options: Any) -> Path:
    config = pipeline.resolve("meshgpt", preset="tiny", data=str(data), sets=(*SETS, *sets))
    return pipeline.train(config, run=run, **options)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("runs") / "run")


def test_a_run_is_judged(run: Path) -> None:
    said: list[str] = []
    first, folder = evaluate_run(run, n=3, sets=QUICK, device="cpu", say=said.append)
    report = json.loads((folder / "evaluation.json").read_text())
    assert report == first.report
    assert (report["n"], report["points"], report["bins"]) == (3, 64, 32)
    assert report["subject"]["stages"] == {"base": 2}
    assert set(report["oracle"]["rows"]) == {"chance", "nearest", "real", "reconstruction", "samples"}
    assert report["reconstruction"]["exact"] == 1.0, "exact coordinates lose nothing but bins"
    assert report["shapes"]["removed_degenerate"] == report["shapes"]["removed_duplicate"] == 0, "no token says such a face"
    assert report["loss"]["bits_per_face"] > 0
    assert report["loss"]["bits_per_mesh"] > report["loss"]["bits_of_face_1"] > 0
    assert (folder / "evaluation.png").is_file()
    assert not (folder / "extractor.safetensors").exists()
    assert "drawing 3 meshes from their captions" in said
    assert any(line.startswith("the oracle finds ") and line.endswith(" of 3 samples right in everything") for line in said)
    assert lines(report)
    again, _ = evaluate_run(run, n=3, sets=QUICK, device="cpu")
    assert again.report == first.report, "the same weights and seed give the same numbers"


def test_bits_are_those_of_validation(run: Path, data: Path) -> None:
    """On the same meshes: the validation split of the training folder, which as a copy elsewhere has no heldout/ beside it."""
    copy = run.parent / "elsewhere"
    copy.mkdir()
    for file in (data / "train").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    report = evaluate_run(run, n=64, sets=(*QUICK, f"data.path={copy}"), device="cpu")[0].report
    assert report["held_out"] == "the validation split"
    numbers = [json.loads(line) for line in (run / "base" / "metrics.jsonl").read_text().splitlines()]
    valid = [line for line in numbers if line["kind"] == "valid"][-1]
    assert report["loss"]["bits_per_face"] == pytest.approx(valid["bits_per_group"], rel=1e-4)
    assert report["loss"]["bits_per_mesh"] == pytest.approx(valid["bits_per_sample"], rel=1e-4)


def test_without_data_the_user_is_told_how_to_name_them(run: Path) -> None:
    with pytest.raises(UserError, match=r"--set data\.path=PATH"):
        evaluate_run(run, n=2, sets=("data.path=null",), device="cpu")


def test_a_graph_tokenizer_alone_is_judged_by_what_it_keeps(data: Path, tmp_path: Path) -> None:
    report = evaluate_run(train(data, tmp_path / "run", GRAPH, stage="tokenizer"), n=3, sets=QUICK, device="cpu")[0].report
    assert report["reconstruction"]["exact"] < 1
    assert report["reconstruction"]["rows"]["quantised"]["exact"] == 1
    assert report["shapes"]["rows"]["reconstruction"]["removed_degenerate"] > 0, "codes that are not learned say such faces"
    assert "removed_degenerate" not in report["shapes"]["rows"]["real"]
    assert "samples" not in report["oracle"]["rows"]
    assert any("no generator is trained" in note for note in report["notes"])


def test_bits_of_quads_are_not_called_bits_of_faces(data: Path, tmp_path: Path) -> None:
    run = train(data, tmp_path / "run", GRAPH.replace("{coord", "{corners: 4, coord"))
    report = evaluate_run(run, n=3, sets=QUICK, device="cpu")[0].report
    loss = report["loss"]
    assert "bits_of_face_1" not in loss
    assert loss["bits_of_quad_1"] > 0
    config = pipeline.resolve("meshgpt", preset="tiny", data=str(data), sets=SETS)
    held_out = load_meshes(config.data, most_train=1, most_held_out=6, seed=0).held_out
    shown = [len(quantise(mesh, 32)) for mesh in held_out.meshes]
    assert loss["bits_per_face"] == pytest.approx(loss["bits_per_mesh"] / np.mean(shown))
    assert loss["bits_per_quad"] > loss["bits_per_face"], "of furniture most quads are two triangles"


def test_groups_are_faces() -> None:
    assert in_faces({"loss": 1.0, "bits_per_group": 2.0, "bits_per_sample": 3.0, "bits_of_group_8": 4.0}) == {
        "loss": 1.0,
        "bits_per_face": 2.0,
        "bits_per_mesh": 3.0,
        "bits_of_face_8": 4.0,
    }


def test_groups_may_be_quads() -> None:
    """Of 30 bits a mesh and 12 triangles."""
    assert in_quads({"loss": 1.0, "bits_per_group": 5.0, "bits_per_sample": 30.0, "bits_of_group_1": 4.0}, 12.0) == {
        "loss": 1.0,
        "bits_per_quad": 5.0,
        "bits_per_mesh": 30.0,
        "bits_of_quad_1": 4.0,
        "bits_per_face": 2.5,
    }
