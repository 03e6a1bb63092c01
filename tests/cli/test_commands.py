"""The commands themselves: what they print, what they write, and that each ends with the next one."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tessera import demo as demo_module
from tessera import pipeline
from tessera.cli.app import finish, spread_sets
from tessera.config import dump_yaml

Run = Any  # the fixture `tessera`: arguments -> code, out, err


# ---- train


def test_the_printed_config_is_the_config(tessera: Run, tmp_path: Path) -> None:
    flags = ["--preset", "tiny", "--steps", "7", "--set", "seed=3", "tokenizer.critic.penalty={weight: 2.0}"]
    ended = tessera("train", "muse", "--data", "photos", *flags, "--print-config")
    assert ended.code == 0
    assert not ended.err
    (tmp_path / "again.yaml").write_text(ended.out)
    wanted = pipeline.resolve(
        "muse", preset="tiny", data="photos", steps=7, sets=["seed=3", "tokenizer.critic.penalty={weight: 2.0}"]
    )
    assert pipeline.resolve("again.yaml") == wanted
    assert dump_yaml(wanted) == ended.out
    assert tessera("train", "again.yaml", "--print-config").out == ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["again.yaml"]


def test_a_dry_run_says_what_it_costs_and_writes_nothing(tessera: Run, tmp_path: Path, shapes: Path, tiny: list[str]) -> None:
    ended = tessera("train", "muse", "--data", shapes, "--dry-run", "--steps", 500, *tiny)
    assert ended.code == 0
    for words in (
        "stage tokenizer: parameters tokenizer 0.0",
        "critic",
        "stage base: parameters generator 0.0",
        "text",
        "peak memory",
        "GiB",
        "items/s",
        "ETA 0:",
        "disk",
    ):
        assert words in ended.out
    following = ended.out.splitlines()[-1]
    assert following.startswith(f"next: tessera train muse --data {shapes} --preset tiny --steps 500 --set engine.device=cpu")
    assert not list(tmp_path.iterdir())
    repeated = shlex.split(following.removeprefix("next: tessera "))
    assert pipeline.resolve("muse", preset="tiny", data=str(shapes), steps=500, sets=repeated[repeated.index("--set") + 1 :])


def test_training_and_going_on(tessera: Run, tmp_path: Path, shapes: Path, tiny: list[str]) -> None:
    ended = tessera("train", "muse", "--data", shapes, "--steps", 2, *tiny)
    assert ended.code == 0
    assert "tokenizer 2/2" in ended.err
    assert "base 2/2" in ended.err
    *made, pictures, following = ended.out.splitlines()
    assert sorted(made) == [f"{stage}: runs/muse-001/{stage}/checkpoints/step-000002" for stage in ("base", "tokenizer")]
    assert pictures.startswith("pictures: runs/muse-001/")
    assert following.startswith("next: tessera ")
    ended = tessera("resume", "runs/muse-001", "--set", "tokenizer.steps=4", "engine.save_every_steps=3")
    assert ended.code == 0
    assert "changed: tokenizer.steps: 2 -> 4" in ended.err
    assert "changed: engine.save_every_steps: 300 -> 3" in ended.err
    assert "resumed from runs/muse-001/tokenizer/checkpoints/step-000002 at step 2" in ended.err
    assert "tokenizer 3/4" in ended.err
    assert "tokenizer: runs/muse-001/tokenizer/checkpoints/step-000004" in ended.out
    ended = tessera("resume", "runs/muse-001")
    assert ended.code == 0
    assert "all 4 steps are done" in ended.err
    ended = tessera("resume", "runs/muse-001", "--set", "seed=7")
    assert ended.code == 2
    assert "start a new run to change it" in ended.err
    listed = tessera("list")
    assert "run runs/muse-001: base step-000002, tokenizer step-000004" in listed.out


# ---- list, data, bench


def test_list(tessera: Run) -> None:
    ended = tessera("list")
    assert ended.code == 0
    assert "muse: text to image" in ended.out
    assert "presets tiny, small, base, large; stages tokenizer, base" in ended.out
    assert "bench cases: image.tokenizer.train" in ended.out
    assert ended.out.splitlines()[-1] == "next: tessera train RECIPE --data FOLDER"


def test_data_check(tessera: Run, shapes: Path, tmp_path: Path) -> None:
    ended = tessera("data", "check", shapes)
    assert ended.code == 0
    assert "30" in ended.out
    assert ended.out.splitlines()[-1] == f"next: tessera train muse --data {shapes}"
    found = json.loads(tessera("data", "check", shapes, "--json").out)
    assert {"kind", "num_samples", "num_captioned", "num_rejected", "rejects"} <= set(found)
    assert (found["kind"], found["num_samples"], found["num_captioned"], found["num_rejected"]) == ("images", 30, 30, 0)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "good.png").write_bytes(next((shapes / "train").glob("*.png")).read_bytes())
    (mixed / "bad.png").write_bytes(b"no")
    found = json.loads(tessera("data", "check", mixed, "--json").out)
    assert (found["num_samples"], found["num_rejected"]) == (1, 1)
    assert found["rejects"][0]["path"] == "bad.png"
    assert "bad.png" in tessera("data", "check", mixed).out


def test_data_check_does_not_send_into_training_without_captions(
    tessera: Run, shapes: Path, tmp_path: Path, tiny: list[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for picture in sorted((shapes / "train").glob("*.png"))[:12]:
        shutil.copy(picture, bare)
    ended = tessera("data", "check", bare)
    train = f"tessera train muse --data {bare}"
    assert ended.out.splitlines()[-1] == f"next: add captions (docs/data.md), then {train}   or   {train} --set text.kind=none"
    assert json.loads(tessera("data", "check", bare, "--json").out)["short_of_captions"]
    few = [word for word in tiny if not word.startswith("text=")]
    assert tessera("train", "muse", "--data", bare, "--dry-run", *few).code == 2
    assert tessera("train", "muse", "--data", bare, "--dry-run", *few, "text.kind=none").code == 0
    (bare / "bad.png").write_bytes(b"no")
    said = tessera("data", "check", bare).out.splitlines()[-1]
    assert said.startswith("next: repair or remove the rejected files, then add captions (docs/data.md), then tessera train muse")


def test_data_synth(tessera: Run, tmp_path: Path) -> None:
    ended = tessera("data", "synth", "shapes", "--out", "made", "--n", 16, "--seed", 3, "--size", 32, "--max-shapes", 1)
    assert ended.code == 0
    assert "16 pictures in made/train, 2 of held-out combinations in made/heldout" in ended.out
    assert ended.out.splitlines()[-1] == "next: tessera train muse --data made"
    assert len(list((tmp_path / "made" / "train").glob("*.png"))) == 16
    before = sorted((tmp_path / "made").rglob("*"))
    assert tessera("data", "synth", "shapes", "--out", "made", "--n", 16).code == 2
    assert sorted((tmp_path / "made").rglob("*")) == before


def test_data_synth_furniture(tessera: Run, tmp_path: Path) -> None:
    ended = tessera("data", "synth", "furniture", "--out", "made", "--n", 8, "--seed", 3)
    assert ended.code == 0
    assert "8 meshes in made/train, 1 of held-out combinations in made/heldout" in ended.out
    assert ended.out.splitlines()[-1] == "next: tessera train meshgpt --data made"
    assert len(list((tmp_path / "made" / "train").glob("*.obj"))) == 8
    assert tessera("data", "synth", "furniture", "--out", "other", "--n", 0).code == 2
    assert not (tmp_path / "other").exists()


def test_data_synth_digits(tessera: Run, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    ended = tessera("data", "synth", "digits", "--out", "made", "--n", 8, "--frames", 5, "--size", 32, "--max-digits", 1)
    assert ended.code == 0
    assert "8 clips in made/train, 1 of held-out combinations in made/heldout" in ended.out
    assert ended.out.splitlines()[-1] == "next: tessera train phenaki --data made"
    assert len(list((tmp_path / "made" / "train").glob("*.gif"))) == len(list((tmp_path / "made" / "train").glob("*.txt"))) == 8
    about = json.loads((tmp_path / "made" / "synth.json").read_text())
    assert (about["frames"], about["image_size"], about["max_digits"]) == (5, 32, 1)
    assert tessera("data", "synth", "digits", "--out", "other", "--frames", 2).code == 2
    assert not (tmp_path / "other").exists()


def test_bench(tessera: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera import bench

    monkeypatch.setattr(bench, "CASES", {"a.case": lambda data: {"ms": 1.5}, "b.case": lambda data: {"ms": 2.5}})
    monkeypatch.setattr(bench, "device_facts", lambda: {"device": "abacus"})
    ended = tessera("bench")
    assert ended.code == 0
    assert ended.out.splitlines()[:2] == ["case a.case  ms 1.5  device abacus", "case b.case  ms 2.5  device abacus"]
    assert ended.out.splitlines()[-1].startswith("next: ")
    assert json.loads(tessera("bench", "b.case", "--json").out) == [{"case": "b.case", "ms": 2.5, "device": "abacus"}]


# ---- demo


def test_the_demo_ends_with_numbers_and_pictures(tessera: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "NUM_PICTURES", 64)
    monkeypatch.setattr(demo_module, "NUM_DRAWN", 12)
    monkeypatch.setattr(demo_module, "CHUNK", 4)
    ended = tessera("demo", "--steps", 3)
    assert ended.code == 0
    lines, run = ended.out.splitlines(), tmp_path / "demo" / "run-001"
    assert any("demo/run-001/drawn.png, demo/run-001/drawn.html" in line for line in lines)
    for row in ("real", "reconstruction", "drawn"):
        assert any(line.split()[:1] == [row] and "joint " in line for line in lines)
    assert lines[-1].startswith("next: tessera sample demo/run-001 ")
    assert (run / "drawn.png").stat().st_size > 1000
    page = (run / "drawn.html").read_text(encoding="utf8")
    assert page.count("<figure") == 8  # as many as are held out
    assert "http" not in page
    again = tessera("demo", "--steps", 1, "--out", "demo")  # the same data, another run
    assert again.code == 0
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["run-001", "run-002", "shapes"]


# ---- several values after one --set


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--set", "a=1", "b=2"], ["--set", "a=1", "--set", "b=2"]),
        (["--set", "a=1", "b.c_d=2", "--steps", "3"], ["--set", "a=1", "--set", "b.c_d=2", "--steps", "3"]),
        (["--set", "a=1", "--set", "b=2"], ["--set", "a=1", "--set", "b=2"]),
        (["--set", "a=b=c", "d="], ["--set", "a=b=c", "--set", "d="]),
        (["train", "muse", "x=1"], ["train", "muse", "x=1"]),
        (["--set", "a=1", "runs/x=1"], ["--set", "a=1", "runs/x=1"]),
        (["--set", "a=1", "--run", "b=2"], ["--set", "a=1", "--run", "b=2"]),
        (["--set"], ["--set"]),
        (["--set", "a", "b=1"], ["--set", "a", "b=1"]),
        ([], []),
    ],
)
def test_several_values_after_one_set(given: list[str], meant: list[str]) -> None:
    assert spread_sets(given) == meant


@pytest.mark.parametrize(("recipe", "expected"), [("muse", "png, jpg"), ("phenaki", "gif, apng"), ("meshgpt", "obj, glb")])
def test_a_folder_that_is_not_there_is_asked_for_as_what_it_should_hold(tessera: Run, recipe: str, expected: str) -> None:
    ended = tessera("train", recipe, "--data", "nowhere")
    assert ended.code == 2
    assert f"nowhere does not exist; expected a folder of {expected}" in ended.err


DRAWS = 'tessera sample RUN "PROMPT"   or   tessera evaluate RUN'


@pytest.mark.parametrize(
    ("recipe", "stages", "following"),
    [
        ("muse", ["tokenizer"], "tessera export RUN --out DIR"),
        ("muse", ["tokenizer", "base"], DRAWS),
        ("meshgpt", ["base"], DRAWS),
        ("dalle2", ["embedder"], "tessera resume RUN   to go on with the next stage"),
        ("dalle2", ["embedder", "prior"], "tessera resume RUN   to go on with the next stage"),
        ("dalle2", ["upsampler1"], 'tessera sample RUN "" --image FILE --set sample.start=upsampler1'),
        ("dalle2", ["embedder", "base", "prior"], DRAWS),
        (
            "dalle2",
            ["embedder", "base"],
            'tessera sample RUN "" --image FILE   or   tessera resume RUN --stage prior   to draw from prompts',
        ),
    ],
)
def test_after_training_comes_what_can_be_done(
    recipe: str, stages: list[str], following: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(pipeline.resolve(recipe, preset="tiny")))
    for age, stage in enumerate(stages):
        latest = tmp_path / stage / "checkpoints" / "latest"
        (latest.parent / "step-000002").mkdir(parents=True)
        latest.write_text("step-000002")
        os.utime(latest, (age, age))
    finish(tmp_path)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.replace(str(tmp_path), "RUN") == (
        f"next: {following}   or   tessera resume RUN --set {stages[-1]}.steps=N   to train longer"
    )
