"""Starts the program as a user does, in processes of its own; ends them in every way a process can end; compares two runs.

Everything a command starts carries a mark in its environment, by which it is found again: torchrun gives each rank a session
of its own, so a process group would not do.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

MARK = "TESSERA_TEST_MARK"
STEPS = 24
TINY = {
    "tokenizer.model.widths": "[8,8]",
    "tokenizer.model.blocks": "[1,1]",
    "tokenizer.model.dropout": "0.1",
    "tokenizer.model.quantizer.levels": "[4,4]",
    "tokenizer.critic.widths": "[8,8]",
    "tokenizer.critic.start_step": "6",
    "tokenizer.critic.warmup_steps": "3",
    "tokenizer.critic.penalty": "{weight: 1.0, every: 4}",
    "tokenizer.batch_size": "8",
    "tokenizer.steps": str(STEPS),
    "text.length": "16",
    "text.width": "16",
    "text.depth": "1",
    "text.heads": "2",
    "base.model": "{width: 16, depth: 1, heads: 2, dropout: 0}",
    "base.batch_size": "8",
    "base.steps": "2",  # what a resumed run does after its tokenizer
    "data.resolution": "16",
    "data.views": "2",
    "data.flip": "true",
    "data.crop": "random",
    "data.validation_fraction": "0.15",
    "engine.log_every_steps": "1",
    "engine.validate_every_steps": "8",
    "engine.preview_every_steps": "8",
    "engine.save_every_steps": "3",
    "engine.keep_checkpoints": "2",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and all it printed."""

    code: int
    output: str


class Running:
    """A command and every process it started. Leaving it kills what is left."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self._path = folder / f"output-{self.mark}.txt"
        self._file = self._path.open("w")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._file.close()

    @property
    def output(self) -> str:
        return self._path.read_text(errors="replace")

    def wait(self, timeout: float = 150) -> Ended:
        """Waits for the end; past the limit it is a hang, and an error."""
        try:
            return Ended(self.process.wait(timeout), self.output)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {timeout} s:\n{self.output}") from None

    def until(self, done: Callable[[], Any], timeout: float = 90) -> None:
        """Waits until something is so; the command must not end before."""
        limit = time.monotonic() + timeout
        while not done():
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with {self.process.returncode} before what the test waits for:\n{self.output}")
            if time.monotonic() > limit:
                raise TimeoutError(f"waited {timeout} s:\n{self.output}")
            time.sleep(0.003)

    def until_step(self, step: int, stage: str = "tokenizer") -> None:
        """Waits until this command has reported a step of a stage."""
        self.until(lambda: any(int(found) >= step for found in re.findall(rf"^{stage} (\d+)/", self.output, re.MULTILINE)))

    def pids(self, **environment: str) -> list[int]:
        """All living processes of the command, or those with certain variables in their environment."""
        wanted = [f"{name}={value}".encode() for name, value in {MARK: self.mark, **environment}.items()]
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and all(entry in (folder / "environ").read_bytes().split(b"\0") for entry in wanted):
                    found.append(int(folder.name))
            except OSError:  # not ours, or gone by now
                continue
        return found

    def send(self, number: int) -> None:
        """A signal to the command's own process alone."""
        self.process.send_signal(number)

    def send_group(self, number: int) -> None:
        """As a terminal does on Ctrl-C: to the process and the workers it forked."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to every process, launcher first, until none is left."""
        self.process.kill()
        self.process.wait()
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)


def start(
    arguments: Sequence[str], folder: Path, *, ranks: int = 1, script: Path | None = None, restarts: int = 0, **environment: str
) -> Running:
    """`tessera ARGUMENTS`, by torchrun if there are several ranks. A script runs in the place of the program's module."""
    program = [str(script)] if script else ["-m", "tessera"]
    if ranks == 1:
        return Running([sys.executable, *program, *arguments], folder, environment)
    # torchrun would take --run for an abbreviation of its own --run-path; behind a lone -- it reads nothing
    program.insert(len(program) - 1, "--")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), f"--max-restarts={restarts}"]
    return Running([sys.executable, *launcher, *program, *arguments], folder, environment)


def run(arguments: Sequence[str], folder: Path, *, ranks: int = 1, script: Path | None = None) -> Ended:
    """Starts a command and waits for its end."""
    with start(arguments, folder, ranks=ranks, script=script) as running:
        return running.wait()


