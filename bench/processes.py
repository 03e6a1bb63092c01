"""Commands that run beside each other and end with the one who started them; and what a process has started (Linux)."""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

SAVED = (0, 143, -signal.SIGTERM)  # exit codes of a command that was asked to stop


class Failed(Exception):
    """A command did, or what it needs."""


@dataclass(slots=True)
class Commands:
    """Started by several threads, stopped by one."""

    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, log: Path, line: str, limit: float, name: str) -> bool:
        """Whether it came to its end within so many seconds, standing still included; if not, it was stopped as by the user,
        which saves. What fails is raised. Its output goes to the log."""
        start, stopped = time.monotonic(), False
        with log.open("w") as file:
            process = self._start(line, file.fileno())
            while process.poll() is None:
                if not stopped and time.monotonic() - start > limit:
                    stopped = True
                    process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
            with self.lock:
                self.running.discard(process)
        print(f"{time.monotonic() - start:6.0f} s  {name}: {line}", flush=True)
        if process.returncode not in (SAVED if stopped else (0,)):
            if process.returncode < 0:
                wake(os.getpid())  # a timing that was killed leaves the others standing still
            last = "\n".join(log.read_text().splitlines()[-8:])
            raise Failed(f"code {process.returncode} of {line}; its last lines:\n{last}")
        return not stopped

    def _start(self, line: str, output: int) -> subprocess.Popen[bytes]:
        with self.lock:
            if self.closed:
                raise Failed(f"stopped before {line}")
            process = subprocess.Popen(shlex.split(line), stdout=output, stderr=subprocess.STDOUT)
            self.running.add(process)
        return process

    def stop(self) -> None:
        """What still runs saves, and ends; nothing starts any more."""
        with self.lock:
            self.closed, left = True, list(self.running)
        for process in left:
            process.send_signal(signal.SIGTERM)
        wake(os.getpid())
        for process in left:
            process.wait()


def wake(pid: int) -> None:
    """What it has started goes on, should it stand still."""
    for child in reversed(below(pid)):
        tell(child, signal.SIGCONT)


def below(pid: int) -> list[int]:
    """What a process has started, and what that has started, parents first; nothing where there is no /proc."""
    places = Path("/proc").glob("[0-9]*/stat")
    parents = {int(place.parent.name): status(int(place.parent.name))[1] for place in places}
    found = [child for child, above in parents.items() if above == pid]
    for one in found:
        found += [child for child, above in parents.items() if above == one]
    return found


def status(pid: int) -> tuple[str, int]:
    """The kernel's letter, T of one that stands still, and its parent; of one that has ended meanwhile nothing, and 0."""
    try:
        state, above = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except OSError:
        return "", 0
    return state.decode(), int(above)


def tell(pid: int, number: int) -> bool:
    """Whether it could be told: it may have ended meanwhile, or be another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def run_here(words: list[str]) -> None:
    """In this process, as if it had been started: `tessera` and its arguments, or a script and its own."""
    sys.argv = words
    if words[0] == "tessera":
        runpy.run_module("tessera", run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
