"""Requests for clips, from a call or a file to what the recipe is asked; clips to tokens and back. The recipe is clipmaker's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.config import UserError, VideoDataConfig
from tessera.contracts import Scene
from tessera.data.clip_sources import ClipFolder
from tessera.data.clips import prepare_clip
from tessera.media.clip_files import encode_gif, encode_mp4
from tessera.media.clips import Clip
from tessera.sampling.clips import prepare
from tessera.sampling.request import make_request, read_request
from tessera.sampling.session import Session, load
from tests.sampling.clipmaker import STORY, ClipSample, chunks, clip_session, colour_of, grey, greys, session, write_gif
from tests.small import generated, pictures, workshop

__all__ = ["generated", "pictures", "session", "workshop"]


# ---- what a recipe is asked


def test_a_clip_is_as_long_as_asked(session: Session) -> None:
    for frames, wanted in ((None, 5), (1, 1), (12, 12)):
        (clip,) = session.sample("up", seed=3, frames=frames)
        assert greys(clip) == [colour_of("up", 3) + i for i in range(wanted)]
        chunk = chunks(session)[-1]
        assert (chunk.options.frames, chunk.frames, chunk.given, chunk.scenes) == (frames, None, None, None)
    assert len(session.sample("up", options={"frames": 7})[0].frames) == 7


def test_a_story_has_rows_of_its_own(session: Session) -> None:
    drawn = session.sample(scenes=STORY, n=3, seed=5)
    assert len(drawn) == 3
    for k, clip in enumerate(drawn):
        up, down, cut = (colour_of(words, 5 + k) for words in ("up", "down", "cut"))
        assert greys(clip) == [up, up + 1, up + 2, down + 3, down + 4, down + 5, down + 6, cut + 7, cut + 8]
    first, second = chunks(session)  # of two rows each, the last one padded
    assert first.scenes == (Scene("up", 3), Scene("down", 4, 2), Scene("cut", 2, 0)) == second.scenes
    assert (first.options.frames, first.seeds.tolist(), second.seeds.tolist()) == (9, [5, 6], [7, 7])
    again = session.sample(scenes=[Scene("up", 3), Scene("down", 4, 2), Scene("cut", 2, 0)], seed=6)
    assert greys(again[0]) == greys(drawn[1])


def test_frames_that_are_given_lie_at_their_places(session: Session) -> None:
    keyframes = {0: grey(10), -1: Image.fromarray(grey(20)), 3: grey(30, 40)}
    drawn = session.sample(["up", "down", "left"], frames=6, keyframes=keyframes)
    for prompt, clip in zip(("up", "down", "left"), drawn, strict=True):
        first = colour_of(prompt, 0)
        assert greys(clip) == [10, first + 1, first + 2, 30, first + 4, 20]
    for chunk in chunks(session):
        assert chunk.frames is not None
        assert chunk.given is not None
        assert (chunk.frames.shape, chunk.frames.dtype) == ((2, 3, 6, 16, 16), torch.float32)
        assert chunk.given.tolist() == [True, False, False, True, False, True]
        expected = torch.tensor([10, 30, 20]) / 127.5 - 1
        assert torch.allclose(chunk.frames[:, :, chunk.given], expected[None, None, :, None, None].expand(2, 3, 3, 16, 16))


def test_given_frames_of_a_long_clip_reach_no_further_than_their_tokens(session: Session) -> None:
    for count, reach in ((1, 1), (2, 3), (3, 3), (4, 5)):  # the first frame alone, then two at a time
        (clip,) = session.sample("up", frames=400, image=np.stack([grey(7)] * count))
        assert (len(clip.frames), greys(clip)[: count + 1]) == (400, [7] * count + [colour_of("up", 0) + count])
        chunk = chunks(session)[-1]
        assert chunk.frames is not None
        assert chunk.given is not None
        assert (chunk.frames.shape[2], chunk.given.tolist()) == (reach, [place < count for place in range(reach)])


def test_a_clip_goes_on_from_a_picture_or_a_clip(session: Session) -> None:
    start = colour_of("up", 0)
    for image in (grey(9), Image.fromarray(grey(9)), grey(9)[:, :, :1], grey(9)[:, :, 0]):
        assert greys(session.sample("up", image=image)[0]) == [9, start + 1, start + 2, start + 3, start + 4]
    before = np.stack([grey(7), grey(8), grey(9)])
    for clip in (before, Clip(before, 30.0)):
        assert greys(session.sample("up", image=clip)[0]) == [7, 8, 9, start + 3, start + 4]
    drawn = session.sample(scenes=STORY, image=before[:1], keyframes={-1: grey(3)})[0]
    assert (greys(drawn)[0], greys(drawn)[-1]) == (7, 3)
    chained = session.sample("up", image=session.sample("down")[0], frames=8)[0]
    assert greys(chained)[:5] == [colour_of("down", 0) + i for i in range(5)]


def test_files_are_taken_as_training_data_is(tmp_path: Path) -> None:
    path = write_gif(tmp_path / "given.gif", [0, 30, 60, 90, 120, 150])
    asked = {"frames": 9, "image": path}
    assert greys(clip_session(tmp_path).sample("up", **asked)[0])[:6] == [0, 30, 60, 90, 120, 150]
    assert greys(clip_session(tmp_path, stride=2).sample("up", **asked)[0])[:3] == [0, 60, 120]
    assert greys(clip_session(tmp_path, fps=5.0).sample("up", **asked)[0])[:3] == [0, 60, 120]
    assert greys(clip_session(tmp_path, fps=20.0).sample("up", frames=20, image=path)[0])[:6] == [0, 0, 30, 30, 60, 60]


def test_videos_and_folders_of_frames_go_on(session: Session, tmp_path: Path) -> None:
    values = [0, 40, 80]
    (tmp_path / "a.mp4").write_bytes(encode_mp4(Clip(np.stack([grey(value, 32) for value in values]), 8.0)))
    (tmp_path / "frames").mkdir()
    for index, value in enumerate(values):
        Image.fromarray(grey(value)).save(tmp_path / "frames" / f"{index:03}.png")
    start = colour_of("up", 0)
    assert greys(session.sample("up", image=tmp_path / "frames")[0]) == [*values, start + 3, start + 4]
    video = session.sample("up", image=tmp_path / "a.mp4")[0].frames
    assert np.abs(video[:3].mean((1, 2, 3)) - values).max() < 3
    assert greys(Clip(video[3:], 8.0)) == [start + 3, start + 4]


def test_frames_are_cut_or_framed_as_training_data_are(tmp_path: Path) -> None:
    wide = np.zeros((16, 32, 3), np.uint8)
    wide[:, 8:24] = 200
    cut = clip_session(tmp_path).sample("up", image=wide)[0].frames[0]
    assert (cut == 200).all()
    framed = clip_session(tmp_path, fit="letterbox", background=(1, 2, 3)).sample("up", image=wide)[0].frames[0]
    assert (framed[:4] == (1, 2, 3)).all()
    assert (framed[12:] == (1, 2, 3)).all()
    assert (framed[4:12, 6:10] == 200).all()
    assert (framed[4:12, :2] == 0).all()


@pytest.mark.parametrize(
    "values",
    [{}, {"fit": "letterbox", "background": (9, 80, 200)}, {"fps": 4.0}, {"fps": 25.0, "channels": 1}, {"stride": 3}],
    ids=str,
)
def test_files_are_prepared_as_in_training(tmp_path: Path, values: dict[str, Any]) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (11, 24, 50, 3), dtype=np.uint8)
    still = noise[0].repeat(2, axis=0)
    for name, clip in (("moving", noise), ("still", still[None])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.gif").write_bytes(encode_gif(Clip(clip, 10.0)))
        data = VideoDataConfig(**{"frames": 100, "resolution": 16, "start": "first", **values})
        wanted = prepare_clip(ClipFolder.open(tmp_path / name, data), data, 0, 0)
        assert wanted.readable
        found = prepare(tmp_path / name / "a.gif", data)
        assert np.array_equal(found.frames, wanted.frames)
        assert np.array_equal(prepare(tmp_path / name / "a.gif", data, most=2).frames, wanted.frames[:2])


def test_real_clips_go_on(session: Session) -> None:
    if "TESSERA_REAL_DATA" not in os.environ:
        pytest.skip("needs TESSERA_REAL_DATA")
    paths = sorted((Path(os.environ["TESSERA_REAL_DATA"]) / "sprites").rglob("*.gif"))[:20]
    for path in paths:
        with Image.open(path) as image:
            count = image.n_frames
        (clip,) = session.sample("up", image=path, frames=count + 2)
        assert len(clip.frames) == count + 2
        assert len(np.unique(clip.frames[0])) > 2
        assert [len(np.unique(frame)) for frame in clip.frames[count:]] == [1, 1]
        (back,) = session.reconstruct(path)
        assert len(back.frames) == count


# ---- tokens


def test_clips_of_any_length_there_and_back(session: Session) -> None:
    rising = np.stack([grey(10 * i) for i in range(6)])
    ids = session.encode(rising, rising[:2], grey(50))
    assert ids.shape == (3, 4, 2, 2)
    assert [row[:, 0, 0].tolist() for row in ids] == [[0, 15, 35, 50], [0, 10, 10, 10], [50] * 4]
    decoded = session.decode(ids)
    assert (greys(decoded[0]), decoded[0].fps) == ([0, 15, 15, 35, 35, 50, 50], 8.0)
    back = session.reconstruct(Clip(rising, 24.0), rising[:2], grey(50))
    assert [greys(clip) for clip in back] == [[0, 15, 15, 35, 35, 50], [0, 10], [50]]
    assert [clip.fps for clip in back] == [24.0, 8.0, 8.0]


def test_many_clips_go_in_chunks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [np.stack([grey(20 * i), grey(i)]) for i in range(7)]
    whole = session.encode(*clips)
    for most in (1, 2, 7):
        monkeypatch.setattr("tessera.sampling.clips.CHUNK_FRAMES", most)
        assert torch.equal(session.encode(*clips), whole)
        assert [greys(clip) for clip in session.decode(whole)] == [[20 * i, i, i] for i in range(7)]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.zeros((2, 2, 2), np.int64), r"shaped \[2, 2, 2\]; expected whole numbers, clips x time x height x width"),
        (np.zeros((1, 2, 2, 2)), "float64"),
        (np.full((1, 2, 2, 2), 256), "reach from 256 to 256; this tokenizer's are 0 to 255"),
    ],
)
def test_wrong_ids(session: Session, ids: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        session.decode(ids)


# ---- wrong calls


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({}, "nothing to draw"),
        ({"prompts": 5}, "prompts is 5; expected text, or a list of texts"),
        ({"prompts": None}, "prompts is None; expected text, or a list of texts"),
        ({"scenes": 5}, "scenes is 5; expected a list of scenes"),
        ({"prompts": "a", "scenes": STORY}, "prompts and scenes both say what to draw"),
        ({"scenes": [{"prompt": "a"}]}, "scene 1 has no frames; expected a prompt and its frames"),
        ({"scenes": [{"frames": 3}]}, "scene 1 has no prompt"),
        ({"scenes": [*STORY, 7]}, "scene 4 is 7; expected a prompt and its frames"),
        ({"scenes": [{"prompt": "a", "frames": 3, "length": 2}]}, "scene 1 has 'length'; expected prompt, frames, overlap"),
        ({"scenes": {"prompt": "a", "frames": 3}}, "expected a list of scenes"),
        ({"scenes": [Scene("a", 0)]}, "scene 1 has frames 0; expected a whole number of 1 or more"),
        ({"scenes": [Scene("a", True)]}, "scene 1 has frames True"),
        ({"scenes": [Scene("a", 3), Scene("b", 3, -1)]}, "scene 2 has overlap -1; expected a whole number of 0 or more"),
        ({"scenes": [Scene("a", 3), Scene("b", 3, 4)]}, "scene 2 overlaps 4 frames, and 3 frames come before it"),
        (
            {"scenes": [Scene("a", 9), Scene("b", 2, 0), Scene("c", 9, 3)]},
            "3 overlaps 3 frames, and 2 frames .* it since a cut;",
        ),
        ({"scenes": [Scene("a", 3, 1)]}, "scene 1 overlaps 1 frames, and nothing comes before it"),
        ({"scenes": [Scene("a", 300), Scene("b", 300)]}, r"sample.frames \(the frames of all scenes\): found 600"),
        ({"scenes": STORY, "frames": 8}, r"the scenes have 9 frames together, and 8 are asked \(frames\); leave that out"),
        ({"prompts": "a", "frames": 0}, r"sample.frames \(frames\): found 0"),
        ({"prompts": "a", "keyframes": {5: grey(1)}}, "a keyframe is for frame 5, and the clip has 5 frames: 0 to 4, or from"),
        ({"prompts": "a", "keyframes": {-6: grey(1)}}, "a keyframe is for frame -6"),
        ({"prompts": "a", "keyframes": {4: grey(1), -1: grey(2)}}, "frame 4 of 5 is given twice, once by the keyframe -1"),
        ({"prompts": "a", "keyframes": {0: grey(1)}, "image": grey(2)}, "frame 0 of 5 is given twice"),
        ({"prompts": "a", "keyframes": {"0": grey(1)}}, "keyframes has the place '0'; expected whole numbers"),
        ({"prompts": "a", "keyframes": {0: np.stack([grey(1)] * 2)}}, "a keyframe's image has several frames"),
        ({"prompts": "a", "keyframes": {0: "gone.png"}}, "gone.png: no such file"),
        ({"prompts": "a", "keyframes": {i: grey(i) for i in range(5)}}, "all 5 frames are given, so nothing would be drawn"),
        ({"prompts": "a", "image": np.stack([grey(1)] * 6)}, "5 frames, and the image has as many or more"),
        ({"prompts": "a", "frames": 1, "image": grey(1)}, "is to have 1 frame, and the image has as many"),
        ({"prompts": "a", "image": grey(1).astype(np.float32)}, r"a clip is float32 shaped \[16, 16, 3\]; expected a file"),
        ({"prompts": "a", "image": np.zeros((2, 16, 16, 5), np.uint8)}, r"shaped \[2, 16, 16, 5\]"),
        ({"prompts": "a", "image": 5}, "a clip is a int"),
        ({"prompts": "a", "image": "gone.mp4"}, "gone.mp4: no such file"),
        ({"prompts": "a", "image": grey(1), "mask": grey(1)}, "recipe flicker draws clips; mask is for pictures: leave it out"),
        ({"prompts": "a", "image": grey(1), "outpaint": {"left": 0.3}}, "flicker draws clips; outpaint is for pictures"),
        ({"prompts": "a", "image": grey(1), "towards": grey(2)}, "flicker draws clips; towards is for pictures: leave it out"),
        ({"prompts": "a", "mesh": "part.obj"}, "flicker draws clips; mesh is for meshes"),
    ],
    ids=str,
)
def test_a_wrong_call_is_told(session: Session, call: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        session.sample(**call)
    assert not chunks(session)


@pytest.mark.parametrize("keyframes", [grey(1), [grey(1)], "a.png", 3], ids=["array", "list", "file", "number"])
def test_keyframes_without_places_are_told(session: Session, keyframes: Any) -> None:
    kind = type(keyframes).__name__
    with pytest.raises(UserError, match=f"keyframes is a {kind}; expected pictures by their places: {{0: FIRST, -1: LAST}}"):
        session.sample("a", keyframes=keyframes)


def test_what_is_of_clips_is_refused_elsewhere(generated: Path) -> None:
    muse = load(generated, device="cpu")
    with pytest.raises(UserError, match="recipe muse draws pictures; scenes is for clips: leave it out"):
        muse.sample(scenes=STORY)
    with pytest.raises(UserError, match="recipe muse draws pictures; keyframes is for clips"):
        muse.sample("a", keyframes={0: grey(1)})
    with pytest.raises(UserError, match=r"sample.frames \(frames\): unknown key"):
        muse.sample("a", frames=3)
    with pytest.raises(UserError, match="a picture is a Clip; expected a file"):
        muse.encode(Clip(grey(1)[None], 8.0))


def test_no_clip_is_no_call(session: Session) -> None:
    with pytest.raises(UserError, match="no clip given"):
        session.encode()


# ---- requests in files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scenes: up", "line 1: scenes is 'up'; expected a list of scenes"),
        ("scenes: []", "line 1: scenes is empty; expected a list of scenes: [{prompt: a, frames: 20}"),
        ("scenes:\n- up", "line 2: scenes.0 is 'up'; expected prompt, frames, overlap"),
        ("scenes:\n- prompt: up\n  frames: 3\n- prompt: 5\n  frames: 3", "line 4: scenes.1.prompt is 5; expected text"),
        ("scenes:\n- {prompt: up}", "line 2: scenes.0 has no frames; expected a whole number"),
        ("scenes:\n- {prompt: up, frames: 2.5}", "line 2: scenes.0.frames is 2.5; expected a whole number"),
        ("scenes:\n- {prompt: up, frames: true}", "line 2: scenes.0.frames is True; expected a whole number"),
        ("scenes:\n- {prompt: up, frames: 2, overlap: x}", "line 2: scenes.0.overlap is 'x'; expected a whole number; 0 is a"),
        ("scenes:\n- {promt: up, frames: 2}", "line 2: scenes.0 has no 'promt'; did you mean 'prompt'?"),
        ("prompt: a\nkeyframes: {0: a.png}", "line 2: keyframes is {'0': 'a.png'}; expected a list of given frames"),
        (
            "prompt: a\nkeyframes:\n- {frame: first, image: a.png}",
            "line 3: keyframes.0.frame is 'first'; expected a whole number",
        ),
        ("prompt: a\nkeyframes:\n- {frame: 0}", "line 3: keyframes.0 has no image; expected the name of a file"),
        ("prompt: a\nkeyframes:\n- {frame: 0, image: 3}", "line 3: keyframes.0.image is 3; expected the name of a file"),
        (
            "prompt: a\nkeyframes: []",
            "line 2: keyframes has no frames; give one or more, each with its place, or leave keyframes out",
        ),
        ("prompt: a\nframes: 20", "a request has no 'frames'; write it below sample: {frames: 20}"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        read_request(tmp_path / "mine.yaml")
    assert said in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "mine.yaml"))


def test_a_file_says_all_that_a_call_does(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "scenes:\n- {prompt: up, frames: 3}\n- {prompt: down, frames: 4, overlap: null}\n- {prompt: cut, frames: 2, overlap: 0}\n"
        "image: start.gif\nkeyframes: [{frame: -1, image: deep/end.png}]\nn: 2\n"
    )
    request = make_request(ClipSample(), **read_request(tmp_path / "mine.yaml"))
    assert request.scenes == (Scene("up", 3), Scene("down", 4), Scene("cut", 2, 0))
    assert (request.image, request.keyframes) == (str(tmp_path / "start.gif"), ((-1, str(tmp_path / "deep" / "end.png")),))
    assert (request.options.frames, request.rows()) == (9, [("up / down / cut", 0), ("up / down / cut", 1)])
