"""The whole cascade, from its pair to its upsampler: ranks change neither losses nor samples, nor what the pair has cached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cascade import STEPS, arguments, saved, vector, write_tars
from tests.processes import check, made_once, read_metrics, run

RECORD = Path(__file__).parent / "record.py"
DIE = Path(__file__).parents[1] / "faults" / "die_between.py"
STAGES = ["embedder", "prior", "base", "upsampler1"]
slow = pytest.mark.slow


def trained(workshop: Path, data: Path, ranks: int, changes: dict[str, str | int] | None = None) -> Path:
    """All stages on so many ranks; what each rank saw lies beside it."""
    path = workshop / f"cascade of {data.name} {ranks} {' '.join(map(str, (changes or {}).values()))}".strip()
    made_once(
        path,
        lambda: check(run([str(records_of(path)), *arguments(data, path, changes)], workshop, ranks=ranks, script=RECORD)),
    )
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
    threads = [name for file in records_of(several).iterdir() for name in json.loads(file.read_text())["threads"]]
    assert changes or not [name for name in threads if "gloo" in name], "nothing of the process group outlives it"
    np.testing.assert_allclose(embeddings_of(several), embeddings_of(alone), rtol=0, atol=1e-5)


def tars_of(workshop: Path) -> Path:
    """Three, with embeddings in them."""
    path = workshop / "tars with embeddings"
    return made_once(path, lambda: write_tars(path, lambda key: saved(vector(key))))


@slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["pair", "tars"])
def test_resumed_on_another_number_of_ranks(kind: str, ranks: int, workshop: Path, shapes: Path, tmp_path: Path) -> None:
    """Two ranks with two workers each stopped in the middle of every stage but the pair, which others have read by then."""
    data = tars_of(workshop) if kind == "tars" else shapes
    changes: dict[str, str | int] = {"embeddings": f"{{kind: {kind}}}", "data.workers": 2}
    alone = trained(workshop, data, 1, changes)
    run_folder = Path(shutil.copytree(trained(workshop, data, 2, changes), tmp_path / "run"))
    for stage in STAGES[1:]:
        shutil.rmtree(run_folder / stage / "checkpoints" / f"step-{STEPS:06d}")
    check(run([str(tmp_path / "records"), "resume", str(run_folder)], tmp_path, ranks=ranks, script=RECORD))
    for stage in STAGES[1:]:
        assert_same(run_folder, alone, stage)
        whole = seen(records_of(alone), stage)
        assert seen(tmp_path / "records", stage) == {step: keys for step, keys in whole.items() if int(step) > STEPS // 2}
        stream = [key for step in sorted(whole, key=int) for key in whole[step]]
        epoch = stream[: len(set(stream))]
        assert len(set(epoch)) == len(epoch), "every sample once, before any comes again"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.slow
def test_killed_while_two_ranks_embed_the_pictures(ranks: int, workshop: Path, shapes: Path, tmp_path: Path) -> None:
    alone, path = trained(workshop, shapes, 1), tmp_path / "run"
    ended = run(["half an array", *arguments(shapes, path)], tmp_path, ranks=2, script=DIE)
    assert "Signal 9 (SIGKILL)" in check(ended, 1).output, "of a rank, which the launcher reports"
    assert not list((path / "cache").glob("embeddings-*/manifest.json")), "not finished"
    assert not list((path / "prior").glob("checkpoints/*"))
    check(run([str(tmp_path / "records"), "resume", str(path)], tmp_path, ranks=ranks, script=RECORD))
    np.testing.assert_allclose(embeddings_of(path), embeddings_of(alone), rtol=0, atol=1e-5)
    for stage in STAGES[1:]:
        assert_same(path, alone, stage)
        assert seen(tmp_path / "records", stage) == seen(records_of(alone), stage)
