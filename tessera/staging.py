"""One stage of a run before it trains: its data, what it needs of earlier stages, its nets and its batches."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.config import MeshDataConfig, UserError, VideoDataConfig
from tessera.contracts import Loader, Stage, Train
from tessera.data import opening
from tessera.data.clip_sources import UNREADABLE, as_clip_source
from tessera.data.loader import Feed
from tessera.data.mesh_sources import as_mesh_source
from tessera.data.order import Cut
from tessera.data.sources import ImageFolder, Source, Stored, as_source, split_indices
from tessera.engine.dist import World
from tessera.engine.state import TrainState, place
from tessera.engine.track import Journal
from tessera.media.clips import read_facts
from tessera.randomness import mix, mix_text
from tessera.recipes import RECIPES
from tessera.sampling.places import has_weights, note_taken, read_config, refuse_gone
from tessera.sampling.stored import StoredStage, build_nets, needed_by_others, open_stored, read_stage
from tessera.text.bytes import ByteTextConfig, num_bytes

MOST_TOLD = 8  # rejects, in the log
MOST_LOOKED_AT = 32  # files that may be animations

# --- data and config


def open_source(config: Any, data: Any = None) -> Source:
    """The user's folder, or the dataset that was passed in."""
    if data is not None and not isinstance(data, (str, Path)):
        if isinstance(config.data, MeshDataConfig):
            return as_mesh_source(data)
        if isinstance(config.data, VideoDataConfig):
            return as_clip_source(data, channels=config.data.channels, background=config.data.background)
        return as_source(data, channels=config.data.channels, background=config.data.background)
    if config.data.path is None:
        raise UserError(
            "no data: give a folder with --data PATH, or data.path in the file; `tessera data synth shapes` makes one "
            "(a run on a Python dataset resumes with tessera.resume(run, data=dataset))"
        )
    return opening.open_source(config.data.path, config.data)


def refuse_moved(config: Any, folder: Path) -> None:
    """A run finds its data where they lay, or is told where they lie now."""
    if config.data.path is not None and not Path(config.data.path).exists():
        raise UserError(
            f"{config.data.path}, the data of this run, is not there any more; if it has moved: "
            f"tessera resume {shlex.quote(str(folder))} --set data.path=NEW"
        )


def describe(config: Any, source: Source, world: World) -> Iterator[str]:
    """What is trained, which a file need not say; what the data is, and what of it and of this machine does not go with the
    config, for the log."""
    yield f"recipe {config.recipe}, preset {config.preset}"
    if world.device.type == "cpu" and config.preset != "tiny":
        yield f"preset {config.preset} is meant for a GPU, and this is a CPU: steps will be slow; --preset tiny is made for one"
    if not isinstance(source, Stored):
        yield f"data: {len(source):,} samples"
        return
    lengths = [num_bytes(caption) for index in range(len(source)) if (caption := source.caption(index)) is not None]
    yield f"data: {source.root}, {len(source):,} {source.kind}, {len(lengths):,} captions, {len(source.rejects):,} rejects"
    most = config.text.length if isinstance(config.text, ByteTextConfig) else None
    if most is not None and (num := sum(length > most for length in lengths)):
        yield (
            f"data: {num:,} of {len(lengths):,} captions are cut after {most} bytes, and what follows is never learned; the "
            f"longest has {max(lengths):,}: raise text.length"
        )
    yield from first_frames(source)
    yield from (f"data: {note}" for note in source.notes)
    yield from (f"data: rejected {reject.path}: {reject.reason}" for reject in source.rejects[:MOST_TOLD])
    if len(source.rejects) > MOST_TOLD:
        yield f"data: and {len(source.rejects) - MOST_TOLD:,} more; `tessera data check` lists them all"


def first_frames(source: Stored) -> Iterator[str]:
    """Animations that are taken for pictures, as far as the headers of a few files tell."""
    if not isinstance(source, ImageFolder):
        return
    may_move = [index for index in range(len(source)) if source.name(index).lower().endswith((".gif", ".webp", ".png"))]
    looked_at = may_move[:: math.ceil(len(may_move) / MOST_LOOKED_AT) or 1]
    num = sum(is_animated(source.path(index)) for index in looked_at)
    if num:
        yield (
            f"data: {num} of {len(looked_at)} files that were looked into are animations, of which the first frame alone is "
            f"used; `tessera data check` counts them, and recipes of clips (phenaki, nuwa) learn from all frames"
        )


def is_animated(file: Path) -> bool:
    """A file that cannot be read is told by whoever reads it."""
    try:
        return read_facts(file).num_frames > 1
    except UNREADABLE:
        return False


def settled(config: Any, source: Source, trains: Sequence[Train]) -> Any:
    """The config with what only the data knows; data without captions is refused where a stage that trains learns from them."""
    own = [train for train in trains if train.origin is None]
    if any(train.captioned for train in own):
        refuse_uncaptioned(config, source)
    return RECIPES[config.recipe].settle(config, source, [train.name for train in own])


