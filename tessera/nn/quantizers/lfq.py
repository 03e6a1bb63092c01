"""Lookup-free quantization: a code is the signs of its channels. No codebook; an entropy penalty keeps all bits in use."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.config import Config
from tessera.nn.quantizers.codes import Quantizer, commitment, per_sample, to_sphere, token_weights


class LFQConfig(Config):
    """Lookup-free quantization: a code is the signs of its channels."""

    kind: Literal["lfq"] = "lfq"
    """The kind of quantizer."""
    bits: int = Field(10, ge=2, le=24)
    """Channels of the latent; 2^bits codes."""
    entropy: float = Field(0.05, ge=0)
    """Weight of the entropy penalty: entropy of a token's soft choice less `diversity` times the micro-batch's, in nats."""
    diversity: float = Field(1.0, ge=0)
    """Share of the micro-batch's entropy, which spreads tokens over the codes."""
    temperature: float = Field(0.25, gt=0)
    """Of the soft choice exp(-distance^2 / temperature) whose entropy is measured; the channels of a code are 1 and -1."""
    group_bits: int = Field(10, ge=1, le=18)
    """Most bits whose joint distribution over the micro-batch is measured; more bits are cut into groups (see `LFQ`)."""
    commitment: float = Field(0.25, ge=0)
    """Weight of the squared distance of a vector from its code."""

    @property
    def vocab_size(self) -> int:
        """Number of codes."""
        return 2**self.bits

    @property
    def width(self) -> int:
        """Channels of the latent."""
        return self.bits

    def build(self, depth: int = 0) -> LFQ:
        """The module; depth is its place in a residual chain."""
        return LFQ(self, depth)


class LFQ(Quantizer):
    """Yu et al. 2023, "Language Model Beats Diffusion" (MAGVIT-v2), section 3.1, eqs. 3 to 5.

    Vectors are put on the sphere of mean square 1 first; otherwise the penalty is won by letting them grow. With the distance
    factorised over channels, bits are independent given the vector. So the entropy of one token's choice is the sum over its
    bits: exact. The entropy of the mean choice is that of a joint distribution of 2^bits: exact up to `group_bits`; above, the
    sum over groups, an upper bound (it counts no dependence between groups). It is a function of the whole micro-batch, so this
    one term changes with how a batch is cut. Deeper in a residual chain codes are smaller by powers of two, and so is the unit
    of the distance.
    """

    powers: Tensor

    def __init__(self, config: LFQConfig, depth: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.width, self.config = config.vocab_size, config.width, config
        self.scale = 2.0**-depth
        self.register_buffer("powers", 2 ** torch.arange(config.bits), persistent=False)

    def prepare(self, z: Tensor) -> Tensor:
        """On the sphere."""
        return to_sphere(z)

    def nearest(self, prepared: Tensor) -> Tensor:
        """The first channel is the lowest bit."""
        return ((prepared > 0) * self.powers).sum(-1)

    def decode(self, ids: Tensor) -> Tensor:
        """ids ... to signs ... d."""
        return ((ids[..., None] // self.powers % 2) * 2 - 1) * self.scale

    def terms(self, prepared: Tensor, ids: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Commitment, and the entropy penalty; its part over the micro-batch is the same number for every sample."""
        logits = 4 / (self.config.temperature * self.scale) * prepared  # log odds of a bit, from the two squared distances
        own = per_sample(bit_entropy(logits).sum(-1))
        whole = batch_entropy(logits.sigmoid().flatten(0, -2), token_weights(ids, valid), self.config.group_bits)
        return {
            "commitment": self.config.commitment * commitment(prepared, self.decode(ids)),
            "entropy": self.config.entropy * (own - self.config.diversity * whole),
        }


def bit_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of a bit with these log odds."""
    return F.softplus(logits) - logits * logits.sigmoid()


def batch_entropy(probs: Tensor, weights: Tensor, group_bits: int) -> Tensor:
    """n d probabilities of ones, n weights -> entropy in nats of the weighted mean choice, summed over groups of equal size."""
    weights = weights / weights.sum().clamp(min=1)
    num_groups = math.ceil(probs.shape[-1] / group_bits)
    mixed = [mean_choice(group, weights).flatten() for group in torch.tensor_split(probs, num_groups, dim=-1)]
    return torch.stack([-(p * p.clamp(min=1e-30).log()).sum() for p in mixed]).sum().float()


def mean_choice(probs: Tensor, weights: Tensor) -> Tensor:
    """n g -> the mean over n of 2^g joint probabilities, as a product of two matrices n x 2^(g/2).

    So the largest tensor has n 2^(g/2) numbers, not n 2^g. In fp64: products of fp32 matrices are TF32 in bf16 runs.
    """
    left, right = (choices(half) for half in torch.tensor_split(probs.double(), 2, dim=-1))
    return (left * weights.double()[:, None]).T @ right


def choices(probs: Tensor) -> Tensor:
    """n g independent bits -> n 2^g probabilities of all their values, the first bit lowest."""
    joint = probs.new_ones(len(probs), 1)
    for bit in probs.unbind(-1):
        joint = torch.cat([joint * (1 - bit[:, None]), joint * bit[:, None]], dim=-1)
    return joint
