"""`die_in_save.py STEP PLACE WHEN ARGUMENTS`: the program, which kills its process group in the first save from a step on.

PLACE is a file of the checkpoint (written before, half or after), `publish` (the folder's rename), `latest` or `best` (the
pointer's replacement), `prune` (before or after). The program itself knows nothing of it: its functions are wrapped from here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.cli import main
from tessera.engine import checkpoint, loop

STEP, PLACE, WHEN = int(sys.argv[1]), sys.argv[2], sys.argv[3]
saving = 0  # the step that was saved last, or is being saved


def die() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def deadly(function: Callable[..., Any], place_of: Callable[..., str]) -> Callable[..., Any]:
    """The function, with a death before it, after it, or with half a file on the disk."""

    def wrapped(*arguments: Any) -> Any:
        here = saving >= STEP and place_of(*arguments) == PLACE
        if here and WHEN == "before":
            die()
        result = function(*arguments)
        if here and WHEN == "half":
            os.truncate(arguments[0], os.path.getsize(arguments[0]) // 2)
        if here:
            die()
        return result

    return wrapped


def remember(save: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(folder: Path, state: Any, facts: Any, **more: Any) -> Any:
        global saving
        saving = state.step
        return save(folder, state, facts, **more)

    return wrapped


checkpoint.write_tensors = deadly(checkpoint.write_tensors, lambda path, tensors: path.name)
checkpoint.write_json = deadly(checkpoint.write_json, lambda path, value: path.name)
os.rename = deadly(os.rename, lambda old, new: "publish" if str(Path(new).name).startswith("step-") else "")
os.replace = deadly(os.replace, lambda old, new: Path(new).name)
loop.prune = deadly(loop.prune, lambda folder, keep, protected: "prune")
loop.save_checkpoint = remember(loop.save_checkpoint)

main(sys.argv[4:])
