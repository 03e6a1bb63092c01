"""A decoder that draws the latent of another run's tokenizer: its scale, there and back, resuming, exports, inpainting."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tessera import pipeline
from tessera.batches import from_uint8
from tessera.config import UserError
from tessera.contracts import Context
from tessera.data.loader import prepare
from tessera.evals.run import evaluate_run
from tessera.generators.diffusion.losses import DiffusionLosses
from tessera.generators.diffusion.processes import EdmConfig, build_process
from tessera.recipes.dalle2.drawing import Painter
from tessera.recipes.dalle2.latent import SCALE, LatentScale, from_canvas, keep_scale, scale_of, to_canvas
from tessera.recipes.dalle2.nets import read_base
from tessera.rehearsal import dry_run
from tessera.sampling.package import export_run
from tessera.sampling.session import Session, load
from tessera.staging import open_source
from tests.processes import made_once
from tests.small import generated, pictures, small_config, workshop

__all__ = ["generated", "pictures", "workshop"]

RATE = "optim: {lr: 1.0e-2, warmup_steps: 0, schedule: constant}"
SETS = (
    "engine.device=cpu",
    "engine.save_every_steps=2",
    "engine.preview_every_steps=4",
    "data.resolution=16",
    "data.validation_fraction=0",
    "text={kind: bytes, length: 24, width: 16, depth: 1, heads: 2}",
    f"embedder={{batch_size: 8, steps: 2, loss: {{group: 8}}, model: {{width: 8, widths: [8, 16]}}, {RATE}}}",
    f"prior={{batch_size: 8, steps: 2, model: {{width: 16, depth: 1, heads: 2}}, {RATE}}}",
    "upsampler1=null",
    "sample={steps: 3, prior: {steps: 2}, chunk: 3, resample_times: 2}",
)
UNET = "{widths: [16, 16], blocks: [1, 1], head_width: 8}"
DIT = "{kind: dit, patch: 2, width: 16, depth: 1, heads: 2}"


def config_of(tokenizer: Path, data: Path, steps: int, *more: str, model: str = UNET) -> Any:
    base = f"base={{batch_size: 5, steps: {steps}, model: {model}, latent: {{path: {tokenizer}}}, {RATE}}}"
    own = {item.partition("=")[0] for item in more}
    kept = [item for item in SETS if item.partition("=")[0] not in own]
    return pipeline.resolve("dalle2", preset="tiny", data=str(data), sets=[*kept, base, *more])


@pytest.fixture(scope="module")
def run(workshop: Path, generated: Path, pictures: Path) -> Path:
    """Six updates, in one go; five pictures each of thirty."""
    path = workshop / "latent"
    made_once(path, lambda: pipeline.train(config_of(generated / "tokenizer", pictures, 6), run=path))
    return path


@pytest.fixture(scope="module")
def session(run: Path) -> Session:
    return load(run, device="cpu")


def painter_of(session: Session) -> Painter:
    assert isinstance(session.draw, Painter)
    return session.draw


def training_pictures(session: Session) -> torch.Tensor:
    source = open_source(session.config)
    items = [prepare(source, session.config.data, index, 0) for index in range(len(source))]
    return from_uint8(torch.from_numpy(np.stack([item.image for item in items])).permute(0, 3, 1, 2))


def test_latents_have_mean_0_and_variance_1_over_the_training_pictures(session: Session, generated: Path) -> None:
    tokenizer: Any = load(generated, device="cpu").tokenizer
    images = training_pictures(session)
    with torch.no_grad():
        latents = tokenizer.encode_latent(images).double().numpy()
    assert latents.shape == (30, 4, 8, 8)
    scale = scale_of(painter_of(session).base_nets)
    assert scale is not None
    np.testing.assert_allclose(scale.mean, latents.mean((0, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(scale.std, latents.std((0, 2, 3)), rtol=1e-5)
    assert (np.abs(latents.std((0, 2, 3)) - 1) > 0.05).all()  # it was another before
    scaled = to_canvas(painter_of(session).base_nets, images)
    np.testing.assert_allclose(scaled.double().var((0, 2, 3), correction=0), np.ones(4), rtol=1e-4)


def test_there_and_back_is_the_tokenizer_s_own_way(session: Session, generated: Path) -> None:
    tokenizer: Any = load(generated, device="cpu").tokenizer
    images, nets = training_pictures(session)[:4], painter_of(session).base_nets
    with torch.no_grad():
        own = tokenizer.decode_latent(tokenizer.encode_latent(images))
    torch.testing.assert_close(from_canvas(nets, to_canvas(nets, images)), own, rtol=0, atol=1e-5)


def test_a_channel_that_never_changes_is_not_blown_up() -> None:
    net = torch.nn.Module()
    net.add_module(SCALE, LatentScale(2))
    keep_scale({"generator": net}, {"count": torch.tensor(4.0), "sum": torch.tensor([8.0, 0]), "square": torch.tensor([16.0, 1])})
    scale = scale_of({"generator": net})
    assert scale is not None
    assert (scale.mean.tolist(), scale.std.tolist()) == ([2, 0], [1, 0.5])


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "base" / "checkpoints" / f"step-{step:06d}"
    return {f"{file.name}/{key}": value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.mark.parametrize("model", [UNET, DIT])
def test_resuming_equals_never_stopping_and_any_step_has_the_scale(
    model: str, generated: Path, pictures: Path, tmp_path: Path
) -> None:
    for name, steps in (("whole", 4), ("parts", 2)):
        config = config_of(generated / "tokenizer", pictures, steps, model=model)
        pipeline.train(config, run=tmp_path / name)
    pipeline.resume(tmp_path / "parts", sets=["base.steps=4"])
    whole, parts = weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())
    scales = [value for key, value in whole.items() if key.endswith("latent_scale.std")]
    assert len(scales) == 2  # raw and averaged
    assert torch.equal(*scales)
    assert torch.equal(scales[0], weights(tmp_path / "parts", 2)["ema.safetensors/generator/latent_scale.std"])
    assert load(tmp_path / "parts", device="cpu").sample("a red circle")[0].size == (16, 16)


def test_an_export_draws_the_same_bits_without_the_run_of_the_tokenizer(generated: Path, pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(generated, tmp_path / "muse")
    pipeline.train(config_of(tmp_path / "muse" / "tokenizer", pictures, 2), run=tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "export")
    drawn = [np.asarray(picture) for picture in load(tmp_path / "run", device="cpu").sample("a red circle", n=2)]
    shutil.rmtree(tmp_path / "muse")
    shutil.rmtree(tmp_path / "run")
    session = load(tmp_path / "export", device="cpu")
    assert list(session.nets) == ["tokenizer", "embedder", "prior", "base"]
    assert np.array_equal(drawn, [np.asarray(picture) for picture in session.sample("a red circle", n=2)])
    assert not np.array_equal(*drawn)
    taken = config_of(tmp_path / "export" / "tokenizer", pictures, 2)  # of an export of this recipe
    pipeline.train(taken, run=tmp_path / "again")
    assert load(tmp_path / "again", device="cpu").hashes["tokenizer"] == session.hashes["tokenizer"]
    tokens = small_config(pictures, base__needs__tokenizer=tmp_path / "export" / "tokenizer", base__steps=1)
    pipeline.train(tokens, run=tmp_path / "tokens")  # nor does muse mind where it comes from
    assert load(tmp_path / "tokens", device="cpu").hashes["tokenizer"] == session.hashes["tokenizer"]


@pytest.mark.parametrize("exported", [False, True])
def test_a_base_from_elsewhere_brings_its_tokenizer(exported: bool, run: Path, pictures: Path, tmp_path: Path) -> None:
    home = export_run(run, tmp_path / "export") if exported else run
    taken = [f"embeddings.path={home / 'embedder'}", f"prior.path={home / 'prior'}", f"base.path={home / 'base'}"]
    kept = [item for item in SETS if not item.startswith(("embedder=", "prior=", "data.resolution="))]
    config = pipeline.resolve("dalle2", preset="tiny", data=str(pictures), sets=[*kept, *taken, "data.resolution=32"])
    pipeline.train(config, run=tmp_path / "run")
    first, second = (load(path, device="cpu") for path in (run, tmp_path / "run"))
    assert second.config.base.latent.model == first.config.base.latent.model
    drawn, again = (np.asarray(session.sample("a red circle")[0]) for session in (first, second))
    assert np.array_equal(drawn, again)


def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def test_what_is_kept_is_kept_and_what_is_drawn_over_does_not_shine_through(session: Session) -> None:
    mask = np.zeros((16, 16), np.uint8)
    mask[5:8, 2:4] = 255
    anew = np.zeros((16, 16), bool)
    anew[2:10, 0:6] = True  # cells of two pixels: 2 to 3 and 1, and one more on each side
    (drawn,) = (np.asarray(picture) for picture in session.sample("a red circle", image=photo(), mask=mask))
    assert np.array_equal(drawn[~anew], photo()[~anew])
    assert (drawn[anew] != photo()[anew]).mean() > 0.5
    other = photo()
    other[mask > 0] = 255 - other[mask > 0]
    (again,) = (np.asarray(picture) for picture in session.sample("a red circle", image=other, mask=mask))
    assert np.array_equal(drawn, again)
    other[12, 12] = 255 - other[12, 12]  # but what is known is heard of
    (third,) = (np.asarray(picture) for picture in session.sample("a red circle", image=other, mask=mask))
    assert not np.array_equal(third[anew], drawn[anew])


def test_pictures_are_varied_judged_and_looked_at_through_tokens(run: Path, session: Session) -> None:
    first, second = (np.asarray(picture) for picture in session.sample("", n=2, image=Image.fromarray(photo())))
    assert not np.array_equal(first, second)
    assert session.encode(photo()).shape == (1, 8, 8)
    sets = ["evaluate.fit_steps=2", "evaluate.resamples=2", "data.validation_fraction=0.2"]
    evaluation, _ = evaluate_run(run, n=4, sets=sets, device="cpu")
    assert {"reconstruction", "samples"} <= set(evaluation.report["oracle"]["rows"])
    assert evaluation.report["loss"]["loss"] > 0
    assert list((run / "base" / "samples").glob("*.png"))


def test_guesses_of_latents_are_not_cut_off_as_pixels_are(session: Session) -> None:
    assert session.config.sample.threshold == "static"
    assert session.config.drawn_by(session.config.sample).threshold == "none"


@pytest.mark.parametrize(
    ("stage", "more", "told"),
    [
        ("tokenizer", ["data.channels=1"], "was trained on pictures of 3 channels, data.channels is 1"),
        ("base", [], "stage of another kind; expected RUN/tokenizer"),
        (
            "tokenizer",
            ["data.resolution=18"],
            "resolution 18 cannot be divided by 4, as base.model over latents of 2 pixels",
        ),
        ("nothing", [], "is no trained stage; expected RUN/STAGE"),
    ],
)
def test_tokenizers_that_do_not_fit_are_refused(
    stage: str, more: list[str], told: str, generated: Path, pictures: Path, tmp_path: Path
) -> None:
    config = config_of(generated / stage, pictures, 2, *more)
    with pytest.raises(UserError, match=told):
        pipeline.train(config, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_needs_no_trained_tokenizer_but_its_architecture(generated: Path, pictures: Path) -> None:
    estimates = dry_run(config_of(generated / "tokenizer", pictures, 2))
    assert [estimate.stage for estimate in estimates] == ["embedder", "prior", "base"]


def test_the_loss_of_latents_is_in_the_units_of_training(session: Session) -> None:
    """EDM's hang on the deviation of what is drawn, which of latents is 1."""
    base = session.config.base.model_copy(update={"process": EdmConfig()})
    painter = Painter(session.config.model_copy(update={"base": base}), session.nets, torch.device("cpu"))
    pixels, captions = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8), tuple("abcd")
    batch = painter.judged(painter.real(pixels), captions, 0)
    losses = DiffusionLosses(base.loss, build_process(EdmConfig(data_std=1.0)), partial(read_base, painter.config))
    with torch.no_grad():
        wanted = losses.measure(painter.base_nets, batch, Context(0, 0, batch.positions))
    assert painter.loss(pixels, captions)["loss"] == pytest.approx(float(wanted.total / wanted.weight), rel=1e-6)
