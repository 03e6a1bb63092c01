"""SIGTERM and SIGINT set a flag; the loop leaves after the same step on all ranks. A second signal leaves at once."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

ECHO_S = 0.5  # launchers signal a process and then its whole group: what arrives so soon again is the same request


class StopFlag:
    """Holds the signal that asked us to stop, while it is entered; restores the old handlers after. `at_once`: the first one ends
    all, where there is nothing to save."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.signal: int | None = None
        self._old: dict[int, Any] = {}
        self._owner = os.getpid()
        self._since = 0.0

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked worker that did not yet ignore signals
            return
        if self.at_once:
            raise SystemExit(128 + number)
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since > ECHO_S:
            os._exit(128 + number)
