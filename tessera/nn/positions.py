"""Where tokens are: coordinates of grids with any number of axes, and rotary embeddings over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BASE = 100.0  # wavelengths from 2 pi to 200 pi cells: grids are tens of cells wide, not thousands


def grid_coordinates(shape: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The cells of a grid in raster order: n a, one coordinate an axis."""
    axes = [torch.arange(size, device=device) for size in shape]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def rotary_turns(coordinates: Tensor, width: int, base: float = BASE) -> Tensor:
    """n a -> 2 n width, what `rotate` multiplies by: each axis turns an equal share of the pairs of channels, at geometric
    frequencies (Su et al. 2021). Made once, for all layers."""
    axes = coordinates.shape[-1]
    share = width // 2 // axes
    if share == 0:
        raise ValueError(f"heads of width {width} have {width // 2} pairs of channels; {axes} axes need at least one each")
    frequencies = base ** -(torch.arange(share, device=coordinates.device) / share)
    angles = (coordinates.float()[..., None] * frequencies).flatten(-2)
    angles = torch.nn.functional.pad(angles, (0, width // 2 - axes * share))  # what is left over does not turn
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])


def refuse_narrow(width: int, heads: int, axes: int, section: str = "") -> None:
    """Heads that `rotary_turns` would refuse on a grid, told to the author of a config: `section` is where the two keys stand."""
    least = 2 * axes
    if width // heads >= least:
        return
    fitting = [num for num in range(1, heads) if width % num == 0 and width // num % 2 == 0 and width // num >= least]
    raise ValueError(
        f"{section}heads {heads} of {section}width {width} have {width // heads} channels each, and positions on a grid of "
        f"{axes} axes take at least {least}; use {max(fitting, default=1)} heads at most, or width {least * heads}"
    )


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """... n d with pairs (i, i + d/2) turned by 2 n d; products of two such vectors depend on differences alone."""
    cos, sin = turns.to(x.dtype).unbind()
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([right, left], dim=-1) * sin
