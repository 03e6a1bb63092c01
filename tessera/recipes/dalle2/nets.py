"""The networks of the stages, what each learns from a batch, and samplers with them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tessera.batches import PairBatch, Text, TextStates
from tessera.contracts import Context, Nets
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.degrade import crop, degrade, draw_levels, draw_places, resize, sample_levels
from tessera.generators.diffusion.denoisers import build_denoiser
from tessera.generators.diffusion.losses import Example
from tessera.generators.diffusion.prior import Prior, best_of, spread, unit
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler
from tessera.generators.diffusion.stage import DiffusionStageConfig
from tessera.randomness import mix_tensors
from tessera.recipes.dalle2.config import BaseConfig, Dalle2Config, PriorStageConfig, UpsamplerConfig
from tessera.recipes.dalle2.latent import SCALE, LatentScale, to_canvas
from tessera.text.encoders import NoTextConfig, build_encoder, encode_text, text_width
from tessera.tokenizers.pair.model import Embedder

# --- networks


def prior_nets(config: Dalle2Config) -> dict[str, nn.Module]:
    """The prior, and the text encoder that is trained with it."""
    width = config.channels_of_embeddings
    net = Prior(config.prior.model, width, text_width(config.text), width if config.has_pair else None)
    return with_encoder(config, net)


def base_nets(config: Dalle2Config) -> dict[str, nn.Module]:
    """The decoder, and the text encoder that is trained with it."""
    channels, *size = config.canvas
    net = build_denoiser(
        config.base.model, channels=channels, size=(size[0], size[1]), embedding_width=config.channels_of_embeddings,
        text_width=None if isinstance(config.text, NoTextConfig) else text_width(config.text),
        self_conditioning=config.base.self_conditioning, variance=config.base.learned_variance,
    )  # fmt: skip
    if config.base.latent is not None:
        net.add_module(SCALE, LatentScale(channels))
    return with_encoder(config, net)


def upsampler_nets(config: Dalle2Config, stage: UpsamplerConfig) -> dict[str, nn.Module]:
    """An upsampler, and the text encoder that is trained with it where it is told captions."""
    size = config.data.at(stage.resolution).size if stage.crop is None else (stage.crop, stage.crop)
    net = build_denoiser(
        stage.model, channels=config.data.channels, size=size, low=True, variance=stage.learned_variance,
        text_width=text_width(config.text) if stage.text else None,
    )  # fmt: skip
    return with_encoder(config, net) if stage.text else {"generator": net}


def with_encoder(config: Dalle2Config, net: nn.Module) -> dict[str, nn.Module]:
    """A denoiser, and a text encoder of its own where one is trained."""
    encoder = build_encoder(config.text)
    return {"generator": net} if encoder is None else {"generator": net, "text": encoder}


def recalls(stage: DiffusionStageConfig) -> bool:
    """Whether the network takes its own earlier guess."""
    if isinstance(stage, PriorStageConfig):
        return stage.model.self_conditioning
    return isinstance(stage, BaseConfig) and stage.self_conditioning


# --- what they are told, and learn from


def told_prior(nets: Nets, text: Text | TextStates) -> TextStates:
    """States of captions by the prior's encoder; with a pair, its vector of the caption is what is pooled of them."""
    states, pair = encode_text(nets, text), nets.get("embedder")
    if not isinstance(pair, Embedder):
        return states
    with torch.no_grad():
        return replace(states, pooled=pair.captions(text))


def told_base(config: Dalle2Config, states: TextStates, embeddings: Tensor) -> Condition:
    """States of captions, where there are captions at all, and embeddings of pictures, b e."""
    return Condition(text=None if isinstance(config.text, NoTextConfig) else states, embedding=embeddings)


def told_upsampler(
    stage: UpsamplerConfig, small: Tensor, size: tuple[int, int], seeds: Tensor, states: TextStates | None = None
) -> Condition:
    """A drawn picture, spoiled as the config says for drawing, and enlarged; and states of captions where it is told them."""
    levels = sample_levels(stage.low, seeds)
    low = degrade(stage.low, small, size, levels, 0, 0, seeds)
    return Condition(text=states, low=low, low_level=levels)


def read_prior(nets: Nets, batch: PairBatch, context: Context) -> Example:
    """An embedding of unit variance, and its caption."""
    assert batch.embeddings is not None
    return Example(spread(batch.embeddings), Condition(text=told_prior(nets, batch.text)), batch.valid)


def read_base(config: Dalle2Config, nets: Nets, batch: PairBatch, context: Context) -> Example:
    """A picture or its latent, its embedding and its caption."""
    assert batch.images is not None
    assert batch.embeddings is not None
    return Example(to_canvas(nets, batch.images), told_base(config, encode_text(nets, batch.text), batch.embeddings), batch.valid)


def read_upsampler(stage: UpsamplerConfig, small: tuple[int, int], nets: Nets, batch: PairBatch, context: Context) -> Example:
    """A picture, or a part of it, and the same place of its smaller self (height and width `small`), spoiled and enlarged."""
    assert batch.images is not None
    images, where = batch.images, (context.seed, context.step, context.positions)
    levels, size = draw_levels(stage.low, *where), images.shape[-2:]
    low = degrade(stage.low, resize(images, small, 1.0), size, levels, *where)
    if stage.crop is not None:
        part = stage.crop, stage.crop
        places = draw_places(*where, size, part)
        images, low = crop(images, places, part), crop(low, places, part)
    states = encode_text(nets, batch.text) if stage.text else None
    return Example(images, Condition(text=states, low=low, low_level=levels), batch.valid)


def sampler_of(
    net: nn.Module, stage: DiffusionStageConfig, options: DiffusionSampleConfig, *, bf16: bool = False, records: bool = False
) -> DiffusionSampler:
    """What draws with a stage's network."""
    return DiffusionSampler(net, stage.build_process(), options, recalls=recalls(stage), bf16=bf16, records=records)


def imagined(
    sampler: DiffusionSampler, channels: int, text: TextStates, seeds: Tensor, candidates: int, captions: Tensor | None,
    negative: TextStates | None = None,
) -> Tensor:  # fmt: skip
    """b e of unit length, by the prior: of several the one that is nearest to the captions' vectors, b e; without these one. The
    seeds themselves are those of the picture that is drawn of it, whose noise is another."""
    told, count = Condition(text=text), 1 if captions is None else candidates
    own = [mix_tensors(seeds, torch.tensor(number)) for number in range(count)]
    drawn = torch.stack([sampler([channels], told, some, negative) for some in own], dim=1)
    return unit(drawn[:, 0] if captions is None else best_of(drawn, captions))
