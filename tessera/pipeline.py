"""What the command line and Python users call: `resolve` a config, `train` it, `resume` a run.

Here the rooms meet: a recipe's stages, the data that feeds them, and the engine that trains them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tessera.config import Kinds, Layer, UserError, build, difference, layer_of, nearest, parse_sets, read_yaml
from tessera.contracts import Stage, Train
from tessera.data.sources import Source, Stored
from tessera.engine.checkpoint import newest_valid, point_back, read_json, restore, sweep
from tessera.engine.dist import World, join, leave
from tessera.engine.loop import Fit, Job, Stopped
from tessera.engine.lost import lost_rank
from tessera.engine.run import lock, never_started, new_run, write_config, write_environment
from tessera.engine.signals import StopFlag
from tessera.engine.state import TrainState
from tessera.engine.track import Journal
from tessera.engine.trackers import refuse_missing
from tessera.recipes import RECIPES, build_unnamed, find_recipe
from tessera.sampling.places import read_config, read_run
from tessera.staging import (
    build_stage,
    describe,
    fingerprint,
    make_feed,
    make_loader,
    open_source,
    read_needs,
    refuse_gone_stages,
    refuse_missing_stages,
    refuse_moved,
    refuse_replaced,
    refuse_uncaptioned,
    refuse_unfit,
    settled,
    stage_elsewhere,
    take_over,
    trained_on,
)  # fmt: skip

StageBuilders = Mapping[str, Callable[[], Stage]]


# --- configuration


def resolve(
    target: str, *, preset: str | None = None, data: str | None = None, steps: int | None = None,
    sets: Sequence[str] = (), stage: str | None = None,
) -> Any:  # fmt: skip
    """A recipe's name or a YAML file, and flags, to a complete config. Later ones win: preset, file, flags, --set."""
    layers: list[Layer] = []
    name = target
    if Path(target).suffix in (".yaml", ".yml") or Path(target).is_file():
        layers.append(read_yaml(Path(target)))
        name = str(layers[0].values.get("recipe", "muse"))
    unnamed = bool(layers) and "recipe" not in layers[0].values
    recipe, own = find_recipe(name), parse_sets(sets)
    in_file = str(layers[0].values.get("preset", "small")) if layers else "small"
    chosen = str(own.values.get("preset", preset or in_file))
    if chosen not in recipe.presets:
        hint = nearest(chosen, recipe.presets)
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise UserError(f"recipe {name} has no preset {chosen!r}{meant}; it has {', '.join(recipe.presets)}")
    kind = recipe.config_type.said([*layers, own]) if isinstance(recipe.config_type, Kinds) else None
    asked = () if kind is None else (kind,)
    layers.insert(0, layer_of(recipe.presets[chosen](*asked), f"preset {chosen}"))
    if preset is not None:
        layers.append(Layer.of({"preset": preset}, "--preset"))
    if data is not None:
        layers.append(Layer.of({"data": {"path": data}}, "--data"))
    layers.append(own)
    made = build_unnamed(recipe, layers, target) if unnamed else build(recipe.config_type, layers)
    trains = [train for train in pick(recipe.steps(made), stage) if train.origin is None]
    if steps is not None:  # behind --set, which may be what makes a stage; but what it says of steps itself stands
        named = [train.name for train in trains if isinstance(said := own.values.get(train.name), Mapping) and "steps" in said]
        layers.append(Layer.of({train.name: {"steps": steps} for train in trains if train.name not in named}, "--steps"))
        made = build(recipe.config_type, layers)
    if name != target and chosen != in_file and in_file in recipe.presets:
        refuse_idle_preset(made, recipe.presets[in_file](*asked), layers[1:], chosen, target)
    return made


def refuse_idle_preset(made: Any, start: Any, layers: Sequence[Layer], chosen: str, file: str) -> None:
    """A preset under a file that sets every value would change nothing but its name."""
    try:
        other = build(type(made), [layer_of(start, "the file's preset"), *layers])
    except UserError:
        return  # what stands in the file does not fit its own preset, so the chosen one does make a difference
    if made == other:
        raise UserError(
            f"preset {chosen} changes nothing: {file} sets every value itself; "
            f"leave the preset out, or delete from the file what it should decide"
        )


def pick(trains: Sequence[Train], stage: str | None, stages: StageBuilders | None = None) -> Sequence[Train]:
    """All stages, or the one that was named; the user's own in the place of ours."""
    names, own = [train.name for train in trains], stages or {}
    for name in (*own, *([] if stage is None else [stage])):
        if name not in names:
            hint = nearest(name, names)
            meant = f"; did you mean {hint!r}?" if hint else ""
            raise UserError(f"no stage is called {name!r}{meant}; this recipe has {', '.join(names)}")
    ours = [train for train in trains if stage in (None, train.name)]
    return [replace(train, build=own[train.name]) if train.name in own else train for train in ours]


