"""Tessera trains, evaluates and serves text-to-image, text-to-video and text-to-mesh generators from your own files.

`tessera.train("muse", data="photos")` and `tessera.resume("runs/muse-001")` do what the commands of those names do;
`tessera.load("runs/muse-001")` opens what came of it, or an export of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.pipeline import resume, train
    from tessera.sampling.session import load

__all__ = ["load", "resume", "train"]
__version__ = "0.1.0"

_HOMES = {"load": "tessera.sampling.session", "resume": "tessera.pipeline", "train": "tessera.pipeline"}


def __getattr__(name: str) -> Any:
    """Loads torch only when it is needed, so that `tessera --help` answers at once."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tessera' has no attribute {name!r}")
