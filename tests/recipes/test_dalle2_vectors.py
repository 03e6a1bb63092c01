"""Pictures drawn of an embedding that the user gives, as a file or an array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.config import UserError
from tessera.sampling.request import make_request
from tessera.sampling.session import Session
from tests.data.array_makers import DAMAGED
from tests.recipes.test_dalle2_drawing import arrays, photo, run, session, workshop

__all__ = ["photo", "run", "session", "workshop"]

WIDTH = 8


@pytest.fixture(scope="module")
def vector(session: Session, photo: Image.Image) -> np.ndarray[Any, Any]:
    """The photo's, as the model makes it."""
    start = session.start_of(make_request(session.config.sample, [""], image=photo))
    assert start is not None
    draw: Any = session.draw
    found: np.ndarray[Any, Any] = draw.sphere.pictures(start[0])[0].numpy()
    assert found.shape == (WIDTH,)
    return found


def test_an_embedding_draws_what_its_picture_draws(
    session: Session, photo: Image.Image, vector: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    wanted = arrays(session.sample("a red circle", 2, seed=3, image=photo))
    np.save(tmp_path / "photo.npy", vector[None].astype(np.float64))
    for given in (
        vector,
        1e30 * vector.astype(np.float64),
        torch.tensor(1e-20 * vector, requires_grad=True),
        tmp_path / "photo.npy",
        str(tmp_path / "photo.npy"),
    ):  # a direction, whatever its length
        found = arrays(session.sample("a red circle", 2, seed=3, image=given))
        assert np.abs(np.stack(found).astype(int) - np.stack(wanted)).max() <= 1
    other = arrays(session.sample("a red circle", 2, seed=3, image=-vector))
    assert np.abs(np.stack(other).astype(int) - np.stack(wanted)).max() > 1


def test_the_way_between_embeddings_and_pictures(session: Session, photo: Image.Image, vector: np.ndarray[Any, Any]) -> None:
    red = Image.new("RGB", photo.size, "red")
    wanted = arrays(session.sample("", 3, seed=3, image=photo, towards=red))
    found = arrays(session.sample("", 3, seed=3, image=vector, towards=red))
    assert np.abs(np.stack(found).astype(int) - np.stack(wanted)).max() <= 1
    back = arrays(session.sample("", 3, seed=3, image=red, towards=vector))
    assert np.abs(np.stack(back[::-1]).astype(int) - np.stack(wanted)).max() <= 1


def test_files_that_hold_none_are_told(session: Session, tmp_path: Path) -> None:
    np.savez(tmp_path / "several.npz", a=np.ones(WIDTH))
    for content in (b"nothing", (tmp_path / "several.npz").read_bytes(), *DAMAGED.values()):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.npy cannot be read as an embedding"):
            session.sample("", image=tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("given", "asked", "told"),
    [
        (np.ones(5), {}, r"image is shaped \[5\]; expected one embedding of this model, 8 numbers"),
        (np.zeros(WIDTH), {}, "image holds nothing but zeros"),
        (np.array([np.nan] * WIDTH), {}, "image holds numbers that are not finite"),
        (np.array(["a"] * WIDTH), {}, "image cannot be read as an embedding"),
        (np.ones(WIDTH) * 1j, {}, "its numbers are complex"),
        ("nowhere.npy", {}, "nowhere.npy cannot be read as an embedding .*expected 8 numbers, in a file an .npy"),
        (np.ones(WIDTH), {"n": 2, "towards": np.zeros(WIDTH)}, "towards holds nothing but zeros"),
        (np.ones(WIDTH), {"mask": np.full((32, 32), 255, np.uint8)}, "an embedding has no pixels that could stay"),
        (np.ones(WIDTH), {"options": {"start": "upsampler1"}}, "enlarges a picture; give one"),
    ],
)
def test_what_is_no_embedding_is_told(given: Any, asked: dict[str, Any], told: str, session: Session) -> None:
    with pytest.raises(UserError, match=told):
        session.sample("", image=given, **asked)
