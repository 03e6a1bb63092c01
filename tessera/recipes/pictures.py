"""Pictures as recipes show and scale them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import to_uint8
from tessera.media.images import encode_png
from tessera.media.sheets import sheet


def at_size(images: Tensor, size: tuple[int, int]) -> Tensor:
    """b c h w in [-1, 1], scaled as the data of training is: bicubic, antialiased, clamped."""
    if images.shape[-2:] == size:
        return images
    return F.interpolate(images, size=size, mode="bicubic", antialias=True).clamp(-1, 1)


def covered_cells(redraw: Tensor, grid: tuple[int, int], ring: int) -> Tensor:
    """b h w bool -> b 1 rows columns: the cells that are touched, and so many around them, whose latents know of these."""
    cells = F.adaptive_max_pool2d(redraw[:, None].float(), grid)
    return F.max_pool2d(cells, 2 * ring + 1, stride=1, padding=ring)


def covered(images: Tensor, redraw: Tensor) -> Tensor:
    """b c h w with the mean of what stays where redraw (b 1 h w bool) is true: what is drawn over must not shine through."""
    mean = (images * ~redraw).sum((2, 3), keepdim=True) / (~redraw).sum((2, 3), keepdim=True).clamp(min=1)
    return torch.where(redraw, mean, images)


def pictures(images: Tensor) -> list[npt.NDArray[np.uint8]]:
    """b c h w in [-1, 1] -> arrays of h w c."""
    return list(to_uint8(images).permute(0, 2, 3, 1).cpu().numpy())


def contact_sheet(rows: dict[str, Tensor], captions: Sequence[str | None]) -> bytes:
    """Named rows of pictures with captions below, as a png."""
    picture = sheet(
        [pictures(images) for images in rows.values()],
        row_names=list(rows),
        captions=[caption or "" for caption in captions],
        scale=max(1, 96 // max(next(iter(rows.values())).shape[-2:])),
    )
    return encode_png(picture)
