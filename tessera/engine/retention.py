"""Which checkpoints others read: retention spares them.

A stage's manifest maps each stage that it `needs` to a hash of the checkpoint it was trained on: of its manifest, or of one of
its files. What lies outside the run is not searched: the user names it in `checkpoints/pins`, one checkpoint a line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.config import UserError
from tessera.engine.checkpoint import hashes_of, list_checkpoints, read_json


def needed_elsewhere(folder: Path) -> set[str]:
    """Names of the checkpoints in a stage's folder that another stage of the run was trained on, or that `pins` names."""
    pins = folder / "pins"
    pinned = set(pins.read_text(encoding="utf8", errors="replace").split()) if pins.is_file() else set()
    hashes = {
        value for manifest in _manifests_beside(folder) for value in _values(manifest.get("needs")) if isinstance(value, str)
    }
    return pinned | {path.name for path in list_checkpoints(folder) if hashes & hashes_of(path)} if hashes else pinned


def _manifests_beside(folder: Path) -> list[dict[str, Any]]:
    """Those of the other stages' checkpoints: all, because any of them may be resumed."""
    others = [other for other in folder.parent.parent.glob("*/checkpoints") if other != folder]
    return [_read(path) for other in others for path in list_checkpoints(other)]


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest; a damaged one refers to nothing."""
    try:
        return read_json(path / "manifest.json")
    except (OSError, UserError):
        return {}


def _values(mapping: Any) -> list[Any]:
    return list(mapping.values()) if isinstance(mapping, dict) else []
