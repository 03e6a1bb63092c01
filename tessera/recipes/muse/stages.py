"""The stages in the order in which they train, and what each reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tessera.batches import ImageBatch, TokenBatch
from tessera.config import Layer, build, layer_of
from tessera.contracts import Context, Nets, Preview, Stage, Train
from tessera.data.loader import Feed, ImageLoader
from tessera.data.prepare import TokenPlan, write_tokens
from tessera.data.sources import Source
from tessera.data.token_cache import TokenCache
from tessera.data.tokens import TokenLoader
from tessera.generators.masked.model import Low
from tessera.nn.perceptual import load_vgg16
from tessera.nn.similarity import psnr
from tessera.recipes.captions import settle_captions, training_text
from tessera.recipes.generator import encode_exactly, facts_of
from tessera.recipes.masked import draw_preview, masked_nets, masked_step
from tessera.recipes.muse.config import MuseConfig, grid_of
from tessera.recipes.needs import found_at, refuse_other_channels
from tessera.recipes.pictures import contact_sheet
from tessera.tokenizers.image.model import ImageTokenizer
from tessera.tokenizers.image.stage import build_stage


def steps(config: MuseConfig) -> Sequence[Train]:
    """Tokenizer, base, and superres where the config has one; with a tokenizer of its own that is a stage, too."""
    found = [tokenizer_step(config), base_step(config)]
    if config.superres is not None:
        if config.superres.needs.tokenizer is not None:
            origin, key = config.superres.needs.tokenizer, "superres.needs.tokenizer"
            found.append(replace(found[0], name="fine_tokenizer", origin=origin, origin_key=key, serves=serves_fine(config)))
        found.append(superres_step(config))
    return found


def adopt(config: MuseConfig, read: Callable[[str], Any]) -> MuseConfig:
    """A tokenizer that comes from elsewhere brings its own architecture."""
    changes: dict[str, Any] = {}
    if config.base.needs.tokenizer is not None:
        origin, other = found_at(read, config.base.needs.tokenizer)
        refuse_other_channels(config.data, other, origin)
        changes["tokenizer"] = {"model": other.tokenizer.model.model_dump(mode="json")}
        changes["base"] = {"needs": {"tokenizer": origin}}
    if config.superres is not None and config.superres.needs.tokenizer is not None:
        origin, other = found_at(read, config.superres.needs.tokenizer)
        refuse_other_channels(config.data, other, origin)
        changes["superres"] = {"needs": {"tokenizer": origin}, "tokenizer": other.tokenizer.model.model_dump(mode="json")}
    if not changes:
        return config
    made = build(MuseConfig, [layer_of(config, "config"), Layer.of(changes, "the tokenizer that needs.tokenizer names")])
    assert isinstance(made, MuseConfig)
    return made


def settle(config: MuseConfig, source: Source, stages: Collection[str]) -> MuseConfig:
    """What only the data knows of how captions are read."""
    text = settle_captions(config.text, source)
    return config if text == config.text else config.model_copy(update={"text": text})


# --- tokenizer


def tokenizer_step(config: MuseConfig) -> Train:
    """Stage 1."""

    def build_tokenizer() -> Stage:
        wanted = config.tokenizer.loss.perceptual
        perceptual = None if wanted is None else load_vgg16(wanted.path)
        stage = build_stage(config.tokenizer, config.data.channels, perceptual, small=coarse_size(config))
        return replace(stage, preview=preview_reconstructions)

    return Train(
        name="tokenizer",
        batch_size=config.tokenizer.batch_size,
        steps=config.tokenizer.steps,
        build=build_tokenizer,
        serves=lambda: {"tokenizer": ImageTokenizer(config.tokenizer.model, config.data.channels)},
        feed=lambda nets, feed: ImageLoader.of(feed, tokenizer_height(config)),
        origin=config.base.needs.tokenizer,
        origin_key="base.needs.tokenizer",
    )


def tokenizer_height(config: MuseConfig) -> int:
    """Height of what the tokenizer learns from: where the finer grid is its own, too, that of the finer pictures."""
    superres = config.superres
    shared = superres is not None and superres.needs.tokenizer is None and superres.enlarged
    return superres.resolution if superres is not None and shared else config.data.resolution


def coarse_size(config: MuseConfig) -> tuple[int, int] | None:
    """To which size pictures are shrunk beside it, where they are larger than those of the coarse grid."""
    return None if tokenizer_height(config) == config.data.resolution else config.data.size


def serves_fine(config: MuseConfig) -> Callable[[], Nets]:
    """The tokenizer of the superres stage."""
    return lambda: {"tokenizer": ImageTokenizer(config.fine_tokenizer, config.data.channels)}


def preview_reconstructions(raw: Nets, averaged: Nets, batch: ImageBatch, context: Context) -> Preview:
    """Three rows: the pictures, and what averaged and raw weights make of them."""
    rows = {"real": batch.images}
    facts: dict[str, object] = {"keys": list(batch.keys), "captions": list(batch.captions)}
    for name, nets in (("ema", averaged), ("raw", raw)):
        rows[name] = nets["tokenizer"](batch.images).images.clamp(-1, 1)
        facts[f"psnr_{name}"] = [round(value, 3) for value in psnr(rows[name], batch.images).tolist()]
    return Preview("png", contact_sheet(rows, batch.captions), facts)


# --- generators


def base_step(config: MuseConfig) -> Train:
    """Stage 2: the tokens of pictures at the data's resolution."""

    def feed(nets: Nets, feed: Feed) -> TokenLoader:
        return TokenLoader(feed, coarse_tokens(config, nets, feed), training_text(config.text, feed))

    def make_nets() -> dict[str, nn.Module]:
        model = config.tokenizer.model
        return masked_nets(config.text, config.base, model.quantizer.vocab_size, grid_of(model, config.data))

    preview = partial(preview_base, config)
    return masked_step("base", config.base, config.text, make_nets, feed, preview, {"tokenizer": "tokenizer"})


