"""What each stage shows of itself while it trains: sheets of the fixed samples, with captions below."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import PairBatch
from tessera.contracts import Context, Nets, Preview
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.degrade import resize
from tessera.generators.diffusion.prior import unit
from tessera.nn.similarity import psnr
from tessera.recipes.dalle2.config import Dalle2Config, UpsamplerConfig
from tessera.recipes.dalle2.latent import from_canvas, to_canvas
from tessera.recipes.dalle2.nets import imagined, sampler_of, told_base, told_prior, told_upsampler
from tessera.recipes.pictures import contact_sheet
from tessera.text.encoders import encode_text
from tessera.tokenizers.pair.model import Embedder


def preview_pair(raw: Nets, averaged: Nets, batch: PairBatch, context: Context) -> Preview:
    """Two rows: the pictures, and for each caption the one among them that is nearest to it."""
    assert batch.images is not None
    embedder: Any = averaged["embedder"]
    pictures, captions = embedder(batch.images, batch.text)
    return found_sheet(batch, batch.images, pictures, captions)


def preview_prior(config: Dalle2Config, raw: Nets, averaged: Nets, batch: PairBatch, context: Context) -> Preview:
    """Two rows: the pictures, and the one among them whose embedding is nearest to that drawn of each caption."""
    assert batch.images is not None
    assert batch.embeddings is not None
    sampler = sampler_of(averaged["generator"], config.prior, config.sample.prior.complete)
    drawn = sampler(batch.embeddings.shape[1:], Condition(text=told_prior(averaged, batch.text)), seeds_of(batch))
    facts = {"cosine": rounded(F.cosine_similarity(drawn, batch.embeddings.float(), dim=-1))}
    return found_sheet(batch, batch.images, batch.embeddings, drawn, facts)


def preview_base(config: Dalle2Config, raw: Nets, averaged: Nets, batch: PairBatch, context: Context) -> Preview:
    """The pictures, what a tokenizer keeps of them where there is one, what is drawn of their own embeddings and captions, and
    where there is a prior what is drawn of the embeddings that it draws of the captions."""
    assert batch.images is not None
    assert batch.embeddings is not None
    sampler = sampler_of(averaged["generator"], config.base, config.drawn_by(config.sample))
    states, rows, facts = encode_text(averaged, batch.text), {"real": batch.images}, facts_of(batch)
    if config.base.latent is not None:
        rows["tokenizer"] = from_canvas(averaged, to_canvas(averaged, batch.images))
    embeddings = {"drawn": batch.embeddings}
    if "prior" in averaged:
        embeddings["prior"] = through_prior(config, averaged, batch)
        facts["cosine"] = rounded(F.cosine_similarity(embeddings["prior"], batch.embeddings.float(), dim=-1))
    for name, told in embeddings.items():
        rows[name] = from_canvas(averaged, sampler(config.canvas, told_base(config, states, told), seeds_of(batch)))
    return Preview("png", contact_sheet(rows, batch.captions), facts)


def through_prior(config: Dalle2Config, nets: Nets, batch: PairBatch) -> Tensor:
    """b e: drawn of the captions as in use, by the nets of the prior, which are one here."""
    options, prior, pair = config.sample.prior, dict(nets["prior"].named_children()), nets.get("embedder")
    captions = pair.captions(batch.text) if isinstance(pair, Embedder) else None
    told = told_prior(prior if pair is None else {**prior, "embedder": pair}, batch.text)
    sampler = sampler_of(prior["generator"], config.prior, options.complete)
    return imagined(sampler, config.channels_of_embeddings, told, seeds_of(batch), options.candidates, captions)


def preview_upsampler(
    config: Dalle2Config,
    stage: UpsamplerConfig,
    small: tuple[int, int],
    raw: Nets,
    averaged: Nets,
    batch: PairBatch,
    context: Context,
) -> Preview:
    """Three rows: the pictures made small, what is drawn of these, and the pictures."""
    assert batch.images is not None
    shrunk = resize(batch.images, small, 1.0)
    sampler, size = (
        sampler_of(averaged["generator"], stage, config.sample.upsampler.complete),
        config.data.at(stage.resolution).size,
    )
    states = encode_text(averaged, batch.text) if stage.text else None
    drawn = sampler(batch.images.shape[1:], told_upsampler(stage, shrunk, size, seeds_of(batch), states), seeds_of(batch))
    rows = {"small": F.interpolate(shrunk, size=drawn.shape[-2:], mode="nearest"), "drawn": drawn, "real": batch.images}
    facts = facts_of(batch) | {"psnr": rounded(psnr(drawn, batch.images))}
    return Preview("png", contact_sheet(rows, batch.captions), facts)


def found_sheet(
    batch: PairBatch, images: Tensor, pictures: Tensor, wanted: Tensor, facts: dict[str, Any] | None = None
) -> Preview:
    """The pictures of a batch, and below each caption the one whose vector (b e) is nearest to what is wanted (b e)."""
    nearest = (unit(wanted) @ unit(pictures).T).argmax(1)
    found = facts_of(batch) | {"found": nearest.tolist()} | (facts or {})
    return Preview("png", contact_sheet({"real": images, "found": images[nearest]}, batch.captions), found)


def seeds_of(batch: PairBatch) -> Tensor:
    """0, 1, ..."""
    return torch.arange(len(batch.keys), device=batch.valid.device)


def facts_of(batch: PairBatch) -> dict[str, Any]:
    """For the JSON beside a preview."""
    return {"keys": list(batch.keys), "captions": list(batch.captions), "seeds": list(range(len(batch.keys)))}


def rounded(values: Tensor) -> list[float]:
    """For the same."""
    return [round(value, 3) for value in values.tolist()]
