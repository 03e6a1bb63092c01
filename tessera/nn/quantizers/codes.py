"""What all quantizers share: the interface, passing gradients straight through, and counting codes.

All of it in fp32 whatever autocast says, because a rounding in bf16 would move the code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a quantizer makes of vectors `b ... d`."""

    codes: Tensor  # b ... d; gradients pass straight through the choice of a code
    ids: Tensor  # b ..., int64 in [0, vocab_size); from a residual quantizer b ... q, one id for each link of its chain
    prepared: Tensor  # b ... d: the vectors as they were compared with the codes, normalised or bounded
    terms: Mapping[str, Tensor]  # name -> b: weighted auxiliary losses of each sample; empty where the kind needs none


class Quantizer(nn.Module, ABC):
    """Vectors <-> codes <-> ids. Subclasses say how; `forward` is the same for all.

    A quantizer sees no other sample when it chooses codes, so results do not depend on how batches are cut. What a codebook
    learns from data goes through `sums` (added up over micro-batches and ranks by the step) and `follow` (once a step).
    """

    vocab_size: int  # of one id
    width: int  # channels d of the vectors

    @abstractmethod
    def prepare(self, z: Tensor) -> Tensor:
        """b ... d fp32, any real numbers, to the space in which codes lie: normalised or bounded, differentiable."""

    @abstractmethod
    def nearest(self, prepared: Tensor) -> Tensor:
        """Ids of the nearest codes. NaN gets any id in range: the code is NaN, so the step refuses the loss; an id out of range
        would crash the device first."""

    @abstractmethod
    def decode(self, ids: Tensor) -> Tensor:
        """Ids to codes ... d."""

    def terms(self, prepared: Tensor, ids: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Weighted auxiliary losses, one number a sample. valid: b, 0 where a sample only fills up a batch."""
        return {}

    def sums(self, prepared: Tensor, ids: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """What `follow` needs to know, as sums over the valid samples, detached."""
        return {}

    def follow(self, sums: Mapping[str, Tensor], step: int) -> None:
        """Moves a codebook after a step; draws from torch's global generator, which every rank has seeded alike."""

    def facts(self) -> dict[str, Tensor]:
        """Scalars for the log."""
        return {}

    def counts(self, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """How often each code occurs: vocab_size; for a residual quantizer q vocab_size."""
        return code_counts(ids, self.vocab_size, valid)

    def forward(self, z: Tensor, valid: Tensor | None = None) -> Quantized:
        """z: b ... d, any real numbers; valid: b, None counts all."""
        with torch.autocast(z.device.type, enabled=False):
            prepared = self.prepare(z.float())
            ids = self.nearest(prepared.detach())
            weights = prepared.new_ones(len(z)) if valid is None else valid.float()
            return Quantized(straight_through(self.decode(ids), prepared), ids, prepared, self.terms(prepared, ids, weights))

    def ids_of(self, z: Tensor) -> Tensor:
        """b ... d to ids alone, without auxiliary losses."""
        with torch.autocast(z.device.type, enabled=False):
            return self.nearest(self.prepare(z.float()).detach())


def straight_through(codes: Tensor, prepared: Tensor) -> Tensor:
    """The value of the codes to the bit, the gradient of the prepared vectors (Bengio et al. 2013); NaN stays NaN."""
    return codes.detach() + (prepared - prepared.detach())


def to_sphere(z: Tensor) -> Tensor:
    """Each vector to mean square 1, without learned scale and without removing its mean: a layer norm would, and then the two
    codes whose signs are all equal could never occur. The epsilon bounds the gradient at 0."""
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6)


def per_sample(values: Tensor) -> Tensor:
    """b ... -> b, means."""
    return values.reshape(len(values), -1).mean(1)


def commitment(prepared: Tensor, codes: Tensor) -> Tensor:
    """Mean squared distance of a sample's vectors from their codes; moves the vectors only (van den Oord et al. 2017, eq. 3)."""
    return per_sample((prepared - codes.detach()).square())


def token_weights(ids: Tensor, valid: Tensor) -> Tensor:
    """A sample's weight for each of its ids, flat."""
    return valid.float().view(-1, *(1,) * (ids.ndim - 1)).expand(ids.shape).flatten()


def code_counts(ids: Tensor, vocab_size: int, valid: Tensor | None = None) -> Tensor:
    """How often each code occurs, fp32; without a wait for the device, as bincount would need."""
    weights = torch.ones_like(ids, dtype=torch.float32).flatten() if valid is None else token_weights(ids, valid)
    return torch.zeros(vocab_size, device=ids.device).index_add_(0, ids.flatten(), weights)


def code_use(counts: Tensor) -> dict[str, float]:
    """Share of codes that occur at all, and perplexity: how many codes a uniform use of that entropy would have.

    Counts ... vocab_size; over the links of a residual quantizer both are means.
    """
    share = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    entropy = -(share * share.clamp(min=1e-30).log()).sum(-1)
    return {"codes_used": float((counts > 0).double().mean()), "perplexity": float(entropy.exp().mean())}
