"""The stop flag in processes of its own, because its second signal ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tessera.engine.signals import ECHO_S, StopFlag

WAITS = """
import time
from tessera.engine.signals import StopFlag
try:
    with StopFlag() as stop:
        print("ready", flush=True)
        while stop.signal is None:
            time.sleep(0.005)
        print("asked by", stop.signal, flush=True)
        time.sleep({patience})
        print("left after", stop.signal, flush=True)
finally:
    print("cleaned up", flush=True)
"""

FORKS = """
import os, signal, time
from tessera.engine.signals import StopFlag
with StopFlag() as stop:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7 if stop.signal is None else 8)
    print("ready", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.signal, flush=True)
"""


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_only_sets_the_flag(number: signal.Signals) -> None:
    with running(WAITS.format(patience=0.05)) as process:
        assert line(process) == "ready"
        process.send_signal(number)
        assert [line(process) for _ in range(3)] == [f"asked by {int(number)}", f"left after {int(number)}", "cleaned up"]
        assert process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_is_saved_the_first_signal_ends_at_once(number: signal.Signals) -> None:
    with running(WAITS.format(patience=60).replace("StopFlag()", "StopFlag(at_once=True)")) as process:
        assert line(process) == "ready"
        process.send_signal(number)
        assert line(process) == "cleaned up"
        assert process.wait(10) == 128 + number


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_the_second_signal_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with running(WAITS.format(patience=60)) as process:
        assert line(process) == "ready"
        process.send_signal(first)
        assert line(process) == f"asked by {int(first)}"
        time.sleep(ECHO_S + 0.1)
        start = time.monotonic()
        process.send_signal(second)
        assert process.wait(10) == 128 + second
        assert time.monotonic() - start < 5
        assert line(process) == "", "nothing more runs, not even what should clean up"


def test_the_echo_of_a_launcher_is_the_same_request() -> None:
    """`timeout` signals its child and then the child's whole group: two signals, one wish."""
    with running(WAITS.format(patience=0.2)) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process) == f"asked by {int(signal.SIGTERM)}"
        process.send_signal(signal.SIGTERM)
        assert [line(process) for _ in range(2)] == [f"left after {int(signal.SIGTERM)}", "cleaned up"]
        assert process.wait(10) == 0


def test_forked_workers_take_no_part() -> None:
    with running(FORKS) as process:
        assert line(process) == "ready 7 None"


def test_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = StopFlag()

    def fail() -> None:
        with stop:
            assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == stop._handle
            signal.raise_signal(signal.SIGTERM)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert stop.signal == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
