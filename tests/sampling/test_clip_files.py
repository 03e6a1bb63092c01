"""Clips by the command: files, the same clip again from its JSON, wrong calls; and what an export says of clips."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tessera.config import VideoDataConfig
from tessera.media.clips import AvMissing, Clip, read_clip
from tessera.nn.quantizers import FSQConfig
from tessera.sampling.card import describe_model, gather_evidence, write_card
from tessera.sampling.session import Session
from tessera.sampling.stored import Stored, StoredStage
from tessera.sampling.uses import use_of_export
from tests.cli.conftest import tessera
from tests.sampling.clipmaker import FLICKER, STORY, ClipConfig, chunks, clip_session, colour_of, grey, greys, session, write_gif

__all__ = ["session", "tessera"]

Run = Callable[..., Any]


# ---- the command


@pytest.fixture
def served(session: Session, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose session is the one of this test."""
    monkeypatch.setattr("tessera.sampling.serve.load", lambda run, checkpoint=None: session)
    session.path.mkdir()
    (session.path / "config.yaml").write_text("recipe: flicker\n")
    return session.path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_by_contract_and_their_json_draws_them_again(tessera: Run, served: Path, tmp_path: Path) -> None:
    ended = tessera("sample", served, "up", "down", "-n", 2, "--seed", 5, "--frames", 9, "--out", "out")
    assert ended.code == 0, ended.err
    found = files(tmp_path / "out")
    names = ["0-0", "0-1", "1-0", "1-1"]
    assert sorted(found) == sorted(f"{name}{suffix}" for name in names for suffix in (".gif", ".mp4", ".png", ".json"))
    assert ended.out.splitlines()[0] == "out/0-0.gif  seed 5  up"
    assert ended.out.splitlines()[-2] == "drawn by tokenizer step 2, base step 3: clips are 9 frames of 16 px"
    facts = json.loads(found["1-1.json"])
    assert (facts["prompt"], facts["seed"], facts["n"], facts["sample"]["frames"]) == ("down", 6, 1, 9)
    assert facts["made_by"]["resolution"] == 16
    assert "scenes" not in facts
    start = colour_of("down", 6)
    assert greys(read_clip(tmp_path / "out" / "1-1.gif", lambda facts: range(facts.num_frames))) == [start + i for i in range(9)]
    with Image.open(tmp_path / "out" / "1-1.png") as sheet:
        assert sheet.width == 2 + 9 * 18  # all frames, side by side
        assert np.asarray(sheet)[10, 10::18][:9, 0].tolist() == [start + i for i in range(9)]
    assert tessera("sample", served, "--request", "out/1-1.json", "--out", "again").code == 0
    for suffix in (".gif", ".png"):  # the encoder of mp4 files does not promise equal bytes
        assert (tmp_path / "again" / f"0{suffix}").read_bytes() == found[f"1-1{suffix}"]
    for taken in ("0.gif", "0.mp4", "0.png", "0.json"):
        (tmp_path / taken[2:]).mkdir()
        (tmp_path / taken[2:] / taken).write_text("mine")
        ended = tessera("sample", served, "up", "--out", taken[2:])
        assert (ended.code, f"{taken[2:]} already holds {taken}; name another --out" in ended.err) == (2, True)


def test_a_story_and_all_that_is_given_are_drawn_again(tessera: Run, served: Path, session: Session, tmp_path: Path) -> None:
    (tmp_path / "asked").mkdir()
    write_gif(tmp_path / "asked" / "start.gif", [10, 60])
    Image.fromarray(grey(33)).save(tmp_path / "asked" / "end.png")
    story = {"scenes": STORY, "image": "start.gif", "keyframes": [{"frame": -1, "image": "end.png"}], "n": 2, "negative": "fog"}
    (tmp_path / "asked" / "r.json").write_text(json.dumps(story))
    ended = tessera("sample", served, "--request", "asked/r.json", "--out", "deep/out")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1] == "deep/out/0-1.gif  seed 1  up / down / cut"
    assert "clips are 9 frames of 16 px" in ended.out
    facts = json.loads((tmp_path / "deep" / "out" / "0-1.json").read_text())
    assert (facts["scenes"], facts["seed"], "prompt" in facts) == (STORY, 1, False)
    assert (facts["image"], facts["keyframes"]) == ("../../asked/start.gif", [{"frame": -1, "image": "../../asked/end.png"}])
    assert tessera("sample", served, "--request", "deep/out/0-1.json", "--out", "again").code == 0
    found = files(tmp_path / "again")
    assert found["0.gif"] == (tmp_path / "deep" / "out" / "0-1.gif").read_bytes()
    before, after = chunks(session)
    assert after.scenes == before.scenes
    assert after.options == before.options
    assert after.negatives == before.negatives == ["fog", "fog"]
    assert before.frames is not None
    assert torch.equal(after.frames, before.frames)
    assert torch.equal(after.given, before.given)
    drawn = greys(read_clip(tmp_path / "again" / "0.gif", lambda facts: range(facts.num_frames)))
    up, down, cut = (colour_of(words, 1) for words in ("up", "down", "cut"))
    assert drawn == [10, 60, up + 2, down + 3, down + 4, down + 5, down + 6, cut + 7, 33]


