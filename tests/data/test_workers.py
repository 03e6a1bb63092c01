"""Processes that read data end with the one that asked for them, even if it is killed while their queues are full."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

CODE = """
import os, sys, time
import torch
from torch.utils.data import Dataset
from tessera.config import ImageDataConfig
from tessera.data.loader import make_dataloader

class Large(Dataset):
    def __getitem__(self, index):
        return bytes(1 << 20)  # more than a pipe holds

if __name__ == "__main__":
    order = [[index] for index in range(1000)]
    config = ImageDataConfig(workers=2, prefetch=4)
    stream = iter(make_dataloader(Large(), order, lambda items: items[0], config, torch.device("cpu")))
    next(stream)
    time.sleep(0.5)
    print(*(worker.pid for worker in stream._workers), flush=True)
    os._exit(1)
"""


def ended(pid: int) -> bool:
    """A zombie has ended, too; nobody may be there to ask for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="Linux sees to it")
def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(CODE)
    done = subprocess.run([sys.executable, "reads.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    workers = list(map(int, done.stdout.split()))
    assert len(workers) == 2
    deadline = time.monotonic() + 15
    while not all(map(ended, workers)):
        assert time.monotonic() < deadline, "they wait for a reader that is gone"
        time.sleep(0.1)
