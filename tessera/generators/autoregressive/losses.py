"""The loss: cross-entropy of every token and of the end, in nats; counted by groups as well, and by how early a group is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.batches import SequenceBatch, TextStates
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.generators.autoregressive.model import Autoregressive, length_class
from tessera.randomness import mix, uniform
from tessera.text.encoders import encode_text

TEXT, LENGTH = 31, 32  # streams of random numbers
PLACES = 8  # the first so many groups, whose loss is counted one by one
TOLD = (1, 2, 4, 8)  # of those, which are reported


class AutoregressiveLossConfig(Config):
    """How the autoregressive generator is trained."""

    text_dropout_prob: float = Field(0.1, ge=0, le=1)
    """How often a caption is taken away, so that guidance has an unconditional branch to lean on."""
    length_dropout_prob: float = Field(0.5, ge=0, le=1)
    """How often the length is not told, so that samples can be drawn without asking for one."""


def as_it_is(nets: Nets, batch: SequenceBatch) -> SequenceBatch:
    """Where the loader brings tokens."""
    return batch


@dataclass(frozen=True, slots=True)
class Targets:
    """What is to be guessed, group by group."""

    ids: Tensor  # b n + 1 t; the end is the first token of the group behind the last
    counts: Tensor  # b n + 1 t bool


@dataclass(frozen=True, slots=True)
class AutoregressiveLosses:
    """The turn and the validation measure, for one configuration."""

    config: AutoregressiveLossConfig
    read: Callable[[Nets, Any], SequenceBatch] = as_it_is  # what the loader brings -> tokens, by a frozen tokenizer

    def turn(self, nets: Nets, batch: Any, context: Context) -> Loss:
        """Take some captions and lengths away, guess."""
        batch = self.read(nets, batch)
        key = mix(context.seed, context.step) >> 1
        untold = uniform(key, context.positions, 1, TEXT)[:, 0] < self.config.text_dropout_prob
        free = uniform(key, context.positions, 1, LENGTH)[:, 0] < self.config.length_dropout_prob
        return guess(nets, batch, encode_text(nets, batch.text).without(untold), batch.lengths.masked_fill(free, 0))

    def measure(self, nets: Nets, batch: Any, context: Context) -> Loss:
        """Validation: with captions, without lengths."""
        batch = self.read(nets, batch)
        return guess(nets, batch, encode_text(nets, batch.text), torch.zeros_like(batch.lengths))


def guess(nets: Nets, batch: SequenceBatch, text: TextStates, lengths: Tensor) -> Loss:
    """Sums over the tokens of valid samples, and one end each."""
    net = generator_of(nets)
    wanted = targets_of(batch, net.end)
    logits = net(batch.ids, text, length_class(lengths))
    each = F.cross_entropy(logits.flatten(0, 2), wanted.ids.flatten(), reduction="none").view(wanted.ids.shape) * wanted.counts
    right = (logits.argmax(-1) == wanted.ids) & wanted.counts
    by_group, groups = each.detach().double().sum(-1), wanted.counts.any(-1)
    early = slice(0, PLACES)
    stats = {
        "nats": by_group.sum()[None],
        "samples": batch.valid.sum().double()[None],
        "groups": (batch.lengths * batch.valid).sum().double()[None],
        "early_nats": padded(by_group[:, early].sum(0)),
        "early_groups": padded(groups[:, early].sum(0).double()),
    }
    return Loss(each.sum(), wanted.counts.sum().float(), {"right": right.sum().float()}, stats)


def targets_of(batch: SequenceBatch, end: int) -> Targets:
    """All tokens of a sample's groups, then the end."""
    ids = F.pad(batch.ids, (0, 0, 0, 1))
    place = torch.arange(ids.shape[1], device=ids.device)[None]
    last, first = place == batch.lengths[:, None], torch.arange(ids.shape[2], device=ids.device) == 0
    counts = (place < batch.lengths[:, None])[..., None] | (last[..., None] & first)
    return Targets(torch.where(last[..., None] & first, end, ids), counts & batch.valid[:, None, None])


def padded(values: Tensor) -> Tensor:
    """As many as are reported, also where all samples are shorter."""
    return F.pad(values, (0, PLACES - len(values)))


def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
    """Bits, which compare across tokenizers that lose nothing: of a group, of a whole sample, and of the first groups."""
    nats, samples, groups = (float(stats[name][0]) for name in ("nats", "samples", "groups"))
    numbers = {"bits_per_group": nats / max(groups, 1) / math.log(2), "bits_per_sample": nats / max(samples, 1) / math.log(2)}
    for place, (some, count) in enumerate(zip(stats["early_nats"].tolist(), stats["early_groups"].tolist(), strict=True)):
        if count and place + 1 in TOLD:
            numbers[f"bits_of_group_{place + 1}"] = some / count / math.log(2)
    return numbers


def generator_of(nets: Nets) -> Autoregressive:
    """The net of that name."""
    net = nets["generator"]
    assert isinstance(net, Autoregressive)
    return net