def test_one_frame_is_a_picture(tessera: Run, served: Path, tmp_path: Path) -> None:
    assert tessera("sample", served, "up", "--frames", 1, "--out", "out").code == 0
    for name in ("0.png", "0.gif"):
        with Image.open(tmp_path / "out" / name) as image:
            assert np.array_equal(np.asarray(image.convert("RGB")), grey(colour_of("up", 0)))


def test_without_av_there_is_no_mp4(tessera: Run, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(clip: Clip) -> bytes:
        raise AvMissing("writing mp4")

    monkeypatch.setattr("tessera.sampling.export.encode_mp4", missing)
    assert tessera("sample", served, "up", "--out", "out").code == 0
    assert sorted(files(tmp_path / "out")) == ["0.gif", "0.json", "0.png"]


def test_wrong_calls_end_with_2_and_write_nothing(tessera: Run, served: Path, tmp_path: Path) -> None:
    (tmp_path / "story.yaml").write_text(json.dumps({"scenes": STORY}))
    (tmp_path / "mesh.yaml").write_text("prompt: a\nmesh: part.obj\n")
    (tmp_path / "text.mp4").write_text("no clip at all")
    calls: list[tuple[list[object], str]] = [
        (["--request", "story.yaml", "up"], "story.yaml has scenes, each with its prompt, and more prompts are given"),
        (["--request", "story.yaml", "--frames", 8], "the scenes have 9 frames together, and 8 are asked (--frames)"),
        (["--request", "mesh.yaml"], "recipe flicker draws clips; mesh is for meshes"),
        (["up", "--frames", 0], "sample.frames (--frames): found 0; expected a whole number >= 1"),
        (["up", "--image", "gone.gif"], "gone.gif: no such file"),
        (["up", "--image", "text.mp4"], "text.mp4: not a clip"),
        (["up", "--image", "a.png", "--mask", "b.png"], "mask is for pictures"),
        (["up", "--steps", 3], "--steps does not apply to this model"),
    ]
    for call, said in calls:
        ended = tessera("sample", served, *call, "--out", "out")
        assert (ended.code, said in ended.err) == (2, True), (call, ended)
    assert not (tmp_path / "out").exists()


# ---- an export


def test_the_card_of_clips(tmp_path: Path) -> None:
    for name in ("step-000002.gif", "step-000004.gif", "step-000004.png", "step-000004.json", "step-000006.png"):
        (tmp_path / "base" / "samples").mkdir(parents=True, exist_ok=True)
        (tmp_path / "base" / "samples" / name).write_bytes(b"")
    config: Any = ClipConfig(data=VideoDataConfig(frames=17, resolution=64, fps=12.5))
    train: Any = SimpleNamespace(name="base")
    folder = tmp_path / "base" / "checkpoints" / "step-000004"
    found = gather_evidence(StoredStage(train, config, folder, 4, {}, frozenset(), ""))
    assert found.sample == tmp_path / "base" / "samples" / "step-000004.gif"
    stored = Stored(tmp_path, FLICKER, config, {})
    facts = {name: {"step": 4, "nets": [name], "averaged": []} for name in ("tokenizer", "base")}
    card = write_card("moving", stored, facts, dict.fromkeys(facts, found), dict.fromkeys(facts, "so many parameters"))
    assert "| resolution | 17 frames (12.5 a second) of 64 x 64 pixels, RGB |" in card
    assert "![sample](base/sample.gif)" in card
    assert "encode_gif(clip)" in card
    assert 'model.encode("clip.gif")' in card


@pytest.mark.parametrize(("frames", "steps"), [(1, 1), (5, 2), (6, 3), (17, 5)])
def test_the_card_counts_tokens_of_clips(frames: int, steps: int) -> None:
    model = SimpleNamespace(stride=8, time_stride=4, quantizer=FSQConfig(levels=(5, 5)))
    data = VideoDataConfig(frames=frames, resolution=32, stride=2)
    config = SimpleNamespace(data=data, tokenizer=SimpleNamespace(model=model))
    train: Any = SimpleNamespace(name="tokenizer")
    said = describe_model(StoredStage(train, config, Path(), 1, {}, frozenset(), ""), {"tokenizer": nn.Linear(10, 100)})
    assert said == (
        f"clips of {frames} frames (stride 2) of 32 x 32 pixels with 3 channels; quantizer fsq with 25 codes; "
        f"{16 * steps} tokens a clip ({steps} x 4 x 4); tokenizer: 0.0011 million parameters"
    )


def test_what_to_do_with_an_export_without_a_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = use_of_export(FLICKER, ClipConfig(), ["tokenizer"], tmp_path / "run", tmp_path / "out")
    code = shlex.split(said)[2]
    assert said.startswith("python -c ")
    monkeypatch.setattr("tessera.load", lambda path: clip_session(Path(path)))
    monkeypatch.chdir(tmp_path)
    write_gif(tmp_path / "CLIP", [10, 30, 60])
    exec(code)
    shown = greys(read_clip(tmp_path / "reconstruction.gif", lambda facts: range(facts.num_frames)))
    assert (shown[0], shown[-1]) == (10, 45)
