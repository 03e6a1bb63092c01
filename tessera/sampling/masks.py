"""A mask beside a picture: white where something new is drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.config import UserError
from tessera.media.images import Pixels, fit, to_array, to_picture

WHITE = 128  # or brighter


def redraw_of(mask: Pixels, picture: tuple[int, int], size: tuple[int, int], name: str) -> npt.NDArray[np.bool_]:
    """h w 4, to a picture of that height and width -> bool, cut and scaled to `size` as the picture is. Transparent parts are
    refused: they might mean either."""
    if mask[:, :, 3].min() < 255:
        raise UserError(
            f"the {name} has transparent pixels, which say neither yes nor no; save it without transparency (no alpha "
            f"channel): white where something new is drawn, black elsewhere"
        )
    height, width = mask.shape[:2]
    if not alike((height, width), picture):
        raise UserError(
            f"the {name} has other proportions than its picture: it is {width / height:.3g} times as wide as high, and the "
            f"picture {picture[1] / picture[0]:.3g} times; make it of the picture's size"
        )
    if not (grey(mask) >= WHITE).any():
        raise UserError(f"the {name} has no white pixel, so nothing would be drawn; white marks what is drawn anew")
    redraw = grey(fit(mask, size)) >= WHITE
    if not redraw.any():
        raise UserError(
            f"the {name} is white only where nothing is left once it is cut to the middle and scaled to {size[0]} x {size[1]} "
            f"pixels, as the picture is; make more of it white"
        )
    return redraw


def alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two sizes have the same proportions, but for rounding: by up to a pixel of the smaller one."""
    (height, width), (tall, wide) = sorted((one, other))
    return abs(height * wide - width * tall) <= max(tall, wide)


def grey(array: Pixels) -> Pixels:
    """h w c -> h w."""
    return to_array(to_picture(array), channels=1)[:, :, 0]
