"""The contrastive loss (InfoNCE in both directions: Radford et al. 2021, figure 3), as a sum over samples.

Samples are told apart within groups: runs of so many places in the stream. So the loss is a sum over groups and asks nothing of
other ranks: however many ranks and micro-batches share a batch, the result is the same, as long as each holds whole groups. A
group that is cut is two smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from tessera.batches import PairBatch
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.tokenizers.pair.model import Embedder


class PairLossConfig(Config):
    """How the pair is trained."""

    group: int = Field(64, ge=2)
    """Samples that are told apart from each other. Batches and micro-batches of whole groups on every rank give the same result
    on any number of ranks; more are harder to tell apart, and teach more."""


@dataclass(frozen=True, slots=True)
class PairLosses:
    """The turn and the validation measure, for one configuration."""

    config: PairLossConfig

    def turn(self, nets: Nets, batch: PairBatch, context: Context) -> Loss:
        """Sums over samples that are valid, have a caption, and have another one in their group to be told from."""
        net = nets["embedder"]
        assert isinstance(net, Embedder)
        assert batch.images is not None
        pictures, captions = net(batch.images, batch.text)
        with torch.autocast(pictures.device.type, enabled=False):
            scores = net.sharpness.float() * pictures @ captions.T
        rivals, contested = rivals_of(batch, context.positions, self.config.group)
        own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        losses = [_surprise(table, rivals, own) for table in (scores, scores.T)]
        total = ((losses[0] + losses[1]) / 2 * contested).sum()
        found = [_nearest_is_own(table, rivals) & contested for table in (scores, scores.T)]
        parts = {"picture_r@1": found[0].sum().float(), "caption_r@1": found[1].sum().float()}
        weight = contested.sum().float()
        return Loss(total, weight, {**parts, "sharpness": net.sharpness.detach().float() * weight})

    def measure(self, nets: Nets, batch: PairBatch, context: Context) -> Loss:
        """Validation: the same, on samples that do not change; r@1 is the share of pictures, and of captions, whose own partner
        is nearest among those of its group."""
        return self.turn(nets, batch, context)


def rivals_of(batch: PairBatch, positions: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """b b bool: what each sample is told apart from, and b bool: which samples are. Equal captions, and the same picture twice,
    are no rivals: neither is wrong."""
    device = positions.device
    captions, keys = (_numbers(names).to(device, non_blocking=True) for names in (batch.captions, batch.keys))
    counts = batch.valid & torch.tensor([bool(caption) for caption in batch.captions]).to(device, non_blocking=True)
    groups = positions // group
    near = groups[:, None] == groups
    other = (captions[:, None] != captions) & (keys[:, None] != keys)
    rivals = near & other & counts[:, None] & counts
    return rivals, rivals.any(1)


def _numbers(names: Sequence[str | None]) -> Tensor:
    """b int64: equal names, equal numbers."""
    first: dict[str | None, int] = {}
    return torch.tensor([first.setdefault(name, len(first)) for name in names])


def _surprise(scores: Tensor, rivals: Tensor, own: Tensor) -> Tensor:
    """b: minus the log share of the own partner among itself and the rivals of its row."""
    return torch.logsumexp(scores.masked_fill(~(rivals | own), -torch.inf), dim=1) - scores.diagonal()


def _nearest_is_own(scores: Tensor, rivals: Tensor) -> Tensor:
    """b bool; a tie counts against it, so that a pair that says always the same finds nothing."""
    return (scores.masked_fill(~rivals, -torch.inf) < scores.diagonal()[:, None]).all(1)
