"""Who may import whom. The table is the design's; every module of the package is parsed and held against it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tessera
from tessera.recipes import RECIPES

ROOT = Path(tessera.__file__).parent
BASE = ("contracts", "batches", "config")
ALL_BUT_CLI = (
    *BASE, "media", "nn", "text", "data", "tokenizers", "generators", "recipes", "engine", "sampling", "evals", "bench",
    "pipeline", "staging", "rehearsal", "demo", "doctor",
)  # fmt: skip

# room -> what it may import besides itself. `engine.dist` is one module of a room, `engine` all of them.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "randomness": (),
    "files": (),
    "compiling": (),
    "recording": (),
    "batches": (),
    "config": (),
    "media": (),
    "contracts": ("batches", "config"),
    "nn": ("config",),
    "text": ("nn", *BASE),
    "data": ("media", *BASE),
    "engine": BASE,
    "tokenizers": ("nn", "text", *BASE),
    "generators": ("nn", "text", *BASE),
    "recipes": ("tokenizers", "generators", "text", "data", "nn", "media", "engine.dist", *BASE),
    "sampling": ("recipes", "text", "media", "engine.checkpoint", *BASE),
    "evals": ("sampling", "recipes", "data", "text", "nn", "engine", "media", *BASE),
    "bench": ALL_BUT_CLI,
    "staging": ALL_BUT_CLI,
    "pipeline": ALL_BUT_CLI,
    "rehearsal": ALL_BUT_CLI,
    "demo": ALL_BUT_CLI,
    "doctor": ("", *ALL_BUT_CLI),
    "cli": ("", *ALL_BUT_CLI),
    "": ("pipeline", "sampling"),  # tessera/__init__.py: what Python users call
    "__main__": ("cli",),
}
EVERYBODY = ("randomness", "files", "compiling", "recording")  # they import nothing of ours


def room_of(module: str) -> str:
    """tessera.engine.step -> engine; tessera.pipeline -> pipeline; tessera -> the empty name."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, module of ours) for every import in a file, in functions and under TYPE_CHECKING too, relative ones resolved."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"), filename=str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "tessera")


def allowed(importer: str, imported: str) -> bool:
    """Whether a module may import another one, or a name from it."""
    room, target = room_of(importer), room_of(imported)
    if target == room or target in EVERYBODY:
        return True
    inside = imported.removeprefix("tessera").removeprefix(".")
    return any(
        inside == permitted or inside.startswith(f"{permitted}.") if permitted else target.startswith("__") or target == ""
        for permitted in MAY_IMPORT[room]
    )


def modules_of(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file, and the module that it is."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield path, ".".join(("tessera", *(part for part in parts if part != "__init__")))


def violations(root: Path) -> list[str]:
    """`file:line imports module` for everything that the table does not permit."""
    found = []
    for path, module in modules_of(root):
        if room_of(module) not in MAY_IMPORT:
            found.append(f"{path.relative_to(root)}: a room that the table does not know")
            continue
        for line, imported in imports_of(path, module):
            if not allowed(module, imported):
                found.append(f"{path.relative_to(root)}:{line} imports {imported}")
    return found


def test_every_module_keeps_to_the_table() -> None:
    assert violations(ROOT) == []


def test_rooms_that_serve_all_recipes_import_none_of_them() -> None:
    """They ask a `Recipe` and its `Draw`. Evaluation and the benchmark know what they judge."""
    importers = [(path, module) for path, module in modules_of(ROOT) if room_of(module) not in ("recipes", "evals", "bench")]
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path, module in importers
        for line, imported in imports_of(path, module)
        if any(f"{imported}.".startswith(f"tessera.recipes.{name}.") for name in RECIPES)
    ]
    assert found == []


def test_the_package_was_really_read() -> None:
    modules = [path for path in ROOT.rglob("*.py") if list(imports_of(path, "tessera.engine.x"))]
    assert len(modules) > 20
    assert {room_of(f"tessera.{path.relative_to(ROOT).with_suffix('').parts[0]}") for path in modules} >= {
        "engine",
        "recipes",
        "cli",
    }