# --- training


def train(
    config: Any, *, data: Any = None, run: Path | str | None = None, preset: str | None = None, steps: int | None = None,
    sets: Sequence[str] = (), stage: str | None = None, stages: StageBuilders | None = None,
) -> Path:  # fmt: skip
    """Trains the stages of a config in a new run folder, which it returns.

    `config` is a recipe's name or a YAML file, with `preset`, `steps` and `sets` as on the command line, or a config that is
    complete. `data` is a folder, or any map-style dataset whose samples have key, image (or mesh) and caption
    (`data.sources.as_source`, `data.mesh_sources.as_mesh_source`).
    `stages` puts the user's own stage in the place of one of ours: name -> function that builds it.
    """
    if isinstance(config, (str, Path)):
        config = resolve(str(config), preset=preset, steps=steps, sets=sets, stage=stage)
    elif preset is not None or steps is not None or sets:
        raise UserError(
            "preset, steps and sets go with a recipe's name or a file; a config object is complete: resolve() makes one"
        )
    if isinstance(data, (str, Path)):
        config = build(type(config), [layer_of(config, "config"), Layer.of({"data": {"path": str(data)}}, "data")])
    recipe = RECIPES[config.recipe]
    config = recipe.adopt(with_absolute_path(config), stage_elsewhere)
    refuse_missing_stages(config, pick(recipe.steps(config), stage, stages))  # or a wrong name, before any file is read
    with session(config) as (world, stop):
        source = open_source(config, data)
        config = settled(config, source, pick(recipe.steps(config), stage))
        trains = pick(recipe.steps(config), stage, stages)
        refuse_unfit(trains, world.device)
        refuse_inside(source, Path(run) if run else Path("runs"))
        made = world.together(lambda: new_run(config.recipe, Path(run) if run else None) if world.main else None)
        folder = world.gather(made)[0]
        assert folder is not None
        _train_all(folder, config, trains, source, world, stop)
    return folder


def with_absolute_path(config: Any) -> Any:
    """So that the run can be resumed from anywhere."""
    if config.data.path is None:
        return config
    path = str(Path(config.data.path).absolute())
    if path.encode("utf8", "replace").decode() != path:
        raise UserError(f"the path {path!a} is not Unicode, so no config file can hold it; rename the folder, or link to it")
    return build(type(config), [layer_of(config, "config"), Layer.of({"data": {"path": path}}, "data")])


def refuse_inside(source: Source, run: Path) -> None:
    """A run inside its data folder would read its own previews as data from the next start on."""
    if isinstance(source, Stored) and run.resolve().is_relative_to(source.root.resolve()):
        raise UserError(f"{run} lies inside the data folder {source.root}: what it draws would become data; give --run elsewhere")


def resume(
    run: Path | str, *, sets: Sequence[str] = (), data: Any = None, stage: str | None = None, stages: StageBuilders | None = None
) -> Path:  # fmt: skip
    """Goes on where a run stopped, exactly. Needs nothing but its folder; `stage` goes on with that one only."""
    folder = Path(run)
    if never_started(folder):
        raise UserError(
            f"{folder} has no config.yaml: training never started in it; give its `tessera train` again, "
            f"with --run {shlex.quote(str(folder))}, which may use it"
        )
    recipe, saved = read_run(folder)
    old = build(recipe.config_type, [saved])
    asked = parse_sets(sets)
    refuse_other_kind(recipe.config_type, saved, asked)
    config = with_absolute_path(build(recipe.config_type, [saved, asked]))
    changes = difference(old, config)
    adopts = any(
        "needs." in key or (key.endswith(".path") and key != "data.path") or isinstance(new, dict) for key, _, new in changes
    )
    refuse_gone_stages(folder, recipe.steps(old), recipe.steps(config), None if adopts else stage)
    if adopts:
        config = recipe.adopt(config, stage_elsewhere)
    refuse_changes(changes)
    refuse_replaced(folder, recipe.steps(old), recipe.steps(config))
    if data is None:
        refuse_moved(config, folder)
    with session(config) as (world, stop):
        source = open_source(config, data)
        names = [train.name for train in pick(recipe.steps(config), stage) if train.origin is None]
        config = recipe.settle(config, source, names)  # --set may have changed how captions are read
        trains = pick(recipe.steps(config), stage, stages)
        refuse_unfit(trains, world.device)
        pairs = {key: [list(v) if isinstance(v, tuple) else v for v in pair] for key, *pair in changes}  # as files write it
        said = [f"changed: {key}: {before} -> {after}" for key, (before, after) in pairs.items()]
        _train_all(folder, config, trains, source, world, stop, said)
    return folder


