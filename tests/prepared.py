"""A stage as a run has it before its first step, with nets of earlier stages that nobody has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tessera.contracts import Loader, Stage, Train
from tessera.engine.dist import World
from tessera.engine.state import TrainState
from tessera.engine.track import Journal
from tessera.recipes import RECIPES
from tessera.staging import Needed, build_stage, make_feed, make_loader, open_source


def prepared(config: Any, train: Train, world: World, caches: Path) -> tuple[Stage, TrainState, Loader]:
    """Nets, and batches whose caches are made where it is told; all functions of the seed."""
    others = {other.name: other for other in RECIPES[config.recipe].steps(config)}
    given = {}
    for net, name in train.needs.items():
        torch.manual_seed(0)
        (module,) = others[name].serves().values()
        given[net] = Needed(name, f"fresh {name}", module.eval())
    stage, state = build_stage(config, train, given, world)
    journal = Journal(caches / "log.txt", speaks=False)
    feed = make_feed(config, train, open_source(config), world, caches, stage.needs, journal)
    return stage, state, make_loader(train, given, feed)
