"""Requests with a sketch: cut as training clips are, as tokens, with how far they reach. The recipe is clipmaker's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.batches import num_latent
from tessera.config import UserError
from tessera.media.clips import Clip
from tessera.sampling.export import recipe_of
from tessera.sampling.request import make_request, read_request
from tessera.sampling.session import Session
from tests.sampling.clipmaker import ClipSample, chunks, clip_session, grey, session, write_gif

__all__ = ["session"]


def test_a_sketch_arrives_as_tokens(tmp_path: Path) -> None:
    """As `encode` makes them; every row has the same."""
    drawer = clip_session(tmp_path / "run", sketch="edges")
    strokes = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    drawer.sample("up", n=3, sketch=strokes)
    for chunk in chunks(drawer):
        assert chunk.sketch is not None
        assert (chunk.sketch.shape, chunk.sketch_length) == ((2, 3, 2, 2), 3)
        assert torch.equal(chunk.sketch, drawer.encode(strokes).expand(2, -1, -1, -1))
    drawer.sample("up")
    assert (chunks(drawer)[-1].sketch, chunks(drawer)[-1].sketch_length) == (None, 0)


@pytest.mark.parametrize(
    ("frames", "asked", "there"), [(1, None, 1), (2, None, 1), (3, None, 2), (4, None, 2), (4, 4, 3), (9, 4, 3)]
)
def test_what_is_there_reaches_as_far_as_its_frames(tmp_path: Path, frames: int, asked: int | None, there: int) -> None:
    """Two frames a token but for the first: what is not there as a whole is not there, but at the clip's end."""
    drawer = clip_session(tmp_path / "run", sketch="files")
    drawer.sample("up", frames=asked, sketch=np.stack([grey(10 * place) for place in range(frames)]))
    chunk = chunks(drawer)[-1]
    assert chunk.sketch is not None
    assert (chunk.sketch.shape[1], chunk.sketch_length) == (num_latent(min(frames, asked or 5), 2), there)
    means = [0, *(10 * place + 5 for place in range(1, 9, 2))]
    whole = min(there, 1 + (min(frames, asked or 5) - 1) // 2)
    assert np.allclose(chunk.sketch[0, :whole, 0, 0].numpy(), means[:whole], atol=1)


def test_files_clips_and_pictures(tmp_path: Path) -> None:
    """Cut and picked as training clips are: two of these five frames at half the rate."""
    wide = write_gif(tmp_path / "wide.gif", [0, 50, 100, 150, 200], 100, (32, 16))
    drawer = clip_session(tmp_path / "run", sketch="files", fps=5.0)
    given: list[tuple[Any, list[int]]] = [
        (wide, [0, 100, 200]), (str(wide), [0, 100, 200]), (Clip(np.stack([grey(0), grey(9)]), 3.0), [0, 9]),
        (Image.fromarray(grey(7, 40)), [7]), (grey(7), [7]),
    ]  # fmt: skip
    for sketch, values in given:
        drawer.sample("up", sketch=sketch)
        found = chunks(drawer)[-1].sketch
        assert found is not None
        assert found.shape[1:] == (num_latent(len(values), 2), 2, 2)
        assert int(found[0, 0, 0, 0]) == values[0]


def test_a_request_s_file_names_a_sketch(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("prompt: up\nsketch: strokes/a.gif\n")
    request = make_request(ClipSample(), **read_request(tmp_path / "a.yaml"))
    assert request.sketch == str(tmp_path / "strokes/a.gif")
    assert recipe_of(request, "up", 0, tmp_path / "out")["sketch"] == "../strokes/a.gif"
    (tmp_path / "b.yaml").write_text("prompt: up\nsketch: 3\n")
    with pytest.raises(UserError, match=r"b\.yaml, line 2: sketch is 3; expected the name of a file"):
        read_request(tmp_path / "b.yaml")


def test_what_is_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe flicker\) learned nothing from sketches: leave the sketch out"):
        session.sample("up", sketch=grey(0))
    drawer = clip_session(tmp_path / "run", sketch="edges")
    with pytest.raises(UserError, match=r"gone\.gif: no such file"):
        drawer.sample("up", sketch=tmp_path / "gone.gif")
    with pytest.raises(UserError, match="a clip is float64 shaped"):
        drawer.sample("up", sketch=np.zeros((5, 16, 16, 3)))
