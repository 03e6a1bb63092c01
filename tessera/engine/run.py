"""The run folder: a new one for every run, one writer at a time, its config beside what it produced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch

from tessera.config import Config, UserError, dump_yaml
from tessera.engine.checkpoint import read_json
from tessera.engine.dist import World
from tessera.files import in_the_way, write_json, write_text

NEVER_STARTED = {".lock", ".launch", ".config.tmp", "env.json", "log.txt"}  # written before config.yaml


def new_run(name: str, wanted: Path | None) -> Path:
    """Makes `wanted`, or the next free `runs/NAME-001`; goes on with the run of this launch if torchrun has restarted us.

    Never a folder that holds anything, but for what a start leaves that died before it had written its config.
    """
    if (own := restarted_run(name, wanted)) is not None:
        return own
    number = 1
    while True:
        folder = wanted or Path("runs") / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if wanted is not None and never_started(wanted):
                break
            if wanted is not None and not wanted.is_dir():
                raise UserError(f"{in_the_way(wanted)}; name another --run, a new folder") from None
            if wanted is not None:
                raise UserError(
                    f"{wanted} exists; a new run needs a new folder. To go on with it: tessera resume {wanted}"
                ) from None
            number += 1
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {in_the_way(folder) or error.strerror}; name another --run") from None
    if (launch := launch_id()) is not None:
        write_text(folder / ".launch", launch)
    return folder


def never_started(folder: Path) -> bool:
    """Whether a folder is empty, or holds only what comes before the config."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= NEVER_STARTED


def restarted_run(name: str, wanted: Path | None) -> Path | None:
    """The folder that this launch made before `torchrun --max-restarts` started its ranks anew."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0:
        return None
    for folder in [wanted] if wanted is not None else sorted(Path("runs").glob(f"{name}-*"), reverse=True):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if (folder / ".launch").read_text(encoding="utf8") == launch_id():
                return folder
    return None


def launch_id() -> str | None:
    """Names one call of torchrun, the same in all its restarts; None without torchrun."""
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    if given is None:
        return None
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # on several machines rank 0 may move
    return f"{given} {socket.gethostname()} {os.getppid()}" if alone else given  # the id may be the user's, used again and again


def lock(run: Path) -> TextIO:
    """Takes the run's lock until the file is closed; the system releases it whatever way the process ends."""
    try:
        file = (run / ".lock").open("w")
    except OSError as error:
        raise unwritable(run / ".lock", error) from None
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
    forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    advice = "Correct its rights" if forbidden else "Make room, or keep less with engine.keep_checkpoints=1"
    return UserError(
        f"{path} cannot be written: {error.strerror or error}. What was saved before is intact. {advice}; then "
        f"`tessera resume {shlex.quote(str(run))}`"
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


def write_environment(run: Path, world: World, started: Mapping[str, Any] | None = None) -> None:
    """env.json of the latest start, and the commands that trained; `started` says what this one trains: stage and from_step.

    Without `started`, for a run that may yet be refused, the list stays as it was. Older runs list bare argvs in it.
    """
    path = run / "env.json"
    try:
        earlier = read_json(path).get("commands", [])
    except (OSError, UserError):  # the first start, or somebody else's file
        earlier = []
    found = describe_environment(world)
    now = [] if started is None else [{"command": found["command"], **started}]
    write_json(path, {**found, "commands": [*(earlier if isinstance(earlier, list) else []), *now]})