@pytest.mark.parametrize(
    ("file", "code", "caught"),
    [
        ("engine/bad.py", "import tessera.tokenizers.image.model", "tessera.tokenizers.image.model"),
        ("engine/bad.py", "from tessera.nn.conv import ResidualBlock", "tessera.nn.conv.ResidualBlock"),
        ("engine/bad.py", "from tessera import recipes", "tessera.recipes"),
        ("engine/bad.py", "from .. import nn", "tessera.nn"),
        ("engine/deep/bad.py", "from ...data.loader import ImageLoader", "tessera.data.loader.ImageLoader"),
        ("engine/__init__.py", "from ..media import images", "tessera.media.images"),
        ("engine/bad.py", "def late() -> None:\n    from tessera.cli import app", "tessera.cli.app"),
        ("engine/bad.py", "if TYPE_CHECKING:\n    from tessera.data.order import Cut", "tessera.data.order.Cut"),
        ("tokenizers/bad.py", "from tessera.generators import masked", "tessera.generators.masked"),
        ("tokenizers/bad.py", "from tessera.engine.dist import World", "tessera.engine.dist.World"),
        ("generators/bad.py", "from tessera.tokenizers.image import model", "tessera.tokenizers.image.model"),
        ("recipes/bad.py", "from tessera.engine.step import train_step", "tessera.engine.step.train_step"),
        ("recipes/bad.py", "from tessera.engine import dist, loop", "tessera.engine.loop"),
        ("recipes/bad.py", "from tessera.engine.distance import x", "tessera.engine.distance.x"),
        ("sampling/bad.py", "from tessera.engine import checkpoint, loop", "tessera.engine.loop"),
        ("nn/bad.py", "from tessera.contracts import Loss", "tessera.contracts.Loss"),
        ("config/bad.py", "from tessera import batches", "tessera.batches"),
        ("media/bad.py", "from tessera.config import UserError", "tessera.config.UserError"),
        ("data/bad.py", "from tessera.nn import conv", "tessera.nn.conv"),
        ("contracts.py", "from tessera.engine.state import TrainState", "tessera.engine.state.TrainState"),
        ("randomness.py", "from tessera.config import Config", "tessera.config.Config"),
        ("pipeline.py", "from tessera.cli.exits import guarded", "tessera.cli.exits.guarded"),
        ("demo.py", "import tessera.cli", "tessera.cli"),
        ("engine/bad.py", "import tessera", "tessera"),
    ],
)  # fmt: skip
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, code: str, caught: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import os\n{code}\n")
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}:")
    assert found.endswith(f" imports {caught}")


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("engine/good.py", "from tessera.engine.step import train_step\nfrom .state import place\nfrom . import ema"),
        (
            "engine/good.py",
            "from tessera.contracts import Loss\nfrom tessera.batches import Batch\nfrom tessera.config import Config",
        ),
        ("engine/good.py", "from tessera.randomness import mix\nfrom tessera import randomness\nimport torch\nimport tesseract"),
        ("recipes/good.py", "from tessera.engine.dist import World\nfrom tessera.engine import dist"),
        ("sampling/good.py", "from tessera.engine.checkpoint import restore"),
        ("evals/good.py", "from tessera.engine.loop import Fit"),
        ("pipeline.py", "from tessera.engine.loop import Fit\nfrom tessera.recipes import RECIPES"),
        ("cli/good.py", "from tessera import __version__, pipeline\nimport tessera.bench"),
    ],
)
def test_a_permitted_import_is_not_caught(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code + "\n")
    assert violations(tmp_path) == []


def test_an_unknown_room_is_caught(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("")
    (tmp_path / "shed").mkdir()
    (tmp_path / "shed" / "misc.py").write_text("")
    assert violations(tmp_path) == [
        "shed/misc.py: a room that the table does not know",
        "utils.py: a room that the table does not know",
    ]


def test_only_the_step_calls_backward_and_optimizers() -> None:
    """Principle one of the house; `autograd.grad` is free to all."""
    callers = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if named and (node.func.attr == "backward" or ast.unparse(node.func).endswith("optimizer.step")):
                callers.append(str(path.relative_to(ROOT)))
    assert set(callers) == {"engine/step.py"}