def refuse_uncaptioned(config: Any, source: Source) -> None:
    """Before anything trains: hours later it would be too late."""
    without = sum(source.caption(index) is None for index in range(len(source)))
    if without > config.data.uncaptioned_budget * len(source):
        raise UserError(
            f"{without:,} of {len(source):,} samples have no caption, more than data.uncaptioned_budget="
            f"{config.data.uncaptioned_budget:g} allows; `tessera data check` says which. Add captions (docs/data.md), raise the "
            f"budget, or set text.kind=none to train without text"
        )


def refuse_gone_stages(folder: Path, before: Sequence[Train], after: Sequence[Train], stage: str | None) -> None:
    """Stages that a run takes from elsewhere lie where they lay, or it is told where they lie now: all, or those that one stage
    reads. Of a place that was named just now `stage_elsewhere` says more. The message has all that are gone: one command."""
    origins = {train.name: train.origin for train in before}
    read = {name for train in after if stage in (None, train.name) for name in (train.name, *train.needs.values())}
    kept = [train for train in after if train.name in read and train.origin == origins.get(train.name)]
    if any(train.origin is not None and not has_weights(folder, train) for train in kept):
        refuse_gone(folder, before)


def refuse_replaced(folder: Path, before: Sequence[Train], after: Sequence[Train]) -> None:
    """What a run has trained stays part of it: other stages may have learned from it."""
    own = {train.name for train in before if train.origin is None and has_weights(folder, train)}
    for train in after:
        if train.name in own and train.origin is not None:
            raise UserError(
                f"this run has trained stage {train.name} itself, and would now take it from {train.origin}; "
                f"name that one in a new run, and the other stages of this run with it"
            )
    origins = {train.name: train.origin for train in before}
    added = [train for train in after if train.origin is not None and origins.get(train.name) is None]
    if own and added and all(has_weights(folder, train) for train in after if train.origin is None):
        raise UserError(
            f"this run would now take stage {added[0].name} from {added[0].origin}, and nothing is left here to learn beside it; "
            f"name that one in a new run, and the other stages of this run with it"
        )


def refuse_unfit(trains: Sequence[Train], device: torch.device) -> None:
    """What cannot train on it, before anything else has trained for hours."""
    for train in trains:
        if train.origin is None:
            train.fits(device)


def refuse_missing_stages(config: Any, trains: Sequence[Train]) -> None:
    """Before a new run has a folder: what its stages need is trained in it, too, or taken from elsewhere."""
    here = {train.name for train in trains}
    elsewhere = {train.name for train in RECIPES[config.recipe].steps(config) if train.origin is not None}
    for train in (train for train in trains if train.origin is None):
        if missing := [name for name in train.needs.values() if name not in here | elsewhere]:
            raise UserError(
                f"stage {train.name} needs the {missing[0]}, which a new run does not have; leave out --stage to train all stages"
                f", or go on with a run that has it: `tessera resume RUN --stage {train.name}`"
            )


def stage_elsewhere(origin: str, kind: str = "tokenizer") -> StoredStage:
    """A stage of that kind that was trained elsewhere, to be taken over from there: as others there were trained on it, or the
    newest."""
    path = Path(origin)
    folder = path.parent
    if (path / "config.yaml").is_file() or (path / "config.json").is_file():
        raise UserError(f"{origin} is a run or an export; name a stage of it, such as {path / kind}")
    if (folder / "config.json").is_file():
        stored = open_stored(folder)
        found = stored.stages.get(path.name)
    else:
        recipe, current = read_config(folder)
        names = {train.name: train for train in recipe.steps(current)}
        wanted = needed_by_others(folder, names, path.name) if path.name in names else None
        found = read_stage(folder, recipe, current, names[path.name], wanted or "latest") if path.name in names else None
    if found is None:
        recipe_of_kind = "muse" if kind == "tokenizer" else "dalle2"
        raise UserError(f"{origin} is no trained stage; expected RUN/STAGE, such as runs/{recipe_of_kind}-001/{kind}")
    if not path.name.rstrip("0123456789").endswith(kind.rstrip("0123456789")):
        raise UserError(f"{origin} is a stage of another kind; expected RUN/{kind} of a run that has trained one")
    return found


# --- needs, nets and batches


@dataclass(frozen=True, slots=True)
class Needed:
    """A trained net of an earlier stage, or all of them as one where previews show it."""

    stage: str
    hash: str | None  # None: not what the stage is trained on, but what its previews show
    net: nn.Module


