"""`die_between.py PLACE ARGUMENTS`: the program, which kills its process group between or inside its later stages.

PLACE is `start STAGE` (before anything of it is made), `half a shard` or `shard` (of the first cache), `half an array` (of the
embeddings), `half the meshes` (of their cache), `cache` (whole, nothing trained from it yet), or `step STAGE N`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tessera import pipeline
from tessera.cli import main
from tessera.data import embedding_cache, mesh_cache, prepare
from tessera.engine import loop

PLACE = sys.argv[1]
make_loader, write_shard, train_step, train_stage = (
    pipeline.make_loader,
    prepare.write_shard,
    loop.train_step,
    pipeline.train_stage,
)
write_array = embedding_cache.write_array
here = ""  # the stage


def die() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def start(folder: Path, config: Any, train: Any, *rest: Any) -> None:
    global here
    here = train.name
    if f"start {here}" == PLACE:
        die()
    train_stage(folder, config, train, *rest)


def write(folder: Path, shard: int, made: Any, plan: Any) -> None:
    if PLACE == "half a shard":
        path = prepare.shard_path(folder, shard)
        path.with_suffix(".json").write_text("{")
        path.with_suffix(".tmp-1").write_bytes(made.ids.tobytes()[:50])
        die()
    write_shard(folder, shard, made, plan)
    if PLACE == "shard":
        die()


def write_vectors(path: Path, array: Any) -> None:
    if PLACE == "half an array":
        path.with_suffix(".tmp-1").write_bytes(array.tobytes()[:50])
        die()
    write_array(path, array)


def write_meshes(path: Path, array: Any) -> None:
    if PLACE == "half the meshes" and path.stem.endswith("-faces"):
        path.with_suffix(".tmp-1").write_bytes(array.tobytes()[:50])
        die()
    write_array(path, array)


def load(*arguments: Any) -> Any:
    loader = make_loader(*arguments)
    if PLACE == "cache" and here not in ("tokenizer", "embedder"):
        die()
    return loader


def step(state: Any, *rest: Any) -> Any:
    if f"step {here} {state.step + 1}" == PLACE:
        die()
    return train_step(state, *rest)


embedding_cache.write_array, mesh_cache.write_array = write_vectors, write_meshes
pipeline.train_stage, pipeline.make_loader, prepare.write_shard, loop.train_step = start, load, write, step
main(sys.argv[2:])
