"""Requests with a sketch: cut as training clips are, as tokens, with how far they reach. The recipe is clipmaker's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.config import UserError
from tessera.contracts import Chunk
from tessera.media.clip_files import encode_mp4
from tessera.media.clips import Clip
from tessera.sampling.clips import first_strokes
from tessera.sampling.export import recipe_of
from tessera.sampling.request import make_request, read_request
from tessera.sampling.session import Session
from tests.sampling.clipmaker import ClipSample, chunks, clip_session, grey, session, write_gif

__all__ = ["session"]


def there(chunk: Chunk) -> list[int]:
    """The latents that a sketch has."""
    assert chunk.sketched is not None
    return chunk.sketched.nonzero().flatten().tolist()


def test_a_sketch_arrives_as_tokens(tmp_path: Path) -> None:
    """As `encode` makes them; every row has the same."""
    drawer = clip_session(tmp_path / "run", sketch="edges")
    strokes = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    drawer.sample("up", n=3, sketch=strokes)
    for chunk in chunks(drawer):
        assert chunk.sketch is not None
        assert (chunk.sketch.shape, there(chunk)) == ((2, 3, 2, 2), [0, 1, 2])
        assert torch.equal(chunk.sketch, drawer.encode(strokes).expand(2, -1, -1, -1))
    drawer.sample("up")
    assert (chunks(drawer)[-1].sketch, chunks(drawer)[-1].sketched) == (None, None)


@pytest.mark.parametrize(
    ("frames", "asked", "count"), [(1, None, 1), (2, None, 1), (3, None, 2), (4, None, 2), (4, 4, 3), (9, 4, 3)]
)
def test_what_is_there_reaches_as_far_as_its_frames(tmp_path: Path, frames: int, asked: int | None, count: int) -> None:
    """Two frames a token but for the first: what is not there as a whole is not there, but at the clip's end."""
    drawer = clip_session(tmp_path / "run", sketch="files")
    drawer.sample("up", frames=asked, sketch=np.stack([grey(10 * place) for place in range(frames)]))
    chunk = chunks(drawer)[-1]
    assert chunk.sketch is not None
    assert there(chunk) == list(range(count))
    means = [0, *(10 * place + 5 for place in range(1, 9, 2))]
    whole = min(count, 1 + (min(frames, asked or 5) - 1) // 2)
    assert np.allclose(chunk.sketch[0, :whole, 0, 0].numpy(), means[:whole], atol=1)


def test_files_clips_and_pictures(tmp_path: Path) -> None:
    """Cut as training clips are, and taken frame by frame, however fast they are shown."""
    wide = write_gif(tmp_path / "wide.gif", [0, 50, 100, 150, 200], 100, (32, 16))
    drawer = clip_session(tmp_path / "run", sketch="files", fps=5.0)
    given: list[tuple[Any, list[int]]] = [
        (wide, [0, 75, 175]), (str(wide), [0, 75, 175]), (Clip(np.stack([grey(0), grey(9)]), 3.0), [0]),
        (Image.fromarray(grey(7, 40)), [7]), (grey(7), [7]),
    ]  # fmt: skip
    for sketch, values in given:
        drawer.sample("up", sketch=sketch)
        found = chunks(drawer)[-1].sketch
        assert found is not None
        assert found.shape[2:] == (2, 2)
        assert found[0, :, 0, 0].tolist() == pytest.approx(values, abs=1)


@pytest.mark.parametrize("data", [{"stride": 2}, {"fps": 20.0}])
def test_strokes_are_taken_frame_by_frame(tmp_path: Path, data: dict[str, Any]) -> None:
    pytest.importorskip("av")
    (tmp_path / "a.mp4").write_bytes(encode_mp4(Clip(np.stack([grey(40 * place) for place in range(5)]), 10.0)))
    write_gif(tmp_path / "a.gif", [40 * place for place in range(5)])
    drawer = clip_session(tmp_path / "run", sketch="files", **data)
    for name in ("a.mp4", "a.gif"):
        drawer.sample("up", sketch=tmp_path / name)
        found = chunks(drawer)[-1].sketch
        assert found is not None
        assert found[0, :, 0, 0].tolist() == pytest.approx([0, 60, 140], abs=4)


@pytest.mark.parametrize(
    ("names", "latents"),
    [
        (["3.png", "4.png", "7.png"], {0: 30, 2: 70}), (["a_001.png", "a_003.png"], {0: 10, 1: 30}),
        (["8.png", "9.png", "10.png"], {0: 80, 1: 95}), (["x.png", "y.png", "z.png"], {0: 0, 1: 0}),
    ],
)  # fmt: skip
def test_pictures_of_a_folder_lie_where_their_numbers_say(tmp_path: Path, names: list[str], latents: dict[int, int]) -> None:
    """From the lowest on; the fifth frame is the last."""
    (tmp_path / "strokes").mkdir()
    for name in names:
        Image.fromarray(grey(10 * int("".join(filter(str.isdigit, name)) or 0))).save(tmp_path / "strokes" / name)
    drawer = clip_session(tmp_path / "run", sketch="files", stride=2)
    drawer.sample("up", sketch=tmp_path / "strokes")
    chunk = chunks(drawer)[-1]
    assert chunk.sketch is not None
    assert {latent: int(chunk.sketch[0, latent, 0, 0]) for latent in there(chunk)} == pytest.approx(latents, abs=1)


def test_a_folder_may_be_longer_than_the_clip_but_no_single_picture_lies_behind_it(tmp_path: Path) -> None:
    drawer = clip_session(tmp_path / "run", sketch="files")
    film, single, both = (tmp_path / name for name in ("film", "single", "both"))
    for folder, places in ((film, [0, 1, 2, 3, 4, 5, 6, 9]), (single, [0, 10, 20, 30, 40]), (both, [0, 1, 2, 4, 5])):
        folder.mkdir()
        for place in places:
            Image.fromarray(grey(place)).save(folder / f"{place:03d}.png")
    drawer.sample("up", sketch=film)
    assert there(chunks(drawer)[-1]) == [0, 1, 2]
    assert max(first_strokes(film, 5, drawer.config.data)) == 4
    for folder, name, place in ((single, "010.png", 10), (both, "005.png", 5)):
        said = f"{name} is for frame {place} of the sketch, by its number, and the clip has 5 frames: 0 to 4; ask for more "
        with pytest.raises(UserError, match=re.escape(f"{said}(--frames {place + 1})")):
            drawer.sample("up", sketch=folder)
    drawer.sample("up", sketch=both, frames=6)
    assert chunks(drawer)[-1].sketch is not None


@pytest.mark.parametrize(
    ("places", "latents"), [((0, 4), {0: 0, 2: 40}), ((2,), {1: 20}), ((0, 1, 3, 4), {0: 0, 2: 35}), ((-1, 0), {0: 0, 2: 40})]
)
def test_a_sketch_may_have_gaps(tmp_path: Path, places: tuple[int, ...], latents: dict[int, int]) -> None:
    """A latent is there where its last frame is; what is missing before that looks like it."""
    drawer = clip_session(tmp_path / "run", sketch="files")
    drawer.sample("up", sketch={place: grey(10 * (place % 5)) for place in places})
    chunk = chunks(drawer)[-1]
    assert chunk.sketch is not None
    assert {latent: int(chunk.sketch[0, latent, 0, 0]) for latent in there(chunk)} == pytest.approx(latents, abs=1)


def test_all_frames_one_by_one_are_the_whole(tmp_path: Path) -> None:
    drawer, frames = clip_session(tmp_path / "run", sketch="files"), [grey(40 * place) for place in range(5)]
    (tmp_path / "strokes").mkdir()
    for place, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / "strokes" / f"{place}.png")
    single = {place: tmp_path / f"strokes/{place}.png" for place in (3, 0, 4, 1, 2)}
    for sketch in (tmp_path / "strokes", single, np.stack(frames)):
        drawer.sample("up", sketch=sketch)
        chunk = chunks(drawer)[-1]
        assert chunk.sketch is not None
        assert (there(chunk), chunk.sketch[0, :, 0, 0].tolist()) == ([0, 1, 2], [0, 60, 140])


