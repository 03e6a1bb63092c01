"""What is read of the user's: lists and arrays."""

from __future__ import annotations

import io
from pathlib import Path
from tokenize import TokenError
from zipfile import BadZipFile

import numpy as np
import pytest

from tessera.files import read_array, read_lines
from tests.data.array_makers import DAMAGED, saved

ERRORS = (TokenError, TypeError, SyntaxError, MemoryError, BadZipFile, EOFError, ValueError)


@pytest.mark.parametrize("raised", DAMAGED)
def test_a_damaged_array_is_told_in_one_line(raised: str, tmp_path: Path) -> None:
    with pytest.raises(ERRORS) as of_numpy:
        np.load(io.BytesIO(DAMAGED[raised]), allow_pickle=False)
    assert of_numpy.typename.endswith(raised)
    path = tmp_path / "a.npy"
    path.write_bytes(DAMAGED[raised])
    for file, mapped in ((io.BytesIO(DAMAGED[raised]), False), (path, False), (path, True)):
        with pytest.raises(ValueError, match=r"^.{5,200}$"):
            read_array(file, mapped=mapped)


def test_an_array_is_read_whole_or_mapped(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    (tmp_path / "a.npy").write_bytes(saved(array))
    assert np.array_equal(read_array(tmp_path / "a.npy"), array)
    assert isinstance(read_array(tmp_path / "a.npy", mapped=True), np.memmap)
    with pytest.raises(FileNotFoundError):
        read_array(tmp_path / "b.npy")
    np.savez(tmp_path / "a.npz", array)
    with pytest.raises(ValueError, match="an archive of several arrays"):
        read_array(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\xef\xbb\xbfa\r\nb\r\n", ["a", "b"]),
        ("a\u2028b\x85\x0b\nc\n".encode(), ["a\u2028b\x85\x0b", "c"]),
    ],
)
def test_only_a_line_feed_ends_a_line(content: bytes, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert read_lines(tmp_path / "a.txt") == lines
