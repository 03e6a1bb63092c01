"""`stall.py PLACE SECONDS ARGUMENTS`: the program, whose every preview, validation or save says `stalling` and takes so long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tessera.cli import main
from tessera.engine import loop

NAMES = {"preview": "write_preview", "validation": "validate", "save": "save_checkpoint"}
PLACE, SECONDS = sys.argv[1], float(sys.argv[2])


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        print("stalling", flush=True)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:  # a signal just before one long sleep would be handled only behind it
            time.sleep(0.05)
        return function(*arguments, **named)

    return wrapped


setattr(loop, NAMES[PLACE], slow(getattr(loop, NAMES[PLACE])))
main(sys.argv[3:])
