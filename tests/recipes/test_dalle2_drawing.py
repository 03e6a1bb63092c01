"""Pictures from text, from a picture, over a part of one, and by an upsampler alone; and which stage is needed for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import pipeline
from tessera.config import TarEmbeddingsConfig, UserError
from tessera.contracts import Chunk
from tessera.data.embedding_files import FileEmbeddings
from tessera.data.synth.shapes import write_shapes
from tessera.evals.run import evaluate_run
from tessera.recipes.dalle2.drawing import Painter
from tessera.recipes.dalle2.embeddings import Sphere
from tessera.sampling.request import make_request
from tessera.sampling.session import Session, load
from tests.processes import made_once, workshop

__all__ = ["workshop"]

SETS = (
    "engine.device=cpu",
    "engine.validate_every_steps=3",
    "engine.preview_every_steps=3",
    "data.resolution=16",
    "data.validation_fraction=0.2",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "pair={batch_size: 8, loss: {group: 8}, model: {width: 8, widths: [8, 16]}}",
    "prior={batch_size: 8, model: {width: 16, depth: 1, heads: 2}}",
    "base={batch_size: 4, model: {widths: [16, 16], blocks: [1, 1], head_width: 8}}",
    "superres={batch_size: 4, model: {widths: [16, 16], blocks: [1, 1], head_width: 8, efficient: false}}",
    "sample={steps: 3, prior: {steps: 2}, superres: {steps: 2}, chunk: 3, resample_times: 2}",
)
RATES = [f"{stage}.optim={{lr: 1.0e-2, warmup_steps: 0}}" for stage in ("pair", "prior", "base", "superres")]


@pytest.fixture(scope="module")
def run(workshop: Path) -> Path:
    """All stages, a few steps each."""
    home = workshop / "dalle2"

    def make() -> None:
        write_shapes(home / "data", 30, 0, image_size=32)
        config = pipeline.resolve("dalle2", preset="tiny", data=str(home / "data"), steps=4, sets=[*SETS, *RATES])
        pipeline.train(config, run=home / "run")

    made_once(home, make)
    return home / "run"


@pytest.fixture(scope="module")
def session(run: Path) -> Session:
    return load(run, device="cpu")


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def arrays(drawn: list[Any]) -> list[Any]:
    return [np.asarray(picture) for picture in drawn]


def test_a_prompt_gives_pictures_of_the_last_size_each_by_its_own_seed(session: Session) -> None:
    one, two, three, four = arrays(session.sample("a red circle", n=4, seed=5))
    assert one.shape == (32, 32, 3)
    assert not np.array_equal(one, two)
    (again,) = arrays(session.sample("a red circle", seed=8))  # alone, in a chunk that is padded
    assert np.array_equal(again, four)
    assert not np.array_equal(three, four)
    (other,) = arrays(session.sample("a blue square", seed=5))
    assert not np.array_equal(one, other)


def test_candidates_are_compared_with_the_prompt(session: Session) -> None:
    painter = session.draw
    assert isinstance(painter, Painter)
    told = Chunk(["a red circle"] * 3, torch.arange(3), None)
    options = session.config.sample.prior
    first, best = (painter.imagine(told, options.model_copy(update={"candidates": count})) for count in (1, 8))
    wanted = painter.sphere.captions(told.captions)
    assert torch.allclose(best.norm(dim=1), torch.ones(3), atol=1e-5)
    assert ((best * wanted).sum(1) >= (first * wanted).sum(1) - 1e-6).all()
    assert not torch.equal(best, first)


def check_views(run: Path, data: Path) -> None:
    """A variation starts from the vector that training has of that picture, nearer to it than to any other's."""
    (cache,) = (run / "cache").glob("embeddings-*")
    known, session = FileEmbeddings.listed(cache), load(run, device="cpu")
    painter = session.draw
    assert isinstance(painter, Painter)
    embed, used = painter.embeddings, list[torch.Tensor]()
    painter.embeddings = lambda *told: used.append(embed(*told)) or used[-1]  # type: ignore[func-returns-value,method-assign]
    paths = sorted((data / "train").glob("*.png"))
    vectors = np.stack([known.read(path.stem) for path in paths])
    for number, path in enumerate(paths[:6]):
        session.sample("", image=path)
        far = np.linalg.norm(vectors - used[-1][0].numpy(), axis=1)
        assert far.argmin() == number
        assert far[number] < np.partition(far, 1)[1] / 5, "but for pixels that were scaled twice"


def test_a_variation_sees_what_training_saw(run: Path) -> None:
    check_views(run, run.parent / "data")


def test_a_variation_asks_the_picture_and_not_the_prior(run: Path, photo: Image.Image) -> None:
    session = load(run, device="cpu")
    varied = arrays(session.sample("", n=2, image=photo))
    assert not np.array_equal(*varied)
    other = arrays(session.sample("", n=2, image=photo.rotate(180)))
    assert not np.array_equal(varied[0], other[0])
    del session.nets["prior"]  # type: ignore[attr-defined]
    assert np.array_equal(varied, arrays(session.sample("", n=2, image=photo)))
    with pytest.raises(UserError, match="stage prior is not trained yet"):
        session.sample("a red circle")


def test_what_is_kept_is_kept(session: Session, photo: Image.Image) -> None:
    mask = np.zeros((32, 32), np.uint8)
    mask[10:20, 4:13] = 255
    (drawn,) = arrays(session.sample("a red circle", image=photo, mask=mask))
    redrawn = np.kron(mask.reshape(16, 2, 16, 2).max((1, 3)), np.ones((2, 2), np.uint8)) > 0  # whole pixels of the decoder
    assert np.array_equal(drawn[~redrawn], np.asarray(photo)[~redrawn])
    assert (drawn[redrawn] != np.asarray(photo)[redrawn]).mean() > 0.5


