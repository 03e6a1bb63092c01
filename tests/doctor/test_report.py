"""`tessera doctor`: one block to paste, and what will trouble a run."""

from __future__ import annotations

import copy
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tessera.cli import main
from tessera.doctor import report
from tessera.doctor.report import CORE, EXTRAS, Report, Trouble, describe_torch, examine, troubles

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> Report:
    return examine(Path())


def healthy(found: Report) -> dict[str, Any]:
    """The sections of this machine, with nothing to complain about."""
    sections = copy.deepcopy(dict(found.sections))
    sections["machine"] |= {
        "usable cpus": 64, "memory available (GiB)": 99.0, "disk free here (GiB)": 99.0, "shared memory free (GiB)": 99.0,
        "open files": "4096 (at most 4096)", "nvidia driver": None,
    }  # fmt: skip
    sections["environment"] = {}
    return sections


def test_the_block_names_what_a_report_needs(found: Report) -> None:
    block = "\n".join(found.lines())
    for words in (
        "tessera:\n", "python", "core:\n", "torch ", "safetensors", "extras:\n", "track (tensorboard)", "machine:\n", "cpus",
        "memory available (GiB)", "disk free here (GiB)", "shared memory free (GiB)", "open files", "gloo", "nccl", "cuda build",
        "threads", "codecs:\n", "png", "jpeg", "webp", "gif", "mp4", "environment:\n",
    ):  # fmt: skip
        assert words in block, words
    assert "\x1b" not in block
    assert json.loads(json.dumps(found.to_json()))["core"]["torch"]


def test_it_knows_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> tuple[str, ...]:
        return tuple(requirement.partition(">")[0].strip().lower() for requirement in requirements)

    assert names(project["dependencies"]) == CORE
    extras = {extra: names(needs) for extra, needs in project["optional-dependencies"].items() if extra != "dev"}
    assert extras == EXTRAS


def test_a_healthy_machine_has_no_warnings(found: Report) -> None:
    assert list(troubles(healthy(found))) == []
    assert list(Report({}, []).lines()) == ["no warnings"]


@pytest.mark.parametrize(
    ("section", "values", "said", "remedy"),
    [
        ("machine", {"shared memory free (GiB)": 0.0625}, "0.06 GiB of shared memory", "--shm-size"),
        ("machine", {"disk free here (GiB)": 1.5}, "1.5 GiB of disk are free", "engine.keep_checkpoints"),
        ("machine", {"memory available (GiB)": 0.5}, "0.5 GiB of memory", "engine.micro_batch_size"),
        ("machine", {"open files": "256 (at most 4096)"}, "only 256 files", "ulimit -n 4096"),
        ("machine", {"nvidia driver": "NVRM version: 595"}, "torch sees no GPU", "torch with CUDA"),
        ("torch", {"threads": 128}, "128 threads on 64 usable cpus", "OMP_NUM_THREADS=64"),
        ("core", {"einops": None}, "einops is not installed", "pip install"),
        ("codecs", {"webp": False}, "cannot read webp", "pillow"),
        ("environment", {"WORLD_SIZE": "2"}, "WORLD_SIZE is set but MASTER_ADDR is not", "torchrun"),
    ],
)
def test_trouble_comes_with_a_remedy(found: Report, section: str, values: dict[str, Any], said: str, remedy: str) -> None:
    sections = healthy(found)
    sections["torch"] = {name: value for name, value in sections["torch"].items() if not name.startswith("device cuda")}
    sections[section] |= values
    (trouble,) = troubles(sections)
    assert said in trouble.found
    assert remedy in trouble.remedy


def test_a_torch_that_does_not_import_is_a_finding(found: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    section = describe_torch()
    assert section["import"].startswith("fails: import of torch halted")
    (trouble,) = troubles(healthy(found) | {"torch": section})
    assert "torch does not import" in trouble.found


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "WORLD_SIZE " in out
    assert "warning: WORLD_SIZE is set" in out
    assert "  remedy: start ranks with torchrun" in out
    assert out.splitlines()[-1].startswith("next: tessera doctor --resume-test")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    assert ended.value.code == 0
    assert {"core", "extras", "machine", "torch", "codecs", "warnings"} <= set(json.loads(capsys.readouterr().out))


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in; tests/gpu has the real one."""
    import torch

    answers = {
        "is_available": True, "device_count": 1, "mem_get_info": (2**30, 4 * 2**30), "get_device_capability": (9, 0),
        "get_device_name": "Abacus", "is_bf16_supported": True,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert describe_torch()["device cuda:0"] == "Abacus, 4.0 GiB (1.0 free), compute capability 9.0"


def test_files_of_the_system_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert report._first_line(tmp_path / "nowhere") is None
    (tmp_path / "empty").touch()
    assert report._first_line(tmp_path / "empty") is None
    assert Trouble("a", "b") == Trouble("a", "b")
