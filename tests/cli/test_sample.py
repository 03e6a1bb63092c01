"""`tessera sample` and `tessera data prepare`: names by contract, pictures that their JSON draws again, nothing overwritten."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera import pipeline
from tests.small import SUPERRES, generated, pictures, small_config, workshop

__all__ = ["generated", "pictures", "workshop"]

Run = Callable[..., Any]


def drawn(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}


def facts(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    return found


# ---- names


def test_names_by_contract(tessera: Run, tmp_path: Path, generated: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n\nune étoile\n", encoding="utf-8-sig")
    for n, names in ((1, ["0", "1", "2"]), (2, ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"])):
        ended = tessera("sample", generated, "--prompts", "prompts.txt", "-n", n, "--out", f"out{n}")
        assert ended.code == 0
        assert sorted(path.name for path in (tmp_path / f"out{n}").iterdir()) == sorted(
            f"{name}{suffix}" for name in names for suffix in (".png", ".json")
        )
        assert ended.out.splitlines()[-1].startswith(f"next: tessera sample {generated} --request out{n}/")
    found = [facts(tmp_path / "out2" / f"{name}.json") for name in ("0-0", "1-1", "2-1")]
    assert [(one["prompt"], one["seed"], one["n"]) for one in found] == [("a red circle", 0, 1), ("", 1, 1), ("une étoile", 1, 1)]
    assert drawn(tmp_path / "out1")["2.png"] == drawn(tmp_path / "out2")["2-0.png"]
    with Image.open(tmp_path / "out1" / "0.png") as picture:
        assert (picture.mode, picture.size) == ("RGB", (16, 16))


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        ("a\n\nb\n  \nc\n", 5, "prompts.txt: 2 of its 5 lines are empty, the first one line 2: drawn as empty prompts"),
        ("a\n\nb\n\n \n", 3, "prompts.txt: 1 of its 3 lines is empty, line 2: drawn as an empty prompt"),
        ("a\nb\n\n\n", 2, "pictures are 16 px"),
    ],
    ids=["two", "one", "none"],
)
def test_empty_lines_are_told_and_those_at_the_end_are_no_prompts(
    tessera: Run, tmp_path: Path, generated: Path, text: str, names: int, said: str
) -> None:
    (tmp_path / "prompts.txt").write_text(text)
    ended = tessera("sample", generated, "--prompts", "prompts.txt", "--out", "out", "--steps", 1)
    assert ended.code == 0, ended.err
    assert sorted(drawn(tmp_path / "out")) == [f"{name}.png" for name in range(names)]
    assert ended.out.splitlines()[-2].endswith(said)
    prompts = [line.strip() for line in text.split("\n")]
    assert [facts(tmp_path / "out" / f"{name}.json")["prompt"] for name in range(names)] == prompts[:names]


def test_without_a_folder_every_call_gets_its_own(tessera: Run, generated: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(generated, tmp_path / "run"))
    for number in ("001", "002"):
        assert tessera("sample", run, "a").code == 0
        assert sorted(path.name for path in (run / "drawn" / number).iterdir()) == ["0.json", "0.png"]


# ---- again


@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", "9", "--steps", "2", "--guidance", "4", "--negative", "blue"],
        ["-n", "2", "--set", "sample.order=confidence", "sample.noise=2.0"],
        ["--image", "in/image.png", "--mask", "in/mask.png"],
        ["--image", "in/image.png", "--set", "sample.variation=0.3"],
    ],
    ids=str,
)
def test_the_json_beside_a_picture_draws_it_again(tessera: Run, tmp_path: Path, generated: Path, flags: list[str]) -> None:
    (tmp_path / "in").mkdir()
    Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)).save(tmp_path / "in" / "image.png")
    Image.fromarray((np.eye(16) * 255).astype(np.uint8)).save(tmp_path / "in" / "mask.png")
    ended = tessera("sample", generated, "a circle", *flags, "--out", "deep/one")
    assert ended.code == 0, ended.err
    for json_file in sorted((tmp_path / "deep" / "one").glob("*.json")):
        again = tmp_path / f"again-{json_file.stem}"
        assert tessera("sample", generated, "--request", json_file, "--out", again).code == 0
        assert drawn(again)["0.png"] == json_file.with_suffix(".png").read_bytes()
        same = facts(again / "0.json")
        assert {**same, "image": 0, "mask": 0} == {**facts(json_file), "image": 0, "mask": 0}
    following = shlex.split(ended.out.splitlines()[-1].partition("   ")[0].removeprefix("next: tessera "))
    assert tessera(*following, "--out", "third").code == 0


def test_flags_and_requests_in_their_order(tessera: Run, tmp_path: Path, generated: Path) -> None:
    (tmp_path / "mine.yaml").write_text("prompts: [x, y]\nn: 2\nseed: 4\nsample: {steps: 2, guidance: 1.5}\n")
    assert tessera("sample", generated, "--request", "mine.yaml", "--out", "out", "--seed", 6, "--steps", 1).code == 0
    found = facts(tmp_path / "out" / "1-1.json")
    assert (found["prompt"], found["seed"], found["sample"]["steps"], found["sample"]["guidance"]) == ("y", 7, 1, 1.5)
    assert found["made_by"]["recipe"] == "muse"
    assert set(found["made_by"]["stages"]) == {"tokenizer", "base"}
    assert found["made_by"]["stages"]["base"]["step"] == 3


def test_from_an_export_and_of_another_checkpoint(tessera: Run, tmp_path: Path, generated: Path) -> None:
    assert tessera("export", generated, "--out", "model").code == 0
    for place, out in ((generated, "a"), ("model", "b")):
        assert tessera("sample", place, "a circle", "--out", out).code == 0
    assert drawn(tmp_path / "a") == drawn(tmp_path / "b")
    assert tessera("sample", generated, "a", "--checkpoint", "step-3", "--out", "c").code == 0


def test_it_says_which_stages_drew(tessera: Run, tmp_path: Path, generated: Path, pictures: Path) -> None:
    ended = tessera("sample", generated, "a", "--out", "out")
    assert ended.out.splitlines()[-2] == "drawn by tokenizer step 3, base step 3: pictures are 16 px"
    long = "a red circle in the top left"  # 28 bytes
    ended = tessera("sample", generated, long, "--out", "long")
    assert ended.out.splitlines()[-2].endswith(f": pictures are 16 px; only the first 24 bytes are read of {long!r}")
    run = pipeline.train(small_config(pictures, superres=SUPERRES), run=tmp_path / "run", stage="tokenizer")
    pipeline.resume(run, stage="base")
    ended = tessera("sample", run, "a", "--out", "out2")
    assert ended.out.splitlines()[-2] == "drawn by tokenizer step 3, base step 3, superres not trained: pictures are 16 px"
    made = facts(tmp_path / "out2" / "0.json")["made_by"]
    assert (made["untrained"], made["resolution"]) == (["superres"], 16)
    assert {name: stage["step"] for name, stage in made["stages"].items()} == {"tokenizer": 3, "base": 3}


# ---- wrong input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to draw: give a prompt"),
        (["a", "--prompts", "prompts.txt"], "give one of them"),
        (
            ["--prompts", "nowhere.txt"],
            "tessera: --prompts nowhere.txt does not exist; expected a text file with one prompt a",
        ),
        (["--prompts", "."], "tessera: --prompts . is a folder; expected a text file with one prompt a line"),
        (["--prompts", "bytes.txt"], "tessera: --prompts bytes.txt is no text in UTF-8 (byte 2); expected a text file"),
        (["--prompts", "blank.txt"], "blank.txt holds no prompt; expected a text file with one prompt a line, in UTF-8; to draw"),
        (["--request", "wrong.yaml"], "a request has no 'promt'; did you mean 'prompt'?"),
        (["a", "-n", "0"], "n is 0"),
        (["a", "--seed", "-1"], "seed is -1"),
        (["a", "--steps", "0"], "sample.steps (--steps): found 0; expected a whole number >= 1"),
        (["a", "--guidance", "-1"], "sample.guidance (--guidance): found -1"),
        (["a", "--guidance", "1e39"], "sample.guidance (--guidance): found 1.0e+39; expected a number >= 0 and <= 1000"),
        (["a", "--mask", "mask.png"], "mask is given without an image"),
        (["a", "--image", "nowhere.png"], "nowhere.png: no such file"),
        (["a", "--towards", "mask.png"], "towards is given without an image"),
        (["a", "--set", "base.steps=3"], "only values of the sample section can be changed here"),
        (["a", "--set", "sample.stepps=3"], "sample.stepps (--set): unknown key; did you mean 'sample.steps'?"),
        (["a", "--set", "sample=3"], "sample (--set): found 3"),
        (["a", "--set", "sample.order=critic"], "order critic needs a critic, and base has none"),
        (["a", "--checkpoint", "step-9"], "has no checkpoint called 'step-9'; it has latest, best, step-000003"),
        (["a", "--checkpoint", "nine"], "has no checkpoint called 'nine'; it has latest, best, step-000003"),
    ],
    ids=str,
)
def test_wrong_input_ends_with_2_and_writes_nothing(
    tessera: Run, tmp_path: Path, generated: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "prompts.txt").write_text("a\n")
    (tmp_path / "wrong.yaml").write_text("promt: a\n")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff\n")
    (tmp_path / "blank.txt").write_text("\n \n")
    ended = tessera("sample", generated, *arguments, "--out", "out")
    assert ended.code == 2
    assert said in ended.err, ended.err
    assert not (tmp_path / "out").exists()
    assert not (generated / "drawn").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt: 3", "mine.yaml, line 1: prompt is 3; expected text, in quotes if need be"),
        ("prompts: {a: b}", "mine.yaml, line 1: prompts is {'a': 'b'}; expected a list of texts"),
        ("prompts: [a, 3]", "mine.yaml, line 1: prompts has 3; expected text"),
        ("prompt: a\nprompts: [b]", "mine.yaml has both prompt and prompts; keep one of them"),
        ("n: 2", "nothing to draw: give a prompt, --prompts FILE or --request FILE with one"),
        ("prompt: a\nn: two", "mine.yaml, line 2: n is 'two'; expected a whole number"),
        ("prompt: a\nn: true", "mine.yaml, line 2: n is True; expected a whole number"),
        ("prompt: a\nseed: 1.5", "mine.yaml, line 2: seed is 1.5; expected a whole number"),
        ("prompt: a\nnegative: 5", "mine.yaml, line 2: negative is 5; expected text"),
        ("prompt: a\nimage: 3", "mine.yaml, line 2: image is 3; expected the name of a file"),
        ("prompt: a\nmask: x.png", "mask is given without an image; give one, too: --image FILE, or image in a request"),
        ("prompt: a\nat: half", "mine.yaml, line 2: at is 'half'; expected a number from 0 to 1"),
        ("prompt: a\noutpaint: 0.5", "mine.yaml, line 2: outpaint is 0.5; expected sides and shares"),
        ("prompt: a\nsample: 3", "mine.yaml, line 2: sample is 3; expected keys and values"),
        ("prompt: a\nsample:\n  stepps: 3", "sample.stepps (mine.yaml, line 3): unknown key; did you mean 'sample.steps'?"),
        ("prompt: a\nsample: {superres: {steps: x}}", "sample.superres.steps (mine.yaml, line 2): found the text 'x'"),
    ],
)
def test_a_wrong_request_names_its_key(tessera: Run, tmp_path: Path, generated: Path, text: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    ended = tessera("sample", generated, "--request", "mine.yaml", "--out", "out")
    assert ended.code == 2
    assert ended.err.startswith(f"tessera: {said}"), ended.err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tessera: Run, tmp_path: Path, generated: Path) -> None:
    assert tessera("sample", generated, "a", "b", "--out", "out").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for prompts in (["c", "d"], ["c"]):
        ended = tessera("sample", generated, *prompts, "--out", "out", "--seed", 5)
        assert ended.code == 2
        assert "out already holds 0.png and" in ended.err
        assert "name another --out" in ended.err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("out", "said"),
    [("file", "tessera: file is a file, not a folder;"), ("file/x", "tessera: file is a file, so file/x cannot lie in it;")],
)
def test_a_file_where_a_folder_is_wanted(tessera: Run, tmp_path: Path, generated: Path, out: str, said: str) -> None:
    (tmp_path / "file").write_text("mine")
    commands = (["sample", generated, "a"], ["export", generated], ["data", "synth", "shapes", "--n", 2])
    for command in commands if out == "file/x" else commands[:1]:
        ended = tessera(*command, "--out", out)
        assert ended.code == 2
        found = ended.err.replace(f"{tmp_path}/", "")
        assert found.startswith(said), found
        assert "name another --out" in found
    ended = tessera("train", "muse", "--data", generated.parent / "pictures", "--run", out)
    assert ended.code == 2
    assert "file is a file" in ended.err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_without_a_generator(tessera: Run, tmp_path: Path, generated: Path) -> None:
    run = Path(shutil.copytree(generated, tmp_path / "run"))
    shutil.rmtree(run / "base")
    ended = tessera("sample", run, "a", "--out", "out")
    assert ended.code == 2
    assert "stage base has not been trained yet" in ended.err


# ---- caches


def test_caches_by_themselves(tessera: Run, tmp_path: Path, generated: Path) -> None:
    run = Path(shutil.copytree(generated, tmp_path / "run"))
    shutil.rmtree(run / "cache")
    ended = tessera("data", "prepare", run)
    assert ended.code == 0
    (cache,) = (run / "cache").iterdir()
    assert ended.out.splitlines() == [
        f"base reads {cache}",
        f"next: tessera resume {run}   or read them yourself: docs/data.md",
    ]
    assert (cache / "manifest.json").is_file()
    assert tessera("data", "prepare", run, "--stage", "base").code == 0
    ended = tessera("data", "prepare", run, "--stage", "tokenizer")
    assert ended.code == 2
    assert "reads no caches" in ended.err
    shutil.rmtree(run / "tokenizer")
    ended = tessera("data", "prepare", run)
    assert ended.code == 2
    assert "stage base needs the tokenizer" in ended.err
