"""Exact coordinates: nine tokens a face, the bins of its corners. Nothing is trained, and what is decoded is welded by
construction: corners with the same bins are the same vertex.

Faces are in canonical order: vertices compare by (z, y, x); the lowest corner of a face comes first, the others follow in their
own turn; faces rise from one to the next. A vertex is also one number, z * bins^2 + y * bins + x, and order is that of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tessera.config import Config

CORNERS, AXES = 3, 3
FACE = CORNERS * AXES  # tokens


class CoordinateConfig(Config):
    """Bins of coordinates, as many as `data.bins`, are the tokens."""

    kind: Literal["coordinates"] = "coordinates"
    """The kind of tokenizer: bins of coordinates as they are. Nothing is trained, and nothing is lost."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The tokenizer. Ids are in [0, bins); one more, `end`, stands where a face might have begun."""

    bins: int

    @property
    def vocab_size(self) -> int:
        """Without the end."""
        return self.bins

    @property
    def group(self) -> tuple[int, ...]:
        """A face has corners, and a corner has coordinates."""
        return CORNERS, AXES

    def encode(self, corners: Tensor) -> Tensor:
        """b f 3 3 -> b f 9"""
        return corners.flatten(-2)

    def decode(self, ids: Tensor) -> Tensor:
        """b f 9 -> b f 3 3"""
        return ids.unflatten(-1, (CORNERS, AXES))

    @property
    def constraint(self) -> FaceOrder:
        """What a canonical mesh may go on with."""
        return FaceOrder(self.bins)


@dataclass(frozen=True, slots=True)
class Begun:
    """The last face, and the tokens of the one that is being written."""

    last: Tensor  # b 3: its vertices as numbers; -1 before the first face
    tokens: tuple[Tensor, ...]  # b each, at most eight


@dataclass(frozen=True, slots=True)
class FaceOrder:
    """Allowed tokens of a mesh in canonical order. A token is allowed if and only if some canonical mesh goes on with it.

    Of a face (u, v, w) after (p, q, r), as numbers up to `most`: u < v, u < w, v != w, and (u, v, w) > (p, q, r). What may follow
    is then an interval for each vertex, without at most one number inside it; an interval of numbers is one of digits, given the
    digits before.
    """

    bins: int

    @property
    def most(self) -> int:
        """The highest vertex."""
        return self.bins**AXES - 1

    def init(self, num: int, device: torch.device) -> tuple[Begun, Tensor]:
        """Before the first face; an empty mesh is not allowed."""
        state = Begun(torch.full((num, CORNERS), -1, device=device), ())
        return state, self.allowed(state)

    def step(self, state: Begun, ids: Tensor) -> tuple[Begun, Tensor]:
        """With one more token; after an end everything is."""
        tokens = (*state.tokens, ids)
        state = Begun(self.vertices(tokens), ()) if len(tokens) == FACE else Begun(state.last, tokens)
        return state, self.allowed(state)

    def vertices(self, tokens: Sequence[Tensor]) -> Tensor:
        """b 3: the numbers of a face's vertices."""
        digits = torch.stack(list(tokens), dim=-1).unflatten(-1, (-1, AXES))
        return (digits[..., 0] * self.bins + digits[..., 1]) * self.bins + digits[..., 2]

    def allowed(self, state: Begun) -> Tensor:
        """b bins + 1 bool; the last one is the end."""
        corner, axis = divmod(len(state.tokens), AXES)
        low, high, out = self.interval(state, corner)
        prefix = torch.zeros_like(low)
        for token in state.tokens[corner * AXES :]:
            prefix = prefix * self.bins + token
        size = self.bins ** (AXES - 1 - axis)  # vertices that share a digit from here on
        first = (prefix[:, None] * self.bins + torch.arange(self.bins, device=low.device)) * size
        fits = (first <= high[:, None]) & (first + (size - 1) >= low[:, None]) & (low <= high)[:, None]
        if size == 1:
            fits = fits & (first != out[:, None])
        end = state.last[:, :1] >= 0 if corner == axis == 0 else torch.zeros_like(fits[:, :1])
        return torch.cat([fits, end], dim=1)

    def interval(self, state: Begun, corner: int) -> tuple[Tensor, Tensor, Tensor]:
        """b each: the lowest and the highest vertex that may stand at a corner, and one between them that may not (or -1)."""
        p, q, r = state.last.unbind(1)
        most, none = torch.full_like(p, self.most), torch.full_like(p, -1)
        if corner == 0:  # with u = p there must be a (v, w) above (q, r): the highest is (most, most - 1)
            full = (q == most) & (r >= most - 1)
            return torch.where(full, p + 1, p).clamp(min=0), most - 2, none
        u = self.vertices(state.tokens[:AXES])[:, 0]
        if corner == 1:  # with (u, v) = (p, q) there must be a w above r that is not v
            full = r >= torch.where(q == most, most - 1, most)
            low = torch.where(u == p, torch.where(full, q + 1, q), none)
            return torch.maximum(low, u + 1), most, none
        v = self.vertices(state.tokens[AXES : 2 * AXES])[:, 0]
        low = torch.maximum(torch.where((u == p) & (v == q), r + 1, none), u + 1)
        low = torch.where(low == v, low + 1, low)
        return low, torch.where(v == most, most - 1, most), v
