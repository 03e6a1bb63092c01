"""What the documents say is run: the README's commands, the example of add-a-model, the generated reference."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tessera
from tessera.cli import main
from tessera.data.synth.furniture import write_furniture
from tessera.data.synth.shapes import write_shapes
from tessera.media.clip_files import encode_gif
from tessera.media.clips import Clip

ROOT = Path(__file__).parents[1]
QUICK = ["--preset", "tiny", "--steps", "2", "--set", "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}"]
MASKED = ["tokenizer.batch_size=4", "base.batch_size=4", "base.model={width: 16, depth: 1, heads: 2}"]
PICTURES = {
    "train": [*QUICK, *MASKED, "tokenizer.model.widths=[8,8]", "tokenizer.model.blocks=[1,1]"],
    "sample": ["--set", "sample.chunk=2"],
    "evaluate": ["--set", "evaluate.fit_steps=2"],
}
CASCADE = {
    "train": [
        *QUICK,
        "embedder.batch_size=4",
        "embedder.loss.group=4",
        "prior.batch_size=4",
        "base.batch_size=4",
        "upsampler1.batch_size=4",
        "sample.resample_times=1",
    ],
    "sample": ["--set", "sample.chunk=2"],
    "evaluate": ["--n", "4", "--set", "evaluate.fit_steps=2", "sample.steps=2"],
}
CLIPS = {
    "synth": ["--n", "24"],
    "train": [*QUICK, *MASKED, "data.resolution=16", "tokenizer.model={kind: conv, widths: [8, 8, 8], blocks: [0, 0, 0]}"],
    "sample": ["--set", "sample.chunk=2", "sample.steps=2"],
    "evaluate": ["--n", "2", "--set", "evaluate.fit_steps=2", "evaluate.stories=1", "sample.chunk=2", "sample.steps=2"],
}
ONE_BY_ONE = {
    "synth": ["--n", "24"],
    "train": [
        *(word for word in CLIPS["train"] if not word.startswith("base.model=")), "base.model.width=16", "base.model.depth=1",
        "base.model.heads=2",
    ],
    "sample": ["--set", "sample.chunk=2"],
    "evaluate": ["--n", "2", "--set", "evaluate.fit_steps=2", "evaluate.stories=1", "sample.chunk=2"],
}  # fmt: skip
MESHES = {
    "synth": ["--n", "24"],
    "train": [*QUICK, "base.batch_size=4", "base.model={width: 16, depth: 1, heads: 2, inner_width: 16, inner_depth: 1}"],
    "sample": ["--set", "sample.chunk=2", "sample.max_faces=20"],
    "evaluate": ["--n", "2", "--set", "evaluate.points=16", "sample.chunk=2", "sample.max_faces=20"],
}
RECIPE = ["data", "train", "sample", "data", "train", "train", "resume", "evaluate", "export"]  # how two of the pages begin
COMMANDS = {
    "README.md": ["data", "train", "train", "sample", "evaluate", "resume", "export"],
    "docs/recipes/muse.md": ["data", "train", "train", "resume", "sample", "evaluate", "export", "train", *["sample"] * 7],
    "docs/recipes/dalle2.md": [
        *("data", "train", "train", "resume", "sample", "evaluate", "export", "train", "train", "export", "train"),
        *["sample"] * 7,
    ],
    "docs/recipes/meshgpt.md": [*RECIPE, *["sample"] * 5],
    "docs/recipes/phenaki.md": [*RECIPE, "train", *["sample"] * 8, "train"],
    "docs/recipes/nuwa.md": [*RECIPE, *["train"] * 3, *["sample"] * 6, "train", "sample", "sample"],
}
EXTRA = {
    "README.md": PICTURES,
    "docs/recipes/muse.md": PICTURES,
    "docs/recipes/dalle2.md": CASCADE,
    "docs/recipes/meshgpt.md": MESHES,
    "docs/recipes/phenaki.md": CLIPS,
    "docs/recipes/nuwa.md": ONE_BY_ONE,
}


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_shapes(tmp_path / "photos", 24, 0, image_size=32)
    write_shapes(tmp_path / "shapes", 24, 0, image_size=32)
    for name, photo in zip(("cat", "dog"), sorted((tmp_path / "photos" / "train").glob("*.png")), strict=False):
        shutil.copy(photo, tmp_path / f"{name}.png")
    Image.new("L", (32, 32), 255).save(tmp_path / "mask.png")
    np.save(tmp_path / "cat.npy", np.arange(32))  # as wide as the embeddings of preset tiny
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def write_clips(home: Path) -> None:
    """Bars that move, a clip to go on from, and its ends."""
    (home / "clips").mkdir()
    for index in range(24):
        frames = np.zeros((17, 16, 16, 3), np.uint8)
        for time in range(17):
            frames[time, :, (index + time) % 16] = 255
        (home / "clips" / f"{index}.gif").write_bytes(encode_gif(Clip(frames, 10.0)))
        (home / "clips" / f"{index}.txt").write_text("a bar moves right")
    for name in ("start", "strokes"):
        shutil.copy(home / "clips" / "0.gif", home / f"{name}.gif")
    for name, time in (("first", 0), ("last", 16)):
        Image.fromarray(frames[time]).save(home / f"{name}.png")


def write_meshes(home: Path) -> None:
    """Furniture, and a part to go on from."""
    write_furniture(home / "models", 24, 0)
    corners = [(-0.9, -0.9, -0.9), (0.9, -0.9, -0.9), (0.9, -0.9, 0.9), (-0.9, -0.9, 0.9)]
    faces = ["f 1 2 3", "f 1 3 4"]
    (home / "part.obj").write_text("\n".join([*(f"v {x} {y} {z}" for x, y, z in corners), *faces]) + "\n")


FILES = {
    "docs/recipes/meshgpt.md": write_meshes,
    "docs/recipes/phenaki.md": write_clips,
    "docs/recipes/nuwa.md": write_clips,
}  # besides pictures


def commands(text: str) -> list[list[str]]:
    lines = re.findall(r"^ {4}(?:\.venv/bin/)?tessera (.*?)(?:\s+#.*)?$", text, flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def quick(words: list[str], extra: dict[str, list[str]]) -> list[str]:
    """The same command in seconds, but for what the page itself sets."""
    more = extra.get("synth" if words[1] == "synth" else words[0], [])
    return [*words, *(word for word in more if not any(own.startswith(word.partition("=")[0] + "=") for own in words))]


@pytest.mark.parametrize("page", list(COMMANDS))
def test_every_command_runs(page: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In its order, in one folder; files that the page shows as YAML lie there."""
    text = (ROOT / page).read_text(encoding="utf8")
    for name, content in re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, flags=re.DOTALL):
        (photos.parent / name).write_text(content)
    found = commands(text)
    assert [words[0] for words in found] == COMMANDS[page]
    if page in FILES:
        FILES[page](photos.parent)
    for words in found:
        with pytest.raises(SystemExit) as end:
            main(quick(words, EXTRA[page]))
        assert end.value.code == 0, (words, capsys.readouterr())
        assert "next: " in capsys.readouterr().out, words
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    examples += re.findall(r"`(tessera\.load\([^`]+\))`", text)
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {"tessera": tessera})
    for name in ("again.png", "again.gif"):
        assert (photos.parent / name).is_file() == (name in text)


