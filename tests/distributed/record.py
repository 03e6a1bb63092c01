"""`record.py FOLDER ARGUMENTS`: the program, which also writes what its rank saw and held to FOLDER/RANK.json.

Of each stage keys: step -> sample keys; hash: of the nets, averages and optimizers at the end; held: share of the weights.
threads: what still runs at exit.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tessera.cli import main
from tessera.engine import loop
from tessera.engine.checkpoint import gather
from tessera.engine.shard import own

train_step, fit_run = loop.train_step, loop.Fit.run
seen: dict[str, Any] = {"stages": {}}


def recorded_step(state: Any, stage: Any, batches: list[Any], *rest: Any) -> Any:
    here = list(seen["stages"].values())[-1]
    here["keys"][state.step + 1] = [key for batch in batches for key in batch.keys]
    return train_step(state, stage, batches, *rest)


def recorded_run(self: loop.Fit) -> None:
    here = seen["stages"][self.job.name] = {"keys": {}}
    fit_run(self)
    digest = hashlib.sha256()
    for file, tensors in gather(self.state, keep=True).items():
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{file} {name}".encode() + tensor.numpy().tobytes())
    here["hash"] = digest.hexdigest()
    parameters = [p for named in self.state.parameters.values() for _, p in named]
    here["held"] = sum(own(p.detach()).numel() for p in parameters) / sum(p.numel() for p in parameters)


def write() -> None:
    seen["threads"] = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))


loop.train_step, loop.Fit.run = recorded_step, recorded_run
atexit.register(write)
main(sys.argv[2:])
