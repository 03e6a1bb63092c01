"""What lies on the disk: a run or an export, its config and the weights of its stages. YAML, JSON and safetensors only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tessera.config import Config, Layer, UserError, build, nearest
from tessera.contracts import Recipe, Train
from tessera.engine.checkpoint import (
    by_net,
    faults,
    hashes_of,
    list_checkpoints,
    misfits,
    newest_valid,
    read_json,
    read_pointer,
    read_tensors,
    read_weights,
    step_name,
    weights_hash,
)
from tessera.files import digest
from tessera.recipes import find_recipe
from tessera.sampling.places import (
    has_weights,
    home_of,
    is_exported,
    is_run,
    lost_needs,
    read_config,
    read_taken,
    refuse_gone,
    refuse_incomplete,
)

EXPORT_FORMAT = 1
RETRIES = 3  # a run in progress may delete an old checkpoint while it is read

Weights = Mapping[str, Mapping[str, Tensor]]  # net -> parameter -> tensor


@dataclass(frozen=True, slots=True)
class StoredStage:
    """One trained stage."""

    train: Train
    config: Any  # the root config that it was trained with
    folder: Path  # of the files that were read
    step: int
    weights: Weights
    averaged: frozenset[str]  # the nets whose weights are averages
    hash: str  # of the file of those weights

    @property
    def home(self) -> Path:
        """RUN/STAGE, wherever it was trained, or EXPORT/STAGE."""
        return self.folder.parents[1] if self.folder.parent.name == "checkpoints" else self.folder


@dataclass(frozen=True, slots=True)
class Stored:
    """A run or an export that was found whole."""

    path: Path
    recipe: Recipe
    config: Any  # that its stages were trained with, and what of the run's may change at any time
    stages: Mapping[str, StoredStage]  # those that have been trained, in the recipe's order


def open_stored(path: Path | str, checkpoint: str | None = None) -> Stored:
    """A run, at its newest valid checkpoint or the one that was named, or an export."""
    folder = Path(path)
    if is_run(folder):
        return open_run(folder, checkpoint or "latest")
    if not (folder / "config.json").is_file():
        raise UserError(describe_wrong(folder))
    if checkpoint is not None:
        raise UserError(f"{folder} is an export, which holds one set of weights; leave out checkpoint={checkpoint!r}")
    return open_export(folder)


def place_for_results(model: Path) -> Path:
    """Where what a model makes is put: into its run; of an export, which stays as it was written, into the current folder."""
    return model if is_run(model) else Path()


def describe_wrong(folder: Path) -> str:
    """Why a path is neither run nor export, and what was probably meant."""
    expected = "expected a run folder (config.yaml, as `tessera train` makes it) or an export (config.json, `tessera export`)"
    if not folder.exists():
        names = [other.name for other in folder.parent.iterdir()] if folder.parent.is_dir() else []
        near = nearest(folder.name, names)
        return f"{folder} does not exist{f'; did you mean {folder.with_name(near)}?' if near else ''}; {expected}"
    for above in list(folder.absolute().parents)[:4]:
        if (above / "config.yaml").is_file() or ((above / "manifest.json").is_file() and (above / "config.json").is_file()):
            return f"{folder} is a part of {above}: open that one, with checkpoint='step-N' if not the latest is meant"
    return f"{folder} is neither a run nor an export; {expected}"


# --- runs


def open_run(folder: Path, checkpoint: str = "latest") -> Stored:
    """A run, also while it is being trained; nothing is written or locked.

    `checkpoint` is that of the last stage that was trained in it. Of an earlier one it is what later ones were trained on, of one
    from elsewhere what was taken over; else the newest.
    """
    recipe, current = read_config(folder)
    trains = {train.name: train for train in recipe.steps(current)}
    refuse_incomplete(folder, list(trains.values()))
    trained = [name for name, train in trains.items() if has_weights(folder, train)]
    if not trained:
        raise UserError(f"{folder} holds no checkpoint yet; train it first: tessera resume {folder}")
    stages, last = {}, next((name for name in reversed(trained) if trains[name].origin is None), None)
    for name in trained:
        wanted = needed_by_others(folder, trains, name)
        stages[name] = read_stage(folder, recipe, current, trains[name], wanted or (checkpoint if name == last else "latest"))
    return Stored(folder, recipe, config_of(current, trains, stages), stages)


def config_of(current: Any, trains: Mapping[str, Train], stages: Mapping[str, StoredStage]) -> Any:
    """What draws, where stages were trained before or after a `resume --set`: of each its own section, of what they share that
    of the last one which builds on others; and of the run, at any time, how is drawn and judged, and where things lie now."""
    own = [name for name in stages if trains[name].origin is None]
    alone = own if len(own) == len(stages) else []  # what stages from elsewhere share is in the run's config
    builders = [name for name in own if trains[name].needs or trains[name].shows] or alone
    shared = stages[builders[-1]].config if builders else current
    sections = {name: (stages[name].config if name in own else current) for name in stages if name in type(current).model_fields}
    places = {name: moved(getattr(shared, name), value) for name, value in current if isinstance(value, Config)}
    uses = {"sample": current.sample, "evaluate": current.evaluate}
    return shared.model_copy(update=places | {name: getattr(config, name) for name, config in sections.items()} | uses)


def moved(then: Any, now: Any) -> Any:
    """A section as it was, but for the place of files that it names."""
    if type(then) is not type(now) or "path" not in type(now).model_fields:
        return then
    return then.model_copy(update={"path": now.path})


def read_stage(run: Path, recipe: Recipe, current: Any, train: Train, wanted: str = "latest") -> StoredStage:
    """A trained stage of a run: of a checkpoint's name or of the hash of its weights. One from elsewhere may be of another
    recipe; its nets are built as this run uses them."""
    refuse_gone(run, [train])
    if is_exported(train):
        origin = Path(str(train.origin))
        found = open_export(origin.parent).stages[origin.name]
        if re.fullmatch("[0-9a-f]{64}", wanted) and found.hash != wanted:
            raise UserError(f"{origin} has changed since this run was made with it; put the old export back")
        return used_as(train, found)
    home, name = home_of(run, train), train.name
    if train.origin is not None:
        name = home.parent.name
        recipe, current = read_config(home.parents[1])
    if re.fullmatch("[0-9a-f]{64}", wanted):
        fitting = [path.name for path in list_checkpoints(home) if wanted in hashes_of(path)]
        if not fitting:
            raise UserError(
                f"{home} no longer holds the checkpoint on which other stages of this run were trained, or which it took over "
                f"(weights {wanted[:12]}); put it back, or make a new run"
            )
        wanted = fitting[-1]
    return used_as(train, _read_checkpoint(home, recipe, current, name, wanted))


def used_as(train: Train, found: StoredStage) -> StoredStage:
    """What was found, with nets as `train` builds them."""
    return found if train.origin is None else replace(found, train=replace(found.train, serves=train.serves))


def needed_by_others(run: Path, trains: Mapping[str, Train], name: str) -> str | None:
    """The hash of a stage's weights that another stage of the run was trained on, if one was; of the earliest such stage. Of a
    stage from elsewhere also what was taken over, or before that, what others from elsewhere were trained on, if it is there."""
    users = [other for other in trains.values() if name in other.needs.values()]
    for other in users:
        if other.origin is None and (known := needed_of(home_of(run, other), name)) is not None:
            return known
    if trains[name].origin is None:
        return None
    if (noted := read_taken(run).get(name)) is not None:
        return noted
    there = {known for path in list_checkpoints(home_of(run, trains[name])) for known in hashes_of(path)}
    return next((known for other in users if (known := needed_of(home_of(run, other), name)) in there), None)


def needed_of(home: Path, name: str) -> str | None:
    """The hash of the weights of stage `name` on which a stage's newest checkpoint was trained."""
    path = newest_valid(home)[0]
    known = None if path is None else read_json(path / "manifest.json").get("needs")
    return str(known[name]) if isinstance(known, dict) and isinstance(known.get(name), str) else None


