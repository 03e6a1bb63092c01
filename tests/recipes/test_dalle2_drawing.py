"""Pictures from text, from a picture, over a part of one, and by an upsampler alone; and which stage is needed for each."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import pipeline
from tessera.config import TarEmbeddingsConfig, UserError
from tessera.config.loading import Layer
from tessera.contracts import Chunk, Context
from tessera.data.embedding_files import FileEmbeddings
from tessera.data.synth.shapes import write_shapes
from tessera.evals.run import evaluate_run
from tessera.generators.diffusion.losses import DiffusionLossConfig, DiffusionLosses
from tessera.generators.diffusion.processes import build_process
from tessera.generators.diffusion.sample import DiffusionSampler
from tessera.recipes.dalle2 import previews
from tessera.recipes.dalle2.drawing import Painter
from tessera.recipes.dalle2.embeddings import Sphere, between
from tessera.recipes.dalle2.nets import read_upsampler, upsampler_nets
from tessera.sampling.request import make_request
from tessera.sampling.serve import draw_to_files, in_pixels
from tessera.sampling.session import Session, load
from tests.cli.conftest import tessera
from tests.processes import made_once, workshop

__all__ = ["tessera", "workshop"]

SETS = (
    "engine.device=cpu",
    "engine.validate_every_steps=3",
    "engine.preview_every_steps=3",
    "data.resolution=16",
    "data.validation_fraction=0.2",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "embedder={batch_size: 8, loss: {group: 8}, model: {width: 8, widths: [8, 16]}}",
    "prior={batch_size: 8, model: {width: 16, depth: 1, heads: 2}}",
    "base={batch_size: 4, model: {widths: [16, 16], blocks: [1, 1], head_width: 8}}",
    "upsampler1={batch_size: 4, model: {widths: [16, 16], blocks: [1, 1], head_width: 8, efficient: false}}",
    "sample={steps: 3, guidance: 3, embedding_guidance: 1, upsampler: {steps: 2}, chunk: 3, resample_times: 2}",
    "sample.prior={steps: 2, guidance: 1, candidates: 2}",
)
RATES = [f"{stage}.optim={{lr: 1.0e-2, warmup_steps: 0}}" for stage in ("embedder", "prior", "base", "upsampler1")]


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


def last_of(folder: Path, pattern: str = "step-*") -> Path:
    return max(folder.glob(pattern))


def preview_of(run: Path) -> dict[str, Any]:
    """The facts beside the last preview of the decoder."""
    facts: dict[str, Any] = json.loads(last_of(run / "base" / "samples", "*.json").read_text())
    return facts


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


@pytest.mark.slow  # a minute of compiling
def test_compiled_layers_draw_the_same(run: Path) -> None:
    session, options = load(run, device="cpu"), {"steps": 2}
    (plain,) = session.sample("a red circle", seed=3, options=options)
    painter = session.draw
    assert isinstance(painter, Painter)
    nets = {name: nets["generator"] for name, nets in painter.stages.items() if "generator" in nets}
    assert not any(compiled_in(net) for net in nets.values())
    (compiled,) = session.sample("a red circle", seed=3, options={**options, "compile": True})
    assert all(compiled_in(net) for net in nets.values()), "prior, base and upsampler"
    np.testing.assert_allclose(np.asarray(compiled).astype(float), np.asarray(plain).astype(float), atol=1)


def compiled_in(net: torch.nn.Module) -> int:
    """How many of its modules are compiled, the whole not counted."""
    return sum(module._compiled_call_impl is not None for module in net.modules() if module is not net)


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


def test_every_stage_starts_from_noise_of_its_own(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, prepare = [], DiffusionSampler.prepare

    def watched(*words: Any, **options: Any) -> Any:
        setup, state = prepare(*words, **options)
        starts.append((setup.seeds, state.base.flatten(1)))
        return setup, state

    monkeypatch.setattr(DiffusionSampler, "prepare", watched)
    session.sample("a red circle", seed=4)
    assert len(starts) == 4, "two candidates of the prior, base and the upsampler"
    for (seeds, one), (others, two) in itertools.combinations(starts, 2):
        assert not torch.isin(seeds, others).any()
        shared = min(one.shape[1], two.shape[1])
        assert torch.isclose(one[:, :shared], two[:, :shared]).float().mean() < 0.01


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


def slerp(a: Any, b: Any, t: float) -> Any:
    """Shoemake 1985, in NumPy."""
    angle = np.arccos(np.clip(a @ b, -1, 1))
    return a if angle < 1e-9 else (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


def test_between_two_embeddings_lies_their_great_circle() -> None:
    rng = np.random.default_rng(0)
    one, other = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in rng.normal(size=(2, 7, 5)))
    other[1] = one[1]
    other[2] = one[2] + 1e-5 * other[2]
    other[2] /= np.linalg.norm(other[2])
    shares = np.array([0.3, 0.5, 0.5, 0.5, 0.9, 0.0, 1.0])
    tensors = [torch.from_numpy(part).float() for part in (one, other, shares)]
    found = between(*tensors)
    wanted = np.stack([slerp(a, b, t) for a, b, t in zip(one, other, shares, strict=True)])
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)
    assert torch.equal(found[1], tensors[0][1])
    assert torch.equal(found[5], tensors[0][5])
    assert torch.equal(found[6], tensors[1][6])


def test_between_opposite_embeddings_half_a_circle_lies() -> None:
    one = torch.nn.functional.normalize(torch.tensor([[0.6, 0.0, 0.8, 0.1]] * 5), dim=1)
    found = between(one, -one, torch.linspace(0, 1, 5))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5))
    torch.testing.assert_close((found * one).sum(1), torch.cos(torch.linspace(0, torch.pi, 5)), atol=1e-6, rtol=0)
    assert torch.equal(found[[0, 4]], torch.stack([one[0], -one[4]]))


def test_on_the_way_between_two_pictures_the_noise_stays(session: Session, photo: Image.Image) -> None:
    other = Image.new("RGB", photo.size, "red")
    way = arrays(session.sample("a red circle", n=5, seed=3, image=photo, towards=other))  # in two chunks
    for end, picture in ((0, photo), (4, other)):
        (varied,) = arrays(session.sample("a red circle", seed=3, image=picture))
        assert np.array_equal(way[end], varied)
    assert len({frame.tobytes() for frame in way}) == 5
    middle = arrays(session.sample("a red circle", n=2, seed=3, image=photo, towards=other, at=0.5))
    assert np.array_equal(middle[0], way[2])
    assert not np.array_equal(*middle), "at one place the seeds differ"


def test_the_json_of_a_picture_on_the_way_draws_it_again(run: Path, photo: Image.Image, tmp_path: Path) -> None:
    for name, picture in (("a", photo), ("b", photo.rotate(90))):
        picture.save(tmp_path / f"{name}.png")
    named = {"n": 4, "seed": 2, "image": tmp_path / "a.png", "towards": tmp_path / "b.png"}
    drawn = draw_to_files(run, [""], named=named, flags={}, out=tmp_path / "way")
    assert [(sample.seed, sample.at) for sample in drawn.samples] == [(2, k / 3) for k in range(4)]
    facts = [json.loads(sample.path.with_suffix(".json").read_text()) for sample in drawn.samples]
    assert [(each["seed"], each["at"], each["towards"]) for each in facts] == [(2, k / 3, "../b.png") for k in range(4)]
    again = draw_to_files(run, [], request_file=tmp_path / "way" / "0-2.json", named={}, flags={}, out=tmp_path / "again")
    assert again.samples[0].path.read_bytes() == drawn.samples[2].path.read_bytes()


def test_each_line_of_a_way_names_its_place(tessera: Callable[..., Any], run: Path, photo: Image.Image, tmp_path: Path) -> None:
    photo.save(tmp_path / "a.png")
    pair = ["--image", "a.png", "--towards", "a.png"]
    ended = tessera("sample", run, "x", *pair, "-n", 3, "--out", "way")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[:3] == [f"way/0-{k}.png  seed 0  at {k / 2:g}  x" for k in range(3)]
    ended = tessera("sample", run, "x", *pair, "--out", "one")
    assert (ended.code, "tessera: one sample is no way from image to towards; ask for 2 or more (-n 8)" in ended.err) == (2, True)
    assert not (tmp_path / "one").exists()


def test_what_is_kept_is_kept(session: Session, photo: Image.Image) -> None:
    mask = np.zeros((32, 32), np.uint8)
    mask[10:20, 4:13] = 255
    (drawn,) = arrays(session.sample("a red circle", image=photo, mask=mask))
    redrawn = np.kron(mask.reshape(16, 2, 16, 2).max((1, 3)), np.ones((2, 2), np.uint8)) > 0  # whole pixels of the decoder
    assert np.array_equal(drawn[~redrawn], np.asarray(photo)[~redrawn])
    assert (drawn[redrawn] != np.asarray(photo)[redrawn]).mean() > 0.5


def test_an_upsampler_alone_enlarges_a_picture(run: Path, photo: Image.Image) -> None:
    session, start = load(run, device="cpu"), {"start": "upsampler1"}
    small = photo.resize((16, 16))
    (drawn,) = arrays(session.sample("", image=small, options=start))
    assert drawn.shape == (32, 32, 3)
    for stage in ("embedder", "prior", "base"):
        del session.nets[stage]  # type: ignore[attr-defined]
    assert np.array_equal(drawn, arrays(session.sample("whatever", image=small, options=start))[0])
    assert in_pixels(session) == "32 px"
    (other,) = arrays(session.sample("", image=photo.rotate(90).resize((16, 16)), options=start))
    assert not np.array_equal(drawn, other)


def test_an_upsampler_sees_a_small_picture_as_it_is(session: Session, photo: Image.Image) -> None:
    request = make_request(session.config.sample, [""], image=photo.resize((16, 16)))
    start = session.start_of(replace(request, options=request.options.model_copy(update={"start": "upsampler1"})))
    assert start is not None
    assert np.array_equal(((start[0][0] + 1) * 127.5).round().permute(1, 2, 0).numpy(), np.asarray(photo.resize((16, 16))))


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda session, photo: session.sample("", options={"start": "upsampler1"}), "enlarges a picture; give one"),
        (lambda session, photo: session.sample("", options={"start": "upsampler2"}, image=photo), "can start at prior, up"),
        (
            lambda session, photo: session.sample("", options={"start": "upsampler1"}, image=photo, outpaint={"left": 0.5}),
            "leave mask and outpaint out",
        ),
        (
            lambda session, photo: session.sample("", options={"start": "upsampler1", "steps": 7}, image=photo),
            "sample.steps=7 is not for upsampler1, which draws here without prior and base; set sample.upsampler.steps, or leave",
        ),
        (
            lambda session, photo: session.sample("", options={"start": "upsampler1", "prior": {"steps": 7}}, image=photo),
            "sample.prior is not for upsampler1, .* base; leave it out",
        ),
        (lambda session, photo: session.sample("", options={"upsampler": {"resample_times": 2}}), "would change nothing: base"),
        (lambda session, photo: session.encode(photo), "has no trained tokenizer"),
        (
            lambda session, photo: session.sample("", 2, options={"start": "upsampler1"}, image=photo, towards=photo),
            "leave towards out",
        ),
        (lambda session, photo: session.sample("", 2, towards=photo), "towards is given without an image"),
        (lambda session, photo: session.sample("", image=photo, towards=photo), "one sample is no way"),
        (lambda session, photo: session.sample("", image=photo, at=0.5), "a place between two pictures; give both"),
        (lambda session, photo: session.sample("", image=photo, towards=photo, at=1.5), "at is 1.5; expected a number from 0"),
        (lambda session, photo: session.sample("", 2, image=photo, towards=photo, mask=photo), "and mask for a part of one"),
    ],
)
def test_what_cannot_be_drawn_is_told(
    ask: Callable[[Session, Image.Image], object], told: str, session: Session, photo: Image.Image
) -> None:
    with pytest.raises(UserError, match=told):
        ask(session, photo)


def given(**options: Any) -> Layer:
    return Layer.of({"sample": options}, "the test")


@pytest.mark.parametrize("pulled", ["prior", "upsampler"])
def test_a_negative_prompt_asks_for_guidance_of_any_stage(session: Session, pulled: str) -> None:
    make_request(session.config.sample, ["a"], negative="b", changes=[given(guidance=1.0, **{pulled: {"guidance": 3.0}})])
    with pytest.raises(UserError, match="guidance 1 is none"):
        make_request(session.config.sample, ["a"], negative="b", changes=[given(guidance=1.0)])


def test_a_negative_prompt_and_guidance_change_what_is_drawn(session: Session) -> None:
    plain, negative, guided = (
        arrays(session.sample("a red circle", **more))[0]  # type: ignore[arg-type]
        for more in ({}, {"negative": "a blue square"}, {"options": {"guidance": 1, "embedding_guidance": 4}})
    )
    assert not np.array_equal(plain, negative)
    assert not np.array_equal(plain, guided)


def test_guidance_of_upsamplers_that_are_told_nothing(session: Session, photo: Image.Image) -> None:
    for image in (None, photo):
        with pytest.raises(UserError, match="no upsampler that draws here is told it; leave it at 1"):
            session.sample("a red circle", image=image, options={"upsampler": {"guidance": 2}})


def test_an_upsampler_that_is_told_captions(run: Path, photo: Image.Image, tmp_path: Path) -> None:
    sets = [*SETS, *RATES, "upsampler1.text=true", "upsampler1.loss.text_dropout_prob=0.5"]
    config = pipeline.resolve("dalle2", preset="tiny", data=str(run.parent / "data"), steps=4, sets=sets, stage="upsampler1")
    pipeline.train(config, run=tmp_path / "run", stage="upsampler1")
    session = load(tmp_path / "run", device="cpu")
    assert set(session.nets["upsampler1"]) == {"generator", "text"}

    def drawn(prompt: str, guidance: float = 1, negative: str | None = None) -> torch.Tensor:
        changes = {"guidance": guidance, "steps": 1, "threshold": "none"}  # one step: what is drawn is the guess itself
        upsampler = session.config.sample.upsampler.model_copy(update=changes)
        options = session.config.sample.model_copy(update={"start": "upsampler1", "upsampler": upsampler})
        small = torch.from_numpy(np.array(photo.resize((16, 16)))).permute(2, 0, 1)[None] / 127.5 - 1
        chunk = Chunk([prompt], torch.tensor([1]), options, None if negative is None else [negative], small)
        assert isinstance(session.draw, Painter)
        with torch.no_grad():
            return session.draw.pixels(chunk)

    red, blue, silent = (drawn(prompt) for prompt in ("a red circle", "a blue square", ""))
    assert (red - blue).abs().max() > 1e-3
    assert (red - silent).abs().max() > 1e-3
    assert torch.allclose(drawn("a red circle", 3), silent + 3 * (red - silent), atol=1e-5)
    assert torch.allclose(drawn("a red circle", 3, "a blue square"), blue + 3 * (red - blue), atol=1e-5)


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_captions_are_taken_from_upsamplers_as_often_as_the_loss_says(prob: float, session: Session) -> None:
    painter = session.draw
    assert isinstance(painter, Painter)
    stage = session.config.upsampler1.model_copy(update={"text": True})
    config = session.config.model_copy(update={"upsampler1": stage})
    torch.manual_seed(0)
    nets = upsampler_nets(config, stage)
    with torch.no_grad():
        for parameter in nets["generator"].parameters():  # what starts as 0 would hide it
            parameter.normal_(std=0.1)
    loss = DiffusionLossConfig(text_dropout_prob=prob)
    losses = DiffusionLosses(loss, build_process(stage.process), partial(read_upsampler, stage, (16, 16)))
    batch = painter.judged(torch.rand(4, 3, 32, 32) * 2 - 1, ("a red circle",) * 4, 0)
    other = replace(batch, text=painter.prompts.read(["a blue square"] * 4))
    told, misled = (losses.turn(nets, some, Context(3, 0, batch.positions)).total.item() for some in (batch, other))
    assert (told == misled) == (prob == 1)


def test_previews_of_the_decoder_show_the_way_through_the_prior(
    run: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter, captions = session.draw, ("a red circle", "a blue square", "")
    assert isinstance(painter, Painter)
    shown: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(previews, "contact_sheet", lambda rows, captions: shown.update(rows) or b"")
    batch = painter.judged(torch.rand(3, 3, 16, 16) * 2 - 1, captions, 0)
    alone = {**session.nets["base"], **session.nets["embedder"]}
    nets = {**alone, "prior": torch.nn.ModuleDict(session.nets["prior"])}
    chunk = Chunk(captions, torch.arange(3), session.config.sample)
    assert chunk.options.guidance == 3
    with torch.no_grad():
        facts = previews.preview_base(session.config, nets, nets, batch, Context(0, 0, batch.positions)).facts
        imagined = painter.imagine(chunk, chunk.options.prior)
        wanted = painter.decode(chunk, imagined, chunk.options)
        assert list(shown) == ["real", "drawn", "prior"]
        assert torch.equal(shown["prior"], wanted)
        assert torch.equal(shown["drawn"], painter.decode(chunk, batch.embeddings, chunk.options))  # type: ignore[arg-type]
        assert facts["cosine"] == pytest.approx((imagined * batch.embeddings).sum(1).tolist(), abs=1e-3)
        shown.clear()
        previews.preview_base(session.config, alone, alone, batch, Context(0, 0, batch.positions))
    assert list(shown) == ["real", "drawn"]


def test_embeddings_of_files_cannot_be_made_of_a_picture(session: Session) -> None:
    painter = session.draw
    assert isinstance(painter, Painter)
    config = session.config.model_copy(update={"embeddings": TarEmbeddingsConfig()})
    with pytest.raises(UserError, match="a picture cannot be embedded"):
        Sphere(config, {}, painter.prompts).pictures(torch.zeros(1, 3, 16, 16))


def test_a_stage_trains_alone_and_takes_the_pair_of_another_run(run: Path, photo: Image.Image, tmp_path: Path) -> None:
    data = str(run.parent / "data")
    config = pipeline.resolve("dalle2", preset="tiny", data=data, steps=2, sets=[*SETS, *RATES], stage="upsampler1")
    pipeline.train(config, run=tmp_path / "upsampler", stage="upsampler1")
    alone = load(tmp_path / "upsampler", device="cpu")
    assert list(alone.nets) == ["upsampler1"]
    photo.save(tmp_path / "photo.png")
    (drawn,) = draw_to_files(alone.path, [""], named={"image": str(tmp_path / "photo.png")}, flags={}).samples
    (same,) = alone.sample("", image=photo, options={"start": "upsampler1"})
    assert np.array_equal(np.asarray(Image.open(drawn.path)), np.asarray(same)), "the only way to draw need not be named"
    assert json.loads(drawn.path.with_suffix(".json").read_text())["made_by"]["resolution"] == same.size[0] == 32
    with pytest.raises(UserError, match="base is not trained, and upsampler1 alone enlarges a picture; give one: --image"):
        alone.sample("a red circle")
    with pytest.raises(UserError, match=r"nothing that can be judged is trained yet \(trained: upsampler1\)"):
        evaluate_run(tmp_path / "upsampler", n=2, device="cpu")
    with pytest.raises(UserError, match="stage base needs the embedder"):
        pipeline.train(config, run=tmp_path / "decoder", stage="base")
    other = [item for item in SETS if not item.startswith(("embedder=", "text="))]
    taken = pipeline.resolve("dalle2", preset="tiny", data=data, steps=2, sets=[*other, f"embeddings.path={run / 'embedder'}"])
    pipeline.train(taken, run=tmp_path / "decoder", stage="base")
    found = load(tmp_path / "decoder", device="cpu")
    without, after = (preview_of(place) for place in (tmp_path / "decoder", run))
    assert "cosine" not in without, "there is no prior"
    assert "cosine" in after
    assert set(json.loads((last_of(run / "base" / "checkpoints") / "manifest.json").read_text())["needs"]) == {"embedder"}
    assert found.hashes["embedder"] == load(run, device="cpu").hashes["embedder"]
    assert (found.config.embedder.model.width, found.config.text.length) == (8, 32)  # as it was trained
    judged = evaluate_run(tmp_path / "decoder", n=2, device="cpu")[0].report
    assert "reconstruction" in judged["oracle"]["rows"]
    assert "samples" not in judged["oracle"]["rows"], "without a prior there is nothing from captions"
    with pytest.raises(UserError, match="stage of another kind; expected RUN/embedder"):
        pipeline.train(pipeline.resolve("dalle2", preset="tiny", data=data, sets=[f"embeddings.path={run / 'base'}"]))


def test_a_run_whose_calls_start_at_an_upsampler_is_judged_from_captions(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("start: prior", "start: upsampler1"))
    assert load(tmp_path / "run", device="cpu").config.sample.start == "upsampler1"
    told = evaluate_run(tmp_path / "run", n=2, device="cpu")[0].report
    assert set(told["oracle"]["rows"]) >= {"samples", "reconstruction"}
    assert told["subject"]["sample"]["start"] == "prior"
    with pytest.raises(UserError, match=r"sample\.start=upsampler1: what is judged is drawn from captions"):
        evaluate_run(run, n=2, device="cpu", sets=["sample.start=upsampler1"])


def test_listed_embeddings_train_without_a_pair(run: Path, tmp_path: Path) -> None:
    (cache,) = (run / "cache").glob("embeddings-*")
    shutil.copytree(cache, tmp_path / "embeddings")
    sets = [*SETS, *RATES, f"embeddings={{kind: list, path: {tmp_path / 'embeddings'}}}"]
    config = pipeline.resolve("dalle2", preset="tiny", data=str(run.parent / "data"), steps=2, sets=sets)
    pipeline.train(config, run=tmp_path / "run")
    session = load(tmp_path / "run", device="cpu")
    assert list(session.nets) == ["prior", "base", "upsampler1"]
    assert session.sample("a red circle")[0].size == (32, 32)
