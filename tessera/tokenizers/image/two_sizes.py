"""The losses of a tokenizer that serves two grids: of each picture as it is, and of the same one shrunk to the coarser size.

Trained at one size, a tokenizer knows things of that size, so far from the border as they were there, and no others: shapes
learned at 32 px came back at 64 px with ghosts in the middle, where no cell of a small grid lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from tessera.batches import ImageBatch
from tessera.contracts import Context, Loss, LossFunction, Nets
from tessera.tokenizers.image.losses import ImageLosses


@dataclass(frozen=True, slots=True)
class TwoSizes:
    """Half of the loss is of pictures as they come, half of their smaller selves. The critic knows the large ones alone: it
    judges no others, and for no others is it pleaded with."""

    losses: ImageLosses
    small: tuple[int, int]  # height and width of the smaller ones

    def tokenizer_turn(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Reconstruct both; the large ones are handed on."""
        alone = replace(self.losses, critic=None)
        return self.both(self.losses.tokenizer_turn, alone.tokenizer_turn, nets, batch, context)

    def critic_turn(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Of the large ones."""
        return self.losses.critic_turn(nets, batch, context)

    def measure(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Validation: means of both sizes."""
        return self.both(self.losses.measure, self.losses.measure, nets, batch, context)

    def digest(self, stats: Mapping[str, Tensor]) -> dict[str, float]:
        """Codebook use over both."""
        return self.losses.digest(stats)

    def both(self, of_large: LossFunction, of_small: LossFunction, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """One loss of two; what is summed over cells is summed over those of both grids."""
        shrunk = F.interpolate(batch.images, size=self.small, mode="bilinear", antialias=True)
        large, small = of_large(nets, batch, context), of_small(nets, replace(batch, images=shrunk), context)
        return Loss(
            (large.total + small.total) / 2,
            large.weight,
            {name: (part + small.parts.get(name, part)) / 2 for name, part in large.parts.items()},
            {name: total + small.stats[name] for name, total in large.stats.items()},
            large.hand,
        )
