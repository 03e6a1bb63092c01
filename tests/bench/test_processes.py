"""Commands beside each other: they end with the one who started them, whatever state they are in, and none starts afterwards."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
WAITS = f"{sys.executable} -c 'import time; time.sleep(60)'"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("processes")


def started(commands: object, log: Path, processes: ModuleType) -> tuple[threading.Thread, int]:
    """A command that waits for a minute, in a thread; and its number."""

    def work() -> None:
        with contextlib.suppress(processes.Failed):  # it is stopped, by the test
            commands.call(log, WAITS, 100.0, "waits")  # type: ignore[attr-defined]

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: bool(commands.running))  # type: ignore[attr-defined]
    return thread, next(iter(commands.running)).pid  # type: ignore[attr-defined]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_ends_even_what_stands_still_and_nothing_starts_afterwards(processes: ModuleType, tmp_path: Path) -> None:
    commands = processes.Commands()
    thread, pid = started(commands, tmp_path / "log", processes)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: processes.status(pid)[0] == "T")
    commands.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert not commands.running
    with pytest.raises(processes.Failed, match="stopped before"):
        commands.call(tmp_path / "more", f"touch {tmp_path / 'made'}", 10.0, "more")
    assert not (tmp_path / "made").exists()


def test_a_command_that_is_killed_leaves_nothing_standing_still(processes: ModuleType, tmp_path: Path) -> None:
    commands = processes.Commands()
    thread, pid = started(commands, tmp_path / "log", processes)
    stops = f"{sys.executable} -c 'import os; os.kill({pid}, {int(signal.SIGSTOP)}); os.kill(os.getpid(), {int(signal.SIGKILL)})'"
    with pytest.raises(processes.Failed, match="code -9"):
        commands.call(tmp_path / "killed", stops, 10.0, "killed")
    until(lambda: processes.status(pid)[0] != "T")
    commands.stop()
    thread.join(30)


def test_a_command_that_takes_too_long_is_stopped(processes: ModuleType, tmp_path: Path) -> None:
    assert not processes.Commands().call(tmp_path / "log", WAITS, 0.2, "waits")


def test_any_name_of_a_process_is_read(processes: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "\u043e\u0431\u0440\u0430\u0431\u043e\u0442\u043a\u0430 (1)"  # the kernel cuts it within a letter
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([str(program), "60"]) as process:
        until(lambda: process.pid in processes.below(os.getpid()))
        process.kill()
    assert process.pid not in processes.below(os.getpid())
