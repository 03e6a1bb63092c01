"""Timing: median of repeated calls, operations counted by torch, and the device's own limit measured first."""

from __future__ import annotations

import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tessera.engine.replay import launched_one_by_one

hush: Callable[[], AbstractContextManager[None]] = nullcontext
"""What keeps the machine quiet while something is timed: nothing, unless a script puts something here (bench/quiet.py)."""


class Operations(TorchDispatchMode):
    """Adds up the floating-point operations of products and convolutions by torch's own formulas.

    FlopCounterMode has the same formulas but follows modules as well, which fails inside a second derivative.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def alone() -> AbstractContextManager[None]:
    """Around what is timed."""
    return hush()


def settle() -> None:
    """Waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tell(row: dict[str, Any]) -> None:
    """A part of what is timed, at once: a case of many lengths that is cut has then shown some of them."""
    print(json.dumps(row), file=sys.stderr, flush=True)


def count_operations(call: Callable[[], Any]) -> int:
    """Of one call, uncompiled. Only after a warm-up: a module that is first called under this stance would never compile."""
    with launched_one_by_one(), torch.compiler.set_stance("force_eager"), Operations() as counter:
        call()
    return counter.total


def time_call(
    call: Callable[[], Any], items: int, *, warm: int = 5, repeats: int = 20, count: bool = True,
    counted: tuple[Callable[[], Any], int] | None = None, together: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """ms, items/s, memory, operations and share of the limit of one call; `together` of them follow each other before the device
    is waited for.

    `counted` is another call and how many of it make one: for what counting cannot see (a recorded graph), or what uncompiled
    would not fit into memory.
    """
    for _ in range(warm):
        call()
    other, times = counted or (call, 1)
    operations = times * count_operations(other) if count else 0
    settle()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # uncompiled, a call takes more memory than it will
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    with alone():
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(together):
                call()
            settle()
            seconds.append((time.perf_counter() - start) / together)
    median = statistics.median(seconds)
    row: dict[str, Any] = {"ms": round(1e3 * median, 2), "items_per_s": round(items / median, 1)}
    if torch.cuda.is_available():
        row["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if count:
        rate = operations / median / 1e12
        row |= {"tflop": round(operations / 1e12, 4), "tflop_per_s": round(rate, 2), "share_of_limit": round(rate / limit(), 3)}
    return row


def time_steps(
    call: Callable[[], Any], items: int, *, warm: int = 5, repeats: int = 20, count: bool = True,
    counted: tuple[Callable[[], Any], int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The same of an update. Training does not wait for the device after each, so neither does this: on a GPU five follow each
    other, and `repeats` counts all of them."""
    together = 5 if torch.cuda.is_available() else 1
    rounds = max(1, repeats // together)
    return time_call(call, items, warm=warm, repeats=rounds, count=count, counted=counted, together=together)


@functools.cache
def limit() -> float:
    """TFLOP/s of a large matrix product on this device: bf16 on a GPU, fp32 on a CPU. Measured, not looked up."""
    size, kind = (8192, torch.bfloat16) if torch.cuda.is_available() else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device(), dtype=kind) for _ in range(2))
    for _ in range(3):
        a @ b
    settle()
    seconds = []
    with alone():
        for _ in range(10):
            start = time.perf_counter()
            a @ b
            settle()
            seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def device_facts() -> dict[str, Any]:
    """Hardware and versions that belong to every figure."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"limit_tflop_per_s": round(limit(), 2), "device": name, "torch": torch.__version__}
