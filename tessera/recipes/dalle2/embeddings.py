"""Embeddings on their two ways: in training from files, or through an encoder once; in use from a picture or a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.config import UserError
from tessera.contracts import Nets
from tessera.data.embedding_cache import write_embeddings
from tessera.data.embedding_files import FileEmbeddings
from tessera.data.embedding_opening import open_embeddings
from tessera.data.embeddings import Embeddings
from tessera.data.loader import Feed
from tessera.data.sources import Source
from tessera.recipes.captions import Prompts
from tessera.recipes.dalle2.config import Dalle2Config, TrainedPairConfig
from tessera.recipes.pictures import at_size
from tessera.recipes.precision import full_precision
from tessera.tokenizers.pair.clip import ClipConfig, FrozenClip, clip_width, load_clip
from tessera.tokenizers.pair.model import Embedder

PARALLEL = 1e-7  # sine of the angle below which vectors in fp32 are equal, or opposite


def training_clip(config: Dalle2Config, feed: Feed) -> FrozenClip | None:
    """The model that makes embeddings, where that is CLIP; for caches and the captions of validation, and not to be kept."""
    return load_clip(config.embeddings.path, feed.device) if isinstance(config.embeddings, ClipConfig) else None


def training_embeddings(config: Dalle2Config, nets: Nets, feed: Feed, clip: FrozenClip | None) -> Embeddings:
    """Of all samples. The pair, or CLIP, runs here, once."""
    kind = config.embeddings
    if config.has_pair:
        net = nets["embedder"]
        assert isinstance(net, Embedder)
        return FileEmbeddings.listed(
            write_embeddings(feed, partial(embed_exactly, net), feed.needs["embedder"], config.data.resolution)
        )
    if clip is not None:
        height, width = config.data.size
        resolution = round(clip.resolution * height / min(height, width))  # CLIP takes the middle of the shorter side's length
        return FileEmbeddings.listed(write_embeddings(feed, clip.pictures, clip.fingerprint, resolution))
    assert not isinstance(kind, (TrainedPairConfig, ClipConfig))
    return open_embeddings(kind, feed.whole or feed.source)


def width_elsewhere(config: Dalle2Config, source: Source) -> int | None:
    """Channels of embeddings that are not made by a pair."""
    if config.has_pair:
        return None
    kind = config.embeddings
    assert not isinstance(kind, TrainedPairConfig)
    return clip_width(kind.path) if isinstance(kind, ClipConfig) else open_embeddings(kind, source).width


@torch.no_grad()
def embed_exactly(embedder: Embedder, images: Tensor) -> Tensor:
    """As it does in use, so that what is cached is what a user gets."""
    with full_precision(images.device):
        return embedder.pictures(images)


def between(one: Tensor, other: Tensor, at: Tensor) -> Tensor:
    """b e twice, and b from 0 to 1 -> b e: so far on the great circle from the one to the other (Ramesh et al. 2022, section
    3.2). Both ends are what was given, bit for bit. Opposite vectors have no shortest way: theirs leads through the axis that is
    furthest from both.

    (sin((1 - t) w) a + sin(t w) b) / sin w = cos(t w) a + sin(t w) u, where u is the part of b across a, of length 1.
    """
    a, b = (F.normalize(vectors.double(), dim=-1) for vectors in (one, other))
    along = (a * b).sum(-1, keepdim=True)
    across = b - along * a
    length = across.norm(dim=-1, keepdim=True)
    axis = F.one_hot(a.abs().argmin(-1), a.shape[-1]).to(a)
    across = torch.where(length > PARALLEL, across, axis - (a * axis).sum(-1, keepdim=True) * a)
    share, angle = at[:, None].double(), torch.atan2(length, along)
    found = torch.cos(share * angle) * a + torch.sin(share * angle) * F.normalize(across, dim=-1)
    return torch.where(share <= 0, one, torch.where(share >= 1, other, found.to(one)))


class Sphere:
    """Where pictures and prompts are vectors: the pair of a run, or a CLIP model, which is loaded once. Embeddings that come from
    files have none."""

    def __init__(self, config: Dalle2Config, nets: Nets, prompts: Prompts) -> None:
        self.config, self.nets, self.prompts = config, nets, prompts

    @property
    def known(self) -> bool:
        """Whether pictures and prompts can be embedded."""
        return self.config.has_pair or isinstance(self.config.embeddings, ClipConfig)

    @cached_property
    def clip(self) -> FrozenClip:
        """The CLIP model."""
        assert isinstance(self.config.embeddings, ClipConfig)
        return load_clip(self.config.embeddings.path, self.prompts.device)

    def pictures(self, images: Tensor) -> Tensor:
        """b c h w in [-1, 1], as large as they are at hand -> b e. The pair sees them at the decoder's size, CLIP at its own."""
        if not self.known:
            raise UserError(
                f"a picture cannot be embedded: the embeddings of this model came from files (embeddings.kind="
                f"{self.config.embeddings.kind}), without what made them; give its embedding (.npy), leave the image out, or "
                "give a mask with it"
            )
        if not self.config.has_pair:
            return self.clip.pictures(images)
        net = self.nets["embedder"]
        assert isinstance(net, Embedder)
        return embed_exactly(net, at_size(images, self.config.data.size))

    def captions(self, captions: Sequence[str | None]) -> Tensor:
        """b prompts -> b e; 0 of an empty one."""
        if not self.config.has_pair:
            return self.clip.captions(captions)
        net = self.nets["embedder"]
        assert isinstance(net, Embedder)
        return net.captions(self.prompts.read(captions))