def test_a_request_s_file_names_a_sketch(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("prompt: up\nsketch: strokes/a.gif\n")
    request = make_request(ClipSample(), **read_request(tmp_path / "a.yaml"))
    assert request.sketch == str(tmp_path / "strokes/a.gif")
    assert recipe_of(request, "up", 0, tmp_path / "out")["sketch"] == "../strokes/a.gif"
    (tmp_path / "b.yaml").write_text("prompt: up\nsketch: [{frame: 0, image: a.png}, {frame: -1, image: deep/b.png}]\n")
    request = make_request(ClipSample(), **read_request(tmp_path / "b.yaml"))
    assert request.sketch == ((0, str(tmp_path / "a.png")), (-1, str(tmp_path / "deep/b.png")))
    facts = recipe_of(request, "up", 0, tmp_path / "out")
    assert facts["sketch"] == [{"frame": 0, "image": "../a.png"}, {"frame": -1, "image": "../deep/b.png"}]


@pytest.mark.parametrize(
    ("sketch", "said"),
    [
        ("3", "line 1: sketch is 3; expected the name of a file, or a list of frames"),
        ("[]", "line 1: sketch has no frames; give one or more, each with its place, or leave sketch out"),
        ("[a.png]", "line 1: sketch.0 is 'a.png'; expected frame, image"),
        ("[{frame: first, image: a.png}]", "line 1: sketch.0.frame is 'first'; expected a whole number"),
        ("[{frame: 0}]", "line 1: sketch.0 has no image; expected the name of a file"),
    ],
)
def test_wrong_sketches_of_a_request_s_file(tmp_path: Path, sketch: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(f"sketch: {sketch}\n")
    with pytest.raises(UserError, match=re.escape(said)):
        read_request(tmp_path / "a.yaml")


def test_what_is_refused(session: Session, tmp_path: Path) -> None:
    remedy = r"train one that does: recipe nuwa \(base.model.kind=autoregressive\) with data.sketch=edges or files"
    with pytest.raises(UserError, match=rf"recipe flicker\) learned nothing from sketches: leave the sketch out, or {remedy}"):
        session.sample("up", sketch=grey(0))
    drawer = clip_session(tmp_path / "run", sketch="edges")
    with pytest.raises(UserError, match=r"gone\.gif: no such file"):
        drawer.sample("up", sketch=tmp_path / "gone.gif")
    (tmp_path / "twice").mkdir()
    for name in ("0.png", "1.png", "01.png"):
        Image.fromarray(grey(0)).save(tmp_path / "twice" / name)
    wrong: list[tuple[Any, str]] = [
        (tmp_path / "twice", r"twice: 1\.png has the number of another picture"),
        (np.zeros((5, 16, 16, 3)), "a clip is float64 shaped"),
        ([grey(0)], "a clip is a list; expected a file"),
        ({}, "sketch has no frames; give one or more, each with its place, or leave sketch out"),
        ((), "sketch has no frames; give one or more"),
        ((grey(0), grey(1)), "sketch is a tuple; expected pictures by their places: {0: FIRST, -1: LAST}"),
        ({5: grey(0)}, "a sketch is for frame 5, and the clip has 5 frames: 0 to 4"),
        ({4: grey(0), -1: grey(1)}, "frame 4 of 5 is given twice, once by the sketch -1"),
        ({"0": grey(0)}, "sketch has the place '0'; expected whole numbers"),
        ({0: np.stack([grey(0)] * 2)}, "a sketch's image has several frames; expected a picture"),
        ({0: grey(0), 3: grey(0)}, "a sketch at frame 3: a token holds 2 frames, .* use 2 or 4"),
    ]
    for sketch, said in wrong:
        with pytest.raises(UserError, match=said):
            drawer.sample("up", sketch=sketch)
