"""Text states that the user computed elsewhere: what the config says of them, and what their files add to it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from tessera.config import Config, UserError
from tessera.files import read_array


class PrecomputedTextConfig(Config):
    """States that were computed elsewhere, a NumPy file for each sample."""

    kind: Literal["precomputed"] = "precomputed"
    """The kind of encoder."""
    path: Path
    """Folder with `<sample key>.npy` for every sample: floats, states x channels, or channels alone."""
    length: int | None = Field(None, ge=1, le=4096)
    """Most states of a sample that are read; left empty, as many as the longest file has."""
    width: int | None = Field(None, ge=1)
    """Channels; left empty, those of the files."""


def settle_precomputed(config: PrecomputedTextConfig) -> PrecomputedTextConfig:
    """The same with an absolute path, and with length and width from the files' headers; no states are read."""
    folder = config.path.expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"text.path {config.path} is not a folder; expected one with <sample key>.npy for every sample")
    shapes = {path: _shape(path) for path in sorted(folder.rglob("*.npy"))}
    if not shapes:
        raise UserError(f"text.path {config.path} holds no .npy file; expected <sample key>.npy for every sample")
    first, width = next((path, shape[-1]) for path, shape in shapes.items())
    for path, shape in shapes.items():
        if shape[-1] != (config.width or width):
            whose = "text.width is" if config.width else f"{first} has"
            raise UserError(f"{path} has {shape[-1]} channels, {whose} {config.width or width}; expected equal widths")
    length = config.length or max(1, *(shape[0] if len(shape) == 2 else 1 for shape in shapes.values()))
    return config.model_copy(update={"path": folder, "length": length, "width": width})


def _shape(path: Path) -> tuple[int, ...]:
    """From the header; anything but one or two axes of floats is refused, and so is whatever would have to be unpickled."""
    try:
        array = read_array(path, mapped=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a NumPy array: {error}") from None
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.floating) or not array.shape[-1]:
        found = f"{array.dtype} of shape {array.shape}"
        raise UserError(f"{path} holds {found}; expected floats, states x channels, or channels alone")
    return tuple(array.shape)
