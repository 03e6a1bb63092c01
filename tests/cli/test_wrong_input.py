"""Wrong input ends with exit code 2 and one message: what was found, where, what was expected, the nearest right name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

Run = Any  # the fixture `tessera`: arguments -> code, out, err


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["tokenizer.optim.learning_rate=1"], ["tokenizer.optim.learning_rate (--set)", "unknown key", "'tokenizer.optim.lr'"]),
        (["tokenizer.stps=4"], ["tokenizer.stps (--set)", "did you mean 'tokenizer.steps'?"]),
        (["tokeniser.steps=4"], ["tokeniser (--set)", "did you mean 'tokenizer'?"]),
        (["tokenizer.steps=many"], ["tokenizer.steps (--set)", "the text 'many'", "expected a whole number"]),
        (["tokenizer.steps=3.5"], ["tokenizer.steps (--set)", "found 3.5", "expected a whole number"]),
        (["seed=-1"], ["seed (--set)", "found -1"]),
        (["data.channels=2"], ["data.channels (--set)", "found 2", "1, 3 or 4"]),
        (["engine.precision=fp16"], ["engine.precision (--set)", "'fp16'", "bf16"]),
        (["data.resolution=50"], ["data.resolution 50 cannot be divided by the tokenizer's stride 8", "use 48 or 56", "--set"]),
        (["data.resolution=8"], ["data.resolution (--set)", "16"]),
        (["data.zoom=2.0"], ["zoom 2.0 has no effect with crop: center"]),
        (["tokenizer.model.blocks=[1]"], ["tokenizer.model", "blocks has 1 entries and widths 4"]),
        (["tokenizer.model.quantizer.levels=[8, 1]"], ["levels [8, 1]: each channel needs 2 to 1000 levels"]),
        (["tokenizer.critic.widths=[4, 4, 4, 4, 4, 4, 4, 4]"], ["halve a picture of 64 pixels 7 times; name fewer"]),
        (["recipe=mese"], ["recipe (--set)", "did you mean 'muse'?"]),
        (["tokenizer.steps"], ["is not KEY=VALUE"]),
        (["seed=1", "seed=2"], ["'seed' already has a value from another --set"]),
    ],
)
def test_a_wrong_set(tessera: Run, sets: list[str], said: list[str]) -> None:
    ended = tessera("train", "muse", "--data", "x", *[part for item in sets for part in ("--set", item)])
    assert ended.code == 2
    assert not ended.out
    for words in said:
        assert words in ended.err, ended.err
    assert ended.err.startswith("tessera: ")


def test_a_wrong_file_names_its_lines(tessera: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "recipe: muse\nseed: zero\ntokenizer:\n  optim:\n    learning_rate: 1.0e-3\n  stepps: 4\n"
    )
    ended = tessera("train", "mine.yaml", "--data", "x")
    assert ended.code == 2
    assert "the config has 3 problems" in ended.err
    assert "seed (mine.yaml, line 2): found the text 'zero'" in ended.err
    assert "tokenizer.optim.learning_rate (mine.yaml, line 5): unknown key; did you mean 'tokenizer.optim.lr'?" in ended.err
    assert "tokenizer.stepps (mine.yaml, line 6): unknown key; did you mean 'tokenizer.steps'?" in ended.err


def test_an_impossible_combination_in_a_file_names_its_line(tessera: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: muse\ndata:\n  path: x\n  resolution: 50\n")
    ended = tessera("train", "mine.yaml")
    assert ended.code == 2
    assert "(mine.yaml, line 4 + preset small): data.resolution 50 cannot be divided" in ended.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: muze\n", "did you mean 'muse'?"),
        ("recipe: muse\npreset: tinny\n", "did you mean 'tiny'?"),
        ("recipe: [muse\n", "not valid YAML"),
        ("", "is empty"),
        ("- 1\n", "must hold keys and values"),
    ],
)
def test_a_file_that_is_no_config(tessera: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    ended = tessera("train", "mine.yaml", "--data", "x")
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "mse"], "no recipe and no file is called 'mse'; did you mean 'muse'?"),
        (["train", "muse", "--preset", "tny"], "recipe muse has no preset 'tny'; did you mean 'tiny'?; it has tiny, small, base"),
        (
            ["train", "muse", "--stage", "bsae"],
            "no stage is called 'bsae'; did you mean 'base'?; this recipe has tokenizer, base",
        ),
        (["train", "muse", "--stage", "bsae", "--print-config"], "no stage is called 'bsae'"),
        (["train", "muse", "--stage", "superres"], "no stage is called 'superres'; this recipe has tokenizer, base"),
        (
            ["train", "muse", "--data", "x", "--stage", "base", "--run", "mine"],
            "stage base needs the tokenizer, which a new run does not have; leave out --stage to train all stages, or go on with",
        ),
        (["train", "muse", "--set", "superres.resolution=32"], "superres.resolution 32 must be larger than data.resolution 64"),
        (["train", "muse", "--set", "base.needs.tokenizer=nowhere/tokenizer"], "nowhere is no run folder"),
        (["sample", "nowhere", "a cat"], "nowhere does not exist; expected a run folder"),
        (["data", "prepare", "nowhere"], "nowhere is no run folder"),
        (["train", "muse", "--stage", "tokeniser", "--steps", "3"], "did you mean 'tokenizer'?"),
        (["train", "muze.yaml"], "muze.yaml does not exist"),
        (["bench", "image.loadr"], "no bench case is called 'image.loadr'; did you mean 'image.loader'?"),
        (["train", "muse"], "no data: give a folder with --data PATH"),
        (["train", "muse", "--dry-run"], "no data: give a folder with --data PATH"),
        (["train", "muse", "--data", "nowhere"], "does not exist; expected a folder of png"),
        (["resume", "nowhere"], "nowhere is no run folder: it has no config.yaml"),
        (["export", "nowhere", "--out", "x"], "nowhere is no run folder: it has no config.yaml"),
        (["data", "check", "nowhere"], "does not exist"),
        # what typer finds
        (["train"], "Missing argument 'RECIPE|FILE.yaml'"),
        (["trian", "muse"], "Did you mean 'train'?"),
        (["train", "muse", "--prest", "tiny"], "--preset"),
        (["train", "muse", "--steps", "0"], "greater than or equal to 1"),
        (["train", "muse", "--steps", "few"], "--steps"),
        (["train", "muse", "--data"], "--data"),
        (["data", "synth", "shapes"], "Missing option '--out DIR'"),
        (["data", "synth", "shaps", "--out", "d"], "Did you mean 'shapes'?"),
        (["data", "synth", "furniture", "--out", "d", "--size", "32"], "No such option: --size"),
        (["export", "run"], "Missing option '--out DIR'"),
        (["doctor", "--resume"], "--resume-test"),
    ],
)
def test_a_wrong_command(tessera: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    ended = tessera(*arguments)
    assert ended.code == 2
    assert said in ended.err, ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_no_command_shows_what_there_is(tessera: Run, arguments: list[str]) -> None:
    ended = tessera(*arguments)
    assert ended.code == 2
    assert "Usage" in ended.out + ended.err


def test_data_that_is_no_folder_of_images(tessera: Run, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    (tmp_path / "meshes").mkdir()
    (tmp_path / "meshes" / "chair.obj").write_text("v 0 0 0\n")
    for name, said in (
        ("a.zip", "is a file; expected a folder of png"),
        ("empty", "holds no images: it is empty"),
        ("meshes", "found 1 .obj file: that looks like meshes"),
    ):
        for command in (["train", "muse", "--data"], ["train", "muse", "--dry-run", "--data"], ["data", "check"]):
            ended = tessera(*command, name)
            assert ended.code == 2
            checks = name == "meshes" and command[0] == "data"  # which takes them for what they are
            assert ("none of the meshes in meshes can be used" if checks else said) in ended.err, ended.err
    assert not (tmp_path / "runs").exists()


def test_too_many_unreadable_pictures_stop_training_by_name(tessera: Run, tmp_path: Path, shapes: Path, tiny: list[str]) -> None:
    (tmp_path / "pictures").mkdir()
    for picture in sorted((shapes / "train").glob("*.png"))[:8]:
        (tmp_path / "pictures" / picture.name).write_bytes(picture.read_bytes())
    (tmp_path / "pictures" / "000003.png").write_bytes(b"not a picture")
    ended = tessera("train", "muse", "--data", "pictures", "--run", "r", "--stage", "tokenizer", "--steps", 4, *tiny)
    assert ended.code == 2
    last = ended.err.splitlines()[-1]
    assert last.startswith("tessera: ")
    assert "000003.png: not an image" in last
    assert "tessera data check" in last


def test_a_run_inside_its_own_data_is_refused(tessera: Run, tmp_path: Path, shapes: Path, tiny: list[str]) -> None:
    (tmp_path / "a.png").write_bytes(next((shapes / "train").glob("*.png")).read_bytes())
    for where in ([], ["--run", "sub/run"]):
        ended = tessera("train", "muse", "--data", ".", "--stage", "tokenizer", *where, *tiny)
        assert ended.code == 2
        assert "lies inside the data folder" in ended.err
        assert "give --run elsewhere" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_a_folder_that_exists_is_not_overwritten(tessera: Run, tmp_path: Path, shapes: Path, tiny: list[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    ended = tessera("train", "muse", "--data", shapes, "--run", "mine", *tiny)
    assert ended.code == 2
    assert "mine exists; a new run needs a new folder. To go on with it: tessera resume mine" in ended.err
    ended = tessera("data", "synth", "shapes", "--out", "mine", "--n", 4)
    assert ended.code == 2
    assert "mine" in ended.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_gpu_that_is_not_there(tessera: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ended = tessera("train", "muse", "--data", shapes, "--set", "engine.device=cuda")
    assert ended.code == 2
    assert "engine.device=cuda" in ended.err
    assert "set engine.device=cpu" in ended.err
