"""Options that would do nothing, that no call could draw with, or that lean on what is never learned: refused where a run is
made, and nowhere else. A run that is there opens whatever its config says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from tessera.config import UserError
from tessera.generators.diffusion.degrade import NoiseConfig
from tessera.generators.diffusion.sample import SamplerConfig
from tessera.recipes.dalle2.config import CascadeStageConfig, Dalle2Config, TrainedPairConfig, UpsamplerConfig
from tessera.recipes.dalle2.presets import PRESETS
from tessera.text.encoders import NoTextConfig
from tessera.tokenizers.pair.clip import ClipConfig


def refuse_idle(config: Dalle2Config) -> None:
    """Only the default of an option without effect is taken, or what the preset has for those who name nothing."""
    start = PRESETS[config.preset]()
    for key, reason in [*idle_in_training(config), *idle_in_drawing(config)]:
        value, default = value_at(config, key), default_of(config, key)
        usual = value_at(start, key)
        if value not in (default, usual):
            shown = default if usual is None else usual
            raise UserError(f"{key} {value} would change nothing: {reason}; leave it out (it is {shown})")
    refuse_unused_variance(config)
    refuse_untaught(config)
    refuse_unseen_levels(config)
    if config.sample.start not in ("prior", *config.upsamplers):
        raise UserError(
            f"sample.start={config.sample.start}: drawing can start at {', '.join(['prior', *config.upsamplers])}, which are the "
            f"stages of this config; name one of them, or add {config.sample.start}"
        )


def idle_in_training(config: Dalle2Config) -> Iterator[tuple[str, str]]:
    """Keys without effect on what is learned, and why."""
    yield "data.views", "pictures are read as they are, not as tokens"
    yield "prior.loss.embedding_dropout_prob", "the prior draws the embedding, and is told none"
    yield "prior.loss.bound_weight", "an embedding has no learned variance"
    if isinstance(config.text, NoTextConfig):
        yield from ((f"{name}.loss.text_dropout_prob", "text.kind=none has no captions") for name in ("prior", "base"))
    for name, stage in {"base": config.base, **config.upsamplers}.items():
        if not stage.learned_variance:
            yield f"{name}.loss.bound_weight", f"{name}.process has no learned variance"
        if isinstance(stage, UpsamplerConfig):
            yield f"{name}.loss.embedding_dropout_prob", "upsamplers are told no embedding"
            yield f"{name}.model.embedding_tokens", "upsamplers are told no embedding"
            if not stage.text:
                yield f"{name}.loss.text_dropout_prob", f"{name}.text=false tells it none"
                if any(getattr(stage.model, "cross", ())):
                    yield f"{name}.model.cross", f"{name}.text=false tells it none to look at"


def idle_in_drawing(config: Dalle2Config) -> Iterator[tuple[str, str]]:
    """Keys without effect on what is drawn, and why."""
    for place in ("sample.prior", "sample.upsampler"):
        yield f"{place}.resample_times", "base alone draws to fit what is known (sample.resample_times)"
    for place in ("sample", "sample.prior", "sample.upsampler"):
        kind = value_at(config, place).threshold
        if kind != "dynamic":
            yield f"{place}.percentile", f"it is for the threshold dynamic, and {place}.threshold is {kind}"
    if isinstance(config.text, NoTextConfig):
        yield from ((key, "text.kind=none has no captions to pull to") for key in ("sample.guidance", "sample.prior.guidance"))
    if not any(stage.text for stage in config.upsamplers.values()):
        yield "sample.upsampler.guidance", "it pulls towards the text, and no upsampler is told it (upsampler1.text=true)"
    pulls = {config.sample.embedding_guidance} | (set() if isinstance(config.text, NoTextConfig) else {config.sample.guidance})
    if pulls == {1}:
        yield "sample.guidance_levels", "neither sample.guidance nor sample.embedding_guidance pulls"
    if config.base.latent is not None:
        yield "sample.threshold", "it is one of pixels, and base draws latents"
    if not isinstance(config.embeddings, (TrainedPairConfig, ClipConfig)):
        yield "sample.prior.candidates", "embeddings from files have no text beside them by which one could be chosen"


def refuse_unused_variance(config: Dalle2Config) -> None:
    """It has to be taught, and one sampler uses what is learned; a call may ask for others."""
    places: dict[str, SamplerConfig] = {"base": config.sample, **dict.fromkeys(config.upsamplers, config.sample.upsampler)}
    for name, options in places.items():
        stage = config.base if name == "base" else config.upsamplers[name]
        if stage.path is not None or not stage.learned_variance:
            continue
        if stage.loss.bound_weight == 0:
            raise UserError(
                f"{name}.loss.bound_weight=0 teaches {name} no variance, which {name}.process.learned_variance asks of it; raise "
                f"it (0.001 is usual), or set the latter to false"
            )
        if options.sampler != "ancestral":
            place = "sample" if name == "base" else "sample.upsampler"
            raise UserError(
                f"{name}.process.learned_variance is for the sampler ancestral, and {place}.sampler is {options.sampler}; set it "
                f"to ancestral (another may be asked for in a call), or learned_variance to false"
            )


def refuse_untaught(config: Dalle2Config) -> None:
    """Guidance compares guesses with those of a network that is told less, which it has to have learned."""
    told = not isinstance(config.text, NoTextConfig)
    hearing: dict[str, CascadeStageConfig] = {"prior": config.prior} if told else {}
    hearing |= {name: stage for name, stage in config.upsamplers.items() if stage.text}
    for name, stage in hearing.items():
        key = "sample.prior.guidance" if name == "prior" else "sample.upsampler.guidance"
        if stage.path is None and value_at(config, key) != 1 and stage.loss.text_dropout_prob == 0:
            raise UserError(
                f"{key} leans on what {name} guesses without text, and {name}.loss.text_dropout_prob=0 never takes it away; "
                f"raise that (0.1 is usual), or set {key} to 1"
            )
    if config.base.path is None:
        refuse_untaught_base(config, told)


def refuse_untaught_base(config: Dalle2Config, told: bool) -> None:
    """Of its two conditions the text is taken away alone, or with the embedding."""
    text, embedding = config.base.loss.text_dropout_prob, config.base.loss.embedding_dropout_prob
    if told and config.sample.guidance != config.sample.embedding_guidance and text <= embedding:
        raise UserError(
            f"sample.guidance leans on what base guesses of an embedding without text, and base.loss.text_dropout_prob={text:g} "
            f"takes text away no more often than base.loss.embedding_dropout_prob={embedding:g} takes both; raise the first "
            f"above the second, or set sample.guidance to sample.embedding_guidance ({config.sample.embedding_guidance:g})"
        )
    if config.sample.embedding_guidance != 1 and (embedding == 0 or (told and text == 0)):
        raise UserError(
            f"sample.embedding_guidance leans on what base guesses without embedding and text, and base.loss.text_dropout_prob="
            f"{text:g} with base.loss.embedding_dropout_prob={embedding:g} never takes both away; raise them, or set "
            f"sample.embedding_guidance to 1"
        )


def refuse_unseen_levels(config: Dalle2Config) -> None:
    """What spoils a drawn picture has to be what an upsampler is trained with."""
    for name, stage in config.upsamplers.items():
        low = stage.low
        if isinstance(low, NoiseConfig):
            key, value, seen = "sample_level", low.sample_level, [low.levels]
        else:
            seen = [low.sigmas] * (low.prob > 0) + [(0.0, 0.0)] * (low.prob < 1)
            key, value = "sample_sigma", low.sample_sigma
        if stage.path is None and not any(least <= value <= most for least, most in seen):
            told = " or ".join(f"{least:g} to {most:g}" if least < most else f"{least:g}" for least, most in seen)
            raise UserError(
                f"{name}.low.{key}={value:g} is nothing that {name} is trained with: {told}; choose one of these, or train with "
                f"others"
            )


def value_at(config: Any, key: str) -> Any:
    """What stands at a dotted key; None where its section is not there."""
    return reduce(lambda section, name: None if section is None else getattr(section, name), key.split("."), config)


def default_of(config: Dalle2Config, key: str) -> Any:
    """What a dotted key has in a section that does not name it."""
    above, _, name = key.rpartition(".")
    return type(value_at(config, above)).model_fields[name].default
