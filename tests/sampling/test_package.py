"""`tessera export`: what it writes, what it leaves out, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tessera import pipeline
from tessera.cli import main
from tessera.config import UserError
from tessera.contracts import Train
from tessera.engine.track import read_metrics
from tessera.files import digest
from tessera.recipes import RECIPES
from tessera.sampling import stored
from tessera.sampling.card import command_text, commands_until
from tessera.sampling.package import export_run, without_places
from tessera.sampling.session import load
from tests.sampling.conftest import SETS


def test_an_export_holds_what_use_needs_and_nothing_else(trained: Path, exported: Path) -> None:
    files = sorted(str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file())
    assert files == ["README.md", "config.json", "manifest.json", "tokenizer/model.safetensors", "tokenizer/sample.png"]
    tensors = load_file(exported / "tokenizer" / "model.safetensors")
    average = load_file(trained / "tokenizer" / "checkpoints" / "step-000005" / "ema.safetensors")
    assert set(tensors) == set(average)
    assert all(tensors[name].equal(average[name]) for name in average)
    assert all(name.startswith("tokenizer/") for name in tensors)  # no critic
    facts = json.loads((exported / "config.json").read_text())
    assert (facts["format"], facts["recipe"]) == (1, "muse")
    assert facts["stages"] == {"tokenizer": {"step": 5, "nets": ["tokenizer"], "averaged": ["tokenizer"]}}
    assert facts["config"]["data"]["path"] is None
    files = json.loads((exported / "manifest.json").read_text())["files"]
    for name in ("config.json", "tokenizer/model.safetensors"):
        assert files[name] == {"bytes": (exported / name).stat().st_size, "sha256": digest(exported / name)}
    sample = trained / "tokenizer" / "samples" / "step-000005.png"
    assert (exported / "tokenizer" / "sample.png").read_bytes() == sample.read_bytes()


def test_paths_stay_at_home() -> None:
    config = {"path": "/home/me/vgg.safetensors", "loss": [{"path": None}, {"path": "a/b"}], "name": "/x"}
    assert without_places(config) == {"path": "vgg.safetensors", "loss": [{"path": None}, {"path": "a/b"}], "name": "/x"}


def test_equal_runs_give_equal_bytes(trained: Path, exported: Path, tmp_path: Path) -> None:
    again = export_run(trained, tmp_path / "again")
    for name in ("config.json", "manifest.json", "tokenizer/model.safetensors"):
        assert (again / name).read_bytes() == (exported / name).read_bytes()


def test_the_card_says_where_it_comes_from(trained: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    last = [line for line in read_metrics(trained / "tokenizer" / "metrics.jsonl") if line["kind"] == "valid"][-1]
    parameters = sum(value.numel() for value in load(exported, device="cpu").nets["tokenizer"]["tokenizer"].parameters())
    for words in (
        "# exported\n",
        'tessera.load("exported")',
        "| samples | 30 |",
        "| with a caption | 30 |",
        "| resolution | 16 x 16 pixels, RGB |",
        "tokenizer (averaged weights), of step 5",
        "Model: pictures of 16 x 16 pixels with 3 channels; quantizer fsq with 1,000 codes; 64 tokens a picture (8 x 8); ",
        f"tokenizer: {parameters / 1e6:.3g} million parameters.",
        f"| psnr | {last['psnr']:.4g} |",
        "last, step 5",
        "![sample](tokenizer/sample.png)",
        "## Licence\n\nNot stated yet.",
        "- torch: ",
    ):
        assert words in card, words
    assert str(trained.parent) not in card.replace(_made_by(card), "")  # no path but those of the command itself


@pytest.mark.parametrize("channels", [1, 4])
def test_the_card_describes_a_residual_quantizer(photos: Path, tmp_path: Path, channels: int) -> None:
    chain = "tokenizer.model.quantizer={kind: residual, num_quantizers: 3, quantizer: {kind: vq, codes: 32}}"
    sets = [*SETS, f"data.channels={channels}", chain]
    run = pipeline.train("muse", preset="tiny", data=photos, steps=1, sets=sets, run=tmp_path / "run")
    card = (export_run(run, tmp_path / "out") / "README.md").read_text()
    assert (
        f"with {channels} channel{'s' if channels > 1 else ''}; quantizer residual of 3 vq with 32 codes each; 64 tokens" in card
    )
    assert "(8 x 8, 3 codes each)" in card


def _made_by(card: str) -> str:
    return card.partition("## How it was made\n")[2]


def test_the_card_names_every_command(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = json.loads((run / "env.json").read_text())
    first["commands"] = [["/a/bin/tessera", "train", "muse", "--data", "my photos"]]
    (run / "env.json").write_text(json.dumps(first))
    monkeypatch.setattr("sys.argv", ["/b/tessera/__main__.py", "resume", "run"])
    pipeline.resume(run, sets=["tokenizer.steps=6"], stage="tokenizer")
    card = (export_run(run, tmp_path / "out") / "README.md").read_text()
    assert "    tessera train muse --data 'my photos'\n    tessera resume run\n" in card


def test_the_card_names_only_commands_that_trained_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = json.loads((run / "env.json").read_text())
    assert [(entry["stage"], entry["from_step"]) for entry in first["commands"]] == [("tokenizer", 0)]
    monkeypatch.setattr("sys.argv", ["tessera", "resume", "refused"])
    with pytest.raises(UserError, match="does not fit net"):
        pipeline.resume(run, sets=["tokenizer.model.widths=[12, 12]", "tokenizer.steps=6"])
    monkeypatch.setattr("sys.argv", ["tessera", "resume", "done"])
    pipeline.resume(run, stage="tokenizer")
    assert json.loads((run / "env.json").read_text()) == first
    monkeypatch.setattr("sys.argv", ["tessera", "resume", "more"])
    pipeline.resume(run, sets=["tokenizer.steps=6"], stage="tokenizer")
    cards = {name: (export_run(run, tmp_path / name, name) / "README.md").read_text() for name in ("step-5", "latest")}
    assert not any(word in cards["latest"] for word in ("refused", "done"))
    assert "tessera resume more" in cards["latest"]
    assert "resume" not in cards["step-5"]


def test_commands_in_every_form() -> None:
    entries = [
        ["old"],
        {"command": ["a"], "stage": "tokenizer", "from_step": 0},
        {"command": ["a"], "stage": "base", "from_step": 0},
        {"command": ["b"], "stage": "base", "from_step": 7},
        {"command": ["c"], "stage": "base", "from_step": 8},
        {"command": ["d"], "stage": "other", "from_step": 0},
        {"command": "e", "stage": "base", "from_step": 0},
        {"command": ["f"], "stage": "base"},
        3,
    ]
    assert commands_until({"commands": entries}, {"tokenizer": 5, "base": 8}) == [["old"], ["a"], ["b"]]
    assert commands_until({"command": ["x"]}, {"base": 8}) == [["x"]]
    assert commands_until({"command": ["x"], "commands": []}, {"base": 8}) == []
    assert commands_until({"commands": 3}, {"base": 8}) == []


def test_commands_are_written_as_one_types_them() -> None:
    assert command_text(["/x/.venv/bin/tessera", "train"]) == "tessera train"
    assert command_text(["/x/site-packages/tessera/__main__.py", "resume", "a b"]) == "tessera resume 'a b'"
    assert command_text(["mine.py", "--fast"]) == "python mine.py --fast"


def test_another_checkpoint(trained: Path, tmp_path: Path) -> None:
    for name, step in (("step-4", 4), ("step-000004", 4), ("best", None), ("latest", 5)):
        out = export_run(trained, tmp_path / name, name)
        facts = json.loads((out / "config.json").read_text())["stages"]["tokenizer"]
        best = (trained / "tokenizer" / "checkpoints" / "best").read_text().strip()
        assert facts["step"] == (step or int(best.removeprefix("step-")))
    assert "last, step 4" in (tmp_path / "step-4" / "README.md").read_text()


def test_a_checkpoint_has_the_config_of_its_save(run: Path, tmp_path: Path) -> None:
    pipeline.resume(run, sets=["data.resolution=32", "tokenizer.steps=6"], stage="tokenizer")
    assert load(run, device="cpu", checkpoint="step-4").prepare(np.zeros((9, 9, 3), np.uint8)).shape == (16, 16, 3)
    for name, side in (("step-4", 16), ("latest", 32)):
        out = export_run(run, tmp_path / name, name)
        assert json.loads((out / "config.json").read_text())["config"]["data"]["resolution"] == side
        assert f"{side} x {side} pixels" in (out / "README.md").read_text()


def test_a_checkpoint_without_a_config_has_that_of_the_run(run: Path) -> None:
    path = run / "tokenizer" / "checkpoints" / "step-000005" / "manifest.json"
    manifest = json.loads(path.read_text())
    for config in ({"data": {"resolution": "x"}}, {"video": 3}, [1]):
        path.write_text(json.dumps(manifest | {"config": config}))
        with pytest.raises(UserError, match=r"manifest.json"):
            load(run)
    del manifest["config"]
    path.write_text(json.dumps(manifest))
    assert load(run, device="cpu").config.data.resolution == 16


def test_each_stage_is_built_from_its_own_config(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of two stages, where the run's config got other widths after the first one was trained."""
    ours = RECIPES["muse"]
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.copytree(run / "tokenizer", run / "second")
    path = run / "second" / "checkpoints" / "step-000005" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["tokenizer"]["model"]["widths"] = [12, 12]
    path.write_text(json.dumps(manifest))

    def steps(config: Any) -> list[Train]:
        first = ours.steps(config)[0]
        return [first, replace(first, name="second", serves=dict)]

    monkeypatch.setitem(RECIPES, "muse", replace(ours, steps=steps))
    for place in (run, export_run(run, tmp_path / "out")):
        found = stored.open_stored(place)
        assert found.stages["second"].config.tokenizer.model.widths == (12, 12)
        assert found.stages["tokenizer"].config.tokenizer.model.widths == found.config.tokenizer.model.widths == (8, 8)
        assert load(place, device="cpu").encode(np.zeros((16, 16, 3), np.uint8)).shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ("oldest", "has no checkpoint called 'oldest'; it has latest, best, step-000002, step-000004, step-000005"),
        ("../latest", "no checkpoint called '../latest'"),
        ("step-3", "has no checkpoint called 'step-3'; it has latest, best, step-000002, step-000004, step-000005"),
    ],
)
def test_a_checkpoint_that_is_not_there(trained: Path, tmp_path: Path, checkpoint: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        export_run(trained, tmp_path / "out", checkpoint)
    assert not list(tmp_path.iterdir())


def test_damaged_checkpoints_are_passed_over_or_named(run: Path, tmp_path: Path) -> None:
    model = run / "tokenizer" / "checkpoints" / "step-000005" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    facts = json.loads((export_run(run, tmp_path / "out") / "config.json").read_text())
    assert facts["stages"]["tokenizer"]["step"] == 4
    with pytest.raises(UserError, match=r"step-000005 is damaged: model.safetensors has"):
        export_run(run, tmp_path / "other", "step-5")
    for path in (run / "tokenizer" / "checkpoints").glob("step-*"):
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact: step-000005: manifest.json is missing"):
        export_run(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_card_with_gaps(run: Path, tmp_path: Path) -> None:
    (run / "env.json").write_bytes(b"\x80\x04")
    (run / "tokenizer" / "metrics.jsonl").write_bytes(b"[[\n\xff\n{}\n" + b"[" * 100_000)
    shutil.rmtree(run / "tokenizer" / "samples")
    out = export_run(run, tmp_path / "out")
    card = (out / "README.md").read_text()
    assert "The command is not known." in card
    assert "sample" not in card.partition("## Stage")[2]
    assert not (out / "tokenizer" / "sample.png").exists()


def test_the_card_says_what_is_not_finite(run: Path, tmp_path: Path) -> None:
    metrics = run / "tokenizer" / "metrics.jsonl"
    metrics.write_text('{"step": 5, "kind": "valid", "psnr": null, "ssim": NaN, "l1": 0.5}\n')
    (run / "tokenizer" / "checkpoints" / "best").unlink()
    state = run / "tokenizer" / "checkpoints" / "step-000005" / "state.json"
    for best, said in ((None, "unknown"), (5, "not finite")):
        state.write_text(json.dumps(json.loads(state.read_text()) | {"best_step": best}))
        manifest = json.loads((state.with_name("manifest.json")).read_text())
        manifest["files"]["state.json"] = {"bytes": state.stat().st_size, "sha256": digest(state)}
        state.with_name("manifest.json").write_text(json.dumps(manifest))
        card = (export_run(run, tmp_path / said) / "README.md").read_text()
        assert ("| last, step 5 | best: unknown |" in card) == (best is None)
        assert f"| psnr | not finite | {said} |\n| ssim | not finite | {said} |\n| l1 | 0.5 | " in card


def test_a_checkpoint_that_is_pruned_while_it_is_read(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As training does, which goes on meanwhile: the next choice is taken."""
    read = stored.read_weights

    def prune_first(path: Path) -> object:
        if path.name == "step-000005":
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(stored, "read_weights", prune_first)
    facts = json.loads((export_run(run, tmp_path / "out") / "config.json").read_text())
    assert facts["stages"]["tokenizer"]["step"] == 4


def test_nothing_is_left_where_writing_fails(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tessera.sampling.package.write_tensors", full)
    with pytest.raises(UserError, match="out cannot be written: No space left on device"):
        export_run(trained, tmp_path / "deep" / "out")
    assert not list((tmp_path / "deep").iterdir())


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_place_is_refused(trained: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "dangling link": lambda: out.symlink_to("nowhere")}[kind]()
    with pytest.raises(SystemExit) as ended:
        main(["export", str(trained), "--out", str(out)])
    assert ended.value.code == 2
    assert "exists; an export needs a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_run_is_refused(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        export_run(exported, tmp_path / "out")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("recipe: muse\n")
    with pytest.raises(UserError, match="holds no checkpoint yet; train it first"):
        export_run(tmp_path / "new", tmp_path / "out")
    (tmp_path / "new" / "config.yaml").write_text("recipe: mouse\n")
    with pytest.raises(UserError, match="no recipe and no file is called 'mouse'"):
        export_run(tmp_path / "new", tmp_path / "out")


def test_the_command_ends_with_how_to_use_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(trained), "--out", "mine", "--checkpoint", "best"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine/README.md  ")
    assert lines[-1] == (
        'next: python -c \'import tessera; tessera.load("mine").reconstruct("PICTURE")[0].save("reconstruction.png")\''
    )