def superres_step(config: MuseConfig) -> Train:
    """Stage 3: the tokens of a finer grid, given those of the coarse one."""
    stage = config.superres
    assert stage is not None
    fine = "tokenizer" if stage.needs.tokenizer is None else "fine_tokenizer"

    def feed(nets: Nets, feed: Feed) -> TokenLoader:
        vocab_size = config.fine_tokenizer.quantizer.vocab_size
        plan = TokenPlan.of(feed.config, feed.needs[fine], vocab_size, stage.resolution)
        tokens = write_tokens(feed, plan, partial(encode_exactly, nets["fine_tokenizer"]))
        return TokenLoader(feed, TokenCache(tokens), training_text(config.text, feed), coarse_tokens(config, nets, feed))

    def make_nets() -> dict[str, nn.Module]:
        low = Low(config.tokenizer.model.quantizer.vocab_size, grid_of(config.tokenizer.model, config.data))
        model = config.fine_tokenizer
        return masked_nets(config.text, stage, model.quantizer.vocab_size, grid_of(model, config.data.at(stage.resolution)), low)

    needs = {"tokenizer": "tokenizer", "fine_tokenizer": fine}
    return masked_step("superres", stage, config.text, make_nets, feed, partial(preview_superres, config), needs)


def coarse_tokens(config: MuseConfig, nets: Nets, feed: Feed) -> TokenCache:
    """The cache that base and superres share."""
    vocab_size = config.tokenizer.model.quantizer.vocab_size
    plan = TokenPlan.of(feed.config, feed.needs["tokenizer"], vocab_size, config.data.resolution)
    return TokenCache(write_tokens(feed, plan, partial(encode_exactly, nets["tokenizer"])))


def preview_base(config: MuseConfig, raw: Nets, averaged: Nets, batch: TokenBatch, context: Context) -> Preview:
    """Two rows: what the tokenizer keeps of the fixed samples, and what the generator draws from their captions."""
    tokenizer: Any = averaged["tokenizer"]
    ids, seeds = draw_preview(config.sample, averaged, batch)
    rows = {"tokenizer": tokenizer.decode(batch.ids), "drawn": tokenizer.decode(ids.view_as(batch.ids))}
    return Preview("png", contact_sheet(rows, batch.captions), facts_of(batch, seeds))


def preview_superres(config: MuseConfig, raw: Nets, averaged: Nets, batch: TokenBatch, context: Context) -> Preview:
    """Three rows: the coarse samples enlarged, what the fine tokenizer keeps, and what the generator makes of the coarse."""
    assert config.superres is not None
    assert batch.low is not None
    coarse: Any = averaged["tokenizer"]
    fine: Any = averaged["fine_tokenizer"]
    ids, seeds = draw_preview(config.sample.superres, averaged, batch, batch.low.flatten(1))
    wanted = fine.decode(batch.ids)
    enlarged = nn.functional.interpolate(coarse.decode(batch.low).float(), size=wanted.shape[-2:], mode="nearest")
    drawn = fine.decode(ids.view_as(batch.ids))
    facts = facts_of(batch, seeds) | {"psnr": [round(value, 3) for value in psnr(drawn, wanted).tolist()]}
    return Preview("png", contact_sheet({"coarse": enlarged, "tokenizer": wanted, "drawn": drawn}, batch.captions), facts)