def test_an_upsampler_alone_enlarges_a_picture(run: Path, photo: Image.Image) -> None:
    session, start = load(run, device="cpu"), {"start": "superres"}
    small = photo.resize((16, 16))
    (drawn,) = arrays(session.sample("", image=small, options=start))
    assert drawn.shape == (32, 32, 3)
    for stage in ("pair", "prior", "base"):
        del session.nets[stage]  # type: ignore[attr-defined]
    assert np.array_equal(drawn, arrays(session.sample("whatever", image=small, options=start))[0])
    (other,) = arrays(session.sample("", image=photo.rotate(90).resize((16, 16)), options=start))
    assert not np.array_equal(drawn, other)


def test_an_upsampler_sees_a_small_picture_as_it_is(session: Session, photo: Image.Image) -> None:
    request = make_request(session.config.sample, [""], image=photo.resize((16, 16)))
    start = session.start_of(replace(request, options=request.options.model_copy(update={"start": "superres"})))
    assert start is not None
    assert np.array_equal(((start[0][0] + 1) * 127.5).round().permute(1, 2, 0).numpy(), np.asarray(photo.resize((16, 16))))


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda session, photo: session.sample("", options={"start": "superres"}), "enlarges a picture; give one"),
        (lambda session, photo: session.sample("", options={"start": "superres2"}, image=photo), "can start at prior, superres"),
        (
            lambda session, photo: session.sample("", options={"start": "superres"}, image=photo, outpaint={"left": 0.5}),
            "leave mask and outpaint out",
        ),
        (lambda session, photo: session.encode(photo), "has no trained tokenizer"),
    ],
)
def test_what_cannot_be_drawn_is_told(
    ask: Callable[[Session, Image.Image], object], told: str, session: Session, photo: Image.Image
) -> None:
    with pytest.raises(UserError, match=told):
        ask(session, photo)


def test_a_negative_prompt_and_guidance_change_what_is_drawn(session: Session) -> None:
    plain, negative, guided = (
        arrays(session.sample("a red circle", **more))[0]  # type: ignore[arg-type]
        for more in ({}, {"negative": "a blue square"}, {"options": {"guidance": 1, "embedding_guidance": 4}})
    )
    assert not np.array_equal(plain, negative)
    assert not np.array_equal(plain, guided)


def test_embeddings_of_files_cannot_be_made_of_a_picture(session: Session) -> None:
    painter = session.draw
    assert isinstance(painter, Painter)
    config = session.config.model_copy(update={"embeddings": TarEmbeddingsConfig()})
    with pytest.raises(UserError, match="a picture cannot be embedded"):
        Sphere(config, {}, painter.prompts).pictures(torch.zeros(1, 3, 16, 16))


def test_it_is_judged_with_the_decoder_and_the_prior_apart(run: Path) -> None:
    evaluation, _ = evaluate_run(run, n=4, sets=["evaluate.fit_steps=2", "evaluate.resamples=2"], device="cpu")
    assert set(evaluation.report["oracle"]["rows"]) == {"chance", "nearest", "real", "reconstruction", "samples"}
    assert "the decoder loses" in evaluation.report["health"]["sentence"]
    assert evaluation.report["loss"]["loss"] > 0


def test_a_stage_trains_alone_and_takes_the_pair_of_another_run(run: Path, tmp_path: Path) -> None:
    data = str(run.parent / "data")
    config = pipeline.resolve("dalle2", preset="tiny", data=data, steps=2, sets=[*SETS, *RATES], stage="superres")
    pipeline.train(config, run=tmp_path / "upsampler", stage="superres")
    assert list(load(tmp_path / "upsampler", device="cpu").nets) == ["superres"]
    with pytest.raises(UserError, match="stage base needs the pair"):
        pipeline.train(config, run=tmp_path / "decoder", stage="base")
    other = [item for item in SETS if not item.startswith(("pair=", "text="))]
    taken = pipeline.resolve("dalle2", preset="tiny", data=data, steps=2, sets=[*other, f"embeddings.path={run / 'pair'}"])
    pipeline.train(taken, run=tmp_path / "decoder", stage="base")
    found = load(tmp_path / "decoder", device="cpu")
    assert found.hashes["pair"] == load(run, device="cpu").hashes["pair"]
    assert (found.config.pair.model.width, found.config.text.length) == (8, 32)  # as it was trained
    with pytest.raises(UserError, match="stage of another kind; expected RUN/pair"):
        pipeline.train(pipeline.resolve("dalle2", preset="tiny", data=data, sets=[f"embeddings.path={run / 'base'}"]))


def test_listed_embeddings_train_without_a_pair(run: Path, tmp_path: Path) -> None:
    (cache,) = (run / "cache").glob("embeddings-*")
    shutil.copytree(cache, tmp_path / "embeddings")
    sets = [*SETS, *RATES, f"embeddings={{kind: list, path: {tmp_path / 'embeddings'}}}"]
    config = pipeline.resolve("dalle2", preset="tiny", data=str(run.parent / "data"), steps=2, sets=sets)
    pipeline.train(config, run=tmp_path / "run")
    session = load(tmp_path / "run", device="cpu")
    assert list(session.nets) == ["prior", "base", "superres"]
    assert session.sample("a red circle")[0].size == (32, 32)
