"""Pictures that are not square, through all of a recipe: sizes, proportions, masks, variations, caches, evaluation, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tessera import pipeline
from tessera.config import ImageDataConfig, UserError
from tessera.data.loader import prepare
from tessera.data.opening import open_source
from tessera.evals.run import evaluate_run
from tessera.sampling.package import export_run
from tessera.sampling.serve import draw_to_files
from tessera.sampling.session import Session, load, shrunk
from tests.processes import made_once, workshop

__all__ = ["workshop"]

COMMON = (
    "engine.device=cpu",
    "engine.validate_every_steps=2",
    "engine.preview_every_steps=2",
    "data.resolution=16",
    "data.width=24",
    "data.validation_fraction=0.2",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
)
CASCADE = (
    *COMMON,
    "data.crop=random",
    "data.zoom=1.5",
    "embedder={batch_size: 8, loss: {group: 8}, model: {width: 8, widths: [8, 16]}}",
    "prior={batch_size: 8, model: {width: 16, depth: 1, heads: 2}}",
    "base={batch_size: 4, model: {kind: dit, patch: 4, width: 16, depth: 1, heads: 2}, optim: {lr: 1.0e-2, warmup_steps: 0}}",
    "upsampler1={batch_size: 4, resolution: 32, crop: 24, model: {widths: [16, 16], blocks: [1, 1], head_width: 8, "
    "efficient: false}, optim: {lr: 1.0e-2, warmup_steps: 0}}",
    "sample={steps: 2, prior: {steps: 2}, upsampler: {steps: 2}, chunk: 2, resample_times: 2}",
)
TOKENS = (
    *COMMON,
    "data.flip=true",
    "data.views=2",
    "tokenizer={batch_size: 4, critic: null, model: {widths: [8, 8, 8], blocks: [0, 0, 1]}}",
    "base={batch_size: 4, model: {width: 16, depth: 1, heads: 2}}",
    "superres={batch_size: 4, resolution: 32, model: {width: 16, depth: 1, heads: 2}}",
    "sample={steps: 2, superres: {steps: 2}, chunk: 2}",
)


@pytest.fixture(scope="module")
def discs(workshop: Path) -> Path:
    """Files of several proportions, each with a disc in the middle, a third as wide as the shorter side."""
    path = workshop / "discs"

    def make() -> None:
        path.mkdir()
        for number in range(24):
            width, height = [(90, 60), (60, 90), (64, 64), (120, 40)][number % 4]
            picture, radius = Image.new("RGB", (width, height), (0, 0, 0)), min(width, height) / 6
            middle = (width - 1) / 2, (height - 1) / 2
            box = [middle[0] - radius, middle[1] - radius, middle[0] + radius, middle[1] + radius]
            ImageDraw.Draw(picture).ellipse(box, fill=(255, 255, 255))
            picture.save(path / f"{number:02d}.png")
            (path / f"{number:02d}.txt").write_text(f"disc {number}")

    made_once(path, make)
    return path


@pytest.fixture(scope="module")
def cascade(workshop: Path, discs: Path) -> Path:
    path = workshop / "wide dalle2"
    config = pipeline.resolve("dalle2", preset="tiny", data=str(discs), steps=2, sets=CASCADE)
    made_once(path, lambda: pipeline.train(config, run=path))
    return path


@pytest.fixture(scope="module")
def tokens(workshop: Path, discs: Path) -> Path:
    path = workshop / "wide muse"
    config = pipeline.resolve("muse", preset="tiny", data=str(discs), steps=2, sets=TOKENS)
    made_once(path, lambda: pipeline.train(config, run=path))
    return path


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)


def extents(disc: np.ndarray) -> tuple[float, float]:
    """Half the radius in both directions, by moments."""
    grey = disc[:, :, 0].astype(float)
    return tuple(  # type: ignore[return-value]
        float(np.sqrt((np.square(np.arange(n) - (n - 1) / 2) * grey.sum(1 - axis)).sum() / grey.sum()))
        for axis, n in enumerate(grey.shape)
    )


@pytest.mark.parametrize("size", [(32, 48), (48, 32)])
def test_discs_stay_discs_whatever_the_proportions_of_their_files(size: tuple[int, int], discs: Path) -> None:
    config = ImageDataConfig(resolution=size[0], width=size[1])
    source = open_source(discs, config)
    for index in range(8):
        image = prepare(source, config, index, 0).image
        assert image.shape == (*size, 3)
        file = np.asarray(Image.open(discs / f"{source.key(index)}.png"))
        pixel = min(file.shape[0] / size[0], file.shape[1] / size[1])
        assert extents(image) == pytest.approx([extent / pixel for extent in extents(file)], rel=0.02)
        assert extents(image)[0] == pytest.approx(extents(image)[1], rel=0.02)


def test_a_large_jpeg_is_not_read_smaller_than_the_longer_side(tmp_path: Path) -> None:
    Image.new("RGB", (800, 400)).save(tmp_path / "a.jpg")
    source = open_source(tmp_path, ImageDataConfig(resolution=32, width=96))
    assert min(source.read(0).shape[:2]) >= 96  # a quarter: 100 x 200


def test_pictures_have_the_asked_size(cascade: Path, photo: np.ndarray, tmp_path: Path) -> None:
    session = load(cascade, device="cpu")
    assert session.size == (32, 48)
    for drawn in (
        session.sample("disc 1")[0],
        session.sample("", image=photo)[0],
        session.sample("", image=photo, options={"start": "upsampler1"})[0],
        session.sample("disc 1", image=photo, outpaint={"left": 0.5})[0],
    ):
        assert drawn.size == (48, 32)
    called = draw_to_files(cascade, ["disc 1"], named={}, flags={}, out=tmp_path)
    assert called.by.endswith("pictures are 48 px wide and 32 high")
    made = json.loads(next(tmp_path.glob("*.json")).read_text())["made_by"]
    assert (made["resolution"], made["width"]) == (32, 48)
    shown = Image.open(max((cascade / "base" / "samples").glob("*.png")))
    assert shown.width >= 4 * 24


def test_an_upsampler_sees_a_small_picture_as_it_is(cascade: Path, photo: np.ndarray) -> None:
    draw: Any = load(cascade, device="cpu").draw
    assert draw.start_size(draw.config.sample.model_copy(update={"start": "upsampler1"})) == (16, 24)


@pytest.mark.parametrize(("model", "cell"), [("cascade", 2), ("tokens", 8)])
def test_what_is_kept_is_kept(model: str, cell: int, request: pytest.FixtureRequest, photo: np.ndarray) -> None:
    session = load(request.getfixturevalue(model), device="cpu")
    mask = np.zeros((32, 48), np.uint8)
    mask[9:12, 33:40] = 255
    ring = cell if model == "tokens" else 0
    anew = np.zeros((32, 48), bool)
    rows, columns = (slice(low // cell * cell - ring, -(-high // cell) * cell + ring) for low, high in ((9, 12), (33, 40)))
    anew[rows, columns] = True
    drawn = np.asarray(session.sample("disc 1", image=photo, mask=mask)[0])
    assert np.array_equal(drawn[~anew], photo[~anew])
    assert (drawn[anew] != photo[anew]).mean() > 0.5


def test_outpainting_keeps_proportions(photo: np.ndarray) -> None:
    framed, redraw = shrunk(photo, {"left": 0.5})
    kept = ~redraw[0].numpy()
    assert np.array_equal(np.argwhere(kept).min(0), [8, 24])  # in the middle of the right half
    assert np.array_equal(np.argwhere(kept).max(0), [23, 47])
    assert np.array_equal(framed[8:24, 24:], np.asarray(Image.fromarray(photo).resize((24, 16), Image.Resampling.BICUBIC)))


def test_it_is_judged_at_its_size(cascade: Path) -> None:
    evaluation, _ = evaluate_run(cascade, n=3, sets=["evaluate.fit_steps=2", "evaluate.resamples=2"], device="cpu")
    assert evaluation.report["n"] == 3
    assert evaluation.report["loss"]["loss"] > 0
    assert evaluation.sheet is not None


def test_tokens_make_a_grid_of_the_same_proportions(tokens: Path, photo: np.ndarray, tmp_path: Path) -> None:
    session = load(tokens, device="cpu")
    assert session.sample("disc 1")[0].size == (48, 32)
    assert session.encode(photo).shape == (1, 4, 6)
    assert session.reconstruct(photo)[0].size == (24, 16)
    caches = {json.loads(path.read_text())["resolution"]: path for path in (tokens / "cache").glob("*/manifest.json")}
    assert {size: json.loads(path.read_text())["grid"] for size, path in caches.items()} == {16: [4, 6], 32: [8, 12]}
    card = (export_run(tokens, tmp_path / "export") / "README.md").read_text()
    assert "16 x 24 pixels" in card
    assert "24 tokens a picture (4 x 6)" in card
    again: Session = load(tmp_path / "export", device="cpu")
    assert np.array_equal(np.asarray(again.sample("disc 1")[0]), np.asarray(session.sample("disc 1")[0]))


@pytest.mark.parametrize(
    ("recipe", "sets", "told"),
    [
        ("muse", ["data.width=42"], "data.width 42 cannot be divided by the tokenizer's stride 4; use 40 or 44"),
        ("muse", ["data.width=20", "superres={resolution: 52}"], "superres.resolution 52 would be 32.50 pixels wide"),
        ("muse", ["data.width=24", "superres={resolution: 40}"], "30 pixels wide, which cannot be divided by the tokenizer's"),
        ("phenaki", ["data.width=48"], "clips are square; leave width out"),
    ],
)
def test_what_does_not_fit_names_the_side(recipe: str, sets: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        pipeline.resolve(recipe, preset="tiny", sets=sets)
    assert told in str(error.value)
