"""An embedding in the place of a picture: a file that holds one, or the vector itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.config import UserError
from tessera.files import read_array


def is_vector(given: Any) -> bool:
    """Whether it is no picture: an .npy file, or an array of one axis."""
    if isinstance(given, (str, Path)):
        return Path(given).suffix == ".npy"
    return isinstance(given, (np.ndarray, Tensor)) and given.ndim == 1


def read_vector(given: Any, width: int | None, key: str) -> Tensor:
    """1 e of length 1, fp32. `width` is that of the model's embeddings, None where there are none; `key` that of a request."""
    name = str(given) if isinstance(given, (str, Path)) else key
    if width is None:
        raise UserError(f"{name} is an embedding, and this model draws from pictures and text alone; give a picture")
    try:
        vector = _numbers(given)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{name} cannot be read as an embedding ({error}); expected {width} numbers, in a file an .npy") from None
    if vector.shape not in ((width,), (1, width)):
        raise UserError(f"{name} is shaped {list(vector.shape)}; expected one embedding of this model, {width} numbers")
    largest = vector.abs().max()
    if not vector.isfinite().all() or largest == 0:
        wrong = "nothing but zeros" if largest == 0 else "numbers that are not finite"
        raise UserError(f"{name} holds {wrong}; expected an embedding, which has a direction")
    return F.normalize(vector.view(1, width) / largest, dim=1).float()  # of any length, and no square overflows


def _numbers(given: Any) -> Tensor:
    """fp64, on the CPU."""
    if not isinstance(given, Tensor):
        given = torch.from_numpy(read_array(Path(given)) if isinstance(given, (str, Path)) else np.asarray(given))
    if given.is_complex():
        raise TypeError("its numbers are complex")
    return given.detach().cpu().double()
