"""The cases of meshes run, and count what they say they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.bench import run_cases, timing
from tessera.data.synth.furniture import write_furniture


@pytest.fixture(autouse=True)
def without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "limit", lambda: 1.0)


@pytest.mark.parametrize("case", ["mesh.tokenizer.train", "mesh.ar.train", "mesh.ar.sample", "mesh.ar.sample64"])
def test_a_case_counts_faces(case: str) -> None:
    (row,) = run_cases([case])
    assert row["items"] == "faces"
    assert row["items_per_s"] == pytest.approx(row["batch"] * row["faces"] / row["ms"] * 1e3, rel=0.01)
    assert row.get("faces_made", row["batch"] * row["faces"]) == row["batch"] * row["faces"], "no mesh ended early"


def test_a_curve_has_a_row_for_each_length() -> None:
    (row,) = run_cases(["mesh.ar.lengths"])
    assert list(row["lengths"]) == [16, 32]
    assert row["most_faces"] == 32
    assert row["items_per_s"] == row["lengths"][32]["items_per_s"]


def test_the_loader_reads_the_users_meshes(tmp_path: Path) -> None:
    write_furniture(tmp_path / "data", 12, 0)
    (row,) = run_cases(["mesh.loader"], tmp_path / "data")
    assert row["items_per_s"] > row["meshes_per_s"] > 0
