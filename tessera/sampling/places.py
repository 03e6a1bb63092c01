"""Where the stages of a run lie: in it, or in other runs and exports; and what is said when one is gone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.config import Layer, UserError, build, read_yaml
from tessera.contracts import Recipe, Train
from tessera.engine.checkpoint import list_checkpoints, read_json
from tessera.files import replace_json
from tessera.recipes import find_recipe

TAKEN = "taken.json"  # in a run: the stages that come from elsewhere, and which weights of theirs


def is_run(path: Path) -> bool:
    """Whether a folder is a run, and not an export."""
    return (path / "config.yaml").is_file()


def read_run(folder: Path) -> tuple[Recipe, Layer]:
    """The recipe of a run, and its saved values."""
    if not is_run(folder):
        raise UserError(f"{folder} is no run folder: it has no config.yaml; `tessera list` shows the runs in ./runs")
    saved = read_yaml(folder / "config.yaml")
    return find_recipe(str(saved.values.get("recipe", ""))), saved


def read_config(folder: Path) -> tuple[Recipe, Any]:
    """The recipe of a run, and its config; no weights are read."""
    recipe, saved = read_run(folder)
    return recipe, build(recipe.config_type, [saved])


def home_of(run: Path, train: Train) -> Path:
    """Where the checkpoints of a stage lie."""
    return (run / train.name if train.origin is None else Path(train.origin)) / "checkpoints"


def has_weights(run: Path, train: Train) -> bool:
    """Whether a stage has been trained, here or where it is taken from."""
    return bool(list_checkpoints(home_of(run, train))) or is_exported(train)


def is_exported(train: Train) -> bool:
    """Whether a stage is taken from an export, which has no checkpoints."""
    return train.origin is not None and (Path(train.origin) / "model.safetensors").is_file()


def read_taken(run: Path) -> dict[str, str]:
    """Stage -> the hash of the weights that a run took over from elsewhere."""
    path = run / TAKEN
    return {str(name): str(known) for name, known in read_json(path).items()} if path.is_file() else {}


def note_taken(run: Path, name: str, weights: str) -> None:
    """From now on the run is made with these weights of another's, even if the stage is trained further over there."""
    if (known := read_taken(run)).get(name) != weights:
        replace_json(run / TAKEN, {**known, name: weights})


def taken_by(run: Path) -> list[str]:
    """Which stages a run takes from where, in words; nothing of a run whose config cannot be read."""
    try:
        recipe, config = read_config(run)
    except UserError:
        return []
    taken = [train for train in recipe.steps(config) if train.origin is not None]
    return [f"{train.name} from {train.origin}{'' if has_weights(run, train) else ' (gone)'}" for train in taken]


# --- what is gone


def refuse_gone(run: Path, trains: Sequence[Train]) -> None:
    """Stages that a run takes from where they do not lie: they were moved, or deleted."""
    gone = [train for train in trains if train.origin is not None and not has_weights(run, train)]
    if not gone:
        return
    places = " and ".join(f"its {train.name} from {train.origin}" for train in gone)
    keys = " ".join(f"{train.origin_key}=NEW/{Path(str(train.origin)).name}" for train in gone)
    one = len(gone) == 1
    raise UserError(
        f"{run} takes {places}, where there is no trained stage; put {'it' if one else 'them'} back, or say where "
        f"{'it lies' if one else 'they lie'} now: tessera resume {shlex.quote(str(run))} --set {keys}"
    )


def refuse_incomplete(run: Path, trains: Sequence[Train]) -> None:
    """What is used together is there together: every stage from elsewhere, but for what only stages that are not trained yet
    would read, and in the run itself what its trained stages were trained on."""
    trained = [train for train in trains if has_weights(run, train)]
    read = {name for train in trains for name in train.needs.values()}
    waiting = [train for train in trains if train.origin is None and train not in trained] if trained else []
    asked = {name for train in trains if train not in waiting for name in train.needs.values()}
    refuse_gone(run, [train for train in trains if train.name in asked or train.name not in read])
    for user, lost in lost_needs(trained):
        raise UserError(
            f"{run / lost} is gone, or has no checkpoint any more, and stage {user} was trained on it and cannot be used without "
            f"it; put it back. Without a copy, `tessera resume {shlex.quote(str(run))}` trains it again, which helps where it "
            f"comes out bit for bit as it was"
        )


def lost_needs(trained: Sequence[Train]) -> list[tuple[str, str]]:
    """Names of stages, each with one that it was trained on and that is not among them."""
    there = {train.name for train in trained}
    return [(user.name, name) for user in trained for name in user.needs.values() if name not in there]
