"""Attributes: a classifier fitted to real training clips tells which value of each slot of the captions a clip shows.

Its own accuracy on real held-out clips is the ceiling of every other row, and others' captions give chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.contracts import Context, Loss, Nets
from tessera.evals.clip_nets import ClipNet, run_clip_net, shrink_clips
from tessera.evals.features import FeatureNet
from tessera.evals.nets import FitBatch, Fitting, fit_net, side_for, weights_hash
from tessera.evals.oracle import Tally
from tessera.evals.slots import Slot
from tessera.media.clips import Frames

WIDTH = 128  # of the trunk's features
SMOOTHING = 0.05  # of targets, so that rare values are not learned by heart


@dataclass(frozen=True, slots=True)
class Classifier:
    """A fitted net with one choice a slot."""

    slots: tuple[Slot, ...]
    net: FeatureNet
    sha256: str

    def guess(self, clips: Sequence[Frames]) -> npt.NDArray[np.int64]:
        """n clips -> n s: the value of each slot."""
        logits = torch.from_numpy(run_clip_net(self.net, clips, self.net.trunk.side, sum(sizes(self.slots))))
        return torch.stack([part.argmax(1) for part in logits.split(sizes(self.slots), 1)], 1).numpy()

    def tally(self, clips: Sequence[Frames], captions: Sequence[str | None]) -> Tally:
        """How often each slot is as the caption says; `joint`: all of a clip that its caption names."""
        return tally_guesses(self.slots, self.guess(clips), read_all(self.slots, captions))


def sizes(slots: Sequence[Slot]) -> list[int]:
    """Values of each."""
    return [len(slot.values) for slot in slots]


def read_all(slots: Sequence[Slot], captions: Sequence[str | None]) -> npt.NDArray[np.int64]:
    """n s: what each caption says; -1 where it says nothing."""
    return np.stack([slot.read(captions) for slot in slots], 1)


def tally_guesses(slots: Sequence[Slot], guesses: npt.NDArray[np.int64], asked: npt.NDArray[np.int64]) -> Tally:
    """n s each; what is not asked for counts nowhere."""
    named, same = asked >= 0, guesses == asked
    right = {slot.name: int((same & named)[:, column].sum()) for column, slot in enumerate(slots)}
    counts = {slot.name: int(named[:, column].sum()) for column, slot in enumerate(slots) if named[:, column].any()}
    any_named = named.any(1)
    right["joint"], counts["joint"] = int((same | ~named).all(1)[any_named].sum()), int(any_named.sum())
    return Tally(right, counts)


def fit_classifier(
    clips: Sequence[Frames], captions: Sequence[str | None], slots: Sequence[Slot], fitting: Fitting
) -> Classifier:
    """From clips and captions of the training split."""
    if not slots:
        raise ValueError("a classifier of attributes needs slots; got none")
    channels, side = clips[0].shape[3], side_for(clips[0].shape[1])

    def loss(nets: Nets, batch: FitBatch, context: Context) -> Loss:
        return slots_loss(nets["net"](batch.images), batch.targets, sizes(slots))

    net: nn.Module = fit_net(
        lambda: FeatureNet(ClipNet(channels, side, WIDTH), sum(sizes(slots))),
        loss,
        shrink_clips(clips, side),
        torch.from_numpy(read_all(slots, captions)),
        fitting,
    )
    assert isinstance(net, FeatureNet)
    return Classifier(tuple(slots), net, weights_hash(net))


def slots_loss(logits: Tensor, targets: Tensor, counts: Sequence[int]) -> Loss:
    """Cross-entropy of every slot, summed over those that a caption names."""
    total = sum(
        (
            F.cross_entropy(part, target, ignore_index=-1, label_smoothing=SMOOTHING, reduction="sum")
            for part, target in zip(logits.split(list(counts), 1), targets.unbind(1), strict=True)
        ),
        logits.new_zeros(()),
    )
    return Loss(total, torch.tensor(float(len(logits)), device=logits.device))
