"""A trained run of clips in use: files and the same again, stories, frames that are given, tokens, an export."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import pipeline
from tessera.config import UserError
from tessera.contracts import Chunk, Scene
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.media.clip_files import encode_gif
from tessera.media.clips import Clip, read_clip
from tessera.recipes import RECIPES
from tessera.recipes.clips.drawing import Animator
from tessera.sampling.package import export_run
from tessera.sampling.session import Session, load
from tests.cli.conftest import tessera
from tests.generators.masked_toys import stirred
from tests.sampling.bars import CLIPS, bar, same, write_bars

__all__ = ["tessera"]

Run = Callable[..., Any]
SUFFIXES = (".gif", ".mp4", ".png", ".json")
SETS = CLIPS | {"base.model": "{width: 16, depth: 1, heads: 2}", "sample.steps": "2", "sample.overlap": "4"}
STORY = [
    {"prompt": "left", "frames": 9},
    {"prompt": "right", "frames": 6, "overlap": 4},
    {"prompt": "left", "frames": 5, "overlap": 0},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of each stage; time stride 2, so training clips are 5 steps of 4 x 4 tokens."""
    folder = tmp_path_factory.mktemp("phenaki")
    write_bars(folder / "data")
    sets = [f"{name}={value}" for name, value in SETS.items()]
    config = pipeline.resolve("phenaki", preset="tiny", data=str(folder / "data"), steps=3, sets=sets)
    return pipeline.train(config, run=folder / "run")


@pytest.fixture(scope="module")
def session(run: Path) -> Session:
    return load(run, device="cpu")


def test_previews_move_and_lie_still(run: Path) -> None:
    for stage in ("tokenizer", "base"):
        names = {path.name for path in (run / stage / "samples").iterdir()}
        assert names == {"step-000003.gif", "step-000003.png", "step-000003.json"}
        assert read_clip(run / stage / "samples" / "step-000003.gif", lambda facts: range(facts.num_frames)).frames.shape[0] > 1


def test_files_by_contract_and_their_json_draws_them_again(tessera: Run, run: Path, session: Session, tmp_path: Path) -> None:
    ended = tessera("sample", run, "left", "right", "-n", 2, "--seed", 5, "--frames", 20, "--out", "out")
    assert ended.code == 0, ended.err
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == sorted(f"{name}{suffix}" for name in ("0-0", "0-1", "1-0", "1-1") for suffix in SUFFIXES)
    assert ended.out.splitlines()[-2] == "drawn by tokenizer step 3, base step 3: clips are 20 frames of 16 px"
    assert len({found[f"{name}.gif"] for name in ("0-0", "0-1", "1-0", "1-1")}) == 4
    assert tessera("sample", run, "--request", "out/1-1.json", "--out", "again").code == 0
    for suffix in (".gif", ".png"):  # once in many hundred times x264 writes other bytes of the same frames
        assert (tmp_path / "again" / f"0{suffix}").read_bytes() == found[f"1-1{suffix}"]
    (drawn,) = session.sample("right", seed=6, frames=20)
    assert drawn.frames.shape == (20, 16, 16, 3)
    assert encode_gif(drawn) == found["1-1.gif"]


def test_a_clip_depends_on_its_own_request_alone(session: Session) -> None:
    for asked in ({"frames": 13}, {"frames": 1}, {"image": bar(3, 3, 1)}, {"negative": "left"}):
        together = session.sample(["left", "right", ""], 2, seed=3, **asked)
        assert same(session.sample("right", seed=4, **asked), together[3:4]), asked
    stories = session.sample(scenes=STORY, n=3, seed=2)
    assert [len(clip.frames) for clip in stories] == [20] * 3
    assert same(session.sample(scenes=STORY, seed=4), stories[2:])


def test_a_story_and_what_is_given_again(tessera: Run, run: Path, tmp_path: Path) -> None:
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "start.gif").write_bytes(encode_gif(Clip(bar(3, 3, 1), 10.0)))
    Image.fromarray(bar(9, 1, 1)[0]).save(tmp_path / "asked" / "later.png")
    story = {"scenes": STORY, "image": "start.gif", "keyframes": [{"frame": 6, "image": "later.png"}], "n": 2}
    (tmp_path / "asked" / "r.json").write_text(json.dumps(story))
    ended = tessera("sample", run, "--request", "asked/r.json", "--out", "out")
    assert ended.code == 0, ended.err
    for name in ("0-0", "0-1"):
        clip = read_clip(tmp_path / "out" / f"{name}.gif", lambda facts: range(facts.num_frames)).frames
        assert clip.shape == (20, 16, 16, 3)
        assert np.array_equal(clip[:3], bar(3, 3, 1))
        assert np.array_equal(clip[6], bar(9, 1, 1)[0])
    assert tessera("sample", run, "--request", "out/0-1.json", "--out", "again").code == 0
    assert (tmp_path / "again" / "0.gif").read_bytes() == (tmp_path / "out" / "0-1.gif").read_bytes()


