"""The stages in the order in which they train, and what each reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessera.batches import TokenBatch, VideoBatch, num_frames, to_uint8
from tessera.config import Layer, UserError, build, layer_of
from tessera.contracts import Context, Nets, Preview, Stage, Train
from tessera.data.clips import ClipLoader, ClipViews
from tessera.data.loader import Feed
from tessera.data.picking import frame_rate
from tessera.data.prepare import TokenPlan, write_tokens
from tessera.data.sources import Source
from tessera.data.token_cache import TokenCache
from tessera.data.tokens import TokenLoader
from tessera.media.clip_facts import DEFAULT_FPS
from tessera.media.clip_files import frame_sheet, grid_gif
from tessera.media.clips import Clip
from tessera.media.images import encode_png
from tessera.nn.nearby import refuse_untrainable
from tessera.nn.perceptual import load_vgg16
from tessera.nn.similarity import psnr
from tessera.recipes.captions import settle_captions, training_text
from tessera.recipes.clips.config import AutoregressiveClipsConfig, ClipsConfig, refuse_sizes
from tessera.recipes.clips.drawing import generator_of
from tessera.recipes.generator import encode_exactly, facts_of, generator_step
from tessera.recipes.needs import found_at
from tessera.tokenizers.image.model import ImageTokenizerConfig
from tessera.tokenizers.video.critic import frames_of
from tessera.tokenizers.video.frames import FramesConfig
from tessera.tokenizers.video.losses import clip_mean
from tessera.tokenizers.video.model import Backbone, VideoTokenizer
from tessera.tokenizers.video.stage import build_stage

PREVIEW_SIDE = 96  # pixels that a frame of a preview has at least


def steps(config: ClipsConfig) -> Sequence[Train]:
    """Tokenizer, then base."""
    return [tokenizer_step(config), base_step(config)]


def adopt(config: ClipsConfig, read: Callable[[str], Any]) -> ClipsConfig:
    """A tokenizer that comes from elsewhere brings its own architecture; one of pictures is used frame by frame."""
    if config.base.needs.tokenizer is None:
        return config
    origin, other = found_at(read, config.base.needs.tokenizer)
    model, still = other.tokenizer.model, isinstance(other.tokenizer.model, ImageTokenizerConfig)
    if not still and not isinstance(model, Backbone):
        raise UserError(
            f"{origin} is of recipe {other.recipe} and holds no tokenizer of clips or pictures; name RUN/tokenizer of a "
            f"phenaki, nuwa or muse run"
        )
    if other.data.channels != config.data.channels:
        raise UserError(
            f"{origin} was trained on {'pictures' if still else 'clips'} of {other.data.channels} channels, data.channels is "
            f"{config.data.channels}; set data.channels={other.data.channels}, or name another tokenizer"
        )
    changes = {
        "tokenizer": {"model": (FramesConfig.of(model) if still else model).model_dump(mode="json")},
        "base": {"needs": {"tokenizer": origin}},
    }
    made = build(type(config), [layer_of(config, "config"), Layer.of(changes, "the tokenizer that needs.tokenizer names")])
    try:
        refuse_sizes(made)
    except ValueError as error:
        raise UserError(f"with the tokenizer of {origin}: {error}") from None
    return made


def settle(config: ClipsConfig, source: Source, stages: Collection[str]) -> ClipsConfig:
    """What only the data knows: how captions are read, and how fast clips are shown."""
    text = settle_captions(config.text, source)
    sample = config.sample
    if sample.fps is None:
        sample = sample.model_copy(update={"fps": frame_rate(source, config.data)})
    changed = text != config.text or sample != config.sample
    return config.model_copy(update={"text": text, "sample": sample}) if changed else config


# --- tokenizer


def tokenizer_step(config: ClipsConfig) -> Train:
    """Stage 1."""

    def build_tokenizer() -> Stage:
        wanted = config.tokenizer.loss.perceptual
        perceptual = None if wanted is None else load_vgg16(wanted.path)
        stage = build_stage(config.tokenizer, config.data.channels, perceptual)
        return replace(stage, preview=partial(preview_reconstructions, config))

    return Train(
        name="tokenizer",
        batch_size=config.tokenizer.batch_size,
        steps=config.tokenizer.steps,
        build=build_tokenizer,
        serves=lambda: {"tokenizer": VideoTokenizer(config.tokenizer.model, config.data.channels)},
        feed=lambda nets, feed: ClipLoader.of(feed),
        origin=config.base.needs.tokenizer,
        origin_key="base.needs.tokenizer",
    )


def preview_reconstructions(config: ClipsConfig, raw: Nets, averaged: Nets, batch: VideoBatch, context: Context) -> Preview:
    """Three rows: the clips, and what averaged and raw weights make of them."""
    rows = {"real": batch.frames}
    facts: dict[str, object] = {"keys": list(batch.keys), "captions": list(batch.captions)}
    for name, nets in (("ema", averaged), ("raw", raw)):
        rows[name] = nets["tokenizer"](batch.frames).frames.clamp(-1, 1)
        alike = clip_mean(psnr(frames_of(rows[name]), frames_of(batch.frames)), batch.mask)
        facts[f"psnr_{name}"] = [round(value, 3) for value in alike.tolist()]
    return preview_of(config, rows, batch.lengths.tolist(), batch.captions, facts)


def preview_of(
    config: ClipsConfig, rows: Mapping[str, Tensor], lengths: Sequence[int], captions: Sequence[str | None], facts: Any
) -> Preview:
    """Named rows of clips, b c t h w, as a gif in which all of them move, and as a sheet of frames."""
    fps, scale = config.sample.fps or DEFAULT_FPS, max(1, PREVIEW_SIDE // config.data.resolution)
    clips = {name: clips_of(frames, lengths, fps) for name, frames in rows.items()}
    texts = [caption or "" for caption in captions]
    moving = grid_gif(list(clips.values()), row_names=list(clips), captions=texts, scale=scale)
    strips = [clip for column in zip(*clips.values(), strict=True) for clip in column]
    names = [f"{name}: {text}" for text in texts for name in clips]
    return Preview("gif", moving, facts, beside={"png": encode_png(frame_sheet(strips, captions=names))})


def clips_of(frames: Tensor, lengths: Sequence[int], fps: float) -> list[Clip]:
    """b c t h w in [-1, 1] -> clips, each as long as it is."""
    arrays = to_uint8(frames).permute(0, 2, 3, 4, 1).cpu().numpy()
    return [Clip(array[:length], fps) for array, length in zip(arrays, lengths, strict=True)]


# --- generator


def base_step(config: ClipsConfig) -> Train:
    """Stage 2: the tokens of clips."""
    model = config.tokenizer.model

    def feed(nets: Nets, feed: Feed) -> TokenLoader:
        vocab_size = model.quantizer.vocab_size
        plan = TokenPlan.of(feed.config, feed.needs["tokenizer"], vocab_size, config.data.resolution, model.time_stride)
        views = ClipViews(feed.source, feed.config, plan.views, feed.seed)
        tokens = write_tokens(feed, plan, partial(encode_exactly, nets["tokenizer"]), views)
        return TokenLoader(feed, TokenCache(tokens), training_text(config.text, feed))

    made, preview = generator_of(config), partial(preview_base, config)
    step = generator_step("base", config.base, config.text, made.nets, made.stage, feed, preview, {"tokenizer": "tokenizer"})
    return replace(step, fits=partial(refuse_device, config))


def refuse_device(config: ClipsConfig, device: torch.device) -> None:
    """One that the generator cannot train on."""
    if isinstance(config, AutoregressiveClipsConfig):
        refuse_untrainable(config.base.model.nearby.execution, device)


def preview_base(config: ClipsConfig, raw: Nets, averaged: Nets, batch: TokenBatch, context: Context) -> Preview:
    """What the tokenizer keeps of the fixed samples, of their sketches, where there are any, and what the generator draws from
    their captions, as long."""
    tokenizer: Any = averaged["tokenizer"]
    assert batch.lengths is not None
    ids, seeds = generator_of(config).preview(averaged, batch)
    sketches = {} if batch.sketch is None else {"sketch": tokenizer.decode(batch.sketch)}
    rows = {"tokenizer": tokenizer.decode(batch.ids), **sketches, "drawn": tokenizer.decode(ids)}
    lengths = [num_frames(length, config.tokenizer.model.time_stride) for length in batch.lengths.tolist()]
    return preview_of(config, rows, lengths, batch.captions, facts_of(batch, seeds))
