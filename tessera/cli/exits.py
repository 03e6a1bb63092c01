"""Exit codes: 0 done, 2 the user's input is wrong, 3 non-finite numbers, 4 out of memory, 130 and 143 stopped by a signal.

1 is another rank that was lost, whose own code says more, or with a traceback a bug of ours.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import typer

# What a disk says when it is full, broken or not ours to write.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}

# Of the click that typer was built with: newer versions carry their own and need no package of that name.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def guarded(work: Callable[[], Any]) -> int:
    """Runs a command; every expected end is one message and a code, everything else a traceback, which is our bug."""
    try:
        result = work()
        sys.stdout.flush()
        sys.stderr.flush()
        return result if isinstance(result, int) else 0
    except UsageError as error:
        name_value(error)
        error.show()
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        for stream in (sys.stdout, sys.stderr):  # or Python would complain at its end about what they still hold
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0  # the reader of our output left, which typer turns into an exit: not an error of ours
    except Exception as error:
        code = expected_code(error)
        if code is None:
            raise
        print(f"tessera: {message_of(error, code)}", file=sys.stderr)
        return code


def name_value(error: Any) -> None:
    """A missing option is told with its value, `--out DIR`, where typer would name the option alone."""
    option = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and option is not None and option.opts[0].startswith("--") and option.metavar:
        error.param_hint = f"'{option.opts[0]} {option.metavar}'"


def expected_code(error: Exception) -> int | None:
    """The exit code of an end that has one."""
    from tessera.config import UserError

    if isinstance(error, UserError):
        return 2
    if isinstance(error, OSError) and error.errno in DISK:
        return 2
    if isinstance(error, MemoryError):
        return 4
    if "torch" not in sys.modules:
        return None
    import torch

    from tessera.engine.checkpoint import NonFiniteWeights
    from tessera.engine.loop import NonFinite, Stopped
    from tessera.engine.lost import RankLost

    if isinstance(error, RankLost):
        return 1
    if isinstance(error, (NonFinite, NonFiniteWeights)):
        return 3
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return 4
    return 128 + error.number if isinstance(error, Stopped) else None


def message_of(error: Exception, code: int) -> str:
    """What was found and what to do."""
    notes: list[str] = getattr(error, "__notes__", [])
    run, again = shlex.quote(notes[0]) if notes else "RUN", notes[1] if len(notes) > 1 else "tessera resume"
    if code == 4:
        first = str(error).strip().splitlines()
        return (
            f"out of memory ({first[0] if first else type(error).__name__}). The last checkpoint is intact. "
            "Lower engine.micro_batch_size, which changes no result, or set engine.activation_checkpointing=true; "
            f"then `tessera resume {run} --set ...`"
        )
    if code == 3:
        return (
            f"{error}. Look at those samples, lower the learning rate, or allow a few with engine.nonfinite=skip; "
            f"then `tessera resume {run} --set ...`"
        )
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'} cannot be used: {error.strerror}. Make room or correct its rights, then try again"
    if code > 128 or code == 1:
        return f"{error}; go on with `{again} {run}`"
    return str(error)
