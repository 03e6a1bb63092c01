"""Stages of other runs and exports: what they bring with them, and which fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tessera.config import Layer, UserError, build, layer_of
from tessera.recipes.dalle2.config import UPSAMPLERS, Dalle2Config, SuperresConfig, TrainedPairConfig
from tessera.tokenizers.pair.clip import ClipConfig

Read = Callable[..., Any]  # (RUN/STAGE, its kind) -> the stage as it lies there: config, train, home, hash

BROUGHT = {  # by a stage: all that its network is built from, and how it is used
    "pair": ("model",),
    "prior": ("model", "process"),
    "base": ("model", "process", "self_conditioning"),
    "superres": ("model", "process", "resolution", "low", "crop", "text"),
}


def adopt(config: Dalle2Config, read: Read) -> Dalle2Config:
    """Stages that come from elsewhere bring their own architecture, and the way that they read text."""
    stages = {name: read(absolute(path), kind_of(name)) for name, path in config.taken.items()}
    path, changes = getattr(config.embeddings, "path", None), dict[str, Any]()
    if path is not None:
        changes["embeddings"] = {"path": absolute(path)}
    if path is not None and isinstance(config.embeddings, TrainedPairConfig):
        stages["pair"] = read(absolute(path), "pair")
        changes["embeddings"] = {"path": str(stages["pair"].home)}
    if not stages and not changes:
        return config
    for name, stage in stages.items():
        refuse_other_pictures(config, stage)
        changes |= brought(name, stage)
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
    return "superres" if name in UPSAMPLERS else name


def brought(name: str, stage: Any) -> dict[str, Any]:
    """What a stage of that name takes over from one that was trained elsewhere, perhaps by another name."""
    other = stage.config
    found = {name: getattr(other, stage.train.name).model_dump(mode="json", include=set(BROUGHT[kind_of(name)]))}
    if name != "pair":
        found[name]["path"] = str(stage.home)  # which is elsewhere again, if it was taken over there
    if name == "base":
        found["data"] = {"resolution": other.data.resolution}
    return found | ({"embedding_width": other.embedding_width} if name in ("prior", "base") else {})


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
    return section.text if isinstance(section, SuperresConfig) else True


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
    learned, ours, pair = [stages[name] for name in ("prior", "base") if name in stages], maker_of(config), stages.get("pair")
    for stage in learned:
        if (theirs := maker_of(stage.config)) != ours:
            raise UserError(
                f"{stage.home} was trained on embeddings by {theirs}, and here they come from {ours}; set embeddings.kind"
            )
    wanted = [read(str(stage.home.parent / "pair"), "pair") for stage in learned] if config.has_pair else []
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
    sides = config.data.resolution, stages["prior"].config.data.resolution if "prior" in stages else None
    if config.has_pair and sides[1] not in (None, sides[0]):
        raise UserError(
            f"{stages['prior'].home} draws embeddings of pictures of {sides[1]} pixels, and the decoder's have {sides[0]}; "
            f"take a base of {sides[1]} pixels, or set data.resolution={sides[1]} and train one"
        )
    for name in config.upsamplers:
        if name in stages and (seen := stages[name].config.seen_by(stages[name].train.name)) != config.seen_by(name):
            raise UserError(
                f"{stages[name].home} enlarges pictures of {seen} pixels, and as {name} it would get pictures of "
                f"{config.seen_by(name)} pixels; let what comes before it draw {seen}, or train another"
            )
    build(Dalle2Config, [layer_of(config, "config"), Layer.of({name: {"path": None} for name in config.taken}, "config")])
