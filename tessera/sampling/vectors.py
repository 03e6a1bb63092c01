"""An embedding in the place of a picture: a file that holds one, or the vector itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.config import UserError


def is_vector(given: Any) -> bool:
    """Whether it is no picture: an .npy file, or an array of one axis."""
    if isinstance(given, (str, Path)):
        return Path(given).suffix == ".npy"
    return isinstance(given, (np.ndarray, Tensor)) and given.ndim == 1


def read_vector(given: Any, width: int | None) -> Tensor:
    """1 e of length 1, fp32. `width` is that of the model's embeddings, None of a model that has none."""
    name = str(given) if isinstance(given, (str, Path)) else "image"
    if width is None:
        raise UserError(f"{name} is an embedding, and this model draws from pictures and text alone; give a picture")
    try:
        array = np.load(given, allow_pickle=False) if isinstance(given, (str, Path)) else np.asarray(given)
        vector = torch.from_numpy(np.array(array, dtype=np.float32))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{name} cannot be read as an embedding ({error}); expected an .npy file of {width} numbers") from None
    if vector.shape not in ((width,), (1, width)):
        raise UserError(f"{name} is shaped {list(vector.shape)}; expected one embedding of this model, {width} numbers")
    if not vector.isfinite().all() or not vector.any():
        raise UserError(f"{name} holds {'nothing but zeros' if not vector.any() else 'numbers that are not finite'}; "
                        f"expected an embedding, which has a direction")  # fmt: skip
    return F.normalize(vector.view(1, width), dim=1)
