"""The stages in the order in which they train, and what each reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tessera.batches import PairBatch
from tessera.config import UserError
from tessera.contracts import Context, Loss, LossFunction, Nets, Stage, Train
from tessera.data.loader import Feed
from tessera.data.pairs import PairLoader
from tessera.data.sources import Source, captions_of
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.denoisers import CHECKPOINTED, COMPILED, RECORDED, SHARDED
from tessera.generators.diffusion.losses import Read
from tessera.generators.diffusion.prior import Prior, cosine_scores, other_rows
from tessera.generators.diffusion.stage import DiffusionStageConfig
from tessera.generators.diffusion.stage import build_stage as build_diffusion
from tessera.nn.attention import EncoderBlock
from tessera.recipes.captions import settle_captions, training_text
from tessera.recipes.dalle2.config import Dalle2Config, LatentConfig, TrainedPairConfig, UpsamplerConfig, guided
from tessera.recipes.dalle2.embeddings import training_clip, training_embeddings, width_elsewhere
from tessera.recipes.dalle2.latent import survey_latents
from tessera.recipes.dalle2.nets import (
    base_nets,
    prior_nets,
    read_base,
    read_prior,
    read_upsampler,
    recalls,
    sampler_of,
    told_prior,
    upsampler_nets,
)
from tessera.recipes.dalle2.previews import preview_base, preview_pair, preview_prior, preview_upsampler
from tessera.text.bytes import ByteEncoder
from tessera.text.encoders import NoTextConfig, PrecomputedTextConfig, reader
from tessera.tokenizers.image.model import ImageTokenizer
from tessera.tokenizers.pair.model import Embedder
from tessera.tokenizers.pair.stage import build_embedder
from tessera.tokenizers.pair.stage import build_stage as build_pair


def steps(config: Dalle2Config) -> Sequence[Train]:
    """A tokenizer, where its latent is drawn; the pair, where embeddings come from none else; the prior, the decoder, and the
    upsamplers that the config has."""
    upsamplers = [upsampler_step(config, name, stage) for name, stage in config.upsamplers.items()]
    tokenizer = [] if config.base.latent is None else [tokenizer_step(config, config.base.latent)]
    return [*tokenizer, *([pair_step(config)] if config.has_pair else []), prior_step(config), base_step(config), *upsamplers]


def settle(config: Dalle2Config, source: Source, stages: Collection[str]) -> Dalle2Config:
    """What only the data knows of how captions are read, and of how wide embeddings are."""
    text = settle_captions(config.text, source)
    try:
        width = width_elsewhere(config, source)
    except UserError:
        if config.embedding_width is None and {"prior", "base"} & set(stages):
            raise
        width = config.embedding_width  # perhaps of a run that goes on; where upsamplers alone train nobody asks
    if config.embedding_width not in (None, width):
        there = "and a pair has embedder.model.width" if width is None else f"and those of the data have {width}"
        raise UserError(
            f"embedding_width={config.embedding_width}, which is named or brought by a stage from elsewhere, {there}; bring the "
            f"embeddings that are meant, or leave it out"
        )
    same = text == config.text and width == config.embedding_width
    return config if same else config.model_copy(update={"text": text, "embedding_width": width})


def learns_from_captions(config: Dalle2Config) -> bool:
    """Whether captions are asked for."""
    return not isinstance(config.text, (NoTextConfig, PrecomputedTextConfig))


# --- pair


def pair_step(config: Dalle2Config) -> Train:
    """Pictures and captions to embeddings."""

    def make() -> Embedder:
        return build_embedder(config.embedder.model, config.text, config.data.channels)

    def feed(nets: Nets, feed: Feed) -> PairLoader:
        if feed.cut.micro_batch_size == 1:
            raise UserError(
                "engine.micro_batch_size=1: the pair tells samples of a micro-batch apart; use 2 or more while it trains "
                "(--stage embedder), and 1 when you resume"
            )
        refuse_alike(feed.whole or feed.source)
        return PairLoader(feed, training_text(config.text, feed))

    kind = config.embeddings
    return Train(
        name="embedder",
        batch_size=config.embedder.batch_size,
        steps=config.embedder.steps,
        build=lambda: replace(build_pair(config.embedder, make()), preview=preview_pair),
        serves=lambda: {"embedder": make()},
        feed=feed,
        captioned=learns_from_captions(config),
        origin=kind.path if isinstance(kind, TrainedPairConfig) else None,
        origin_key="embeddings.path",
    )


def refuse_alike(source: Source) -> None:
    """A pair has nothing to learn where no two captions differ."""
    found = set[str]()
    for index in range(len(source)):
        found.update(captions_of(source, index))
        if len(found) > 1:
            return
    told = f"all captions are {found.pop()!r}" if found else "there is no caption"
    raise UserError(
        f"{told}, and the pair learns to tell captions apart; bring captions that differ, or embeddings of yours: embeddings.kind"
    )


# --- tokenizer


def tokenizer_step(config: Dalle2Config, latent: LatentConfig) -> Train:
    """Pixels to latents and back; a muse run has trained it."""

    def serves() -> Nets:
        if latent.model is None:
            raise UserError("base.latent.model is not known; training fills it in from base.latent.path")
        return {"tokenizer": ImageTokenizer(latent.model, config.data.channels)}

    def trained(*_: object) -> Any:
        raise UserError(f"stage tokenizer is not trained here, but taken from {latent.path}")

    return Train(
        name="tokenizer",
        batch_size=1,
        steps=1,
        build=trained,
        serves=serves,
        feed=trained,
        origin=latent.path,
        origin_key="base.latent.path",
    )


# --- prior


def prior_step(config: Dalle2Config) -> Train:
    """Captions to embeddings."""

    def feed(nets: Nets, feed: Feed) -> PairLoader:
        text, clip = training_text(config.text, feed), training_clip(config, feed)
        embeddings, embed = training_embeddings(config, nets, feed, clip), None if clip is None else clip.captions
        return PairLoader(feed, text, embeddings, pictures=False, embed_captions=embed)

    def build_prior() -> Stage:
        stage = build_diffusion(
            config.prior, prior_nets(config), read_prior, recalls=recalls(config.prior), compiled=(EncoderBlock,),
            recorded=(Prior, ByteEncoder), sharded=(EncoderBlock,), checkpointed=(EncoderBlock,),
        )  # fmt: skip
        assert stage.measure is not None
        return replace(stage, preview=partial(preview_prior, config), measure=partial(measure_prior, config, stage.measure))

    return Train(
        name="prior",
        batch_size=config.prior.batch_size,
        steps=config.prior.steps,
        build=build_prior,
        serves=lambda: prior_nets(config),
        feed=feed,
        needs=needs_pair(config),
        captioned=learns_from_captions(config),
        origin=config.prior.path,
        origin_key="prior.path",
    )


def needs_pair(config: Dalle2Config) -> dict[str, str]:
    """What makes embeddings, where that is trained."""
    return {"embedder": "embedder"} if config.has_pair else {}


def measure_prior(config: Dalle2Config, measure: LossFunction, nets: Nets, batch: PairBatch, context: Context) -> Loss:
    """The loss, and how near embeddings that are drawn of captions come to those of their pictures, and of others'."""
    loss = measure(nets, batch, context)
    assert batch.embeddings is not None
    sampler = sampler_of(nets["generator"], config.prior, guided(config.sample.prior))
    text, seeds = told_prior(nets, batch.text), context.positions
    others = other_rows(batch.captions).to(seeds.device)
    shape = batch.embeddings.shape[1:]
    drawn, misled = (sampler(shape, Condition(text=told), seeds) for told in (text, text.picked(others)))
    pair = nets.get("embedder")
    captions = pair.captions(batch.text) if isinstance(pair, Embedder) else batch.wanted
    scores = cosine_scores(drawn, misled, batch.embeddings, captions, batch.valid)
    return replace(loss, parts={**loss.parts, **scores})


