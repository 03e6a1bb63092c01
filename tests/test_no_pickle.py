"""Nothing that is read can run code. Every file that we read is replaced by one that would, if anything unpickled it."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera import pipeline
from tessera.cli import main
from tessera.data.synth.shapes import write_shapes
from tessera.files import digest
from tessera.sampling.package import export_run

ROOT = Path(tessera.__file__).parent
CHECKPOINT = "tokenizer/checkpoints/step-000003"
TENSORS = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
SETS = (
    "engine.device=cpu",
    "engine.save_every_steps=2",
    "engine.validate_every_steps=2",
    "data.resolution=16",
    "data.validation_fraction=0.2",
    "tokenizer.batch_size=4",
    "tokenizer.model={widths: [8], blocks: [0]}",
    "tokenizer.critic=null",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
    "base.batch_size=4",
    "base.model={width: 16, depth: 1, heads: 2}",
)


# ---- by reading the program

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.distributed.checkpoint.load"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "pandas.read_pickle"),
    *("importlib.util.spec_from_file_location", "runpy.run_path"),
}


def offences(path: Path) -> Iterator[str]:
    """Imports and calls that turn bytes into objects or code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(name.split(".")[0] in FORBIDDEN_MODULES for name in names) or FORBIDDEN_CALLS & set(names):
            yield f"{path.name}:{node.lineno} imports {names}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS:
                yield f"{path.name}:{node.lineno} calls {called}"
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "weights_only") and ast.unparse(keyword.value) != "False":
                    yield f"{path.name}:{node.lineno} passes {keyword.arg}"


def test_the_program_never_unpickles() -> None:
    """But for one call: Inception is a TorchScript program, run only if the user names its file (`evaluate.inception`)."""
    found = [offence for path in sorted(ROOT.rglob("*.py")) for offence in offences(path)]
    assert [offence.partition(":")[0] for offence in found] == ["run.py"], found
    assert found[0].endswith("calls torch.jit.load")


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import yaml\nyaml.load(text, Loader=x)",
        "np.load(x, allow_pickle=True)",
        "torch.load(x, weights_only=True)",
        "eval(text)",
    ],
)
def test_an_offence_is_seen(code: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(code)
    assert list(offences(tmp_path / "bad.py"))


# ---- by trying it


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def traps(marker: Path, folder: Path) -> dict[str, bytes]:
    """The same trap, as pickle of every protocol kind and as torch.save writes it."""
    torch.save({"tokenizer/x": torch.zeros(1), "trap": Trap(marker)}, folder / "trap.pt")
    made = {
        "pickle": pickle.dumps(Trap(marker)),
        "text pickle": pickle.dumps(Trap(marker), protocol=0),
        "torch": (folder / "trap.pt").read_bytes(),
    }
    (folder / "trap.pt").unlink()
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 3, and an export of it beside."""
    home = tmp_path_factory.mktemp("malice")
    write_shapes(home / "photos", 30, 0, image_size=32)
    config = pipeline.resolve("muse", preset="tiny", data=str(home / "photos"), steps=3, sets=SETS)
    run = pipeline.train(config, run=home / "run", stage="tokenizer")
    export_run(run, home / "export")
    return run


@pytest.fixture
def case(trained: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the run and of the export."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(trained.parent / "export", tmp_path / "export")
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command; nothing but an exit code may come out of it."""

    def call(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err + said.out
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.err

    return call


def load_code(path: Path) -> int:
    """tessera.load, with the exit code that a command would give."""
    from tessera.cli.exits import guarded

    return guarded(lambda: tessera.load(path, device="cpu") and 0)


def fix_hash(folder: Path, name: str) -> None:
    """What somebody does who wants the manifest to agree."""
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / name
    manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("kind", "hash_fits"), [("pickle", False), ("pickle", True), ("text pickle", True), ("torch", True)])
@pytest.mark.parametrize("name", [*TENSORS, "state.json"])
def test_a_checkpoint_file(case: Path, command: Any, name: str, hash_fits: bool, kind: str) -> None:
    marker, folder = case / "marker", case / "run" / CHECKPOINT
    (folder / name).write_bytes(traps(marker, case)[kind])
    if hash_fits:
        fix_hash(folder, name)
    reads = hash_fits and name in TENSORS[:2]
    assert load_code(case / "run") == (2 if reads else 0)  # a wrong hash is passed over: the checkpoint before is whole
    assert command("export", case / "run", "--out", case / "out")[0] == (2 if reads else 0)
    code, said = command("resume", case / "run", "--stage", "tokenizer")
    assert code == (2 if hash_fits else 0)
    assert name in said if hash_fits else "passed over: step-000003" in said
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["pickle", "text pickle", "torch"])
@pytest.mark.parametrize("name", [f"{CHECKPOINT}/manifest.json", "tokenizer/metrics.jsonl", "env.json", "log.txt"])
def test_a_file_that_is_passed_over(case: Path, command: Any, name: str, kind: str) -> None:
    marker = case / "marker"
    (case / "run" / name).write_bytes(traps(marker, case)[kind])
    assert load_code(case / "run") == 0
    assert command("export", case / "run", "--out", case / "out")[0] == 0
    assert command("resume", case / "run", "--stage", "tokenizer", "--set", "tokenizer.steps=4")[0] == 0
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["pickle", "text pickle", "torch"])
def test_the_config(case: Path, command: Any, kind: str) -> None:
    marker = case / "marker"
    (case / "run" / "config.yaml").write_bytes(traps(marker, case)[kind])
    assert load_code(case / "run") == 2
    for words in (("resume", case / "run"), ("train", case / "run" / "config.yaml")):
        assert command(*words)[0] == 2
    assert command("export", case / "run", "--out", case / "out")[0] == 2
    assert not marker.exists()