@contextmanager
def start_ranks(arguments: Sequence[str], folder: Path, ranks: int, script: Path | None = None) -> Iterator[list[Running]]:
    """The same program on several ranks without torchrun, which hides the ranks' own exit codes and ends all with the first."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started: list[Running] = []
    try:
        for rank in range(ranks):
            started.append(start(arguments, folder, script=script, RANK=str(rank), LOCAL_RANK=str(rank), **shared))
        yield started
    finally:
        for running in started:
            running.__exit__()


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out by itself."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def train_arguments(data: Path, run_folder: Path, stage: str | None = "tokenizer", **sets: str | int | float) -> list[str]:
    """`train muse` of a very small model; double underscores stand for dots. What concerns the engine alone is tried on the
    first stage; None trains all."""
    own = {name.replace("__", "."): str(value) for name, value in sets.items()}
    values = {name: value for name, value in TINY.items() if not name.startswith(tuple(f"{section}." for section in own))} | own
    command = ["train", "muse", "--preset", "tiny", "--data", str(data), "--run", str(run_folder)]
    return [
        *command,
        *(() if stage is None else ("--stage", stage)),
        "--set",
        *(f"{name}={value}" for name, value in values.items()),
    ]


def made_once(path: Path, make: Callable[[], object]) -> Path:
    """Makes something that all test processes share; the others wait for the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = path.with_name(f"{path.name}.done")
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)  # what a test that failed left behind
            make()
            done.touch()
    return path


def check(ended: Ended, code: int = 0) -> Ended:
    """The exit code that is expected, or the output says why not."""
    assert ended.code == code, f"exit code {ended.code}, expected {code}:\n{ended.output}"
    return ended


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes of one session share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "workshop"


@pytest.fixture(scope="session")
def shapes(workshop: Path) -> Path:
    """Sixty small pictures."""
    from tessera.data.synth.shapes import write_shapes

    path = workshop / "shapes"
    return made_once(path, lambda: write_shapes(path, 60, 0, image_size=32))


# --- what a run holds


def read_metrics(run_folder: Path, stage: str = "tokenizer") -> list[dict[str, Any]]:
    """metrics.jsonl without what differs from run to run."""
    lines = (run_folder / stage / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "memory/"))} for line in lines]


def checkpoints(run_folder: Path, stage: str = "tokenizer") -> list[str]:
    """Names of the checkpoints, oldest first."""
    return sorted(path.name for path in (run_folder / stage / "checkpoints").glob("step-*"))


def differences(run_folder: Path, reference: Path) -> list[str]:
    """Where a finished run is not bit for bit the reference, over all stages of that one."""
    stages = sorted(path.parent.name for path in reference.glob("*/checkpoints"))
    return [f"{stage}: {line}" for stage in stages for line in _differences(run_folder, reference, stage)]


def _differences(run_folder: Path, reference: Path, stage: str) -> list[str]:
    """Of one stage: pointers, checkpoints, metrics but for times, pictures."""
    found = []
    home, wanted = run_folder / stage, reference / stage
    for pointer in ("latest", "best"):
        name, right = ((folder / "checkpoints" / pointer).read_text().strip() for folder in (home, wanted))
        if name != right:
            found.append(f"{pointer} is {name}, expected {right}")
        found += _different_files(home / "checkpoints" / name, wanted / "checkpoints" / right)
    found += _different_files(home / "samples", wanted / "samples")
    if left := [path.name for path in (home / "checkpoints").glob(".*")]:
        found.append(f"left behind in checkpoints: {left}")
    if missing := set(checkpoints(reference, stage)) - set(checkpoints(run_folder, stage)):
        found.append(f"no longer there: {sorted(missing)}")
    mine, theirs = read_metrics(run_folder, stage), read_metrics(reference, stage)
    if len(mine) != len(theirs):
        found.append(f"{len(mine)} lines of metrics, expected {len(theirs)}")
    found += [f"metrics: {a}, expected {b}" for a, b in zip(mine, theirs, strict=False) if a != b][:2]
    return found


def _different_files(folder: Path, reference: Path) -> list[str]:
    names, wanted = ({path.name for path in place.iterdir()} for place in (folder, reference))
    found = [f"{folder.name} holds {sorted(names)}, expected {sorted(wanted)}"] if names != wanted else []
    return found + [
        f"{folder.name}/{name} differs" for name in sorted(names & wanted) if content(folder / name) != content(reference / name)
    ]


def content(path: Path) -> bytes:
    """A file's bytes; of a manifest, all but the number of workers, which changes no result."""
    return re.sub(rb'"workers": \d+', b'"workers": any', path.read_bytes()) if path.name == "manifest.json" else path.read_bytes()