def prepare(run: Path | str, stage: str | None = None) -> dict[str, list[Path]]:
    """Makes the caches that the stages of a run read, without training; stage -> the folder of each."""
    folder = Path(run)
    recipe, config = read_config(folder)
    trains = [train for train in pick(recipe.steps(config), stage) if train.origin is None]
    refuse_gone_stages(folder, recipe.steps(config), recipe.steps(config), stage)
    refuse_moved(config, folder)
    used: dict[str, list[Path]] = {train.name: [] for train in trains}
    with session(config) as (world, stop), world.together(lambda: lock(folder) if world.main else nullcontext()):
        source, journal = open_source(config), Journal(folder / "log.txt", speaks=world.main)
        try:
            for train in trains:
                given = world.together(partial(read_needs, folder, config, train))
                for needed in given.values():
                    needed.net.to(world.device)
                feed = make_feed(config, train, source, world, folder / "cache", trained_on(given), journal)
                check = partial(leave_on_signal, world, stop, None)
                make_loader(train, given, replace(feed, uses=used[train.name].append, check=check))
        except Exception as error:
            error.add_note(str(folder))  # the message of the command line names the run, and the command that goes on
            error.add_note("tessera data prepare")
            raise
    if not any(used.values()):
        which = f"stage {stage} of recipe {recipe.name} reads" if stage else f"the stages of {folder} read"
        raise UserError(f"{which} no caches, but the files themselves; there is nothing to prepare")
    return {name: folders for name, folders in used.items() if folders}


def refuse_other_kind(root: Any, saved: Layer, sets: Layer) -> None:
    """Of generator or tokenizer: another one has other weights, and other options."""
    asked = root.said([sets]) if isinstance(root, Kinds) else None
    if asked is not None and asked != root.said([saved]):
        raise UserError(
            f"--set {root.key}={asked}: a run keeps its {root.key}, here {root.said([saved])}; start a new run (with "
            f"base.needs.tokenizer it takes a tokenizer that is trained already)"
        )


def refuse_changes(changes: Sequence[tuple[str, object, object]]) -> None:
    """The order of samples is a function of these: changing one would repeat some samples and never show others. Embeddings of
    another kind are other numbers than those that nets have learned from."""
    for key, before, after in changes:
        if key.startswith("embeddings.") and key != "embeddings.path":
            raise UserError(
                f"--set {key}={after}: this run was made with {before}, and learns from those embeddings; start a new run to "
                f"change them (embeddings.path may change, where the same ones have moved)"
            )
        if key == "seed" or key.endswith(".batch_size") or key.startswith("recipe"):
            raise UserError(
                f"--set {key}={after}: this run was made with {before}, and its order of samples depends on it; "
                f"start a new run to change it (engine.micro_batch_size may change at any time)"
            )


@contextmanager
def session(config: Any, *, saves: bool = True) -> Iterator[tuple[World, StopFlag]]:
    """Ranks joined, signals caught, numerics set. What saves nothing leaves at the first signal."""
    engine = config.engine
    refuse_missing(engine.trackers)
    torch.use_deterministic_algorithms(engine.deterministic, warn_only=True)
    torch.backends.cudnn.benchmark = not engine.deterministic  # shapes are few and fixed
    torch.set_float32_matmul_precision("high" if engine.precision == "bf16" else "highest")
    torch.backends.cudnn.allow_tf32 = engine.precision == "bf16"
    with StopFlag(at_once=not saves) as stop:
        try:
            yield join(engine), stop
        except RuntimeError as error:
            lost = lost_rank(error, engine.timeout_s)
            if lost is None:
                raise
            raise lost from None
        finally:
            leave()
            torch.use_deterministic_algorithms(False)


def _train_all(
    folder: Path, config: Any, trains: Sequence[Train], source: Source, world: World, stop: StopFlag, changes: Sequence[str] = ()
) -> None:
    """The main rank locks the folder and writes environment and config; then every stage trains."""
    with world.together(lambda: lock(folder) if world.main else nullcontext()):
        journal = Journal(folder / "log.txt", speaks=world.main)
        if world.main:
            if not (folder / "env.json").exists():  # later ones are written once it is certain that they train
                write_environment(folder, world)
            if not (folder / "config.yaml").exists():  # an older one is replaced once its checkpoint is known to fit the new
                write_config(folder, config)
        journal.say(f"run {folder} on {world.device}, {world.size} rank{'s' if world.size > 1 else ''}")
        for line in [*changes, *describe(config, source, world)]:
            journal.say(line)
        try:
            for train in trains:
                train_stage(folder, config, train, source, world, stop, journal)
            if world.main:  # where all stages come from elsewhere, none has written it
                write_config(folder, config)
        except Exception as error:
            journal.note(f"ended: {type(error).__name__}: {error}")
            error.add_note(str(folder))  # the message of the command line names the run to resume
            raise


