"""Trackers: where numbers go besides metrics.jsonl. Off by default; none asks for an account or uses the network by itself.

TensorBoard writes into the stage's folder, W&B too (offline, unless WANDB_MODE says otherwise), trackio into its own local
database. A tracker that fails while training runs is reported once and never stops it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tessera.config import UserError

EXTRAS = {"tensorboard": "track", "wandb": "wandb", "trackio": "trackio"}  # tracker -> the extra that brings it
Say = Callable[[str], None]


class Tracker(Protocol):
    """What a tracker must be able to do."""

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """Finite numbers of one step; kind is train, valid or valid_raw."""

    def close(self) -> None:
        """Flushes and ends."""


def refuse_missing(names: Sequence[str]) -> None:
    """Says which package is missing, before a run folder is made."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin it is a folder of that name, as W&B leaves one behind
            extra = f"tessera-gen[{EXTRAS[name]}]"
            raise UserError(f"engine.trackers names {name}, which is not installed; pip install '{extra}', or leave it out")


def open_trackers(names: Sequence[str], folder: Path, first_step: int, config: Mapping[str, Any], say: Say) -> list[Tracker]:
    """The trackers of one stage; `first_step` is the step that is already done."""
    refuse_missing(names)
    opened: list[Tracker] = []
    for name in dict.fromkeys(names):
        try:
            if name == "tensorboard":
                tracker: Tracker = TensorBoard(folder, first_step)
            else:
                memory = Memory(folder / "trackers.json", name)
                tracker = Once((WandB if name == "wandb" else Trackio)(folder, memory.identity, config), memory)
        except Exception as error:  # at the door a failure is the user's to know, not to be passed over
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"engine.trackers names {name}, which cannot start: {reason}; leave it out, or repair it") from error
        opened.append(Unfailing(name, tracker, say))
    return opened


class Unfailing:
    """A tracker whose exceptions are said once. It is tried again: a full disk may be emptied."""

    def __init__(self, name: str, tracker: Tracker, say: Say) -> None:
        self.name, self.tracker, self.say = name, tracker, say
        self.failed = False

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """Passes on."""
        self._try(lambda: self.tracker.write(step, kind, numbers), f"at step {step}")

    def close(self) -> None:
        """Passes on."""
        self._try(self.tracker.close, "at its end")

    def _try(self, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception as error:
            if not self.failed:
                self.say(f"tracker {self.name} failed {when} ({type(error).__name__}: {error}); metrics.jsonl has every number")
            self.failed = True


class Memory:
    """What a tracker that cannot take back has been given, in a file of the stage: per kind, the last step."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        known = self._read()
        self.identity = str(known["id"])
        self.sent: dict[str, int] = dict(known.get(name, {}))
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.path.read_text(encoding="utf8"))
            if isinstance(known["id"], str) and all(isinstance(known.get(name, {}), dict) for name in EXTRAS):
                return dict(known)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # the first start, or not ours: the tracker gets a new run
        return {"id": uuid.uuid4().hex[:8]}

    def note(self, step: int, kind: str) -> None:
        """Remembers, also over a kill."""
        self.sent[kind] = step
        self._write()

    def _write(self) -> None:
        whole = {**self._read(), "id": self.identity, self.name: self.sent}  # another tracker has its part in it
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(whole), encoding="utf8")
        os.replace(temporary, self.path)


class Once:
    """Leaves out what was written before a kill and comes again after the resume: the same numbers, as resume is exact."""

    def __init__(self, tracker: Tracker, memory: Memory) -> None:
        self.tracker, self.memory = tracker, memory

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """Passes on what is new."""
        if step > self.memory.sent.get(kind, -1):
            self.tracker.write(step, kind, numbers)
            self.memory.note(step, kind)

    def close(self) -> None:
        """Passes on."""
        self.tracker.close()


class TensorBoard:
    """Event files in STAGE/tensorboard; on resume it purges what the checkpoint does not know."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """One curve a number."""
        for name, value in numbers.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flushes the files."""
        self.writer.close()


class WandB:
    """Weights & Biases, offline unless the user's WANDB_MODE says otherwise; `wandb sync STAGE/wandb/offline-run-*` uploads."""

    def __init__(self, folder: Path, identity: str, config: Mapping[str, Any]) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tessera"),
            id=identity,
            name=f"{folder.parent.name}-{folder.name}",
            group=folder.parent.name,
            dir=str(folder),
            config=dict(config),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """One row a call."""
        self.run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        """Ends the run."""
        self.run.finish()


class Trackio:
    """trackio's local database (TRACKIO_DIR); `trackio show --project tessera` draws it."""

    def __init__(self, folder: Path, identity: str, config: Mapping[str, Any]) -> None:
        import trackio

        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            self.run: Any = trackio.init(
                project="tessera", name=f"{folder.parent.name}-{folder.name}-{identity}", config=dict(config), resume="allow"
            )

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """One row a call."""
        self.run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        """Ends the run."""
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()
