"""Where numbers and messages go: metrics.jsonl always, trackers if asked, log.txt, and one live line on a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tessera.engine.trackers import open_trackers


class Journal:
    """Messages of a run: to the terminal and, with a time in front, to log.txt. Silent on other ranks."""

    def __init__(self, path: Path | None, *, speaks: bool = True, stream: TextIO | None = None) -> None:
        self._path = path
        self._speaks = speaks
        self._stream = stream or sys.stderr
        self._live = speaks and self._stream.isatty()
        self._open_line = False

    def say(self, message: str) -> None:
        """A line that stays."""
        if not self._speaks:
            return
        self._print(("\r\x1b[K" if self._open_line else "") + message + "\n")
        self._open_line = False
        self.note(message)

    def note(self, message: str) -> None:
        """Only to log.txt."""
        if self._speaks and self._path is not None:
            with self._path.open("a", encoding="utf8", errors="backslashreplace") as file:
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

    def _print(self, text: str) -> None:
        """A reader that has left, as in `2>&1 | head`, does not stop training; log.txt goes on."""
        with contextlib.suppress(BrokenPipeError):
            print(text, end="", file=self._stream, flush=True)


class Metrics:
    """metrics.jsonl of one stage, and the trackers that were asked for."""

    def __init__(
        self, folder: Path, trackers: Sequence[str], first_step: int, journal: Journal | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._path = folder / "metrics.jsonl"
        cut_back(self._path, first_step)
        self._file = self._path.open("a", encoding="utf8")
        self._trackers = open_trackers(trackers, folder, first_step, config or {}, journal.say if journal else print)

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """One line; what is not finite becomes null, which JSON can say."""
        clean = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, "kind": kind, **clean}) + "\n")
        self._file.flush()
        finite = {name: value for name, value in clean.items() if value is not None}
        for tracker in self._trackers:
            tracker.write(step, kind, finite)

    def close(self) -> None:
        """Flushes and closes everything."""
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
