"""Pictures as recipes show and scale them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import to_uint8
from tessera.media.images import encode_png
from tessera.media.sheets import sheet


def at_size(images: Tensor, size: int) -> Tensor:
    """b c h w in [-1, 1], scaled as the data of training is: bicubic, antialiased, clamped."""
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, size=(size, size), mode="bicubic", antialias=True).clamp(-1, 1)


def pictures(images: Tensor) -> list[npt.NDArray[np.uint8]]:
    """b c h w in [-1, 1] -> arrays of h w c."""
    return list(to_uint8(images).permute(0, 2, 3, 1).cpu().numpy())


def contact_sheet(rows: dict[str, Tensor], captions: Sequence[str | None]) -> bytes:
    """Named rows of pictures with captions below, as a png."""
    picture = sheet(
        [pictures(images) for images in rows.values()],
        row_names=list(rows),
        captions=[caption or "" for caption in captions],
        scale=max(1, 96 // next(iter(rows.values())).shape[-1]),
    )
    return encode_png(picture)
