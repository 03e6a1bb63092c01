"""The losses: cross-entropy of hidden tokens, in nats, the vocabulary head computed only there; and the critic's verdict on what
the generator puts in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.batches import TextStates, TokenBatch
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.generators.masked.critic import judge
from tessera.generators.masked.frames import FrameMaskConfig, Frames, draw_frames, plain_frames
from tessera.generators.masked.masking import FILL, RECALL, TEXT, capacity, chance, disturb, gather_hidden, hide
from tessera.generators.masked.model import MaskedTransformer
from tessera.nn.drawing import draw
from tessera.randomness import mix, uniform
from tessera.text.encoders import encode_text

RECALL_PROB = 0.5  # Chen et al. 2022, section 3.2


class MaskedLossConfig(Config):
    """How the masked generator is trained."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread over the vocabulary. Off by default; the papers take 0.1."""
    text_dropout_prob: float = Field(0.1, ge=0, le=1)
    """How often a caption is taken away, so that guidance has an unconditional branch to lean on."""
    low_noise: float = Field(0.1, ge=0, le=1)
    """Super-resolution: up to this share of a sample's coarse tokens is replaced by random ones."""
    frames: FrameMaskConfig | None = None
    """Clips: whole latent frames that are shown or taken away; null for pictures."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the generator is told besides visible tokens."""

    text: TextStates
    low: Tensor | None  # b k
    recalls: Tensor  # b bool: which samples get features of an earlier pass, where the network takes them
    frames: Frames | None = None  # of clips; None: all are there, and none is shown whole

    @property
    def present(self) -> Tensor | None:
        """b t bool: which frames are there."""
        return None if self.frames is None else self.frames.present


@dataclass(frozen=True, slots=True)
class Filled:
    """Grids in which the generator's draws stand for what was hidden: what a critic judges."""

    ids: Tensor  # b n
    guessed: Tensor  # b n bool: drawn, and in a valid sample
    wrong: Tensor  # b n bool: not the true token
    given: Given


@dataclass(frozen=True, slots=True)
class MaskedLosses:
    """The turns and the validation measure, for one configuration."""

    config: MaskedLossConfig
    joint: float = 0.0  # weight of a critic that the generator's own turn trains; 0: it has a turn of its own, or there is none

    def turn(self, nets: Nets, batch: TokenBatch, context: Context) -> Loss:
        """Hide tokens, take some captions away, guess. A critic is handed what was guessed."""
        seed, step, positions = context.seed, context.step, context.positions
        dropped = chance(self.config.text_dropout_prob, seed, step, positions, TEXT)
        low = None if batch.low is None else batch.low.flatten(1)
        net = generator_of(nets)
        if low is not None and net.embed_low is not None:
            low = disturb(low, net.embed_low.vocab_size, self.config.low_noise, seed, step, positions)
        recalls = chance(RECALL_PROB, seed, step, positions, RECALL)
        frames = self.frames(batch, context)
        given = Given(encode_text(nets, batch.text).without(dropped), low, recalls, frames)
        loss = guess(nets, batch, given, context, step, self.config.label_smoothing)
        return add_verdict(loss, verdict(nets, loss.hand, through=True), self.joint) if self.joint else loss

    def frames(self, batch: TokenBatch, context: Context) -> Frames | None:
        """What is there of each clip, and shown; None where all is there and nothing shown, which costs nothing."""
        config, lengths, num_steps = self.config.frames, batch.lengths, batch.ids.shape[1]
        if config is None:
            return None if lengths is None else plain_frames(lengths, num_steps)
        lengths = torch.full_like(context.positions, num_steps) if lengths is None else lengths
        return draw_frames(config, context.seed, context.step, context.positions, lengths, num_steps)

    def critic_turn(self, nets: Nets, batch: TokenBatch, context: Context) -> Loss:
        """Judge what the generator's turn of this micro-batch handed on."""
        return verdict(nets, context.handed["generator"])

    def measure(self, nets: Nets, batch: TokenBatch, context: Context) -> Loss:
        """Validation: with captions, undisturbed, clips as long as they are and from their start, and masks that do not change
        with the step, so that numbers compare."""
        low = None if batch.low is None else batch.low.flatten(1)
        frames = None if batch.lengths is None else plain_frames(batch.lengths, batch.ids.shape[1])
        given = Given(encode_text(nets, batch.text), low, torch.ones_like(batch.valid), frames)
        loss = guess(nets, batch, given, context, step=0, smoothing=0.0)
        if "critic" not in nets:
            return loss
        return add_verdict(loss, verdict(nets, loss.hand), weight=0.0)


