"""The extractor of clips: a small net fitted to the *training* split. It predicts the words of the captions, and whether a clip
runs backwards (`clip-words-1a2b3c4d`); without captions how a clip was turned, blurred and reversed (`clip-turns-1a2b3c4d`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from tessera.contracts import Context, Loss, Nets
from tessera.evals.clip_nets import ClipNet, shrink_clips
from tessera.evals.features import NUM_TURNS, WIDTH, Extractor, FeatureNet, fitted, turned
from tessera.evals.nets import FitBatch, Fitting, fit_net, side_for
from tessera.evals.words import telling_words, which_words
from tessera.media.clips import Frames
from tessera.randomness import uniform

REVERSED = 0.25  # share of the clips that are shown backwards; their words may be wrong then and are not asked for


def fit_clip_extractor(clips: Sequence[Frames], captions: Sequence[str | None], fitting: Fitting) -> Extractor:
    """From clips and captions of the training split; by words where captions differ in two or more, else by turns."""
    if not len(clips):
        raise ValueError("an extractor is fitted to training clips; got none")
    channels, side = clips[0].shape[3], side_for(clips[0].shape[1])
    words = telling_words(captions)
    by_words = len(words) >= 2
    targets = torch.from_numpy(which_words(captions, words)) if by_words else torch.zeros(len(clips), 1)
    net = fit_net(
        lambda: FeatureNet(ClipNet(channels, side, WIDTH), len(words) + 1 if by_words else 2 * NUM_TURNS),
        words_loss if by_words else turns_loss,
        shrink_clips(clips, side),
        targets,
        fitting,
    )
    return fitted("clip-words" if by_words else "clip-turns", net)


def words_loss(nets: Nets, batch: FitBatch, context: Context) -> Loss:
    """Binary cross-entropy of every word of a clip that runs forwards, and of running backwards."""
    backwards = uniform(context.seed, context.positions, 1)[:, 0] < REVERSED
    logits = nets["net"](reverse(batch.images, backwards))
    targets = torch.cat([batch.targets, backwards.float()[:, None]], 1)
    errors = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    total = (errors[:, :-1].sum(1) * ~backwards).sum() + errors[:, -1].sum()
    return Loss(total, torch.tensor(float(len(logits)), device=logits.device))


def turns_loss(nets: Nets, batch: FitBatch, context: Context) -> Loss:
    """Cross-entropy of which quarter turn, whether blurred, and whether backwards; drawn for each place in the stream."""
    drawn = (uniform(context.seed, context.positions, 1)[:, 0] * 2 * NUM_TURNS).long()
    num = batch.images.shape[2]
    frames = turned(rearrange(batch.images, "b c t h w -> (b t) c h w"), repeat(drawn % NUM_TURNS, "b -> (b t)", t=num))
    logits = nets["net"](reverse(rearrange(frames, "(b t) c h w -> b c t h w", t=num), drawn >= NUM_TURNS))
    return Loss(F.cross_entropy(logits, drawn, reduction="sum"), torch.tensor(float(len(logits)), device=logits.device))


def reverse(clips: Tensor, backwards: Tensor) -> Tensor:
    """b c t h w, those of `backwards` (b bool) from their last frame to their first."""
    return torch.where(backwards.view(-1, 1, 1, 1, 1), clips.flip(2), clips)
