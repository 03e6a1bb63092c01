"""The loss: cross-entropy of hidden tokens, in nats; the vocabulary head is computed only there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field

from tessera.batches import TextStates, TokenBatch
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.generators.masked.masking import TEXT, capacity, gather_hidden, hide
from tessera.generators.masked.model import MaskedTransformer
from tessera.randomness import mix, uniform


class MaskedLossConfig(Config):
    """How the masked generator is trained."""

    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Share of the target spread over the vocabulary."""
    text_dropout_prob: float = Field(0.1, ge=0, le=1)
    """How often a caption is taken away, so that guidance has an unconditional branch to lean on."""


@dataclass(frozen=True, slots=True)
class MaskedLosses:
    """The turn and the validation measure, for one configuration."""

    config: MaskedLossConfig

    def turn(self, nets: Nets, batch: TokenBatch, context: Context) -> Loss:
        """Hide tokens, take some captions away, guess."""
        dropped = uniform(mix(context.seed, context.step) >> 1, context.positions, 1, stream=TEXT)[:, 0]
        text = encode_text(nets, batch).without(dropped < self.config.text_dropout_prob)
        return guess(nets, batch, text, context, context.step, self.config.label_smoothing)

    def measure(self, nets: Nets, batch: TokenBatch, context: Context) -> Loss:
        """Validation: the same, with captions, and masks that do not change with the step, so that numbers compare."""
        return guess(nets, batch, encode_text(nets, batch), context, step=0, smoothing=0.0)


def guess(nets: Nets, batch: TokenBatch, text: TextStates, context: Context, step: int, smoothing: float) -> Loss:
    """Sums over hidden tokens of valid samples; `step` draws the masks."""
    net = nets["generator"]
    assert isinstance(net, MaskedTransformer)
    ids = batch.ids.flatten(1)
    hidden = hide(context.seed, step, context.positions, ids.shape[1])
    features = net(torch.where(hidden, net.mask_id, ids), text)
    places, real = gather_hidden(hidden, capacity(*ids.shape))
    weights = real * batch.valid[places // ids.shape[1]]
    logits, targets = net.logits(features.flatten(0, 1)[places]), net.split(ids.flatten()[places])
    pairs = list(zip(logits, targets, strict=True))
    losses = [F.cross_entropy(logit, target, reduction="none", label_smoothing=smoothing) for logit, target in pairs]
    right = torch.stack([logit.argmax(-1) == target for logit, target in pairs]).all(0)
    total = (torch.stack(losses).sum(0) * weights).sum()
    return Loss(total, weights.sum().float(), {"right": (right * weights).sum().float()})


def encode_text(nets: Nets, batch: TokenBatch) -> TextStates:
    """Captions by the stage's own encoder; those of a frozen one come encoded."""
    if isinstance(batch.text, TextStates):
        return batch.text
    states = nets["text"](batch.text)
    assert isinstance(states, TextStates)
    return states
