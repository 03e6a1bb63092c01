"""The contrastive loss (InfoNCE in both directions: Radford et al. 2021, figure 3), as a sum over samples.

Each sample is told apart from all others of its micro-batch, those of other ranks too, within a group: a run of so many places in
the stream. So ranks change nothing. Micro-batches change nothing where each is made of whole groups; a group that they cut is two
smaller ones.
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
from tessera.randomness import mix_text
from tessera.tokenizers.pair.model import Embedder


class PairLossConfig(Config):
    """How the pair is trained."""

    group: int = Field(64, ge=2)
    """Samples that are told apart from each other, over all ranks: more are harder to tell apart, and teach more. A group that
    micro-batches cut is two smaller ones."""


@dataclass(frozen=True, slots=True)
class PairLosses:
    """The turn and the validation measure, for one configuration."""

    config: PairLossConfig

    def turn(self, nets: Nets, batch: PairBatch, context: Context) -> Loss:
        """Sums over samples that are valid, have a caption, and have another one in their group to be told from."""
        net = nets["embedder"]
        assert isinstance(net, Embedder)
        assert batch.images is not None
        own = torch.cat(net(batch.images, batch.text), dim=1)
        everyone = context.gather(own)
        partner, rivals = partners_and_rivals(batch, context, self.config.group)
        contested = rivals.any(1)
        (pictures, captions), (all_pictures, all_captions) = own.chunk(2, dim=1), everyone.chunk(2, dim=1)
        with torch.autocast(own.device.type, enabled=False):
            sharpness = net.sharpness.float()
            tables = [sharpness * pictures @ all_captions.T, sharpness * captions @ all_pictures.T]
        total = (torch.stack([_surprise(table, rivals, partner) for table in tables]).mean(0) * contested).sum()
        found = [_nearest_is_own(table, rivals, partner) & contested for table in tables]
        parts = {"picture_r@1": found[0].sum().float(), "caption_r@1": found[1].sum().float()}
        weight = contested.sum().float()
        return Loss(total, weight, {**parts, "sharpness": net.sharpness.detach().float() * weight})

    def measure(self, nets: Nets, batch: PairBatch, context: Context) -> Loss:
        """Validation: the same, on samples that do not change; r@1 is the share of pictures, and of captions, whose own partner
        is nearest among those of its group."""
        return self.turn(nets, batch, context)


def partners_and_rivals(batch: PairBatch, context: Context, group: int) -> tuple[Tensor, Tensor]:
    """b n bool each, n over all ranks: which one belongs to a sample, and what it is told apart from. Equal captions, and the
    same picture twice, are no rivals: neither is wrong."""
    device, positions = context.positions.device, context.positions
    told = torch.tensor([bool(caption) for caption in batch.captions])
    captions, keys, told = (part.to(device, non_blocking=True) for part in (_numbers(batch.captions), _numbers(batch.keys), told))
    own = torch.stack([positions, captions, keys, batch.valid & told])
    everyone = context.gather(own.T.contiguous()).T
    same_place, same_caption, same_key, _ = own[:, :, None] == everyone[:, None]
    near = positions[:, None] // group == everyone[0] // group
    counted = own[3, :, None].bool() & everyone[3].bool()
    return same_place, near & ~same_caption & ~same_key & counted


def _numbers(names: Sequence[str | None]) -> Tensor:
    """b int64: equal names, equal numbers, on every rank."""
    return torch.tensor([mix_text(name or "") >> 1 for name in names])


def _surprise(scores: Tensor, rivals: Tensor, partner: Tensor) -> Tensor:
    """b: minus the log share of the own partner among itself and the rivals of its row."""
    return torch.logsumexp(scores.masked_fill(~(rivals | partner), -torch.inf), dim=1) - _of(partner, scores)


def _nearest_is_own(scores: Tensor, rivals: Tensor, partner: Tensor) -> Tensor:
    """b bool; a tie counts against it, so that a pair that says always the same finds nothing."""
    return (scores.masked_fill(~rivals, -torch.inf) < _of(partner, scores)[:, None]).all(1)


def _of(partner: Tensor, scores: Tensor) -> Tensor:
    """b: the score with the own partner, which is one of each row."""
    return scores.masked_fill(~partner, 0).sum(1)