def read_needs(folder: Path, config: Any, train: Train) -> dict[str, Needed]:
    """The trained nets that a stage reads: those it was trained on before, or that others of its run were, or the newest."""
    recipe = RECIPES[config.recipe]
    trains = {other.name: other for other in recipe.steps(config)}
    found = {}
    for net, name in train.needs.items():
        if not has_weights(folder, trains[name]):
            where = trains[name].origin or folder
            raise UserError(
                f"stage {train.name} needs the {name}, of which {where} holds no checkpoint; train it first: "
                f"`tessera resume {shlex.quote(str(folder))}` trains all stages in order"
            )
        wanted = needed_by_others(folder, {train.name: train, **trains}, name) or "latest"
        stored = read_stage(folder, recipe, config, trains[name], wanted)
        (module,) = build_nets(stored).values()
        found[net] = Needed(name, stored.hash, module)
        if trains[name].origin is not None and stored.home != stored.folder:
            pin(stored.folder)
    for net, name in train.shows.items():
        if has_weights(folder, trains[name]):
            shown = read_stage(folder, recipe, config, trains[name], needed_by_others(folder, trains, name) or "latest")
            found[net] = Needed(name, None, nn.ModuleDict(build_nets(shown)))
    return found


def trained_on(given: Mapping[str, Needed]) -> dict[str, str]:
    """Stage -> hash of its weights, of what is more than shown."""
    return {needed.stage: needed.hash for needed in given.values() if needed.hash is not None}


def take_over(folder: Path, config: Any, train: Train) -> None:
    """Notes which weights of a stage from elsewhere this run is made with, once they are known to fit."""
    recipe = RECIPES[config.recipe]
    trains = {other.name: other for other in recipe.steps(config)}
    stored = read_stage(folder, recipe, config, train, needed_by_others(folder, trains, train.name) or "latest")
    build_nets(stored)
    note_taken(folder, train.name, stored.hash)
    if stored.home != stored.folder:
        pin(stored.folder)


def pin(checkpoint: Path) -> None:
    """Notes in another run that its checkpoint is needed, so that its retention spares it."""
    pins = checkpoint.parent / "pins"
    try:
        known = pins.read_text(encoding="utf8").split() if pins.is_file() else []
        if checkpoint.name not in known:
            pins.write_text("\n".join([*known, checkpoint.name]) + "\n", encoding="utf8")
    except OSError:  # somebody else's folder: then it is theirs to keep
        return


def build_stage(config: Any, train: Train, given: Mapping[str, Needed], world: World) -> tuple[Stage, TrainState]:
    """Nets initialised on the CPU from the seed, so that they are equal on every rank and at every layout."""
    if train.batch_size < world.size:
        raise UserError(f"{train.name}.batch_size {train.batch_size} is smaller than the number of ranks {world.size}; raise it")
    if config.engine.parallel == "shard" and config.engine.micro_batch_size == 1 and train.batch_size % world.size:
        raise UserError(
            f"engine.parallel=shard needs equally many micro-batches on {world.size} ranks, and {train.name}.batch_size "
            f"{train.batch_size} is no multiple of that, with engine.micro_batch_size=1; make it one, or set micro batches of 2"
        )
    torch.manual_seed(mix(config.seed, mix_text(train.name)) >> 1)
    stage = train.build()
    frozen = {**stage.frozen, **{net: needed.net for net, needed in given.items()}}
    stage = replace(stage, frozen=frozen, needs={**stage.needs, **trained_on(given)})
    return stage, place(stage, config.seed, config.engine, world.device)


def make_feed(
    config: Any, train: Train, source: Source, world: World, caches: Path, needs: Mapping[str, str], journal: Journal
) -> Feed:
    """What the stage's loader and caches are made from."""
    origins = [Path(other.origin) for other in RECIPES[config.recipe].steps(config) if other.origin is not None]
    return Feed(
        source=source,
        config=config.data,
        cut=Cut(train.batch_size, config.engine.micro_batch_size, world.rank, world.size),
        seed=config.seed,
        device=world.device,
        validation_samples=config.engine.validation_samples,
        preview_samples=config.engine.preview_samples,
        caches=caches,
        needs=needs,
        say=journal.say,
        note=journal.note,
        show=journal.progress,
        wait=lambda: world.together(lambda: None),
        lenders=tuple(origin.absolute().parent / "cache" for origin in origins),
    )


def make_loader(train: Train, given: Mapping[str, Needed], feed: Feed) -> Loader:
    """The caches first, then the batches that read them."""
    return train.feed({net: needed.net for net, needed in given.items()}, feed)


def fingerprint(source: Source, validation_fraction: float) -> dict[str, Any]:
    """Says whether the data is still the same: how many samples, and a hash over the keys in order."""
    mixed = 0
    for index in range(len(source)):
        mixed = mix(mixed, mix_text(source.key(index)))
    train, _ = split_indices(source, validation_fraction)
    return {"num_samples": len(source), "num_train": len(train), "keys": f"{mixed:016x}"}
