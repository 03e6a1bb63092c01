"""Errors of collectives in words, and the folder that torchrun's restarts go on with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as torch_dist

from tessera.config import UserError
from tessera.engine.dist import store_of_restart
from tessera.engine.lost import lost_rank
from tessera.engine.run import launch_id, new_run

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:8095"), "rank 1 lost another rank"),
        (RuntimeError(GLOO + "timed out connecting: SO_ERROR: Connection refused"), "rank 1 lost another rank"),
        (RuntimeError(GLOO + "Timed out waiting 5000ms for recv operation to complete"), "rank 1 waited 7 s for another rank"),
        (torch_dist.DistStoreError("Timed out after 6 seconds waiting for clients. 1/2"), "rank 1 waited 7 s for another rank"),
        (torch_dist.DistBackendError("NCCL error: remote process exited"), "rank 1 lost another rank"),
    ],
)
def test_an_error_of_a_collective_is_one_message(error: RuntimeError, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    error.add_note("runs/muse-001")
    lost = lost_rank(error, 7)
    assert str(lost).startswith(said)
    assert "\n" not in str(lost)
    assert "--log-dir" in str(lost)
    assert lost is not None
    assert lost.__notes__ == ["runs/muse-001"], "the command line names the run"


def test_other_errors_are_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 7) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert lost_rank(RuntimeError(GLOO + "Connection closed by peer"), 7) is None


# ---- restarts


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """As torchrun starts a rank for the first time."""
    for name, value in {"RUN_ID": "none", "RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    return monkeypatch


@pytest.mark.parametrize("wanted", [Path("mine"), None])
def test_a_restart_goes_on_with_its_own_folder(wanted: Path | None, launched: pytest.MonkeyPatch) -> None:
    first = new_run("muse", wanted)
    (first / "config.yaml").touch()
    if wanted is not None:
        with pytest.raises(UserError, match="exists; a new run"):
            new_run("muse", wanted)
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert new_run("muse", wanted) == first
    (Path("runs") / "muse-009").mkdir(parents=True)
    assert new_run("muse", wanted) == first


def test_a_restart_of_another_launch_does_not(launched: pytest.MonkeyPatch) -> None:
    """Even under an id that the user gives to all his launches: the launcher is another process."""
    launched.setenv("TORCHELASTIC_RUN_ID", "job")
    folder = new_run("muse", Path("mine"))
    (folder / "config.yaml").touch()
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    launched.setattr(os, "getppid", lambda: 1)
    with pytest.raises(UserError, match="exists; a new run"):
        new_run("muse", folder)
    assert new_run("muse", None) == Path("runs/muse-001")


def test_without_torchrun_nothing_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch_id() is None
    assert list(new_run("muse", tmp_path / "mine").iterdir()) == []


def test_a_folder_that_never_started_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".lock").touch()
    assert new_run("muse", tmp_path / "mine") == tmp_path / "mine"
    (tmp_path / "mine" / "config.yaml").touch()
    with pytest.raises(UserError, match="exists; a new run"):
        new_run("muse", tmp_path / "mine")


def test_only_a_restart_on_one_machine_needs_a_store_of_its_own(launched: pytest.MonkeyPatch) -> None:
    assert store_of_restart(0, 2, 10) == {}
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    launched.setenv("LOCAL_WORLD_SIZE", "1")
    assert store_of_restart(0, 2, 10) == {}
