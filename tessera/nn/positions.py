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


def rotary_angles(coordinates: Tensor, width: int, base: float = BASE) -> Tensor:
    """n a -> n width/2: each axis turns an equal share of the pairs of channels, at geometric frequencies (Su et al. 2021)."""
    axes = coordinates.shape[-1]
    share = width // 2 // axes
    if share == 0:
        raise ValueError(f"heads of width {width} have {width // 2} pairs of channels; {axes} axes need at least one each")
    frequencies = base ** -(torch.arange(share, device=coordinates.device) / share)
    angles = (coordinates.float()[..., None] * frequencies).flatten(-2)
    return torch.nn.functional.pad(angles, (0, width // 2 - axes * share))  # what is left over does not turn


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """... n d with pairs (i, i + d/2) turned by n d/2 angles; products of two such vectors depend on differences alone."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
