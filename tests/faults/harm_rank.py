"""`harm_rank.py RANK STEP HARM ARGUMENTS`: the program, one rank of which dies, stops or runs out of memory at a step.

Only once: not after torchrun has restarted it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from tessera.cli import main
from tessera.engine import loop

train_step = loop.train_step
RANK, STEP, HARM = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def harmed_step(state: Any, stage: Any, batches: Any, setting: Any, *rest: Any) -> Any:
    if (setting.world.rank, state.step + 1) == (RANK, STEP) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if HARM == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[HARM])
    return train_step(state, stage, batches, setting, *rest)


loop.train_step = harmed_step
main(sys.argv[4:])
