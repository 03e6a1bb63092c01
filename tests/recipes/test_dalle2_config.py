"""What the recipe refuses before anything trains, and what it fills in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tessera import pipeline
from tessera.batches import PairBatch, TextStates
from tessera.config import Layer, UserError, build, dump_yaml
from tessera.contracts import Context, Train
from tessera.data.opening import open_source
from tessera.data.synth.shapes import write_shapes
from tessera.recipes.dalle2.config import Dalle2Config
from tessera.recipes.dalle2.idle import refuse_idle
from tessera.recipes.dalle2.nets import read_prior, sampler_of
from tessera.recipes.dalle2.presets import PRESETS, tiny
from tessera.recipes.dalle2.stages import settle, steps
from tessera.rehearsal import dry_run
from tessera.sampling.places import read_run
from tessera.sampling.request import make_request
from tessera.sampling.session import load
from tessera.tokenizers.pair.model import PictureTower


def resolved(*sets: str) -> Dalle2Config:
    config = pipeline.resolve("dalle2", preset="tiny", sets=sets)
    assert isinstance(config, Dalle2Config)
    return config


def names(config: Dalle2Config) -> list[str]:
    return [train.name for train in steps(config)]


def step(config: Dalle2Config, name: str) -> Train:
    (found,) = (train for train in steps(config) if train.name == name)
    return found


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["embeddings={kind: magic}"], "embeddings.kind"),
        (["embeddings={kind: clip}"], "embeddings.path"),
        (["embeddings={kind: shards}"], "embeddings.path"),
        (["text={kind: none}"], "embeddings.kind=pair learns from captions, and text.kind=none has none"),
        (["data.resolution=17"], "data.resolution 17 cannot be divided by 2, as base.model asks; use 16 or 18"),
        (["upsampler1.resolution=16"], "upsampler1.resolution 16 must be larger than data.resolution 16; use 32"),
        (["upsampler2={resolution: 32}"], "upsampler2.resolution 32 must be larger than upsampler1.resolution 32; use 64"),
        (["upsampler1=null", "upsampler2={resolution: 64}"], "there is no upsampler1"),
        (
            ["upsampler2={resolution: 64}", "upsampler4={resolution: 96}"],
            "upsampler4 enlarges what upsampler3 draws, and there is no",
        ),
        (["upsampler5={resolution: 64}"], "there can be 4 upsamplers: upsampler1, upsampler2, upsampler3, upsampler4; rename it"),
        (["upsampler1.text=true", "text={kind: none}", "embeddings={kind: tars}"], "upsampler1.text=true tells captions, and"),
        (["sample.start=upsampler5"], "sample.start"),
        (["upsampler1.crop=48"], "upsampler1.crop 48 is larger than upsampler1.resolution 32"),
        (["upsampler1.crop=18"], "upsampler1.crop 18 cannot be divided by 4"),
        (["upsampler1.crop=16", "upsampler1.model={kind: dit}"], "a dit draws the size alone that it learned from"),
        (["data.width=21"], "data.width 21 cannot be divided by 2, as base.model asks; use 20 or 22"),
        (
            ["data.width=24", "upsampler1.resolution=25"],
            "upsampler1.resolution 25 would be 37.50 pixels wide, as pictures of 16 x",
        ),
        (
            ["data.resolution=20", "data.width=18", "upsampler1.resolution=60"],
            "upsampler1.resolution 60 is 54 pixels wide, which cannot be divided by 4, as upsampler1.model asks; use 40 or 80",
        ),
        (["data.resolution=24", "data.width=16", "upsampler1={resolution: 48, crop: 36}"], "upsampler1.crop 36 is larger than "),
        (
            ["upsampler1.low={kind: blur, sigmas: [0.4, 5.1]}"],
            "upsampler1.low reaches 16 pixels to each side, and upsampler1 sees pictures of 16 x 16; use sigmas and "
            "sample_sigma of 5.0 at most",
        ),
        (
            ["data.width=24", "upsampler2={resolution: 64, low: {kind: blur, sample_sigma: 11}}"],
            "upsampler2.low reaches 33 pixels to each side, and upsampler2 sees pictures of 32 x 48",
        ),
        (["base.latent={}"], "base.latent.path"),
        (["prior.process={kind: ddpm, learned_variance: true}"], "learned_variance is for pictures"),
        (["sample.guidance_levels=[3, -3]"], "the lower one comes first"),
    ],
)
def test_what_cannot_be_is_refused(sets: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        resolved(*sets)
    assert told in str(error.value)


NO_TEXT = ["text={kind: none}", "embeddings={kind: tars}"]


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (
            ["data.views=4"],
            "data.views 4 would change nothing: pictures are read as they are, not as tokens; leave it out (it is 8)",
        ),
        (["prior.loss.embedding_dropout_prob=0.3"], "prior.loss.embedding_dropout_prob 0.3 would change nothing"),
        (["prior.loss.bound_weight=1"], "an embedding has no learned variance"),
        (["upsampler1.loss.embedding_dropout_prob=0"], "upsamplers are told no embedding"),
        (["upsampler1.loss.text_dropout_prob=0"], "upsampler1.text=false tells it none; leave it out (it is 0.2)"),
        (["base.loss.bound_weight=1"], "base.loss.bound_weight 1.0 would change nothing: base.process has no learned variance"),
        (
            ["upsampler1.process={kind: ddpm}", "upsampler1.loss.bound_weight=0"],
            "upsampler1.loss.bound_weight 0.0 would change nothing",
        ),
        (
            ["base.process={kind: ddpm, learned_variance: true}"],
            "base.process.learned_variance is for the sampler ancestral, and sample.sampler is dpm; set it to ancestral",
        ),
        (
            ["upsampler1.process={kind: ddpm, learned_variance: true}", "sample.sampler=ancestral"],
            "for the sampler ancestral, and sample.upsampler.sampler is dpm",
        ),
        (["sample.prior.resample_times=2"], "sample.prior.resample_times 2 would change nothing: base alone"),
        (["sample.upsampler.resample_times=2"], "sample.upsampler.resample_times 2 would change nothing"),
        (["sample.percentile=0.9"], "percentile 0.9 would change nothing: it is for the threshold dynamic"),
        (["sample.upsampler.percentile=0.9"], "sample.upsampler.percentile 0.9 would change nothing"),
        (["sample.upsampler.guidance=3"], "sample.upsampler.guidance 3.0 would change nothing: it pulls towards"),
        (["upsampler1=null", "sample.upsampler.guidance=3"], "sample.upsampler.guidance 3.0 would change nothing"),
        (["sample.start=upsampler3"], "sample.start=upsampler3: drawing can start at prior, upsampler1, which are the stages of"),
        ([*NO_TEXT, "base.loss.text_dropout_prob=0"], "base.loss.text_dropout_prob 0.0 would change nothing: text.kind=none"),
        ([*NO_TEXT, "prior.loss.text_dropout_prob=0"], "prior.loss.text_dropout_prob 0.0 would change nothing"),
        ([*NO_TEXT, "sample.guidance=5"], "sample.guidance 5.0 would change nothing: text.kind=none has no captions to pull to"),
        ([*NO_TEXT, "sample.prior.guidance=5"], "sample.prior.guidance 5.0 would change nothing"),
        (["embeddings={kind: tars}", "sample.prior.candidates=3"], "sample.prior.candidates 3 would change nothing: embed"),
        (
            ["upsampler1.model.embedding_tokens=9"],
            "upsampler1.model.embedding_tokens 9 would change nothing: upsamplers are told no",
        ),
        (["upsampler1.model.cross=[true, true]"], "upsampler1.text=false tells it none to look at; leave it out"),
        (
            ["sample={guidance: 1, embedding_guidance: 1, guidance_levels: [0, 2]}"],
            "neither sample.guidance nor sample.embedding_guidance pulls",
        ),
        (
            [*NO_TEXT, "sample={guidance: 3, embedding_guidance: 1, guidance_levels: [0, 2]}"],
            "sample.guidance_levels (0.0, 2.0) would change nothing: neither",
        ),
    ],
)
def test_what_would_do_nothing_is_refused_where_a_run_is_made(sets: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        pipeline.train(resolved(*sets), run=tmp_path / "run")
    assert told in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (
            ["sample.embedding_guidance=1", "base.loss.text_dropout_prob=0"],
            "text_dropout_prob=0 takes text away no more often than",
        ),
        (
            ["sample.guidance=3", "base.loss.embedding_dropout_prob=0.2"],
            "sample.guidance leans on what base guesses of an embedding without text",
        ),
        (
            ["sample={guidance: 3, embedding_guidance: 3}", "base.loss={text_dropout_prob: 0, embedding_dropout_prob: 0.1}"],
            "sample.embedding_guidance leans on what base guesses without embedding and text",
        ),
        (
            ["sample.embedding_guidance=3", "base.loss.embedding_dropout_prob=0"],
            "base.loss.text_dropout_prob=0.2 with base.loss.embedding_dropout_prob=0 never takes both away",
        ),
        ([*NO_TEXT, "sample.embedding_guidance=3", "base.loss.embedding_dropout_prob=0"], "never takes both away"),
        (
            ["sample.prior.guidance=2", "prior.loss.text_dropout_prob=0"],
            "sample.prior.guidance leans on what prior guesses without text, and prior.loss.text_dropout_prob=0 never takes it",
        ),
        (
            ["upsampler1={text: true, loss: {text_dropout_prob: 0}}", "sample.upsampler.guidance=2"],
            "sample.upsampler.guidance leans on what upsampler1 guesses without text",
        ),
        (["upsampler1.low.sample_level=50"], "upsampler1.low.sample_level=50 is nothing that upsampler1 is trained with: 0 to 8"),
        (["upsampler1.low={kind: blur, sample_sigma: 3}"], "is nothing that upsampler1 is trained with: 0.4 to 0.8 or 0"),
        (
            ["upsampler1.low={kind: blur, prob: 1}"],
            "sample_sigma=0 is nothing that upsampler1 is trained with: 0.4 to 0.8; choose",
        ),
        (
            ["upsampler1.low={kind: blur, prob: 0, sample_sigma: 0.5}"],
            "sample_sigma=0.5 is nothing that upsampler1 is trained with: 0; choose",
        ),
        (
            ["base={process: {kind: ddpm, learned_variance: true}, loss: {bound_weight: 0}}", "sample.sampler=ancestral"],
            "base.loss.bound_weight=0 teaches base no variance, which base.process.learned_variance asks of it; raise it",
        ),
    ],
)
def test_what_is_never_learned_is_not_leant_on(sets: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        refuse_idle(resolved(*sets))
    assert told in str(error.value)


@pytest.mark.parametrize(
    "sets",
    [
        ["base.loss.text_dropout_prob=0", "sample={guidance: 1, embedding_guidance: 1}"],
        ["base.loss={text_dropout_prob: 0.1, embedding_dropout_prob: 0.1}", "sample={guidance: 3, embedding_guidance: 3}"],
        [*NO_TEXT, "sample.embedding_guidance=3"],
        ["prior.loss.text_dropout_prob=0", "sample.prior.guidance=1"],
        ["upsampler1.low={kind: blur, sample_sigma: 0.5, prob: 1}"],
        ["upsampler1.low={levels: [4, 6], sample_level: 6}"],
        ["upsampler1.low={kind: blur, prob: 0}"],
        [*NO_TEXT, "sample={embedding_guidance: 3, guidance_levels: [0, 2]}"],
    ],
)
def test_what_is_learned_may_be_leant_on(sets: list[str]) -> None:
    refuse_idle(resolved(*sets))


@pytest.mark.parametrize(("side", "levels"), [(16, 5), (32, 6), (48, 6)])
def test_a_pair_has_no_more_levels_than_pictures_can_be_halved(side: int, levels: int) -> None:
    size, upsampler = f"data.resolution={side}", "upsampler1.resolution=96"
    config = resolved(size, upsampler, f"embedder.model.widths={[8] * levels}")
    tower = PictureTower(config.embedder.model, 3)
    assert tower(torch.zeros(1, 3, side, side)).shape == (1, config.embedder.model.width)
    with pytest.raises(UserError, match=f"widths has {levels + 1} levels, and pictures of .* name {levels} widths at most"):
        resolved(size, upsampler, f"embedder.model.widths={[8] * (levels + 1)}")


def test_a_rehearsal_refuses_what_training_would() -> None:
    with pytest.raises(UserError, match=r"data\.views 4 would change nothing"):
        dry_run(resolved("data.views=4"))


def test_values_of_presets_and_defaults_are_taken_where_they_do_nothing() -> None:
    for preset in PRESETS:
        for sets in ([], NO_TEXT, ["embeddings={kind: tars}"], ["upsampler1=null", "upsampler2=null"]):
            refuse_idle(pipeline.resolve("dalle2", preset=preset, sets=sets))


def test_latents_have_no_limits_of_pixels() -> None:
    for set_, told in (("threshold=dynamic", "sample.threshold dynamic"), ("percentile=0.9", "sample.percentile 0.9")):
        with pytest.raises(UserError, match=f"{told} would change nothing"):
            refuse_idle(resolved("base.latent={path: elsewhere/tokenizer}", f"sample.{set_}"))


OLD = (
    "base.process={kind: ddpm, learned_variance: true}", "upsampler1.loss.bound_weight=1", "sample.percentile=0.9",
    "sample.upsampler.resample_times=2", "data.views=4",
)  # fmt: skip


def test_a_run_that_is_there_opens_whatever_is_refused_since(tmp_path: Path) -> None:
    """Its config was valid once: dpm with a learned variance, and values that did nothing."""
    write_shapes(tmp_path / "data", 12, 0, image_size=32)
    small = ["engine.device=cpu", "upsampler1={batch_size: 2, steps: 1}", f"data.path={tmp_path / 'data'}"]
    run = pipeline.train(resolved(*small), run=tmp_path / "run", stage="upsampler1")
    with pytest.raises(UserError, match="would change nothing"):
        pipeline.train(resolved(*small, *OLD), run=tmp_path / "other")
    (run / "config.yaml").write_text(dump_yaml(resolved(*small, *OLD)))
    recipe, saved = read_run(run)
    old = build(recipe.config_type, [saved])
    assert (old.base.learned_variance, old.sample.sampler, old.sample.percentile) == (True, "dpm", 0.9)
    assert load(run, device="cpu").config.sample.upsampler.resample_times == 2
    pipeline.resume(run, sets=["upsampler1.steps=2", "sample.steps=5"], stage="upsampler1")
    again = load(run, device="cpu")
    assert (again.steps, again.config.sample.steps, again.config.upsampler1.loss.bound_weight) == ({"upsampler1": 2}, 5, 1)
    pipeline.resume(run, sets=["sample.sampler=ancestral", "sample.percentile=0.995"], stage="upsampler1")
    assert load(run, device="cpu").config.sample.sampler == "ancestral"


def test_a_call_names_what_it_changes_and_nothing_else() -> None:
    """A run's percentile stays where a call takes another threshold."""
    options = resolved("sample.threshold=dynamic", "sample.percentile=0.9").sample
    asked = make_request(options, ["a"], changes=[Layer.of({"sample": {"threshold": "static"}}, "--set")]).options
    assert (asked.threshold, asked.percentile) == ("static", 0.9)


