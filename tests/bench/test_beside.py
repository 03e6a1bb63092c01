"""The script that times old packages beside ours: its table, and what it prints when. None of the packages is needed here."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tessera.bench import CASES

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("beside")
    monkeypatch.setattr(module, "device_facts", lambda: {"device": "here"})
    return module


def test_every_case_of_a_peer_is_listed_and_ours_too(beside: ModuleType) -> None:
    modules = {name: importlib.import_module(f"peers.{name}") for name in set(beside.PEERS.values())}
    found = {case: name for name, module in modules.items() for case in module.CASES}
    assert found == beside.PEERS
    assert found.keys() <= CASES.keys()
    for module in modules.values():
        assert module.Peer(), "built without its package"


def rows(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[dict[str, object]]:
    """What is printed, with sides that take no time; ours notes how many rows were out before it."""

    def ours(name: str) -> dict[str, object]:
        return {"items_per_s": 10, "printed": len(capsys.readouterr().out.splitlines())}

    monkeypatch.setattr(beside, "peer_row", lambda name: {"items_per_s": 4})
    monkeypatch.setattr(beside, "our_row", ours)
    monkeypatch.setattr(sys, "argv", ["beside.py", *words])
    beside.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_peers_row_is_out_before_ours_is_timed(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = rows(beside, monkeypatch, capsys, "video.ar.sample")
    assert row == {"case": "video.ar.sample", "side": "ours", "items_per_s": 10, "printed": 1, "ratio": 2.5, "device": "here"}


@pytest.mark.parametrize("side", ["peer", "ours"])
def test_one_side_alone(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], side: str
) -> None:
    found = rows(beside, monkeypatch, capsys, "--only", side, "mesh.ar.train")
    assert [row["side"] for row in found] == [side]
    assert "ratio" not in found[0]


def test_an_unknown_case(beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        rows(beside, monkeypatch, capsys, "video.ar.trian")
    assert stopped.value.code == 2
    assert "no case 'video.ar.trian'; there are image.tokenizer.train" in capsys.readouterr().err
