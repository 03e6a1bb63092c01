"""The run folder: a new one for every run, one writer at a time, its config beside what it produced."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch

from tessera.config import Config, UserError, dump_yaml
from tessera.engine.checkpoint import read_json, write_json, write_text
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
        "tessera": installed("tessera-gen"),
        "device": f"{world.device.type}: {device}",
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
    }


def installed(package: str) -> str:
    """The version of a package, as its installer noted it."""
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def write_environment(run: Path, world: World) -> None:
    """env.json of the latest start, and the commands of all: the first one trained, the others went on."""
    path = run / "env.json"
    try:
        earlier = read_json(path).get("commands", [])
    except (OSError, UserError):  # the first start, or somebody else's file
        earlier = []
    found = describe_environment(world)
    write_json(path, {**found, "commands": [*(earlier if isinstance(earlier, list) else []), found["command"]]})