def _read_checkpoint(home: Path, recipe: Recipe, current: Any, name: str, checkpoint: str) -> StoredStage:
    for _ in range(RETRIES):
        folder = choose_checkpoint(home, checkpoint)
        try:
            config = config_then(folder, recipe, current)
            weights = read_weights(folder)
            with safe_open(folder / "ema.safetensors", framework="pt") as file:
                averaged = frozenset(key.partition("/")[0] for key in file.keys())  # noqa: SIM118 (no mapping)
        except (UserError, OSError):
            if folder.is_dir():
                raise
        else:
            step = int(folder.name.removeprefix("step-"))
            return StoredStage(stage_of(recipe, config, name), config, folder, step, weights, averaged, weights_hash(folder))
    raise UserError(f"{home}: each checkpoint was deleted while it was read; raise engine.keep_checkpoints, or try again")


def config_then(checkpoint: Path, recipe: Recipe, current: Any) -> Any:
    """The config at the save of a checkpoint: `resume --set` may have changed the run's since. One without has the run's."""
    path = checkpoint / "manifest.json"
    values = read_json(path).get("config")
    if values is None:
        return current
    if not isinstance(values, dict):
        raise UserError(f"{path} has a config that is no JSON object; take another checkpoint")
    try:
        return build(recipe.config_type, [Layer.of(values, str(path))])
    except RecursionError:
        raise UserError(f"{path} has a config that is nested without end; take another checkpoint") from None


