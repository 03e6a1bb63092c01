"""Time and memory of a run: items a second, share of time spent waiting for data, what is left to do."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping

import torch

from tessera.engine.step import StepReport


class Clock:
    """Measures between two log lines; chores are left out of the rate."""

    def __init__(self, device: torch.device, batch_size: int, step: int, steps: int) -> None:
        self.device, self.batch_size, self.steps = device, batch_size, steps
        self.wait = 0.0
        self.idle = 0.0  # spent in chores
        self.since = time.perf_counter()
        self.since_step = step
        self.rate = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for the next batch."""
        start = time.perf_counter()
        yield
        self.wait += time.perf_counter() - start

    @contextlib.contextmanager
    def chore(self) -> Iterator[None]:
        """Around what is not training."""
        start = time.perf_counter()
        yield
        self.idle += time.perf_counter() - start

    def read(self, step: int) -> dict[str, float]:
        """Numbers since the last reading; names start with time/ or memory/, because they differ from run to run."""
        now = time.perf_counter()
        span = max(now - self.since - self.idle, 1e-9)
        self.rate = (step - self.since_step) * self.batch_size / span
        numbers = {
            "time/items_per_s": self.rate,
            "time/step_ms": 1e3 * span / max(1, step - self.since_step),
            "time/wait_share": min(1.0, self.wait / span),
            "memory/peak_gib": peak_bytes(self.device) / 2**30,
        }
        self.since, self.since_step, self.wait, self.idle = now, step, 0.0, 0.0
        return numbers

    def line(self, name: str, report: StepReport, numbers: Mapping[str, float]) -> str:
        """The progress line: step, loss, lr, items/s, ETA, memory."""
        losses = "  ".join(f"{turn.turn.name} loss {numbers[f'{turn.turn.name}/loss']:.4f}" for turn in report.turns)
        lr = next(iter(report.turns[0].update.lrs.values()))
        left = (self.steps - report.step) * self.batch_size / max(self.rate, 1e-9)
        return (
            f"{name} {report.step}/{self.steps}  {losses}  lr {lr:.1e}  {self.rate:.0f} items/s  "
            f"ETA {duration(left)}  {numbers['memory/peak_gib']:.2f} GiB"
        )


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: of the device, or the resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour; from a hundred hours on 5 d 3 h."""
    minutes, rest = divmod(round(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
