"""`stall_preview.py SECONDS ARGUMENTS`: the program, whose every preview says `stalling` and takes so long."""

from __future__ import annotations

import sys
import time
from typing import Any

from tessera.cli import main
from tessera.engine import loop

write_preview, SECONDS = loop.write_preview, float(sys.argv[1])


def stall(*arguments: Any) -> None:
    print("stalling", flush=True)
    time.sleep(SECONDS)
    write_preview(*arguments)


loop.write_preview = stall
main(sys.argv[2:])