# --- decoder and upsamplers


def base_step(config: Dalle2Config) -> Train:
    """Embeddings and captions to small pictures."""

    def feed(nets: Nets, feed: Feed) -> PairLoader:
        text, clip = training_text(config.text, feed), training_clip(config, feed)
        return PairLoader(feed, text, training_embeddings(config, nets, feed, clip))

    nets, preview, latent = partial(base_nets, config), partial(preview_base, config), config.base.latent is not None
    survey = survey_latents() if latent else None
    return Train(
        name="base",
        batch_size=config.base.batch_size,
        steps=config.base.steps,
        build=lambda: replace(picture_stage(config.base, nets(), partial(read_base, config)), preview=preview, survey=survey),
        serves=nets,
        feed=feed,
        needs={**needs_pair(config), **({"tokenizer": "tokenizer"} if latent else {})},
        shows={"prior": "prior"},
        captioned=learns_from_captions(config),
        origin=config.base.path,
        origin_key="base.path",
    )


def upsampler_step(config: Dalle2Config, name: str, stage: UpsamplerConfig) -> Train:
    """Small pictures to larger ones; it asks nothing of other stages."""

    def feed(nets: Nets, feed: Feed) -> PairLoader:
        read_text = training_text(config.text, feed) if stage.text else reader(NoTextConfig())
        return PairLoader(feed, read_text, resolution=stage.resolution)

    nets, small = partial(upsampler_nets, config, stage), config.data.at(config.seen_by(name)).size
    read, preview = partial(read_upsampler, stage, small), partial(preview_upsampler, config, stage, small)
    return Train(
        name=name,
        batch_size=stage.batch_size,
        steps=stage.steps,
        build=lambda: replace(picture_stage(stage, nets(), read), preview=preview),
        serves=nets,
        feed=feed,
        captioned=stage.text and learns_from_captions(config),
        origin=stage.path,
        origin_key=f"{name}.path",
    )


def picture_stage(stage: DiffusionStageConfig, nets: dict[str, nn.Module], read: Read) -> Stage:
    """How a denoiser of pictures is trained."""
    return build_diffusion(
        stage, nets, read, recalls=recalls(stage), compiled=(*COMPILED, EncoderBlock), recorded=(*RECORDED, ByteEncoder),
        sharded=SHARDED, checkpointed=CHECKPOINTED,
    )  # fmt: skip