def stage_of(recipe: Recipe, config: Any, name: str) -> Train:
    """A stage of a recipe as a config has it."""
    for train in recipe.steps(config):
        if train.name == name:
            return train
    raise UserError(f"recipe {recipe.name} has no stage {name!r} with the config of its checkpoint")


def choose_checkpoint(home: Path, name: str) -> Path:
    """`latest` (the newest valid one), `best` or `step-N`, found whole."""
    if name == "latest":
        path, skipped = newest_valid(home)
        if path is None:
            raise UserError(f"no checkpoint in {home} is intact: {'; '.join(skipped) or 'there is none'}")
        return path
    named = re.fullmatch(r"step-(\d{1,12})", name)
    best = read_pointer(home / "best")
    found = step_name(int(named[1])) if named else best if name == "best" else None
    if found is None or not (home / found).is_dir():
        pointed = ["best"] if best is not None and (home / best).is_dir() else []
        there = ", ".join(["latest", *pointed, *(path.name for path in list_checkpoints(home))])
        raise UserError(f"{home} has no checkpoint called {name!r}; it has {there}")
    if fault := faults(home / found):
        raise UserError(f"checkpoint {home / found} is damaged: {fault}; take another one, such as `latest`")
    return home / found


# --- exports


def open_export(folder: Path) -> Stored:
    """An export whose files are those of its manifest."""
    facts = read_json(folder / "config.json")
    refuse_newer(folder / "config.json", facts)
    name, stages, values = facts.get("recipe"), facts.get("stages"), facts.get("config")
    sound = isinstance(stages, dict) and all(map(_is_stage, stages, stages.values()))
    if not isinstance(stages, dict) or not sound or not isinstance(values, dict) or not isinstance(name, str):
        raise UserError(
            f"{folder / 'config.json'} is not that of an export: expected format, recipe, config and stages, each with its "
            f"step, nets and averaged; export the run again"
        )
    refuse_damage(folder, ["config.json", *(f"{stage}/model.safetensors" for stage in stages)])
    recipe = find_recipe(name)
    origin = str(folder / "config.json")
    try:
        config = build(recipe.config_type, [Layer.of(values, origin)])
        own = {
            stage: build(recipe.config_type, [Layer.of(known["config"], origin)]) if "config" in known else config
            for stage, known in stages.items()
        }
    except (UserError, RecursionError) as error:
        raise UserError(f"{error}\n(written by tessera {facts.get('tessera')}, this is {our_version()})") from None
    names = [train.name for train in recipe.steps(config)]
    if unknown := [stage for stage in stages if stage not in names]:
        raise UserError(
            f"{folder} has stages {unknown}, recipe {name} has {names}; it was written by tessera {facts.get('tessera')}, "
            f"this is {our_version()}"
        )
    refuse_parts(folder, [train for train in recipe.steps(config) if train.name in stages])
    found = {stage: _read_stage(folder / stage, recipe, own[stage], stages[stage]) for stage in names if stage in stages}
    return Stored(folder, recipe, config, found)


