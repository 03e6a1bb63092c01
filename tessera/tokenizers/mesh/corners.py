"""Which codes may follow which. Corners of the same codes are one vertex, so no corner of a face repeats another one's; what the
faces of a mesh may be otherwise, codes do not say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Face:
    """The one that is being written."""

    tokens: tuple[Tensor, ...]  # b each
    later: bool  # whether another one stands before it


@dataclass(frozen=True, slots=True)
class DistinctCorners:
    """Allowed tokens of faces, corner by corner: at its last token a corner takes none that would make it an earlier one. Among
    quads the last corner may repeat the third: a triangle. The end stands between faces, and not at once."""

    corners: int
    sizes: tuple[int, ...]  # ids of each token of a corner

    def init(self, num: int, device: torch.device) -> tuple[Face, Tensor]:
        """Before the first face."""
        state = Face((), False)
        return state, self.allowed(state, num, device)

    def step(self, state: Face, ids: Tensor) -> tuple[Face, Tensor]:
        """With one more token."""
        tokens = (*state.tokens, ids)
        state = Face((), True) if len(tokens) == self.corners * len(self.sizes) else Face(tokens, state.later)
        return state, self.allowed(state, len(ids), ids.device)

    def allowed(self, state: Face, num: int, device: torch.device) -> Tensor:
        """b v + 1 bool; the last one is the end."""
        count, vocabulary = len(self.sizes), max(self.sizes)
        corner, place = divmod(len(state.tokens), count)
        ids = torch.arange(vocabulary + 1, device=device)
        found = (ids < self.sizes[place]).expand(num, -1)
        if state.later and not state.tokens:
            found = found | (ids == vocabulary)
        if place == count - 1 and self.sizes[place] >= self.corners:  # with fewer there might be none left
            own = state.tokens[corner * count :]
            for other in self.others(corner):
                tokens = state.tokens[other * count : (other + 1) * count]
                repeats = ids == tokens[-1][:, None]
                for one, same in zip(own, tokens, strict=False):  # the corner's own so far
                    repeats = repeats & (one == same)[:, None]
                found = found & ~repeats
        return found

    def others(self, corner: int) -> range:
        """Earlier corners that it may not repeat."""
        return range(corner - (corner == 3))
