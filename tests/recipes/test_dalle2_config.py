"""What the recipe refuses before anything trains, and what it fills in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera import pipeline
from tessera.config import UserError
from tessera.contracts import Train
from tessera.data.opening import open_source
from tessera.data.synth.shapes import write_shapes
from tessera.recipes.dalle2.config import Dalle2Config
from tessera.recipes.dalle2.presets import tiny
from tessera.recipes.dalle2.stages import settle, steps


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
        (["superres.resolution=16"], "superres.resolution 16 must be larger than data.resolution 16; use 32"),
        (["superres2={resolution: 32}"], "superres2.resolution 32 must be larger than superres.resolution 32; use 64"),
        (["superres=null", "superres2={resolution: 64}"], "there is no superres"),
        (
            ["superres2={resolution: 64}", "superres4={resolution: 96}"],
            "superres4 enlarges what superres3 draws, and there is no",
        ),
        (["superres5={resolution: 64}"], "there can be 4 upsamplers: superres, superres2, superres3, superres4; rename it"),
        (["superres.text=true", "text={kind: none}", "embeddings={kind: tars}"], "superres.text=true tells captions, and"),
        (["sample.start=superres5"], "sample.start"),
        (["superres.crop=48"], "superres.crop 48 is larger than superres.resolution 32"),
        (["superres.crop=18"], "superres.crop 18 cannot be divided by 4"),
        (["superres.crop=16", "superres.model={kind: dit}"], "a dit draws the size alone that it learned from"),
        (["data.width=21"], "data.width 21 cannot be divided by 2, as base.model asks; use 20 or 22"),
        (
            ["data.width=24", "superres.resolution=25"],
            "superres.resolution 25 would be 37.50 pixels wide, as pictures of 16 x",
        ),
        (
            ["data.resolution=20", "data.width=18", "superres.resolution=60"],
            "superres.resolution 60 is 54 pixels wide, which cannot be divided by 4, as superres.model asks; use 40 or 80",
        ),
        (["data.resolution=24", "data.width=16", "superres={resolution: 48, crop: 36}"], "superres.crop 36 is larger than "),
        (["base.latent={}"], "base.latent.path"),
        (["prior.process={kind: ddpm, learned_variance: true}"], "learned_variance is for pictures"),
        (["sample.guidance_levels=[3, -3]"], "the lower one comes first"),
    ],
)
def test_what_cannot_be_is_refused(sets: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        resolved(*sets)
    assert told in str(error.value)


def test_stages_follow_from_the_config() -> None:
    assert names(tiny()) == ["pair", "prior", "base", "superres"]
    assert names(resolved("superres=null")) == ["pair", "prior", "base"]
    assert names(resolved("superres2={resolution: 64}")) == ["pair", "prior", "base", "superres", "superres2"]
    assert names(resolved("embeddings={kind: list, path: e.npy}", "superres=null")) == ["prior", "base"]
    assert step(tiny(), "base").needs == step(tiny(), "prior").needs == {"embedder": "pair"}
    assert not step(tiny(), "superres").needs
    assert not step(resolved("embeddings={kind: list, path: e.npy}"), "base").needs


def test_widths_follow_from_heights() -> None:
    config = resolved("data.width=24", "superres2={resolution: 64}")
    assert [config.data.at(resolution).size for resolution in (16, 32, 64)] == [(16, 24), (32, 48), (64, 96)]
    assert tiny().data.at(32) == tiny().data.model_copy(update={"resolution": 32})


def test_a_tokenizer_is_a_stage_of_another_run() -> None:
    config = resolved("base.latent={path: elsewhere/tokenizer}")
    assert names(config) == ["tokenizer", "pair", "prior", "base", "superres"]
    assert step(config, "tokenizer").origin == "elsewhere/tokenizer"
    assert step(config, "base").needs == {"embedder": "pair", "tokenizer": "tokenizer"}
    with pytest.raises(UserError, match=r"base\.latent\.model is not known"):
        step(config, "base").serves()
    with pytest.raises(UserError, match=r"resolution 16 cannot be divided by 32, as base\.model over latents of 16 pixels asks"):
        resolved("base.latent={path: elsewhere/tokenizer, model: {widths: [8, 8, 8, 8, 8], blocks: [0, 0, 0, 0, 0]}}")


def test_a_cascade_of_four() -> None:
    more = [f"superres{number}={{resolution: {side}}}" for number, side in ((2, 48), (3, 64), (4, 96))]
    config = resolved(*more, "superres4.text=true", "sample.start=superres4")
    assert names(config) == ["pair", "prior", "base", "superres", "superres2", "superres3", "superres4"]
    assert [config.seen_by(name) for name in config.upsamplers] == [16, 32, 48, 64]
    assert set(step(config, "superres3").serves()) == {"generator"}
    assert set(step(config, "superres4").serves()) == {"generator", "text"}
    assert [step(config, name).captioned for name in ("superres3", "superres4")] == [False, True]


def test_the_width_of_listed_embeddings_is_filled_in(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", 12, 0, image_size=32)
    config = resolved(f"embeddings={{kind: list, path: {tmp_path / 'e.npy'}}}", f"data.path={tmp_path / 'data'}")
    source = open_source(tmp_path / "data", config.data)
    keys = [source.key(index) for index in range(len(source))]
    np.save(tmp_path / "e.npy", np.random.default_rng(0).normal(size=(len(keys), 24)).astype(np.float32))
    (tmp_path / "e.txt").write_text("\n".join(keys) + "\n")
    with pytest.raises(UserError, match="embedding_width is not known"):
        step(config, "base").serves()
    assert settle(config, source).embedding_width == 24
    with pytest.raises(UserError, match="embedding_width=9, and those of the data have 24"):
        settle(config.model_copy(update={"embedding_width": 9}), source)
    with pytest.raises(UserError, match=r"embedding_width=9, and a pair has pair\.model\.width"):
        settle(tiny().model_copy(update={"embedding_width": 9}), source)
    assert settle(tiny(), source).embedding_width is None


def test_embeddings_in_tars_ask_for_tars(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", 12, 0, image_size=32)
    config = resolved("embeddings={kind: tars}", f"data.path={tmp_path / 'data'}")
    with pytest.raises(UserError, match=r"of kind tars belong to webdataset tars, and the data is ImageFolder; bring"):
        settle(config, open_source(tmp_path / "data", config.data))


def test_guidance_reaches_the_sampler() -> None:
    options = resolved("sample.guidance=4", "sample.embedding_guidance=2", "sample.prior.guidance=1.5", "sample.steps=7").sample
    assert (options.complete.guidance.text, options.complete.guidance.embedding, options.complete.steps) == (4, 2, 7)
    assert (options.prior.complete.guidance.text, options.prior.complete.threshold) == (1.5, "none")
