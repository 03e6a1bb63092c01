"""Files that are whole or absent: written, flushed and hashed. A leaf: every room may use it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Sorted, indented, ends in a newline."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Written and flushed to the disk; of a file name that is not Unicode, which JSON may quote, the odd bytes as escapes."""
    with path.open("w", encoding="utf8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Makes names durable, not only contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_folder(parent: Path, prefix: str = "") -> Path:
    """`parent/PREFIX001`, or the next number that is free: nothing is ever written over."""
    number = 1
    while (folder := parent / f"{prefix}{number:03d}").exists():
        number += 1
    return folder


def in_the_way(folder: Path) -> str | None:
    """Why a folder of this name cannot be: a file has the name, or that of a folder above it. None if nothing is in its way."""
    file = next((place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), None)
    if file is None:
        return None
    return f"{file} is a file, not a folder" if file == folder else f"{file} is a file, so {folder} cannot lie in it"
