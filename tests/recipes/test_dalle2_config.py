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
from tessera.recipes.dalle2.config import Dalle2Config, tiny
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
        (["superres.crop=48"], "superres.crop 48 is larger than superres.resolution 32"),
        (["superres.crop=18"], "superres.crop 18 cannot be divided by 4"),
        (["superres.crop=16", "superres.model={kind: dit}"], "a dit draws the size alone that it learned from"),
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
