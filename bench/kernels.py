"""Where the time of a case goes: the device's kernels (on a CPU torch's operations) while it is timed, longest first.

    python bench/kernels.py [--most 40] tessera bench image.diffusion.train
    python bench/kernels.py bench/beside.py --only ours mesh.tokenizer.train

Watching costs time, so the rates that are printed meanwhile are not to be reported. The first line says how long the device was
busy of all the time that passed; what is missing it waited for the host. Kernels of one name are one row, so what a compiler has
fused is told apart by the number in its name.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from processes import run_here
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tessera.bench import timing

WIDTH = 110  # of a name: libraries put all that they know of a kernel into it


def main() -> None:
    """A script, or the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=40, help="rows")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="tessera bench CASE, or a script of this folder")
    asked = parser.parse_args()
    if not asked.words:
        parser.error("say what is to be watched: tessera bench CASE, or a script and its arguments")
    timing.hush = lambda: watched(asked.most)
    run_here(asked.words)


@contextmanager
def watched(most: int) -> Iterator[None]:
    """What is timed inside."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        begun = time.perf_counter()
        yield
        passed = time.perf_counter() - begun
    print("\n".join(rows(seen.events() or [], passed, most, cuda)), flush=True)


def rows(events: Any, passed: float, most: int, cuda: bool) -> list[str]:
    """A line for all, and one for each name."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        if cuda and event.device_type == DeviceType.CPU:  # calls that launch them, which take none of the device's time
            continue
        times[event.name] += (event.device_time_total if cuda else event.self_cpu_time_total) / 1e3
        counts[event.name] += 1
    busy, order = sum(times.values()), sorted(times, key=lambda name: -times[name])
    lines = [f"busy {busy:.1f} of {1e3 * passed:.1f} ms, {sum(counts.values())} launches of {len(times)} kinds"]
    for name in order[:most]:
        lines.append(f"{times[name]:9.2f} ms {times[name] / busy:6.1%} {counts[name]:6d} x {name[:WIDTH]}")
    return lines


if __name__ == "__main__":
    main()
