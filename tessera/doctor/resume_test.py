"""A proof that resume is exact on this machine: a small run is killed twice, resumed, and compared with an unbroken one.

The processes are started as a user starts them and ended by SIGKILL, which nothing can catch: once at a random moment, once while
a checkpoint is being written.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tessera
from tessera.data.synth.shapes import write_shapes

STEPS, SAVE_EVERY = 60, 4
WAIT_S = 120  # for one process; a machine on which it takes longer has failed
SETS = (
    "tokenizer.model={widths: [8, 8], blocks: [1, 1], dropout: 0.1}",
    "tokenizer.critic={widths: [8, 8], start_step: 6, warmup_steps: 3, penalty: {every: 4}}",
    "tokenizer.batch_size=8",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
    "base.model={width: 16, depth: 1, heads: 2, dropout: 0.1}",
    "base.batch_size=8",
    "data.resolution=16",
    "data.views=2",
    "data.flip=true",
    "data.crop=random",
    "data.workers=2",
    "data.validation_fraction=0.15",
    "engine.log_every_steps=1",
    "engine.validate_every_steps=20",
    "engine.preview_every_steps=20",
    f"engine.save_every_steps={SAVE_EVERY}",
    "engine.keep_checkpoints=2",
)


@dataclass(slots=True)
class Proof:
    """What was done, what was compared, and where the two runs differ."""

    device: str
    events: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether something was compared and nothing differed."""
        return bool(self.compared) and not self.differences


class Failed(Exception):
    """A training process did not do what it should."""


def prove_resume(say: Callable[[str], None]) -> Proof:
    """Trains the two runs in a temporary folder, which is removed afterwards."""
    import torch

    start = time.monotonic()
    cuda = torch.cuda.is_available()
    proof = Proof(f"{torch.cuda.get_device_name()}, deterministic mode" if cuda else "CPU, fp32")
    with tempfile.TemporaryDirectory(prefix="tessera-resume-test-") as folder:
        home = Path(folder)
        write_shapes(home / "shapes", 60, 0, image_size=32)
        trial = Trial(home, (*SETS, f"engine.device={'cuda' if cuda else 'cpu'}", f"engine.deterministic={str(cuda).lower()}"))
        try:
            say(f"training {STEPS} steps without a break")
            trial.finish(trial.train("unbroken"))
            for happen in (trial.kill_at_random, trial.kill_in_save):
                proof.events.append(happen())
                say(proof.events[-1])
            trial.finish(["resume", "broken"])
            proof.events.append("resumed to the end")
            for stage in ("tokenizer", "base"):
                for what, wrong in compare(home / "broken" / stage, home / "unbroken" / stage):
                    proof.compared.append(f"{stage}: {what}")
                    proof.differences += [f"{stage}: {line}" for line in wrong]
        except (Failed, OSError) as error:
            proof.differences.append(str(error))
    proof.seconds = time.monotonic() - start
    return proof