def test_both_ends_given(session: Session) -> None:
    for clip in session.sample(["left", "right"], keyframes={0: bar(2, 1, 1)[0], -1: bar(10, 1, 1)[0]}):
        assert np.array_equal(clip.frames[[0, -1]], np.stack([bar(2, 1, 1)[0], bar(10, 1, 1)[0]]))


def test_frames_far_off_are_given(session: Session) -> None:
    wanted = {0: bar(2, 1, 1)[0], 20: bar(10, 1, 1)[0], -1: bar(5, 1, 1)[0]}
    for asked in ({"prompts": "left", "frames": 40}, {"scenes": [Scene("left", 13), Scene("right", 27)]}):
        (clip,) = session.sample(keyframes=wanted, **asked)
        assert clip.frames.shape[0] == 40
        assert np.array_equal(clip.frames[[0, 20, 39]], np.stack(list(wanted.values())))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"prompts": "a", "frames": 12, "options": {"overlap": 7}}, "in a window of 9; use at most 6: sample.overlap"),
        ({"scenes": [Scene("a", 9), Scene("b", 4, 7)]}, "no room for new frames in a window of 9; use at most 6"),
        ({"scenes": [Scene("a", 9), Scene("b", 4, 0)], "keyframes": {10: bar(1, 1, 1)[0]}}, "10 is given, .* up to 8"),
        ({"scenes": [Scene("a", 9), Scene("b", 4, 0)], "image": bar(1, 10, 1)}, "9 is given, and a hard cut .* up to 8"),
        ({"scenes": [Scene("a", 10), Scene("b", 1)]}, r"scene 'b' \(1 of 2 frames .* at least 2 frames"),
        ({"prompts": "a", "options": {"order": "critic"}}, "order critic needs a critic"),
    ],
    ids=str,
)
def test_what_the_windows_do_not_allow_is_told_in_frames(session: Session, call: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        session.sample(**call)


def test_a_model_of_single_frames_says_so(run: Path, session: Session) -> None:
    for frames, count in ((1, 1), (3, 2)):
        config = pipeline.resolve(
            "phenaki", preset="tiny", data=str(run.parent / "data"),
            sets=[f"{a}={b}" for a, b in (SETS | {"data.frames": frames, "sample.overlap": "null"}).items()],
        )  # fmt: skip
        nets = {train.name: train.serves() for train in RECIPES["phenaki"].steps(config)}
        draw = Animator(config, nets, torch.device("cpu"))
        (clip,) = draw(Chunk(["left"], torch.tensor([1]), config.sample))
        assert (len(clip.frames), config.grid[0]) == (frames, count)
        with pytest.raises(UserError, match=f"trained on clips of {frames} frames, in which nothing can go on from anything"):
            draw(Chunk(["left"], torch.tensor([1]), config.sample.model_copy(update={"frames": frames + 1})))


def test_what_is_kept_while_drawing_does_not_grow(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, decode = [], session.tokenizer.decode_more  # type: ignore[attr-defined]

    def decode_more(ids: torch.Tensor, memory: Any = None) -> Any:
        frames, memory = decode(ids, memory)
        decoded.append((ids.shape[1], sum(kept.numel() for kept in memory)))
        return frames, memory

    monkeypatch.setattr(session.tokenizer, "decode_more", decode_more)
    session.sample("left", image=bar(3, 31, 1), frames=90)
    assert max(latents for latents, _ in decoded) == 5, "what is given is decoded a window at a time, too"
    assert len({size for _, size in decoded}) == 1


def test_tokens_there_and_back(session: Session, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = bar(4, 8, 1)
    ids = session.encode(clip, clip[:3])
    assert (ids.shape, ids.device.type) == ((2, 5, 4, 4), "cpu")
    assert torch.equal(ids[1, :2], ids[0, :2])  # strictly causal: the shorter one is its beginning
    assert torch.equal(session.encode(clip[0])[0], ids[0, :1])  # a picture is its first frame
    back = session.reconstruct(clip, Clip(clip[:3], 24.0))
    assert [(len(made.frames), made.fps) for made in back] == [(8, session.fps), (3, 24.0)]
    assert session.fps == pytest.approx(10, rel=0.01) == session.sample("left")[0].fps  # that of the data
    decoded = session.decode(ids)
    assert np.array_equal(decoded[0].frames[:8], back[0].frames)
    monkeypatch.setattr("tessera.sampling.clips.CHUNK_FRAMES", 4)
    parts = session.decode(ids)
    assert all(np.abs(a.frames.astype(int) - b.frames).max() <= 1 for a, b in zip(parts, decoded, strict=True))
    assert torch.equal(session.encode(clip, clip[:3]), ids)


@pytest.mark.parametrize(
    ("quantizer", "right", "wrong", "said"),
    [
        ("{kind: fsq, levels: [4, 4]}", (1, 3, 4, 4), (1, 3, 4, 4, 2), "clips x time x height x width$"),
        ("{kind: residual, num_quantizers: 2}", (1, 3, 4, 4, 2), (1, 3, 4, 4), "x width x codes of a place, up to 2$"),
        ("{kind: residual, num_quantizers: 2}", (1, 3, 4, 4, 1), (1, 3, 4, 4, 3), "x width x codes of a place, up to 2$"),
    ],
)
def test_ids_have_the_axes_of_the_codes(
    session: Session, quantizer: str, right: tuple[int, ...], wrong: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"{{widths: [8, 8, 8], blocks: [0, 0, 0], time_downsamples: 1, quantizer: {quantizer}}}"
    config = pipeline.resolve("phenaki", preset="tiny", sets=[f"tokenizer.model={model}"])
    monkeypatch.setattr(session, "nets", {"tokenizer": RECIPES["phenaki"].steps(config)[0].serves()})
    assert session.decode(np.zeros(right, np.int64))[0].frames.shape == (5, 16, 16, 3)
    with pytest.raises(UserError, match=said):
        session.decode(np.zeros(wrong, np.int64))


def test_an_export_draws_the_same(session: Session, run: Path, tmp_path: Path) -> None:
    model = load(export_run(run, tmp_path / "model"), device="cpu")
    assert same(model.sample(["left", "right"], frames=12), session.sample(["left", "right"], frames=12))
    assert (tmp_path / "model" / "base" / "sample.gif").is_file()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "![sample](base/sample.gif)" in card
    assert "80 tokens a clip (5 x 4 x 4)" in card
    assert "| resolution | 9 frames of 16 x 16 pixels, RGB |" in card


def test_nothing_is_drawn_without_a_generator(run: Path, tessera: Run, tmp_path: Path) -> None:
    config = pipeline.resolve(
        "phenaki", preset="tiny", data=str(run.parent / "data"), steps=1, sets=[f"{a}={b}" for a, b in SETS.items()]
    )
    only = pipeline.train(config, run=tmp_path / "only", stage="tokenizer")
    with pytest.raises(UserError, match="stage base has not been trained yet"):
        load(only, device="cpu").sample("left")
    ended = tessera("export", only, "--out", "model")
    assert ended.code == 0, ended.err
    code = shlex.split(ended.out.splitlines()[-1].removeprefix("next: "))[2]
    (tmp_path / "CLIP").write_bytes(encode_gif(Clip(bar(1, 6, 1), 10.0)))
    exec(code)
    made = read_clip(tmp_path / "reconstruction.gif", lambda facts: range(facts.num_frames))
    assert (made.frames.shape, made.fps) == ((6, 16, 16, 3), pytest.approx(10))


def test_several_codes_a_place(run: Path, tmp_path: Path) -> None:
    """A residual quantizer gives the grid a fourth axis; windows, given frames and previews know it."""
    changed = SETS | {"tokenizer.model": SETS["tokenizer.model"][:-1] + ", quantizer: {kind: residual, num_quantizers: 2}}"}
    sets = [f"{name}={value}" for name, value in changed.items()]
    config = pipeline.resolve("phenaki", preset="tiny", data=str(run.parent / "data"), steps=1, sets=sets)
    model = load(pipeline.train(config, run=tmp_path / "run"), device="cpu")
    assert model.encode(bar(1, 9, 1)).shape == (1, 5, 4, 4, 2)
    (clip,) = model.sample("left", image=bar(3, 3, 1), frames=20)
    assert clip.frames.shape == (20, 16, 16, 3)
    assert np.array_equal(clip.frames[:3], bar(3, 3, 1))


# ---- what is asked reaches the generator


@pytest.fixture(scope="module")
def loud(run: Path) -> Session:
    """With weights that every input changes: after three steps of training tokens hardly know of each other."""
    session = load(run, device="cpu")
    torch.manual_seed(0)
    generator: Any = stirred(session.nets["base"]["generator"])
    for weight in (generator.condition.weight, generator.places[0]):
        torch.nn.init.normal_(weight, std=0.2)
    torch.nn.init.normal_(generator.head.weight, std=0.5)
    return session


def tokens(session: Session, **asked: Any) -> torch.Tensor:
    """t h w: what is decoded; pixels of a latent depend on those before it, tokens only where the generator says so."""
    found, decode = [], session.tokenizer.decode_more  # type: ignore[attr-defined]

    def decode_more(ids: torch.Tensor, memory: Any = None) -> Any:
        found.append(ids[0])
        return decode(ids, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.tokenizer, "decode_more", decode_more)
        session.sample(**{"seed": 3} | asked)
    return torch.cat(found)


def story(loud: Session, first: str, second: str, overlap: int | None = None) -> torch.Tensor:
    """5 latents and 4 more, in windows of 2 known and 2 new ones."""
    return tokens(loud, scenes=[Scene(first, 9), Scene(second, 8, overlap)])


def differ(first: torch.Tensor, second: torch.Tensor) -> list[bool]:
    """Which latents."""
    return (first != second).flatten(1).any(1).tolist()


def test_a_window_goes_on_from_the_tokens_before_it(loud: Session) -> None:
    assert any(differ(story(loud, "left", "up"), story(loud, "right", "up"))[5:7]), "of the same text and noise"
    assert not any(differ(story(loud, "left", "up", 0), story(loud, "right", "up", 0))[5:]), "behind a cut"
    twice = story(loud, "left", "left", 0)
    assert any(differ(twice[:5], twice[5:])), "windows have noise of their own"


def test_a_window_has_no_more_latents_than_are_asked(loud: Session) -> None:
    seen: list[torch.Tensor | None] = []
    generator: Any = loud.nets["base"]["generator"]
    hook = generator.register_forward_pre_hook(lambda net, given, named: seen.append(named["frames"]), with_kwargs=True)
    tokens(loud, prompts="left", frames=5, options={"steps": 1})
    tokens(loud, prompts="left", frames=11, options={"steps": 1})
    hook.remove()
    assert [None if frames is None else frames[0].tolist() for frames in seen] == [
        [True, True, True, False, False], None, [False, True, True, True, False],
    ]  # fmt: skip


def test_another_second_caption_changes_the_second_scene_alone(loud: Session) -> None:
    changed = differ(story(loud, "left", "right"), story(loud, "left", "left"))
    assert not any(changed[:5])
    assert any(changed[5:7])
    assert torch.equal(story(loud, "left", "left"), tokens(loud, prompts="left", frames=17)), "the same is no change"


def test_given_frames_are_known_to_the_generator(loud: Session) -> None:
    for name, first, second, known in (
        ("image", bar(3, 3, 1), bar(9, 3, 1), [0, 1]),
        ("keyframes", {8: bar(3, 1, 1)[0]}, {8: bar(9, 1, 1)[0]}, [4]),
        ("keyframes", {0: bar(3, 1, 1)[0], 12: bar(3, 1, 1)[0]}, {0: bar(3, 1, 1)[0], 12: bar(9, 1, 1)[0]}, [0, 6]),
    ):
        one, other = (tokens(loud, prompts="left", frames=13, **{name: given}) for given in (first, second))
        changed = differ(one, other)
        drawn = [place for place in range(7) if place not in known]
        assert changed[known[-1]]
        assert any(changed[place] for place in drawn), (name, changed)
        plain = tokens(loud, prompts="left", frames=13)
        assert any(differ(one, plain)[place] for place in drawn)
    image = tokens(loud, prompts="left", frames=13, image=bar(3, 3, 1))
    assert torch.equal(image[:2], loud.encode(bar(3, 3, 1))[0])


def test_every_option_of_a_request_is_heard(loud: Session) -> None:
    sure = {"order": "confidence"}
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "steps": ({}, {"steps": 3}), "guidance": ({}, {"guidance": 9.0}), "guidance_ramp": ({}, {"guidance_ramp": False}),
        "temperature": ({}, {"temperature": 0.1}), "top_p": ({}, {"top_p": 0.1}), "min_share": ({}, {"min_share": 0.9}),
        "order": ({}, sure), "noise": (sure, sure | {"noise": 0.0}), "remask": ({}, {"remask": 0.9}),
    }  # fmt: skip
    assert set(changes) == set(MaskedSampleConfig.model_fields)
    for name, (before, after) in changes.items():
        one, other = (tokens(loud, prompts="left", options={"steps": 4} | options) for options in (before, after))
        assert any(differ(one, other)), name


def test_a_negative_prompt_is_heard(loud: Session) -> None:
    plain, *others = (tokens(loud, prompts="left", **asked) for asked in ({}, {"negative": "right"}, {"negative": "up"}))
    assert any(differ(plain, others[0]))
    assert any(differ(*others))
