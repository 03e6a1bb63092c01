"""`fill_disk.py STEP ARGUMENTS`: the program, for which no file may grow past 8 KiB any more from the save of a step on.

The limit is the system's own, so the error comes the way a full disk's does, through safetensors and all.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from tessera.cli import main
from tessera.engine import loop

save_checkpoint = loop.save_checkpoint


def save(folder: Path, state: Any, facts: Any, **more: Any) -> Path:
    if state.step >= int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    return save_checkpoint(folder, state, facts, **more)


loop.save_checkpoint = save
main(sys.argv[2:])
