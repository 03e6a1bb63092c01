"""The loss on clips: cross-entropy of every token of the frames that a clip has, in nats; the first frame and later ones are also
counted apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.batches import TextStates, TokenBatch
from tessera.contracts import Context, Loss, Nets
from tessera.generators.autoregressive.grid_model import GridAutoregressive
from tessera.generators.autoregressive.losses import LENGTH, TEXT, AutoregressiveLossConfig
from tessera.generators.autoregressive.model import length_class
from tessera.randomness import mix, uniform
from tessera.text.encoders import encode_text

SKETCH, GAPS = 33, 34  # streams of random numbers


class GridLossConfig(AutoregressiveLossConfig):
    """How the autoregressive generator of clips is trained. A length is a number of latent frames."""

    sketch_dropout_prob: float = Field(0.2, ge=0, le=1)
    """How often a sketch is taken away, where the generator takes one: for clips without, and for guidance."""
    sketch_gaps_prob: float = Field(0.0, ge=0, le=1)
    """How often latent frames of a sketch are taken away, from none to all of them: for sketches with gaps."""


@dataclass(frozen=True, slots=True)
class GridLosses:
    """The turn and the validation measure, for one configuration."""

    config: GridLossConfig

    def turn(self, nets: Nets, batch: TokenBatch, context: Context) -> Loss:
        """Take some captions, numbers of frames and sketches away, guess."""
        key, config = mix(context.seed, context.step) >> 1, self.config
        untold, free, bare = (
            uniform(key, context.positions, 1, stream)[:, 0] < prob
            for stream, prob in (
                (TEXT, config.text_dropout_prob), (LENGTH, config.length_dropout_prob), (SKETCH, config.sketch_dropout_prob)
            )
        )  # fmt: skip
        text, told = encode_text(nets, batch.text).without(untold), frames_of(batch).masked_fill(free, 0)
        gone = bare[:, None]
        if batch.sketch is not None and config.sketch_gaps_prob:
            gone = gone | gaps(key, context.positions, batch.sketch.shape[1], config.sketch_gaps_prob)
        return guess(nets, batch, text, told, sketch_of(nets, batch, gone))

    def measure(self, nets: Nets, batch: TokenBatch, context: Context) -> Loss:
        """Validation: with captions and sketches, without numbers of frames."""
        text, told = encode_text(nets, batch.text), torch.zeros_like(frames_of(batch))
        return guess(nets, batch, text, told, sketch_of(nets, batch, torch.zeros_like(batch.valid)[:, None]))


def frames_of(batch: TokenBatch) -> Tensor:
    """b int64: how many latent frames each clip has."""
    return batch.ids.new_full((len(batch.ids),), batch.ids.shape[1]) if batch.lengths is None else batch.lengths


def gaps(key: int, positions: Tensor, frames: int, prob: float) -> Tensor:
    """b t bool: which latent frames of sketches are taken away. A sample has gaps with that probability, and then loses each
    frame with one of its own, which is even from 0 to 1."""
    drawn = uniform(key, positions, 1 + frames, GAPS)
    return (drawn[:, :1] < prob) & (drawn[:, 1:] < drawn[:, :1] / prob)  # a number below `prob` is even from 0 to it


def sketch_of(nets: Nets, batch: TokenBatch, gone: Tensor) -> Tensor | None:
    """b t h w or b t h w q: sketches, with `nothing` in frames that they do not have, and in those that are gone (b t bool, or
    b 1)."""
    if batch.sketch is None:
        return None
    lengths = batch.ids.shape[1] if batch.sketch_lengths is None else batch.sketch_lengths[:, None]
    missing = (torch.arange(batch.sketch.shape[1], device=gone.device) >= lengths) | gone
    return batch.sketch.masked_fill(missing.view(*missing.shape, *[1] * (batch.sketch.ndim - 2)), generator_of(nets).nothing)


def guess(nets: Nets, batch: TokenBatch, text: TextStates, told: Tensor, sketch: Tensor | None = None) -> Loss:
    """Sums over the tokens of valid clips; `told` b is the number of frames that the network is told, 0 for none."""
    net, frames = generator_of(nets), batch.ids.shape[1]
    logits = net(batch.ids, text, length_class(told), net.sights(frames, batch.ids.device), sketch)
    parts = net.split(batch.ids)
    there = (torch.arange(frames, device=parts.device) < frames_of(batch)[:, None]) & batch.valid[:, None]
    each = F.cross_entropy(logits.flatten(0, -2), parts.flatten(), reduction="none").view(*there.shape, -1) * there[..., None]
    right = (net.join(logits.argmax(-1)) == batch.ids).flatten(2).sum(2) * there
    by_frame, tokens = each.detach().double().sum((0, 2)), there.sum(0).double() * batch.ids[0, 0].numel()
    stats = {
        "samples": batch.valid.sum().double()[None],
        "nats": torch.stack([by_frame[0], by_frame[1:].sum()]),
        "tokens": torch.stack([tokens[0], tokens[1:].sum()]),
    }
    return Loss(each.sum(), tokens.sum().float(), {"right": right.sum().float()}, stats)


def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
    """Bits: of a token, of a whole clip, and of a token of the first frame and of later ones."""
    (samples,), nats, tokens = (stats[name].tolist() for name in ("samples", "nats", "tokens"))
    bits = [some / math.log(2) for some in nats]
    numbers = {"bits_per_token": sum(bits) / max(sum(tokens), 1), "bits_per_sample": sum(bits) / max(samples, 1)}
    apart = zip(("first_frame", "later_frames"), bits, tokens, strict=True)
    return numbers | {f"bits_of_{name}": some / count for name, some, count in apart if count}


def generator_of(nets: Nets) -> GridAutoregressive:
    """The net of that name."""
    net = nets["generator"]
    assert isinstance(net, GridAutoregressive)
    return net