def train_stage(folder: Path, config: Any, train: Train, source: Source, world: World, stop: StopFlag, journal: Journal) -> None:
    """One stage, from its newest valid checkpoint or from the start."""
    home = folder / train.name
    if train.origin is not None:
        world.together(lambda: take_over(folder, config, train) if world.main else None)
        journal.say(f"{train.name}: taken from {train.origin}")
        return
    given = world.together(lambda: read_needs(folder, config, train))
    stage, state = build_stage(config, train, given, world)
    facts = {
        "stage": train.name,
        "batch_size": train.batch_size,
        "world_size": world.size,
        "data": fingerprint(source, config.data.validation_fraction),
        "num_captioned": sum(source.caption(index) is not None for index in range(len(source))),  # for the model card
        "needs": dict(stage.needs),
        "config": config.model_dump(mode="json"),
    }
    resumed = world.together(lambda: _resume_state(home / "checkpoints", state, facts, world, journal))
    if state.step >= train.steps:
        journal.say(f"{train.name}: all {train.steps} steps are done (it is at step {state.step})")
        return
    if world.main:  # not before: a later stage may refuse what is new in it
        write_config(folder, config)
    if train.captioned:  # a run of --stage tokenizer was not asked for captions
        refuse_uncaptioned(config, source)
    if world.main:
        write_environment(folder, world, {"stage": train.name, "from_step": state.step})
    for turn in stage.turns:
        if turn.start >= train.steps:
            journal.say(f"{train.name}: turn {turn.name} starts at step {turn.start}, so in {train.steps} steps it never trains")
    feed = make_feed(config, train, source, world, folder / "cache", stage.needs, journal)
    loader = make_loader(train, given, replace(feed, check=partial(leave_on_signal, world, stop, state.step)))
    facts["num_used"] = len(loader.train)
    before = next((read_json(home / "checkpoints" / name / "manifest.json").get("num_used") for name in resumed), None)
    if before not in (None, len(loader.train)):  # samples without an embedding, or whose file a cache could not read
        journal.say(
            f"{train.name}: {before:,} samples could be used when this run was saved, {len(loader.train):,} can be now: "
            f"from here on their order differs"
        )
    job = Job(
        train.name, stage, loader, train.steps, train.batch_size, home, config.engine, facts, resumed,
        num_samples=len(loader.train), corrupt_budget=config.data.corrupt_budget,
    )  # fmt: skip
    if not len(loader.held_out):
        journal.say(f"{train.name}: no sample falls into the validation split, so there is no validation and no best")
    Fit(job, state, world, journal, stop).run()


def leave_on_signal(world: World, stop: StopFlag, step: int | None) -> None:
    """While caches are made: what is written stays. Several ranks finish first, because not all may have heard it."""
    if stop.signal is not None and world.size == 1:
        raise Stopped(stop.signal, step)


def _resume_state(
    checkpoints: Path, state: TrainState, facts: Mapping[str, Any], world: World, journal: Journal
) -> frozenset[str]:
    """Fills the state from the newest valid checkpoint; returns its name, which retention spares."""
    if world.main:
        checkpoints.mkdir(parents=True, exist_ok=True)
        sweep(checkpoints)
    path, skipped = world.gather(newest_valid(checkpoints) if world.main else (None, []))[0]
    for line in skipped:
        journal.say(f"checkpoint passed over: {line}")
    if path is None:
        if skipped:
            raise UserError(
                f"none of the {len(skipped)} checkpoints in {checkpoints} is intact; "
                f"move that folder away to train this stage anew"
            )
        if (checkpoints.parent / "metrics.jsonl").exists():
            journal.say(f"{checkpoints} holds no checkpoint yet: training starts at step 0")
        return frozenset()
    restore(path, state)
    if world.main:
        point_back(checkpoints, path.name, state.best_step)
    saved = read_json(path / "manifest.json").get("data")
    if saved != facts["data"]:
        before, now = ((known or {}).get("num_samples") for known in (saved, facts["data"]))
        journal.say(
            f"the data has changed since this run was saved ({before} samples then, {now} now): from here on their order differs"
        )
    journal.say(f"resumed from {path} at step {state.step}")
    return frozenset({path.name})
