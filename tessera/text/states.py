"""What every encoder puts out, and every generator takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TextStates:
    """Encoded captions."""

    states: Tensor  # b m c
    mask: Tensor  # b m bool: which states belong to the caption; none of an empty one
    pooled: Tensor  # b c; 0 of an empty one

    def without(self, dropped: Tensor) -> TextStates:
        """The same with some captions (b bool) taken away, as if they were empty."""
        return replace(self, mask=self.mask & ~dropped[:, None], pooled=self.pooled * ~dropped[:, None])
