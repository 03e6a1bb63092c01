"""Small meshes and small graph tokenizers for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import MeshBatch, Text
from tessera.contracts import Context, Loss
from tessera.nn.quantizers import FSQConfig, LFQConfig, ResidualConfig, VQConfig
from tessera.tokenizers.mesh.autoencoder import GraphTokenizer, GraphTokenizerConfig
from tessera.tokenizers.mesh.graph_losses import GraphLossConfig, GraphLosses

CPU = torch.device("cpu")
BINS = 32
SIDES = ((2, 3, 1, 0), (5, 7, 6, 4), (1, 5, 4, 0), (6, 7, 3, 2), (4, 6, 2, 0), (3, 7, 5, 1))  # corner i of a box: bits z y x
FSQ = ResidualConfig(quantizer=FSQConfig(levels=(8, 8, 8, 8)), num_quantizers=2)
LFQ = ResidualConfig(quantizer=LFQConfig(bits=8), num_quantizers=3)
RVQ = ResidualConfig(quantizer=VQConfig(codes=32, width=4), num_quantizers=2)


def box(low: Sequence[int], high: Sequence[int], corners: int = 3) -> Tensor:
    """12 triangles or 6 quads, counter-clockwise seen from outside; bins of (z, y, x)."""
    points = torch.tensor(list(itertools.product(*zip(low, high, strict=True))))
    faces = list(SIDES) if corners == 4 else [(s[0], *pair) for s in SIDES for pair in (s[1:3], s[2:4])]
    return points[torch.tensor(faces)]


def table(corners: int = 3) -> Tensor:
    legs = [box((1, y, x), (20, y + 3, x + 3), corners) for y in (3, 26) for x in (3, 26)]
    return torch.cat([box((20, 2, 2), (24, 30, 30), corners), *legs])


def soup(num: int, corners: int = 3, bins: int = 3, seed: int = 0) -> Tensor:
    """Random faces of few bins: edges of many faces, faces of no area, sides of no length, faces that occur twice."""
    return torch.randint(bins, (num, corners, 3), generator=torch.Generator().manual_seed(seed))


def pad(meshes: Sequence[Tensor], most: int | None = None, junk: bool = False) -> tuple[Tensor, Tensor]:
    """Corners b f c 3 and numbers of faces; what is behind the end is 0, or junk."""
    most = most or max(map(len, meshes))
    corners = torch.zeros(len(meshes), most, *meshes[0].shape[1:], dtype=torch.long)
    if junk:
        corners.random_(BINS, generator=torch.Generator().manual_seed(9))
    for row, mesh in zip(corners, meshes, strict=True):
        row[: len(mesh)] = mesh
    return corners, torch.tensor([len(mesh) for mesh in meshes])


def batch(
    meshes: Sequence[Tensor], most: int | None = None, valid: Sequence[bool] | None = None, junk: bool = False
) -> MeshBatch:
    corners, num_faces = pad(meshes, most, junk)
    mask = torch.ones(len(meshes), dtype=torch.bool) if valid is None else torch.tensor(valid)
    names, text = tuple(map(str, range(len(meshes)))), Text(torch.zeros(len(meshes), 1, dtype=torch.long))
    return MeshBatch(corners.short(), num_faces, text, mask, torch.arange(len(meshes)), names, (None,) * len(meshes)).to(CPU)


def model(**changes: Any) -> GraphTokenizerConfig:
    small = {
        "coordinate_width": 8,
        "encoder_width": 24,
        "encoder_layers": 2,
        "decoder_width": 24,
        "decoder_blocks": 2,
        "heads": 2,
    }
    return GraphTokenizerConfig(**(small | {"quantizer": FSQ} | changes))


def build(**changes: Any) -> GraphTokenizer:
    """Trained a little in effect: no weight is left at 0, so that every layer takes part."""
    torch.manual_seed(0)
    net = GraphTokenizer(model(**changes), BINS)
    for parameter in net.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    for name, buffer in net.named_buffers():
        if "codebook" in name and not buffer.any():
            nn.init.normal_(buffer, std=0.3)
    return net


def turn(net: GraphTokenizer, data: MeshBatch, blur: float = 0.4) -> Loss:
    return GraphLosses(GraphLossConfig(blur=blur)).turn({"tokenizer": net}, data, Context(0, 0, data.positions))


KINDS: dict[str, dict[str, Any]] = {
    "fsq": {},
    "lfq": {"quantizer": LFQ},
    "rvq": {"quantizer": RVQ},
    "attention": {"encoder_attention": 1, "decoder_attention": 2, "kernel": 5},
    "no waves": {"code_octaves": 0},
    "bare": {"encoder_layers": 0, "decoder_blocks": 0},
    "quads": {"corners": 4},
}


def meshes_for(kind: str) -> list[Tensor]:
    corners = 4 if kind == "quads" else 3
    return [box((4, 4, 4), (27, 20, 9), corners), soup(17, corners), table(corners), box((0, 0, 0), (31, 31, 31), corners)]


def names_of(corners: Tensor, ids: Tensor) -> dict[tuple[int, ...], set[tuple[int, ...]]]:
    """Of one mesh, f c 3 and f c q: all ids that corners at one place have."""
    names: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for place, name in zip(corners.flatten(0, 1).tolist(), ids.flatten(0, 1).tolist(), strict=True):
        names.setdefault(tuple(place), set()).add(tuple(name))
    return names


def are_names(corners: Tensor, ids: Tensor) -> bool:
    """Whether corners of one mesh have the same ids exactly if they are one vertex."""
    names = list(names_of(corners, ids).values())
    return all(len(found) == 1 for found in names) and len(set.union(*names)) == len(names)


def told_together(logits: Tensor, ids: Tensor) -> Tensor:
    """f c 3 bins and f c q of one mesh: logits in which all corners of the same ids have their sum, one by one."""
    keys, sums = [tuple(row) for row in ids.flatten(0, 1).tolist()], dict[tuple[int, ...], Tensor]()
    for key, row in zip(keys, logits.flatten(0, 1), strict=True):
        sums[key] = sums.get(key, torch.zeros_like(row)) + row
    return torch.stack([sums[key] for key in keys]).view_as(logits)
