"""Sizes that do not fit each other, told with those that do: ValueErrors for the validators of configs."""

from __future__ import annotations

from collections.abc import Sequence


def refuse_resolution(resolution: int, stride: int) -> None:
    """Pixels must be whole tokens."""
    if resolution % stride:
        below, above = resolution // stride * stride, -(-resolution // stride) * stride
        raise ValueError(
            f"data.resolution {resolution} cannot be divided by the tokenizer's stride {stride}; "
            f"use {' or '.join(str(size) for size in (below, above) if size >= 16)}, or another tokenizer.model"
        )


def refuse_halvings(widths: Sequence[int], resolution: int, what: str) -> None:
    """A critic halves a picture once less than it has widths."""
    if resolution < 2 ** (len(widths) - 1):
        raise ValueError(f"tokenizer.critic.widths halve a {what} of {resolution} pixels {len(widths) - 1} times; name fewer")
