"""Vector quantization with a codebook that follows the data: no gradient, no optimizer, no collapse.

How it learns: the loss counts, sums and measures the vectors of each code (`sums`); the step adds that up over micro-batches and
ranks; `follow` moves the codebook once a step from the totals alone. So one rank, two ranks and accumulation give one codebook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from tessera.config import Config
from tessera.nn.quantizers.codes import Quantizer, commitment, to_sphere, token_weights

MOST_DISTANCES = 2**24  # at once, fp64: 128 MiB


class VQConfig(Config):
    """Vector quantization: the nearest entry of a codebook, on a sphere of few dimensions."""

    kind: Literal["vq"] = "vq"
    """The kind of quantizer."""
    codes: int = Field(1024, ge=2, le=2**20)
    """Entries of the codebook."""
    width: int = Field(8, ge=2)
    """Channels of the latent and of a code. Few, so that all codes are in use (Yu et al. 2021)."""
    decay: float = Field(0.98, ge=0, lt=1)
    """Of the codebook's moving averages, each step."""
    restart_below: float = Field(0.1, gt=0, lt=1)
    """A code used less than this share of the average use is moved beside a busy one."""
    commitment: float = Field(0.25, ge=0)
    """Weight of the squared distance of a vector from its code."""

    @property
    def vocab_size(self) -> int:
        """Number of codes."""
        return self.codes

    def build(self, depth: int = 0) -> VQ:
        """The module; depth is its place in a residual chain."""
        return VQ(self, depth)


class VQ(Quantizer):
    """van den Oord et al. 2017 (appendix A.1: moving averages) with normalised codes as in Yu et al. 2021 (ViT-VQGAN).

    The first step counts in full, so the codebook starts from data: codes that were chosen move onto their vectors, all others
    are placed beside those with the largest error. That is also how dead codes restart later: the splitting of Linde, Buzo and
    Gray 1980 with the choice of Patane and Russo 2001, which needs sums alone and no candidate vectors.
    Deeper in a residual chain vectors are small differences and are not normalised; the codebook there starts at 0.
    """

    codebook: Tensor
    count: Tensor
    total: Tensor
    restarted: Tensor

    def __init__(self, config: VQConfig, depth: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.width, self.config, self.depth = config.codes, config.width, config, depth
        codebook = torch.zeros(config.codes, config.width) if depth else to_sphere(torch.randn(config.codes, config.width))
        self.register_buffer("codebook", codebook)
        self.register_buffer("count", torch.ones(config.codes))  # vectors of each code in a step, moving average
        self.register_buffer("total", codebook.clone())  # and their sum
        self.register_buffer("restarted", torch.zeros(()))  # codes that the last step moved

    def prepare(self, z: Tensor) -> Tensor:
        """On the sphere."""
        return to_sphere(z)

    def nearest(self, prepared: Tensor) -> Tensor:
        """In fp64: products of fp32 matrices are TF32 in bf16 runs, and would choose other codes than at fp32."""
        codebook = self.codebook.double()
        half_norms = codebook.square().sum(-1) / 2
        chunks = prepared.flatten(0, -2).split(max(1, MOST_DISTANCES // self.vocab_size))
        ids = torch.cat([(half_norms - chunk.double() @ codebook.T).argmin(-1) for chunk in chunks])
        return ids.view(prepared.shape[:-1])

    def decode(self, ids: Tensor) -> Tensor:
        """ids ... to codes ... d."""
        return self.codebook[ids]

    def terms(self, prepared: Tensor, ids: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Commitment; the codebook has no loss of its own."""
        return {"commitment": self.config.commitment * commitment(prepared, self.decode(ids))}

    @torch.no_grad()
    def sums(self, prepared: Tensor, ids: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Of the vectors of each code: number, sum, sum of squared lengths. fp64, so that the order of summing does not show."""
        weights, vectors = token_weights(ids, valid).double()[:, None], prepared.flatten(0, -2).double()
        rows = torch.cat([torch.ones_like(weights), vectors.square().sum(-1, keepdim=True), vectors], dim=-1) * weights
        zeros = torch.zeros(self.vocab_size, self.width + 2, dtype=torch.float64, device=ids.device)
        added = zeros.index_add_(0, ids.flatten(), rows)
        return {"count": added[:, 0], "square": added[:, 1], "sum": added[:, 2:]}

    @torch.no_grad()
    def follow(self, sums: Mapping[str, Tensor], step: int) -> None:
        """Moving averages with Laplace smoothing, then restarts. The plain mean of the first steps, then a moving one."""
        share = max(1 - self.config.decay, 1 / (step + 1))
        self.count.lerp_(sums["count"].float(), share)
        self.total.lerp_(sums["sum"].float(), share)
        whole, small = self.count.sum(), 1e-5
        smooth = (self.count + small) / (whole + small * self.vocab_size) * whole
        self.codebook.copy_(self.on_shell(self.total / smooth.clamp(min=1e-12)[:, None]))
        number = sums["count"].clamp(min=1)
        self.restart((sums["square"] - sums["sum"].square().sum(-1) / number).clamp(min=0), number)

    def restart(self, error: Tensor, number: Tensor) -> None:
        """The i-th dead code goes beside the living code of the i-th largest error, off by the deviation of its vectors.

        error: summed squared distance of a code's vectors from their mean; number: how many there are.
        """
        average = self.count.mean()
        dead = self.count < self.config.restart_below * average
        busy = torch.where(dead, -1.0, error).argsort(descending=True, stable=True)
        donor = busy[(dead.cumsum(0) - 1).clamp(min=0) % (~dead).sum().clamp(min=1)]
        deviation = (error / number / self.width).sqrt().float()
        beside = self.codebook[donor] + deviation[donor, None] * torch.randn_like(self.codebook)
        self.codebook.copy_(torch.where(dead[:, None], self.on_shell(beside), self.codebook))
        trial = 2 * self.config.restart_below * average  # it may halve before the code is dead again
        self.count.copy_(torch.where(dead, trial, self.count))
        self.total.copy_(torch.where(dead[:, None], self.codebook * trial, self.total))
        self.restarted.copy_(dead.sum())

    def on_shell(self, codes: Tensor) -> Tensor:
        """Normalised where vectors are."""
        return codes if self.depth else to_sphere(codes)

    def facts(self) -> dict[str, Tensor]:
        """How many codes were dead after the last step."""
        return {"codes_restarted": self.restarted}