def guess(nets: Nets, batch: TokenBatch, given: Given, context: Context, step: int, smoothing: float) -> Loss:
    """Sums over hidden tokens of valid samples; `step` draws the masks."""
    net, ids = generator_of(nets), batch.ids.flatten(1)
    among = None if given.frames is None else net.spread(given.frames.present & ~given.frames.shown)
    hidden = hide(context.seed, step, context.positions, ids.shape[1], among)
    features = look(net, ids.masked_fill(hidden, net.mask_id), given)
    places, real = gather_hidden(hidden, capacity(*ids.shape))
    weights = real * batch.valid[places // ids.shape[1]]
    logits, targets = net.logits(features.flatten(0, 1).index_select(0, places)), net.split(ids.flatten()[places])
    pairs = list(zip(logits, targets, strict=True))
    losses = [F.cross_entropy(logit, target, reduction="none", label_smoothing=smoothing) for logit, target in pairs]
    right = torch.stack([logit.argmax(-1) == target for logit, target in pairs]).all(0)
    total = (torch.stack(losses).sum(0) * weights).sum()
    hand = None
    if "critic" in nets:
        drawn = fill(net, ids, logits, places, hidden, mix(context.seed, step) >> 1, context.positions)
        hand = Filled(drawn, hidden & batch.valid[:, None], drawn != ids, detached(given))
    return Loss(total, weights.sum().float(), {"right": (right * weights).sum().float()}, hand=hand)


def look(net: MaskedTransformer, ids: Tensor, given: Given) -> Tensor:
    """Features b n d. With self-conditioning a first pass is always made, so that shapes and cost are the same for all batches,
    and some samples are not shown its features."""
    if net.recall is None:
        return net(ids, given.text, given.low, frames=given.present)
    with torch.no_grad():
        previous = net(ids, given.text, given.low, frames=given.present) * given.recalls[:, None, None]
    return net(ids, given.text, given.low, previous, frames=given.present)


@torch.no_grad()
def fill(
    net: MaskedTransformer, ids: Tensor, logits: Sequence[Tensor], places: Tensor, hidden: Tensor, key: int, positions: Tensor
) -> Tensor:
    """b n: ids with a draw of the generator, at temperature 1, in every hidden place; logits are those of the places."""
    numbers = uniform(key, positions, ids.shape[1] * len(logits), FILL).view(-1, len(logits))[places]
    drawn = net.join([draw(logit.detach(), number) for logit, number in zip(logits, numbers.unbind(-1), strict=True)])
    return torch.where(hidden, ids.flatten().scatter(0, places, drawn).view(ids.shape), ids)


def verdict(nets: Nets, filled: Filled, *, through: bool = False) -> Loss:
    """Binary cross-entropy of "this token is not the true one", over what was guessed. Tokens that were visible are right by
    construction: counting them would teach that most are, while in sampling every token that is judged was once guessed."""
    given = filled.given
    logits = judge(nets["critic"], generator_of(nets), filled.ids, given.text, given.low, given.present, through=through)
    each = F.binary_cross_entropy_with_logits(logits, filled.wrong.float(), reduction="none")
    right = ((logits > 0) == filled.wrong) & filled.guessed
    wrong = filled.wrong & filled.guessed
    total, weight = (each * filled.guessed).sum(), filled.guessed.sum().float()
    return Loss(total, weight, {"right": right.sum().float(), "wrong_tokens": wrong.sum().float()})


def add_verdict(loss: Loss, judged: Loss, weight: float) -> Loss:
    """The generator's loss with the critic's numbers, and with its loss at a weight; both count the same tokens."""
    parts = {"critic": judged.total.detach(), "critic_right": judged.parts["right"]}
    return replace(loss, total=loss.total + weight * judged.total, parts={**loss.parts, **parts})


def detached(given: Given) -> Given:
    """The same outside of any graph."""
    text = given.text
    return replace(given, text=TextStates(text.states.detach(), text.mask, text.pooled.detach()))


def generator_of(nets: Nets) -> MaskedTransformer:
    """The net of that name."""
    net = nets["generator"]
    assert isinstance(net, MaskedTransformer)
    return net
