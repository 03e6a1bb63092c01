"""Stages of other runs and exports: what they bring with them, and which fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tessera.config import ImageDataConfig, Layer, UserError, build, layer_of
from tessera.recipes.dalle2.config import UPSAMPLERS, Dalle2Config, TrainedPairConfig, UpsamplerConfig
from tessera.recipes.dalle2.idle import refuse_idle
from tessera.recipes.needs import refuse_other_channels
from tessera.tokenizers.image.model import ImageTokenizerConfig
from tessera.tokenizers.pair.clip import ClipConfig

Read = Callable[..., Any]  # (RUN/STAGE, its kind) -> the stage as it lies there: config, train, home, hash

BROUGHT = {  # by a stage: all that its network is built from, and how it is used
    "embedder": ("model",),
    "prior": ("model", "process"),
    "base": ("model", "process", "self_conditioning", "latent"),
    "upsampler1": ("model", "process", "resolution", "low", "crop", "text"),
}


def adopt(config: Dalle2Config, read: Read) -> Dalle2Config:
    """What every new run comes by, and one that takes another path or section: stages from elsewhere bring theirs, and then no
    option may be idle."""
    made = with_stages(config, read)
    refuse_idle(made)
    return made


def with_stages(config: Dalle2Config, read: Read) -> Dalle2Config:
    """Stages that come from elsewhere bring their own architecture, and the way that they read text."""
    stages = {name: read(absolute(path), kind_of(name)) for name, path in config.taken.items()}
    path, changes = getattr(config.embeddings, "path", None), dict[str, Any]()
    if path is not None:
        changes["embeddings"] = {"path": absolute(path)}
    if path is not None and isinstance(config.embeddings, TrainedPairConfig):
        stages["embedder"] = read(absolute(path), "embedder")
        changes["embeddings"] = {"path": str(stages["embedder"].home)}
    if not stages and not changes and config.base.latent is None:
        return config
    for name, stage in stages.items():
        refuse_other_pictures(config, stage)
        changes |= brought(name, stage)
    if (latent := latent_of(config, stages, read)) is not None:
        changes["base"] = {**changes.get("base", {}), "latent": latent}
    refuse_other_embeddings(config, stages, read)
    made = build(Dalle2Config, [layer_of(config, "config"), Layer.of(changes | text_of(stages), "stages from elsewhere")])
    assert isinstance(made, Dalle2Config)
    refuse_sizes(made, stages)
    return made


def absolute(path: str) -> str:
    """So that the run can be opened from anywhere."""
    return str(Path(path).expanduser().absolute())


def kind_of(name: str) -> str:
    """One upsampler may stand in the place of another."""
    return "upsampler1" if name in UPSAMPLERS else name


def brought(name: str, stage: Any) -> dict[str, Any]:
    """What a stage of that name takes over from one that was trained elsewhere, perhaps by another name."""
    other = stage.config
    found = {name: getattr(other, stage.train.name).model_dump(mode="json", include=set(BROUGHT[kind_of(name)]))}
    if name != "embedder":
        found[name]["path"] = str(stage.home)  # which is elsewhere again, if it was taken over there
    if name == "base":
        found["data"] = {"resolution": other.data.resolution, "width": other.data.width}
    return found | ({"embedding_width": other.embedding_width} if name in ("prior", "base") else {})


def latent_of(config: Dalle2Config, stages: Mapping[str, Any], read: Read) -> dict[str, Any] | None:
    """The tokenizer whose latent base draws: the one that base was trained with where it comes from, or that the config names."""
    base = stages.get("base")
    section = (config if base is None else base.config).base.latent
    if section is None:
        return None
    found = read(absolute(section.path) if base is None else str(base.home.parent / "tokenizer"), "tokenizer")
    model = found.config.tokenizer.model
    if not isinstance(model, ImageTokenizerConfig):
        raise UserError(
            f"{found.home} is of recipe {found.config.recipe} and holds no tokenizer of pictures; name RUN/tokenizer of a "
            f"muse run"
        )
    refuse_other_channels(config.data, found.config, str(found.home))
    return {"path": str(found.home), "model": model.model_dump(mode="json")}


def text_of(stages: Mapping[str, Any]) -> dict[str, Any]:
    """The text section of those that read captions, of which a run has one."""
    readers = [stage for stage in stages.values() if reads_captions(stage)]
    for stage in readers:
        if stage.config.text != readers[0].config.text:
            raise UserError(
                f"{readers[0].home} and {stage.home} read captions in two ways (their text sections differ), and a run reads "
                f"them in one; take both from runs with the same text section"
            )
    return {"text": readers[0].config.text.model_dump(mode="json")} if readers else {}


def reads_captions(stage: Any) -> bool:
    """All but upsamplers that are told none."""
    section = getattr(stage.config, stage.train.name)
    return section.text if isinstance(section, UpsamplerConfig) else True


def refuse_other_pictures(config: Dalle2Config, stage: Any) -> None:
    """Grey ones, or no pictures at all."""
    other = stage.config
    if other.recipe != "dalle2":
        raise UserError(f"{stage.home} is a stage of recipe {other.recipe}; expected one of a dalle2 run or export")
    if other.data.channels != config.data.channels:
        raise UserError(
            f"{stage.home} was trained on pictures of {other.data.channels} channels, data.channels is {config.data.channels}; "
            f"set data.channels={other.data.channels}, or name another stage"
        )


def refuse_other_embeddings(config: Dalle2Config, stages: Mapping[str, Any], read: Read) -> None:
    """What a prior draws, and a decoder draws of, are embeddings of one pair."""
    learned, ours, pair = [stages[name] for name in ("prior", "base") if name in stages], maker_of(config), stages.get("embedder")
    for stage in learned:
        if (theirs := maker_of(stage.config)) != ours:
            raise UserError(
                f"{stage.home} was trained on embeddings by {theirs}, and here they come from {ours}; set embeddings.kind"
            )
        width, first = stage.config.embedding_width, learned[0].config.embedding_width
        if width != first:
            raise UserError(
                f"{learned[0].home} learned from embeddings of {first} channels, and {stage.home} from those of {width}; take "
                f"stages that were trained on the same ones, or train this one anew"
            )
    wanted = [read(str(stage.home.parent / "embedder"), "embedder") for stage in learned] if config.has_pair else []
    for stage, needed in zip(learned, wanted, strict=False):
        if pair is None:
            raise UserError(
                f"{stage.home} was trained on the embeddings of {needed.home}; name it, too: --set embeddings.path={needed.home}"
            )
        if needed.hash != wanted[0].hash or (needed.hash != pair.hash and needed.home != pair.home):
            other = pair if needed.home != pair.home else wanted[0]
            raise UserError(
                f"{stage.home} was trained on the embeddings of {needed.home}, and they would come from {other.home}, with other "
                f"weights; take stages that were trained on one pair, or train this one anew"
            )


def maker_of(config: Dalle2Config) -> str:
    """What makes embeddings; of files it is not known."""
    return "a trained pair" if config.has_pair else "CLIP" if isinstance(config.embeddings, ClipConfig) else "files"


def refuse_sizes(config: Dalle2Config, stages: Mapping[str, Any]) -> None:
    """Upsamplers enlarge pictures of the size that they learned from, a pair embeds those of the decoder's size; then what holds
    for any cascade."""
    ours, theirs = config.data, stages["prior"].config.data if "prior" in stages else config.data
    if config.has_pair and ours.size != theirs.size:
        wide = "" if theirs.square else f" and data.width={theirs.width}"
        raise UserError(
            f"{stages['prior'].home} draws embeddings of pictures of {pixels(theirs)} pixels, and the decoder's have "
            f"{pixels(ours)}; take a base of {pixels(theirs)} pixels, or set data.resolution={theirs.resolution}{wide} and "
            f"train one"
        )
    for name in config.upsamplers:
        if name not in stages:
            continue
        other = stages[name].config
        seen, given = other.data.at(other.seen_by(stages[name].train.name)), config.data.at(config.seen_by(name))
        if seen.size != given.size:
            raise UserError(
                f"{stages[name].home} enlarges pictures of {pixels(seen)} pixels, and as {name} it would get pictures of "
                f"{pixels(given)} pixels; let what comes before it draw {pixels(seen)}, or train another"
            )
    build(Dalle2Config, [layer_of(config, "config"), Layer.of({name: {"path": None} for name in config.taken}, "config")])


def pixels(data: ImageDataConfig) -> str:
    """How large pictures are, in words."""
    height, width = data.size
    return f"{height}" if data.square else f"{height} x {width}"