@pytest.mark.parametrize("tag", ["python/object/apply:os.mkdir [{}]", "python/name:os.mkdir ''", "python/module:antigravity ''"])
def test_yaml_makes_no_objects(case: Path, command: Any, tag: str) -> None:
    marker = case / "marker"
    path = case / "run" / "config.yaml"
    path.write_text(f"{path.read_text()}extra: !!{tag.format(marker)}\n")
    assert command("resume", case / "run")[0] == 2
    assert load_code(case / "run") == 2
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["pickle", "text pickle", "torch"])
@pytest.mark.parametrize("name", ["config.json", "manifest.json", "tokenizer/model.safetensors"])
def test_a_file_of_an_export(case: Path, name: str, kind: str) -> None:
    marker = case / "marker"
    (case / "export" / name).write_bytes(traps(marker, case)[kind])
    assert load_code(case / "export") == 2
    if name != "manifest.json":
        fix_hash(case / "export", name)
        assert load_code(case / "export") == 2
    assert not marker.exists()


POINTERS = ["../../../elsewhere", "/etc", "..", "step-000003/../../../..", "", "step-000003\0", "step-999999", "\udcff"]


@pytest.mark.parametrize("pointer", ["latest", "best"])
@pytest.mark.parametrize("content", ["trap", *POINTERS])
def test_a_pointer_leads_nowhere_else(
    case: Path, command: Any, pointer: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(case)
    (case / "runs").mkdir()
    (case / "runs" / "mine").symlink_to(case / "run")
    shutil.copytree(case / "run" / CHECKPOINT, case / "elsewhere")
    before = {path: path.read_bytes() for path in (case / "elsewhere").iterdir()}
    marker = case / "marker"
    bad = pickle.dumps(Trap(marker)) if content == "trap" else content.encode("utf8", "surrogateescape")
    (case / "run" / "tokenizer" / "checkpoints" / pointer).write_bytes(bad)
    assert load_code(case / "run") == 0  # `latest` is the newest valid one, whatever the pointer says
    if pointer == "best":
        assert command("export", case / "run", "--out", case / "out", "--checkpoint", "best")[0] == 2
    assert command("list")[0] == 0
    assert command("resume", case / "run", "--stage", "tokenizer", "--set", "tokenizer.steps=4")[0] == 0
    assert {path: path.read_bytes() for path in (case / "elsewhere").iterdir()} == before
    assert not marker.exists()


def test_a_manifest_reaches_no_other_file(case: Path, command: Any) -> None:
    """Its names are looked up, never opened."""
    for folder in (case / "run" / CHECKPOINT, case / "export"):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["../../../../../../etc/passwd"] = {"bytes": 1, "sha256": "0"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert load_code(case / "run") == 0
    assert load_code(case / "export") == 2
    assert command("resume", case / "run", "--stage", "tokenizer")[0] == 0


@pytest.mark.parametrize("kind", ["pickle", "text pickle", "torch"])
@pytest.mark.parametrize("name", ["00000.npy", "manifest.json"])
def test_a_file_of_a_token_cache(case: Path, command: Any, name: str, kind: str) -> None:
    assert command("data", "prepare", case / "run")[0] == 0
    (file,) = (case / "run" / "cache").glob(f"*/{name}")
    marker = case / "marker"
    file.write_bytes(traps(marker, case)[kind])
    code, said = command("resume", case / "run")
    assert code == 2
    assert "delete it, and it is made anew" in said
    assert not marker.exists()