def test_what_is_written_of_a_call_is_what_draws() -> None:
    config = resolved("sample.start=upsampler1")
    assert set(config.sample.model_dump()) == {"upsampler", "start", "chunk", "compile"}
    whole = config.model_dump(mode="json")["sample"]
    assert whole == {**resolved().sample.model_dump(mode="json"), "start": "upsampler1"}
    assert build(Dalle2Config, [Layer.of(config.model_dump(mode="json"), "a manifest")]) == config


def test_what_changes_something_is_taken() -> None:
    config = resolved(
        "upsampler1.text=true",
        "upsampler1.loss.text_dropout_prob=0",
        "base.loss.embedding_dropout_prob=0",
        "sample.embedding_guidance=1",
    )
    assert config.upsamplers["upsampler1"].loss.text_dropout_prob == config.base.loss.embedding_dropout_prob == 0
    learned = ["base.process={kind: ddpm, learned_variance: true}", "base.loss.bound_weight=1", "sample.sampler=ancestral"]
    other = resolved(*learned, "sample.threshold=dynamic", "sample.percentile=0.9")
    assert other.base.loss.bound_weight == 1
    for each in (config, other, resolved("upsampler1.text=true", "sample.upsampler.guidance=3")):
        refuse_idle(each)


def test_stages_follow_from_the_config() -> None:
    assert names(tiny()) == ["embedder", "prior", "base", "upsampler1"]
    assert names(resolved("upsampler1=null")) == ["embedder", "prior", "base"]
    assert names(resolved("upsampler2={resolution: 64}")) == ["embedder", "prior", "base", "upsampler1", "upsampler2"]
    assert names(resolved("embeddings={kind: list, path: e.npy}", "upsampler1=null")) == ["prior", "base"]
    assert step(tiny(), "base").needs == step(tiny(), "prior").needs == {"embedder": "embedder"}
    assert not step(tiny(), "upsampler1").needs
    assert not step(resolved("embeddings={kind: list, path: e.npy}"), "base").needs


