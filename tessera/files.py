"""Files that are whole or absent: written, flushed and hashed; lists and arrays of the user's, read. A leaf: every room may use
it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt


def write_json(path: Path, value: Any) -> None:
    """Sorted, indented, ends in a newline."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Written and flushed to the disk; of a file name that is not Unicode, which JSON may quote, the odd bytes as escapes."""
    with path.open("w", encoding="utf8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_json(path: Path, value: Any) -> None:
    """As `write_json`, but what is there is the old file or the new one, whole."""
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    write_json(temporary, value)
    os.replace(temporary, path)


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """A .npy file, whole or not at all."""
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    with temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_array(file: Path | BinaryIO, *, mapped: bool = False) -> npt.NDArray[Any]:
    """A .npy file; ValueError says in one line why it is none, OSError that it cannot be read. Nothing is unpickled."""
    with told_of_array():
        found = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            found.close()
            raise ValueError("an archive of several arrays, expected one")
    return found


@contextmanager
def told_of_array() -> Iterator[None]:
    """What reading a .npy file raises, as a ValueError of one line: a damaged header is parsed as Python, and leaks all that this
    may raise."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None


def read_lines(path: Path) -> list[str]:
    """Of a text in UTF-8, with or without a byte order mark: nothing but a line feed ends a line, for names may hold what else
    Python takes for an end."""
    lines = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    return lines[:-1] if not lines[-1] else lines  # the end of the last line is no line of its own


def share_file(source: Path, path: Path) -> None:
    """The same content under another name, whole or not at all: one file with two names where the disk can do that, else a copy.
    Neither may be written to afterwards."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # another disk, or one that has no such names
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(temporary, path)


def sweep_halves(folder: Path) -> None:
    """Deletes what a killed process has left of those above. Nobody may be writing there."""
    for path in folder.glob("*.tmp-*"):
        path.unlink()


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
