"""Times something beside other work: what else the caller has started stands still while a case is timed, and goes on while the
next one is built and compiled.

    python bench/quiet.py bench/beside.py mesh.tokenizer.train
    python bench/quiet.py tessera bench video.loader

The caller is the shell or, with --timed, bench/headline.py. Needs Linux. What stands still keeps its memory of the GPU.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import below, run_here, status, tell

from tessera.bench import timing

LOCK = Path(tempfile.gettempdir()) / f"tessera-quiet-{os.getuid()}.lock"
CALLER = os.getppid()


def main() -> None:
    """A script, or the program."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what stands still goes on
    timing.hush = hushed
    run_here(sys.argv[1:])


@contextmanager
def hushed() -> Iterator[None]:
    """All that the caller has started stands still, but for this process, what it has started, and what stood still before. One
    at a time."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        seen: set[int] = set()
        stopped: list[int] = []
        try:
            while fresh := [pid for pid in others() if pid not in seen]:  # until nothing has started meanwhile
                seen.update(fresh)
                stopped += [pid for pid in fresh if status(pid)[0] != "T" and tell(pid, signal.SIGSTOP)]
            yield
        finally:
            for pid in reversed(stopped):  # children first: who waits for them finds them awake
                tell(pid, signal.SIGCONT)
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing would not do if a child has it, too


def others() -> list[int]:
    """What the caller has started, and what that has started, parents first, but for this one; nothing once it has ended."""
    own = {os.getpid(), *below(os.getpid())}
    return [pid for pid in below(CALLER) if pid not in own] if os.getppid() == CALLER else []


if __name__ == "__main__":
    main()