def test_widths_follow_from_heights() -> None:
    config = resolved("data.width=24", "upsampler2={resolution: 64}")
    assert [config.data.at(resolution).size for resolution in (16, 32, 64)] == [(16, 24), (32, 48), (64, 96)]
    assert tiny().data.at(32) == tiny().data.model_copy(update={"resolution": 32})


def test_a_tokenizer_is_a_stage_of_another_run() -> None:
    config = resolved("base.latent={path: elsewhere/tokenizer}")
    assert names(config) == ["tokenizer", "embedder", "prior", "base", "upsampler1"]
    assert step(config, "tokenizer").origin == "elsewhere/tokenizer"
    assert step(config, "base").needs == {"embedder": "embedder", "tokenizer": "tokenizer"}
    with pytest.raises(UserError, match=r"base\.latent\.model is not known"):
        step(config, "base").serves()
    with pytest.raises(UserError, match=r"resolution 16 cannot be divided by 32, as base\.model over latents of 16 pixels asks"):
        resolved("base.latent={path: elsewhere/tokenizer, model: {widths: [8, 8, 8, 8, 8], blocks: [0, 0, 0, 0, 0]}}")


def test_a_cascade_of_four() -> None:
    more = [f"upsampler{number}={{resolution: {side}}}" for number, side in ((2, 48), (3, 64), (4, 96))]
    config = resolved(*more, "upsampler4.text=true", "sample.start=upsampler4")
    assert names(config) == ["embedder", "prior", "base", "upsampler1", "upsampler2", "upsampler3", "upsampler4"]
    assert [config.seen_by(name) for name in config.upsamplers] == [16, 32, 48, 64]
    assert set(step(config, "upsampler3").serves()) == {"generator"}
    assert set(step(config, "upsampler4").serves()) == {"generator", "text"}
    assert [step(config, name).captioned for name in ("upsampler3", "upsampler4")] == [False, True]


