"""`poison_sample.py RANK STEP VALUE ARGUMENTS`: the program, with one sample of one rank and step made of VALUE."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from tessera.cli import main
from tessera.engine import loop

train_step = loop.train_step
RANK, STEP, VALUE = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def poisoned_step(state: Any, stage: Any, batches: list[Any], setting: Any, *rest: Any) -> Any:
    if (setting.world.rank, state.step + 1) == (RANK, STEP):
        images = batches[0].images.clone()
        images[0] = VALUE
        batches = [replace(batches[0], images=images), *batches[1:]]
        print(f"poisoned {batches[0].keys[0]}.", flush=True)
    return train_step(state, stage, batches, setting, *rest)


loop.train_step = poisoned_step
main(sys.argv[4:])