def refuse_parts(folder: Path, trains: Sequence[Train]) -> None:
    """An export of a run of which a stage was gone has another that cannot be used."""
    for user, lost in lost_needs(trains):
        raise UserError(
            f"{folder} holds no {lost}, and its {user} was trained on one and cannot be used without it; export the run again: "
            f"tessera export RUN --out NEW"
        )


def _is_stage(name: str, facts: Any) -> bool:
    """A name that cannot lead out of the folder, and the facts that an export gives."""
    known = isinstance(facts, dict) and isinstance(facts.get("step"), int)
    known = known and isinstance(facts.get("config", {}), dict)  # there where it is not that of the last stage
    return name.isidentifier() and known and all(isinstance(facts.get(key), list) for key in ("nets", "averaged"))


def _read_stage(folder: Path, recipe: Recipe, config: Any, facts: Mapping[str, Any]) -> StoredStage:
    weights, averaged = by_net(read_tensors(folder / "model.safetensors")), frozenset(map(str, facts["averaged"]))
    hashed = digest(folder / "model.safetensors")
    return StoredStage(stage_of(recipe, config, folder.name), config, folder, facts["step"], weights, averaged, hashed)


def refuse_newer(path: Path, facts: Mapping[str, Any]) -> None:
    """A format that this program does not know."""
    if not isinstance(facts.get("format"), int):
        raise UserError(f"{path} is not that of an export: it names no format; another program may have made it")
    if facts["format"] != EXPORT_FORMAT:
        writer = f" (written by tessera {facts['tessera']})" if "tessera" in facts else ""
        raise UserError(
            f"{path} has format {facts['format']}{writer}; this is "
            f"tessera {our_version()}, which reads format {EXPORT_FORMAT}: install a newer one, or export the run again"
        )


def refuse_damage(folder: Path, names: list[str]) -> None:
    """Sizes and hashes against the manifest. Only files that belong to an export are opened, whatever the manifest names."""
    manifest = read_json(folder / "manifest.json") if (folder / "manifest.json").is_file() else {}
    if manifest:
        refuse_newer(folder / "manifest.json", manifest)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise UserError(f"{folder} has no manifest.json with its files, so it cannot be checked; export the run again")
    if set(files) != set(names):
        raise UserError(f"{folder / 'manifest.json'} names {sorted(files)}, expected {sorted(names)}; export the run again")
    for name in names:
        wanted, path = files[name], folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing; copy or export it again")
        if not isinstance(wanted, dict) or not isinstance(wanted.get("bytes"), int):
            raise UserError(f"{folder / 'manifest.json'} does not say how many bytes {name} has; copy or export it again")
        if (size := path.stat().st_size) != wanted["bytes"]:
            raise UserError(f"{path} is damaged: it has {size} bytes, expected {wanted['bytes']}; copy or export it again")
        if digest(path) != wanted.get("sha256"):
            raise UserError(f"{path} is damaged: it is not what was written (sha256 differs); copy or export it again")


# --- nets


def build_nets(stage: StoredStage) -> dict[str, nn.Module]:
    """Fresh nets, filled. Their first random weights leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        nets = dict(stage.train.serves())
    for name, net in nets.items():
        found = dict(stage.weights.get(name, {}))
        if wrong := misfits(found, net):
            raise UserError(
                f"{stage.folder} does not fit net {name!r} of its config: {len(wrong)} tensors differ "
                f"({', '.join(sorted(wrong)[:4])}); its nets are {', '.join(stage.weights) or 'none'}. "
                f"What a stage of your own trained can be read with safetensors, not opened as the recipe's"
            )
        net.load_state_dict(found)
        net.eval().requires_grad_(False)
    return nets


def our_version() -> str:
    """The version of this program, as it was installed."""
    try:
        return version("tessera-gen")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
