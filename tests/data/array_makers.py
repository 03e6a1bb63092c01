"""Damaged .npy files, for tests: what numpy's reader makes of each is another kind of error."""

from __future__ import annotations

import io

import numpy as np


def saved(array: np.ndarray) -> bytes:
    """As a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def patched(content: bytes, place: int, byte: bytes) -> bytes:
    """With another byte at a place."""
    return content[:place] + byte + content[place + 1 :]


def huge() -> bytes:
    """More numbers than any memory holds, by the header."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f2", "fortran_order": False, "shape": (10**17,)})
    return stream.getvalue()


_WHOLE = saved(np.ones(6, np.float16))
DAMAGED = {  # by what numpy raises
    "TokenError": patched(_WHOLE, 8, b"\x01"),  # the header's length
    "TypeError": patched(_WHOLE, 26, b"b"),
    "SyntaxError": patched(_WHOLE, 21, b","),
    "MemoryError": huge(),
    "BadZipFile": b"PK\x03\x04" + _WHOLE[4:],
    "EOFError": b"",
    "ValueError": _WHOLE[:-1],
}