def test_the_width_of_listed_embeddings_is_filled_in(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", 12, 0, image_size=32)
    config = resolved(f"embeddings={{kind: list, path: {tmp_path / 'e.npy'}}}", f"data.path={tmp_path / 'data'}")
    source = open_source(tmp_path / "data", config.data)
    keys = [source.key(index) for index in range(len(source))]
    np.save(tmp_path / "e.npy", np.random.default_rng(0).normal(size=(len(keys), 24)).astype(np.float32))
    (tmp_path / "e.txt").write_text("\n".join(keys) + "\n")
    with pytest.raises(UserError, match="embedding_width is not known"):
        step(config, "base").serves()
    assert settle(config, source, ["base"]).embedding_width == 24
    with pytest.raises(UserError, match=r"embedding_width=9, .* and those of the data have 24"):
        settle(config.model_copy(update={"embedding_width": 9}), source, ["base"])
    with pytest.raises(UserError, match=r"embedding_width=9, .* and a pair has embedder\.model\.width"):
        settle(tiny().model_copy(update={"embedding_width": 9}), source, ["base"])
    assert settle(tiny(), source, ["base"]).embedding_width is None


def test_embeddings_in_tars_ask_for_tars(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", 12, 0, image_size=32)
    config = resolved("embeddings={kind: tars}", f"data.path={tmp_path / 'data'}")
    with pytest.raises(UserError, match=r"of kind tars belong to webdataset tars, and the data is ImageFolder; bring"):
        settle(config, open_source(tmp_path / "data", config.data), ["prior"])


def test_upsamplers_alone_ask_for_no_embeddings(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", 12, 0, image_size=32)
    config = resolved("embeddings={kind: list, path: nowhere.npy}", "engine.device=cpu", "upsampler1={batch_size: 2, steps: 1}")
    with pytest.raises(UserError, match=r"nowhere\.npy"):
        pipeline.train(config, data=tmp_path / "data", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    pipeline.train(config, data=tmp_path / "data", run=tmp_path / "run", stage="upsampler1")
    with pytest.raises(UserError, match=r"nowhere\.npy"):
        pipeline.resume(tmp_path / "run", stage="base")


def test_edm_knows_the_deviation_of_what_it_draws() -> None:
    config = resolved("prior.process.kind=edm", "base.process.kind=edm", "upsampler1.process.kind=edm")
    latent = resolved("base.process.kind=edm", "base.latent={path: elsewhere/tokenizer}")
    named = resolved("prior.process={kind: edm, data_std: 0.7}")
    stages = (config.prior, config.base, config.upsamplers["upsampler1"], latent.base, named.prior)
    assert [stage.build_process().data_std for stage in stages] == [1, 0.5, 0.5, 1, 0.7]
    nets = step(config, "prior").serves()
    assert sampler_of(nets["generator"], config.prior, config.sample.prior.complete).process.data_std == 1
    embeddings = read_prior({}, pairs(torch.randn(64, 8)), Context(0, 0, torch.arange(64))).clean
    assert embeddings.square().mean() == pytest.approx(1)


def pairs(embeddings: torch.Tensor) -> PairBatch:
    """Of no pictures and no captions."""
    num = len(embeddings)
    positions, names = torch.arange(num), ("",) * num
    return PairBatch(None, embeddings, TextStates.none(num, 4), positions >= 0, positions, names, names)


def test_guidance_reaches_the_sampler() -> None:
    options = resolved("sample.guidance=4", "sample.embedding_guidance=2", "sample.prior.guidance=1.5", "sample.steps=7").sample
    assert (options.complete.guidance.text, options.complete.guidance.embedding, options.complete.steps) == (4, 2, 7)
    assert (options.prior.complete.guidance.text, options.prior.complete.threshold) == (1.5, "none")
