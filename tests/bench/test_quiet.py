"""What runs beside a timing stands still while something is timed, and only then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUIET = ROOT / "bench" / "quiet.py"
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")

CALLER = """
import signal, subprocess, sys
from pathlib import Path
busy = [sys.executable, "-c", sys.argv[1]]
beside = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *busy])
resting = subprocess.Popen(["sleep", "60"])
resting.send_signal(signal.SIGSTOP)
try:
    quiet = subprocess.Popen(sys.argv[2:])
    code = quiet.wait()
    Path("resting").write_text(Path(f"/proc/{resting.pid}/stat").read_text().rpartition(")")[2].split()[0])
    sys.exit(code)
finally:
    beside.terminate()
    resting.kill()
"""
BUSY = """
import os, time
from pathlib import Path
Path("busy.pid").write_text(str(os.getpid()))
while os.getppid() != 1:
    with open("beats", "a") as beats:
        beats.write(".")
    time.sleep(0.01)
"""
TIMED = """
import sys, time
from pathlib import Path
from tessera.bench import timing
def beats():
    return Path("beats").stat().st_size
def moves():
    before, start = beats(), time.monotonic()
    while beats() == before and time.monotonic() - start < WAIT:
        time.sleep(0.05)
    return beats() > before
while not Path("beats").exists():
    time.sleep(0.05)
told = [moves()]
with timing.alone():
    time.sleep(0.2)
    Path("inside").touch()
    told.append(moves())
    FAULT
told.append(moves())
print(*sys.argv[1:], *told)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if (tmp_path / "busy.pid").exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "busy.pid").read_text()), signal.SIGKILL)


def begin(home: Path, wait: float, fault: str = "") -> subprocess.Popen[str]:
    """A caller that has something running, and times something beside it."""
    (home / "timed.py").write_text(TIMED.replace("WAIT", str(wait)).replace("FAULT", fault))
    words = [sys.executable, "-c", CALLER, BUSY, sys.executable, str(QUIET), "timed.py", "word"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(home)}
    return subprocess.Popen(words, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def state(home: Path) -> str:
    """Of the busy one, as the kernel says: T is one that was stopped; nothing of one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{(home / 'busy.pid').read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def test_what_runs_beside_stands_still_while_something_is_timed(home: Path) -> None:
    told, errors = begin(home, 1.0).communicate(timeout=120)
    assert told.split() == ["word", "True", "False", "True"], errors
    assert (home / "resting").read_text() == "T", "what stood still before is not set going"


def test_it_goes_on_when_the_timing_fails(home: Path) -> None:
    process = begin(home, 0.1, "raise RuntimeError('what broke')")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "what broke" in errors
    assert state(home) != "T"


def test_it_goes_on_when_the_timing_is_stopped(home: Path) -> None:
    process = begin(home, 0.1, "time.sleep(60)")
    deadline = time.monotonic() + 100
    while not (home / "inside").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert state(home) == "T"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGTERM)  # the last that it started
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert state(home) != "T"
