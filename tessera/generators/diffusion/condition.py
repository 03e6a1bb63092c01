"""What a denoiser is told beside the noised sample: text, an embedding, a smaller picture, its own earlier guess."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tessera.batches import TextStates


@dataclass(frozen=True, slots=True)
class Condition:
    """Rows of one batch. What is None is not used by the network; what a row is not told is masked, and a learned vector stands
    in its place."""

    text: TextStates | None = None  # b m c; rows without text have an empty mask
    embedding: Tensor | None = None  # b e: of the picture that is to be drawn
    has_embedding: Tensor | None = None  # b bool; None: all rows
    low: Tensor | None = None  # b c h w: the smaller picture, enlarged to the size of what is drawn
    low_level: Tensor | None = None  # b: log-SNR of the noise that was put on it
    before: Tensor | None = None  # as the sample: the network's own earlier guess of it; zeros where there is none

    def without(self, untold_text: Tensor, untold_embedding: Tensor) -> Condition:
        """b bool each: rows that are told less."""
        text = None if self.text is None else self.text.without(untold_text)
        if self.embedding is None:
            return replace(self, text=text)
        had = torch.ones(len(self.embedding), dtype=torch.bool, device=self.embedding.device)
        had = had if self.has_embedding is None else self.has_embedding
        return replace(self, text=text, has_embedding=had & ~untold_embedding)