class Trial:
    """The processes of one proof."""

    def __init__(self, home: Path, sets: Sequence[str]) -> None:
        self.home, self.sets = home, sets
        self.moment = random.SystemRandom()
        package = str(Path(tessera.__file__).parents[1])  # so that the same tessera is tested, wherever it lies
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self.environment = {**kept, "PYTHONPATH": os.pathsep.join(paths), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    @property
    def checkpoints(self) -> Path:
        """Of the run that is broken."""
        return self.home / "broken" / "tokenizer" / "checkpoints"

    def train(self, run: str) -> list[str]:
        """`tessera train` of a very small model."""
        return ["train", "muse", "--preset", "tiny", "--data", "shapes", "--run", run, "--steps", str(STEPS), "--set", *self.sets]

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process group of its own, so that the loader's workers die with it."""
        with (self.home / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tessera", *arguments], cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def finish(self, arguments: Sequence[str]) -> None:
        """Runs a command to its end."""
        process = self.start(arguments)
        try:
            code = process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"`tessera {shlex.join(arguments[:2])}` took longer than {WAIT_S} s") from None
        finally:
            self.kill(process)
        if code:
            raise Failed(f"`tessera {shlex.join(arguments[:2])}` ended with code {code}:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of what the processes said."""
        return "\n".join((self.home / "output.txt").read_text(errors="replace").splitlines()[-12:])

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_at_random(self) -> str:
        """Any moment of the first half, between two steps or inside one."""
        step, delay = self.moment.randrange(1, STEPS // 2), self.moment.uniform(0, 0.05)
        self._kill_once(self.train("broken"), lambda: self.steps_done() >= step, delay)
        return f"killed {1000 * delay:.0f} ms after step {step} (it was at step {self.steps_done()})"

    def kill_in_save(self) -> str:
        """As soon as a checkpoint that is not yet complete lies on the disk."""
        first = self.steps_done() + self.moment.randrange(1, SAVE_EVERY + 1)

        def due() -> bool:
            """A save may be over before it is seen; then any late moment must do."""
            return (bool(self.unfinished()) and self.steps_done() >= first) or self.steps_done() >= STEPS - SAVE_EVERY

        self._kill_once(["resume", "broken"], due, 0.0)
        left = self.unfinished()
        where = f"in a save, with {left[0].name} half written" if left else "between two saves"
        return f"resumed and killed {where} (it was at step {self.steps_done()})"

    def _kill_once(self, arguments: Sequence[str], due: Callable[[], bool], delay: float) -> None:
        process, limit = self.start(arguments), time.monotonic() + WAIT_S
        try:
            while not due():
                if process.poll() is not None:
                    raise Failed(f"the run ended with code {process.returncode} before it was killed:\n{self.last_words()}")
                if time.monotonic() > limit:
                    raise Failed(f"the run did not come as far as the kill in {WAIT_S} s:\n{self.last_words()}")
                time.sleep(0.0005)
            time.sleep(delay)
        finally:
            self.kill(process)
        if process.returncode != -signal.SIGKILL:
            raise Failed("the run ended before it could be killed; this machine is quicker than the test expects")

    def steps_done(self) -> int:
        """As far as the broken run's metrics know."""
        path = self.home / "broken" / "tokenizer" / "metrics.jsonl"
        steps = [line.get("step", 0) for line in read_lines(path)]
        return max(steps, default=0)

    def unfinished(self) -> list[Path]:
        """Checkpoints that are being written."""
        return list(self.checkpoints.glob(".step-*.tmp-*"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl, without what differs from run to run; the last one may be half written."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    numbers = [json.loads(line) for line in lines]
    return [{name: v for name, v in line.items() if not name.startswith(("time/", "memory/"))} for line in numbers]


def compare(broken: Path, unbroken: Path) -> Iterator[tuple[str, list[str]]]:
    """(what was compared, where it differs), over everything that a run leaves but times, memory and the log."""
    for pointer in ("latest", "best"):
        names = [(folder / "checkpoints" / pointer).read_text().strip() for folder in (broken, unbroken)]
        if names[0] != names[1]:
            yield f"checkpoints/{pointer}", [f"checkpoints/{pointer} names {names[0]}, unbroken {names[1]}"]
            continue
        title, places = f"checkpoint {names[0]} ({pointer})", [f / "checkpoints" / names[0] for f in (broken, unbroken)]
        yield from _compare_folders(title, *places)
    yield from _compare_folders("previews", broken / "samples", unbroken / "samples")
    mine, theirs = read_lines(broken / "metrics.jsonl"), read_lines(unbroken / "metrics.jsonl")
    wrong = [f"metrics: {a}, unbroken {b}" for a, b in zip(mine, theirs, strict=False) if a != b][:3]
    if len(mine) != len(theirs):
        wrong.append(f"metrics: {len(mine)} lines, unbroken {len(theirs)}")
    yield f"metrics.jsonl: {len(theirs)} lines, without times and memory", wrong


def _compare_folders(title: str, broken: Path, unbroken: Path) -> Iterator[tuple[str, list[str]]]:
    names = sorted(path.name for path in unbroken.iterdir())
    wrong = [f"{title}: other files"] if sorted(path.name for path in broken.iterdir()) != names else []
    wrong += [f"{title}: {name} differs" for name in names if not _equal(broken / name, unbroken / name)]
    size = sum((unbroken / name).stat().st_size for name in names)
    yield f"{title}: {len(names)} files, {size:,} bytes", wrong


def _equal(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()
