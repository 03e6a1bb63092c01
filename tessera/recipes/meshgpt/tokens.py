"""Meshes to tokens and back, by either tokenizer: what training, previews and drawing share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tessera.batches import MeshBatch, SequenceBatch
from tessera.contracts import Constraint, Nets
from tessera.data.canonical import CleanedMesh, Corners, clean, quantise, to_mesh
from tessera.data.quads import find_quads, join_quads, split_quads
from tessera.generators.masked.model import digit_sizes, join_digits, split_digits
from tessera.media.meshes import Mesh
from tessera.recipes.meshgpt.config import MeshGPTConfig
from tessera.recipes.precision import full_precision
from tessera.tokenizers.mesh.autoencoder import GraphTokenizer
from tessera.tokenizers.mesh.coordinates import CoordinateConfig, Coordinates
from tessera.tokenizers.mesh.corners import DistinctCorners


@dataclass(frozen=True, slots=True)
class MeshTokens:
    """How many ids there are, how they are grouped, which may follow which, and the two ways."""

    vocab_size: int
    group: tuple[int, ...]
    constraint: Constraint
    encode: Callable[[Nets, Tensor, Tensor], Tensor]  # nets, corners b f c 3, faces b -> ids b f t
    decode: Callable[[Nets, Tensor, Tensor], Tensor]  # nets, ids b f t, faces b -> corners b f c 3


def tokens_of(config: MeshGPTConfig) -> MeshTokens:
    """Those of the config's tokenizer."""
    if isinstance(config.tokenizer, CoordinateConfig):
        exact = Coordinates(config.data.bins)
        return MeshTokens(
            exact.vocab_size, exact.group, exact.constraint,
            encode=lambda nets, corners, faces: exact.encode(corners), decode=lambda nets, ids, faces: exact.decode(ids),
        )  # fmt: skip
    quantizer = config.tokenizer.model.quantizer
    codes, digits = (config.tokenizer.model.corners, quantizer.num_quantizers), digit_sizes(quantizer.vocab_size)
    return MeshTokens(
        max(digits), codes if len(digits) == 1 else (*codes, len(digits)), DistinctCorners(codes[0], digits * codes[1]),
        encode=partial(encode_graph, digits), decode=partial(decode_graph, digits),
    )  # fmt: skip


@torch.no_grad()
def encode_graph(digits: Sequence[int], nets: Nets, corners: Tensor, faces: Tensor) -> Tensor:
    """Codes, or their two digits: of 16,384 codes logits would be the most that training keeps, of 128 they are little. Ids need
    full precision, whatever the training around it has."""
    with full_precision(corners.device), torch.autocast(corners.device.type, enabled=False):
        codes = graph_of(nets).encode(corners, faces).flatten(-2)
    return split_digits(codes, digits).flatten(-2)


@torch.no_grad()
def decode_graph(digits: Sequence[int], nets: Nets, ids: Tensor, faces: Tensor) -> Tensor:
    """Codes to corners."""
    tokenizer = graph_of(nets)
    codes = join_digits(ids.unflatten(-1, (-1, len(digits))), digits)
    with full_precision(ids.device), torch.autocast(ids.device.type, enabled=False):
        return tokenizer.decode(codes.unflatten(-1, (tokenizer.corners, -1)), faces)


def graph_of(nets: Nets) -> GraphTokenizer:
    """The frozen tokenizer that a stage was given."""
    net = nets["tokenizer"]
    assert isinstance(net, GraphTokenizer)
    return net


def sequences(tokens: MeshTokens) -> Callable[[Nets, Any], SequenceBatch]:
    """What the generator's loss reads of a batch of meshes."""

    def read(nets: Nets, batch: MeshBatch) -> SequenceBatch:
        return SequenceBatch(
            ids=tokens.encode(nets, batch.corners, batch.num_faces),
            lengths=batch.num_faces,
            text=batch.text,
            valid=batch.valid,
            positions=batch.positions,
            keys=batch.keys,
            captions=batch.captions,
            faults=batch.faults,
        )

    return read


def meshes_of(tokens: MeshTokens, nets: Nets, ids: Tensor, faces: Tensor, bins: int) -> list[CleanedMesh]:
    """Drawn ids to meshes, in canonical order and welded: learned codes may say the same face twice, or none at all."""
    corners = tokens.decode(nets, ids, faces).cpu().numpy()
    made = [clean(mesh_of(own[:count], bins)) for own, count in zip(corners, faces.tolist(), strict=True)]
    quads = [find_quads(mesh, bins) if corners.shape[2] == 4 else None for mesh, _ in made]
    return [CleanedMesh(mesh.vertices, mesh.faces, own, cleaning=done) for own, (mesh, done) in zip(quads, made, strict=True)]


def mesh_of(corners: npt.NDArray[np.integer], bins: int) -> Mesh:
    """f 3 3, or quads f 4 3, as triangles."""
    return to_mesh(split_quads(corners) if corners.shape[1] == 4 else corners, bins)


def in_bins(config: MeshGPTConfig, mesh: Mesh) -> Corners:
    """A standard mesh as the tokenizer reads it: f 3 3, or f 4 3."""
    corners = quantise(mesh, config.data.bins)
    return join_quads(corners) if config.quads else corners


def module_of(config: MeshGPTConfig) -> nn.Module | None:
    """A fresh tokenizer, where one is trained."""
    return None if isinstance(config.tokenizer, CoordinateConfig) else GraphTokenizer(config.tokenizer.model, config.data.bins)