def test_make_has_the_targets_of_the_readme() -> None:
    named = set(re.findall(r"^ {4}make (\w+)", (ROOT / "README.md").read_text(encoding="utf8"), flags=re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), flags=re.MULTILINE))
    assert named == {"demo", "test"}
    assert named <= targets


def test_the_example_of_add_a_model_trains_and_resumes(photos: Path) -> None:
    page = (ROOT / "docs/add-a-model.md").read_text(encoding="utf8")
    code = re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(compile(code[1].replace("steps=20", "steps=4"), "docs/add-a-model.md", "exec"), names)
    run = names["run"]
    assert isinstance(run, Path)
    assert (run / "tokenizer" / "checkpoints" / "latest").read_text() == "step-000004\n"


def test_the_config_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf8") == module.render(), "run `make docs`"


def test_documents_name_files_that_exist() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / link).exists(), f"{page.name} names {link}"


def test_every_promise_is_proved_by_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line.rpartition(" | ")[2]]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) >= len(rows) > 30
    for file, test in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf8")
        assert f"\ndef {test}(" in source, f"reliability.md names {file}::{test}"
        slow = re.search(rf"@pytest\.mark\.slow\ndef {test}\(", source) is not None
        assert slow == (f"slow: `{file}::{test}`" in page), f"{test} is {'' if slow else 'not '}slow"


def test_every_test_that_a_page_names_exists() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf8")):
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(encoding="utf8"), f"{page.name} names {file}::{test}"
