"""Caption retrieval: whether a picture finds its caption among others, by a small contrastive model (after CLIP, Radford et al.
2021) that is fitted to the training split and has never seen the model under test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.contracts import Context, Loss, Nets
from tessera.evals.clip_nets import ClipNet, run_tower, shrink_clips
from tessera.evals.nets import FitBatch, Fitting, PictureNet, Pictures, fit_net, shrink, side_for, weights_hash
from tessera.evals.words import phrases_of
from tessera.media.clips import Frames
from tessera.randomness import Draws, mix

WIDTH = 64
NUM_BINS = 8192  # phrases are hashed to these; 0 is for padding
MOST_PHRASES = 96  # of a caption that are read
CANDIDATES = 32  # captions that a picture chooses from, its own among them
DEPTHS = (1, 5)  # R@1, R@5


def phrase_ids(captions: Sequence[str | None]) -> Tensor:
    """n m int64: words, pairs and triples of words as numbers from 1, 0 behind the last. Hashing needs no list of words."""
    ids = torch.zeros(len(captions), MOST_PHRASES, dtype=torch.int64)
    for row, caption in enumerate(captions):
        for column, phrase in enumerate(phrases_of(caption)[:MOST_PHRASES]):
            digest = hashlib.blake2b(phrase.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            ids[row, column] = int.from_bytes(digest, "little") % (NUM_BINS - 1) + 1
    return ids


class PairNet(nn.Module):
    """A tower of pictures, or clips, and a caption tower that meet on the unit sphere."""

    def __init__(self, tower: PictureNet | ClipNet) -> None:
        super().__init__()
        self.picture = tower
        self.phrases = nn.EmbeddingBag(NUM_BINS, WIDTH, mode="mean", padding_idx=0)
        self.mixed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.sharpness = nn.Parameter(torch.tensor(2.3))  # log of 10

    def captions(self, ids: Tensor) -> Tensor:
        """b m -> b d"""
        bag = self.phrases(ids)
        return F.normalize(bag + self.mixed(bag), dim=1)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """b c (t) h w, b m -> b b: cosine of each picture with each caption, sharpened."""
        cosine = F.normalize(self.picture(images), dim=1) @ self.captions(ids).T
        return cosine * self.sharpness.clamp(max=4.6).exp()


def contrastive_loss(nets: Nets, batch: FitBatch, context: Context) -> Loss:
    """Both directions of InfoNCE; captions that are equal are equally right."""
    scores = nets["net"](batch.images, batch.targets)
    same = (batch.targets[:, None] == batch.targets[None]).all(2).float()
    right = same / same.sum(1, keepdim=True)
    total = F.cross_entropy(scores, right, reduction="sum") + F.cross_entropy(scores.T, right, reduction="sum")
    return Loss(total / 2, torch.tensor(float(len(scores)), device=scores.device))


@dataclass(frozen=True, slots=True)
class Retriever:
    """Both towers, fitted."""

    pictures: Callable[[Any], npt.NDArray[np.float32]]  # n h w c -> n d on the unit sphere
    captions: Callable[[Sequence[str | None]], npt.NDArray[np.float32]]
    sha256: str


def fit_retriever(media: Pictures | Sequence[Frames], captions: Sequence[str | None], fitting: Fitting) -> Retriever:
    """From pictures, or a list of clips, and captions of the training split; those without a caption are left out."""
    kept = [index for index, caption in enumerate(captions) if caption]
    if not kept:
        raise ValueError("retrieval needs captions; got none")
    texts, moving = [captions[index] for index in kept], not isinstance(media, np.ndarray)
    some: Any = media[kept] if isinstance(media, np.ndarray) else [media[index] for index in kept]
    height, _, channels = some[0].shape[-3:]
    side = side_for(height)
    tower: Any = ClipNet if moving else PictureNet
    small = shrink_clips(some, side) if moving else shrink(some, side)
    net = fit_net(lambda: PairNet(tower(channels, side, WIDTH)), contrastive_loss, small, phrase_ids(texts), fitting)
    assert isinstance(net, PairNet)
    return Retriever(
        lambda given: unit(run_tower(net.picture, given)),
        lambda given: net.captions(phrase_ids(given).to(fitting.device)).detach().cpu().numpy(),
        weights_hash(net),
    )


def unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each row divided by its length."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def candidates_for(captions: Sequence[str | None], most: int, seed: int) -> npt.NDArray[np.int64]:
    """n k: for each caption its own index, then those of k - 1 other texts; the same for every row that is compared."""
    first: dict[str, int] = {}
    for index, caption in enumerate(captions):
        first.setdefault(caption or "", index)
    size = min(most, len(first))
    table = np.zeros((len(captions), size), np.int64)
    for index, caption in enumerate(captions):
        others = [place for text, place in first.items() if text != (caption or "")]
        table[index] = [index, *Draws(mix(seed, index)).shuffled(others)[: size - 1]]
    return table


def recall(
    pictures: npt.NDArray[np.float32], captions: npt.NDArray[np.float32], candidates: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Share of pictures whose own caption (the first candidate) is among the k nearest. A tie counts against it, so that a model
    that answers always the same finds nothing."""
    scores = np.einsum("nd,nkd->nk", pictures, captions[candidates])
    rank = (scores[:, 1:] >= scores[:, :1]).sum(1)
    return {f"r@{depth}": float((rank < depth).mean()) for depth in DEPTHS}


def chance(num_candidates: int) -> dict[str, float]:
    """Recall of guessing."""
    return {f"r@{depth}": min(1.0, depth / num_candidates) for depth in DEPTHS}
