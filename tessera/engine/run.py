"""The run folder: a new one for every run, one writer at a time, its config beside what it produced."""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch

from tessera.config import Config, UserError, dump_yaml
from tessera.engine.checkpoint import write_json, write_text
from tessera.engine.dist import World


def new_run(name: str, wanted: Path | None) -> Path:
    """Makes `wanted`, or the next free `runs/NAME-001`. Never an existing folder."""
    number = 1
    while True:
        folder = wanted or Path("runs") / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if wanted is not None:
                raise UserError(
                    f"{wanted} exists; a new run needs a new folder. To go on with it: tessera resume {wanted}"
                ) from None
            number += 1
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror}") from None


def lock(run: Path) -> TextIO:
    """Takes the run's lock until the file is closed; the system releases it whatever way the process ends."""
    file = (run / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(f"{run} is being written by another process; wait for it, or stop it first") from None
    os.register_at_fork(after_in_child=file.close)  # or a loader's worker would hold on to it after our death
    return file


def unwritable(path: Path, error: OSError) -> UserError:
    """What to say when a file of the run cannot be written: the disk is full, a quota is reached, a right is missing."""
    run = path.parents[2] if path.parent.name == "checkpoints" else path.parent
    return UserError(
        f"{path} cannot be written: {error.strerror or error}. What was saved before is intact. Make room, "
        f"or keep less with engine.keep_checkpoints=1; then `tessera resume {shlex.quote(str(run))}`"
    )


def write_config(run: Path, config: Config) -> None:
    """config.yaml, atomically; an older one that says something else stays as config-1.yaml, config-2.yaml, ..."""
    path, text = run / "config.yaml", dump_yaml(config)
    if path.exists() and path.read_text(encoding="utf8") != text:
        number = 1
        while (kept := run / f"config-{number}.yaml").exists():
            number += 1
        os.link(path, kept)
    write_text(run / ".config.tmp", text)
    os.replace(run / ".config.tmp", path)


def describe_environment(world: World) -> dict[str, Any]:
    """What a bug report needs."""
    device = (
        torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor() or platform.machine()
    )
    return {
        "command": sys.argv,
        "device": f"{world.device.type}: {device}",
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
    }


def write_environment(run: Path, world: World) -> None:
    """env.json of the latest start; log.txt has the history."""
    write_json(run / "env.json", describe_environment(world))
