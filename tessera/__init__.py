"""Tessera trains, evaluates and serves text-to-image, text-to-video and text-to-mesh generators from your own files.

`tessera.train("muse", data="photos")` and `tessera.resume("runs/muse-001")` do what the commands of those names do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.pipeline import resume, train

__all__ = ["resume", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads torch only when it is needed, so that `tessera --help` answers at once."""
    if name in __all__:
        from tessera import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'tessera' has no attribute {name!r}")
