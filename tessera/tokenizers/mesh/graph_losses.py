"""The graph tokenizer's turn: bins right, and the quantizer's own terms.

Targets are faces. Every term is a mean over a face's own coordinates or corners and a sum over faces, so batches may be cut and
padded anywhere; only LFQ's entropy is a function of a whole micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from tessera.batches import MeshBatch
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.nn.quantizers import code_use
from tessera.tokenizers.mesh.autoencoder import GraphTokenizer, Reconstruction, slot_weights
from tessera.tokenizers.mesh.graph import at_corners

QUANTIZER = "quantizer/"  # in front of the names of the quantizer's own sums


class GraphLossConfig(Config):
    """The target of a coordinate."""

    blur: float = Field(0.4, ge=0, le=32)
    """Deviation, in bins, of the Gaussian that is the target: a near miss costs less. 0: the right bin alone."""


@dataclass(frozen=True, slots=True)
class GraphLosses:
    """The turn and the validation measure, for one configuration."""

    terms: GraphLossConfig

    def turn(self, nets: Nets, batch: MeshBatch, context: Context) -> Loss:
        """Reconstruct."""
        tokenizer = tokenizer_of(nets)
        made = tokenizer(batch.corners, batch.num_faces, batch.valid)
        parts = self.reconstruction_parts(made, batch)
        total = parts["kl"]
        for name, term in made.quantized.terms.items():
            parts[name] = at_corners(term, made.graph).mean(-1)
            total = total + parts[name]
        parts |= {name: fact.expand(total.shape) for name, fact in tokenizer.quantizer.facts().items()}
        return summed(total, parts, made, batch, tokenizer_sums(tokenizer, made, batch.valid))

    def measure(self, nets: Nets, batch: MeshBatch, context: Context) -> Loss:
        """Validation. Of the quantizer's terms only the commitment: the entropy of a batch is no mean over faces."""
        tokenizer = tokenizer_of(nets)
        made = tokenizer(batch.corners, batch.num_faces, batch.valid)
        parts = self.reconstruction_parts(made, batch)
        commitments = {name: term for name, term in made.quantized.terms.items() if name == "commitment"}
        counts = tokenizer.quantizer.counts(made.quantized.ids, slot_weights(made.graph, batch.valid))
        parts |= {name: at_corners(term, made.graph).mean(-1) for name, term in commitments.items()}
        return summed(parts["kl"], parts, made, batch, {"codes": counts})

    def reconstruction_parts(self, made: Reconstruction, batch: MeshBatch) -> dict[str, Tensor]:
        """b f each: divergence from the blurred bins, share of bins that are right, and whether all of a face's are."""
        right = made.logits.detach().argmax(-1) == batch.corners
        return {
            "kl": blurred_divergence(made.logits, batch.corners, self.terms.blur).mean((-2, -1)),
            "bin_accuracy": right.float().mean((-2, -1)),
            "triangle_accuracy": right.all(-1).all(-1).float(),
        }

    @staticmethod
    def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
        """Codebook use from summed counts of vertices."""
        return code_use(stats["codes"])


def blurred_divergence(logits: Tensor, targets: Tensor, blur: float) -> Tensor:
    """... bins, targets ... -> ...: divergence (KL) of the prediction from a Gaussian about the target, cut at the first and the
    last bin and of sum 1. Cross-entropy less the target's own entropy, so that 0 is perfect. fp32."""
    logs = logits.float().log_softmax(-1)  # one kernel there and one back, `logsumexp` is several
    bins = logs.shape[-1]
    reach = math.ceil(6 * blur)  # beyond, weights are below 2e-8
    steps = torch.arange(-reach, reach + 1, device=logits.device)
    near = targets[..., None] + steps
    weights = torch.exp(-0.5 * (steps / max(blur, 1e-12)).square()) * ((near >= 0) & (near < bins))
    weights = weights / weights.sum(-1, keepdim=True)
    entropies = -torch.special.xlogy(weights, weights).sum(-1)
    return -(weights * logs.gather(-1, near.clamp(0, bins - 1))).sum(-1) - entropies


def summed(total: Tensor, parts: dict[str, Tensor], made: Reconstruction, batch: MeshBatch, stats: dict[str, Tensor]) -> Loss:
    """Numbers of faces, b f, to sums over the faces of valid meshes."""
    counted = made.graph.mask & batch.valid[:, None]
    return Loss(
        torch.where(counted, total, 0).sum(),
        counted.float().sum(),
        {name: torch.where(counted, part.detach(), 0).sum() for name, part in parts.items()},
        stats,
    )


def tokenizer_of(nets: Nets) -> GraphTokenizer:
    """The trained net, by its type."""
    tokenizer = nets["tokenizer"]
    assert isinstance(tokenizer, GraphTokenizer)
    return tokenizer


def tokenizer_sums(tokenizer: GraphTokenizer, made: Reconstruction, valid: Tensor) -> dict[str, Tensor]:
    """What `follow` and the log need, over vertices: counts of codes, sums of latents, and the quantizer's own under its name."""
    weights, latents = slot_weights(made.graph, valid), made.latents.detach().float()
    own = tokenizer.quantizer.sums(made.quantized.prepared, made.quantized.ids, weights)
    return {
        "codes": tokenizer.quantizer.counts(made.quantized.ids, weights),
        "latent_count": weights.sum(),
        "latent_sum": (latents * weights[:, None]).sum(0),
        "latent_square": (latents.square() * weights[:, None]).sum(0),
        **{QUANTIZER + name: value for name, value in own.items()},
    }


def follow(nets: Nets, stats: Mapping[str, Tensor], step: int) -> None:
    """`Stage.after`: running mean and deviation of the latents, and codebooks, from sums over the whole global batch."""
    tokenizer = tokenizer_of(nets)
    mean = stats["latent_sum"] / stats["latent_count"]
    variance = (stats["latent_square"] / stats["latent_count"] - mean.square()).clamp(min=0)
    share = max(0.05, 1 / (step + 1))  # the plain mean of the first twenty steps, then a moving one
    variance += (1 - share) * (mean - tokenizer.latent_mean).square()  # between batches too
    tokenizer.latent_mean.lerp_(mean.float(), share)
    tokenizer.latent_variance.lerp_(variance.float(), share)
    own = {name.removeprefix(QUANTIZER): value for name, value in stats.items() if name.startswith(QUANTIZER)}
    tokenizer.quantizer.follow(own, step)
