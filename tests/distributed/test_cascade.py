"""The whole cascade, from its pair to its upsampler: ranks change neither losses nor samples, nor what the pair has cached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cascade import STEPS, arguments
from tests.processes import check, made_once, read_metrics, run

RECORD = Path(__file__).parent / "record.py"
STAGES = ["pair", "prior", "base", "superres"]
slow = pytest.mark.slow


def trained(workshop: Path, shapes: Path, ranks: int, changes: dict[str, str | int] | None = None) -> Path:
    """All stages on so many ranks; what each rank saw lies beside it."""
    path = workshop / f"cascade {ranks} {' '.join(map(str, (changes or {}).values()))}".strip()
    records = path.with_name(f"{path.name} records")
    made_once(path, lambda: check(run([str(records), *arguments(shapes, path, changes)], workshop, ranks=ranks, script=RECORD)))
    return path


def losses(path: Path, stage: str) -> dict[tuple[int, str], float]:
    """(step, name) -> of training and validation."""
    lines = read_metrics(path, stage)
    return {(line["step"], name): line[name] for line in lines for name in line if name == "loss" or name.endswith("/loss")}


def seen(records: Path, stage: str) -> dict[str, list[str]]:
    """step -> keys of the global batch, in rank order."""
    ranks: list[dict[str, Any]] = [json.loads(file.read_text())["stages"][stage] for file in sorted(records.iterdir())]
    assert len({rank["hash"] for rank in ranks}) == 1, "ranks agree bit for bit"
    return {step: [key for rank in ranks for key in rank["keys"][step]] for step in ranks[0]["keys"]}


def records_of(path: Path) -> Path:
    return path.with_name(f"{path.name} records")


def embeddings_of(path: Path) -> np.ndarray:
    (folder,) = (path / "cache").glob("embeddings-*")
    return np.load(folder / "00000.npy")


def assert_same(path: Path, alone: Path, stage: str) -> None:
    expected = losses(alone, stage)
    assert len([name for _, name in expected if "/" in name]) == STEPS
    assert losses(path, stage) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("ranks", "changes"), [(2, {}), pytest.param(3, {}, marks=slow), pytest.param(2, {"engine.parallel": "shard"}, marks=slow)]
)
def test_ranks_change_nothing(stage: str, ranks: int, changes: dict[str, str | int], workshop: Path, shapes: Path) -> None:
    """Seven samples, which is four and three on two ranks, and one group of the pair."""
    alone, several = trained(workshop, shapes, 1), trained(workshop, shapes, ranks, changes)
    assert_same(several, alone, stage)
    assert seen(records_of(several), stage) == seen(records_of(alone), stage)
    np.testing.assert_allclose(embeddings_of(several), embeddings_of(alone), rtol=0, atol=1e-5)


@slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_resumed_on_another_number_of_ranks(ranks: int, workshop: Path, shapes: Path, tmp_path: Path) -> None:
    """Two ranks stopped in the middle of every stage, the first of which others have read by then."""
    alone = trained(workshop, shapes, 1)
    run_folder = Path(shutil.copytree(trained(workshop, shapes, 2), tmp_path / "run"))
    for stage in STAGES[1:]:
        shutil.rmtree(run_folder / stage / "checkpoints" / f"step-{STEPS:06d}")
    check(run([str(tmp_path / "records"), "resume", str(run_folder)], tmp_path, ranks=ranks, script=RECORD))
    for stage in STAGES:
        assert_same(run_folder, alone, stage)
    for stage in STAGES[1:]:
        after = {step: keys for step, keys in seen(records_of(alone), stage).items() if int(step) > STEPS // 2}
        assert seen(tmp_path / "records", stage) == after
