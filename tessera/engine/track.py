"""Where numbers and messages go: metrics.jsonl always, trackers if asked, log.txt, and one live line on a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tessera.engine.trackers import open_trackers

PIECE = 1000  # characters: in UTF-8 no more than the 4,096 bytes that a ready pipe takes at once
SAY_PATIENCE_S = 0.5  # for a reader that is merely slow; progress lines do not wait


class Journal:
    """Messages of a run: to the terminal and, with a time in front, to log.txt. Silent on other ranks."""

    def __init__(self, path: Path | None, *, speaks: bool = True, stream: TextIO | None = None) -> None:
        self._path = path
        self._speaks = speaks
        self._stream = stream or sys.stderr
        self._live = speaks and self._stream.isatty()
        self._open_line = False
        self._descriptor = _descriptor(self._stream)

    def say(self, message: str) -> None:
        """A line that stays."""
        if not self._speaks:
            return
        self._print(("\r\x1b[K" if self._open_line else "") + message + "\n", patience_s=SAY_PATIENCE_S)
        self._open_line = False
        self.note(message)

    def note(self, message: str) -> None:
        """Only to log.txt; on a full disk the line is lost, and training goes on."""
        if self._speaks and self._path is not None:
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def progress(self, line: str) -> None:
        """The live line on a terminal, a plain line elsewhere."""
        if not self._speaks:
            return
        if self._live:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80  # 0 where a container does not know
            self._print(f"\r\x1b[K{line[: max(20, width - 1)]}")
            self._open_line = True
        else:
            self._print(line + "\n")

    def _print(self, text: str, patience_s: float = 0.0) -> None:
        """Neither a reader that left, as in `2>&1 | head`, nor one that sleeps in front of a full pipe stops training."""
        for start in range(0, len(text), PIECE):
            if self._descriptor is not None and not _ready(self._descriptor, patience_s):
                return  # log.txt has the message
            with contextlib.suppress(OSError):  # a broken pipe, or a full disk behind `2> file`
                print(text[start : start + PIECE], end="", file=self._stream, flush=True)


def _descriptor(stream: TextIO) -> int | None:
    """The number of a stream that the system knows; None for one that is only in memory."""
    try:
        return stream.fileno()
    except (OSError, ValueError):  # closed, or io.UnsupportedOperation, which is both
        return None


def _ready(descriptor: int, patience_s: float) -> bool:
    """Whether PIPE_BUF bytes, 4,096, can be written without waiting."""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(patience_s * 1000))
    except OSError:
        return True


class Metrics:
    """metrics.jsonl of one stage, and the trackers that were asked for."""

    def __init__(
        self, folder: Path, trackers: Sequence[str], first_step: int, journal: Journal | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._path = folder / "metrics.jsonl"
        cut_back(self._path, first_step)
        self._file = self._path.open("ab", buffering=0)
        self._pending = b""  # lines that the disk did not take yet
        self._journal = journal
        self._trackers = open_trackers(trackers, folder, first_step, config or {}, journal.say if journal else print)

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """One line; what is not finite becomes null, which JSON can say."""
        clean = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        told = bool(self._pending)
        self._pending += (json.dumps({"step": step, "kind": kind, **clean}) + "\n").encode()
        self._flush(told)
        finite = {name: value for name, value in clean.items() if value is not None}
        for tracker in self._trackers:
            tracker.write(step, kind, finite)

    def _flush(self, told: bool) -> None:
        """A full disk delays lines and does not stop training: the next checkpoint will, if there is no room by then."""
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if self._journal is not None and not told:
                self._journal.say(f"{self._path} cannot be written: {error.strerror}; its lines wait until there is room")

    def close(self) -> None:
        """Writes what is left and closes everything."""
        self._flush(told=False)
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def cut_back(path: Path, step: int) -> None:
    """Drops lines after a step, and a last line that a kill left unfinished; the file is continuous after a resume."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
