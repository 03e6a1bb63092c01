"""Sizes that do not fit each other, told with those that do: ValueErrors for the validators of configs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.config import ImageDataConfig


def refuse_resolution(data: ImageDataConfig, stride: int) -> None:
    """Pixels must be whole tokens."""
    for name, side in zip(("data.resolution", "data.width"), data.size, strict=True):
        if side % stride:
            raise ValueError(
                f"{name} {side} cannot be divided by the tokenizer's stride {stride}; "
                f"use {sides_near(side, stride)}, or another tokenizer.model"
            )


def sides_near(side: int, stride: int) -> str:
    """The two that can be divided, in words."""
    below, above = side // stride * stride, -(-side // stride) * stride
    return " or ".join(str(near) for near in (below, above) if near >= 16)


def refuse_other_proportions(data: ImageDataConfig, resolution: int, name: str) -> None:
    """The width that follows from a height must be whole pixels."""
    height, width = data.size
    if resolution * width % height:
        step = height // math.gcd(height, width)
        raise ValueError(
            f"{name} {resolution} would be {resolution * width / height:.2f} pixels wide, as pictures of {height} x {width} are "
            f"(data.resolution, data.width); use {sides_near(resolution, step)}"
        )


def refuse_halvings(widths: Sequence[int], resolution: int, what: str) -> None:
    """A critic halves a picture once less than it has widths."""
    if resolution < 2 ** (len(widths) - 1):
        raise ValueError(f"tokenizer.critic.widths halve a {what} of {resolution} pixels {len(widths) - 1} times; name fewer")
