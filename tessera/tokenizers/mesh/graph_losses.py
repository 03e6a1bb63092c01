"""The graph tokenizer's turn: bins right, and the quantizer's own terms.

Targets are faces. Every term is a mean over a face's own coordinates or corners and a sum over faces, so batches may be cut and
padded anywhere; only LFQ's entropy is a function of a whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from tessera.batches import MeshBatch
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.nn.quantizers import code_use
from tessera.tokenizers.mesh.autoencoder import QUANTIZER, GraphTokenizer
from tessera.tokenizers.mesh.graph import face_mask


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
        made = tokenizer(batch.corners, batch.num_faces, batch.valid, self.terms.blur)
        total = sum(made.terms.values(), made.scores["kl"])
        facts = {name: fact * made.weight for name, fact in tokenizer.quantizer.facts().items()}
        parts = {name: part.detach() for name, part in {**made.scores, **made.terms, **facts}.items()}
        return Loss(total, made.weight, parts, made.sums)

    def measure(self, nets: Nets, batch: MeshBatch, context: Context) -> Loss:
        """Validation. Of the quantizer's terms only the commitment: the entropy of a batch is no mean over faces."""
        tokenizer = tokenizer_of(nets)
        made = tokenizer(batch.corners, batch.num_faces, batch.valid, self.terms.blur)
        parts = made.scores | {name: term for name, term in made.terms.items() if name == "commitment"}
        parts["decoded_accuracy"] = num_back(tokenizer, batch)
        return Loss(made.scores["kl"], made.weight, parts, {"codes": made.sums["codes"]})

    @staticmethod
    def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
        """Codebook use from summed counts of vertices."""
        return code_use(stats["codes"])


def num_back(tokenizer: GraphTokenizer, batch: MeshBatch) -> Tensor:
    """How many faces come back in all their bins from their ids, as what is drawn does: corners of the same ids together."""
    with torch.autocast(batch.corners.device.type, enabled=False):  # as ids are made for the generator
        back = tokenizer.decode(tokenizer.encode(batch.corners, batch.num_faces), batch.num_faces)
    counted = face_mask(batch.num_faces, batch.corners.shape[1]) & batch.valid[:, None]
    return ((back == batch.corners).all(-1).all(-1) & counted).float().sum()


def tokenizer_of(nets: Nets) -> GraphTokenizer:
    """The trained net, by its type."""
    tokenizer = nets["tokenizer"]
    assert isinstance(tokenizer, GraphTokenizer)
    return tokenizer


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
