"""From a request's chunk to meshes: text, tokens, corners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.batches import SequenceBatch
from tessera.config import UserError
from tessera.contracts import Chunk, Context, Nets
from tessera.data.canonical import CleanedMesh, Corners, standardise
from tessera.generators.autoregressive.losses import AutoregressiveLosses, digest
from tessera.generators.autoregressive.sample import AutoregressiveSampleConfig, Known, Sampler, Writer
from tessera.media.meshes import Mesh
from tessera.recipes.captions import Prompts
from tessera.recipes.meshgpt.config import MeshGPTConfig, MeshSampleConfig
from tessera.recipes.meshgpt.tokens import in_bins, meshes_of, tokens_of
from tessera.recording import Kept, Lean

LOSS_CHUNK = 16  # meshes


class Sculptor:
    """Draws with the trained nets of a run. Rows of a chunk do not see each other."""

    def __init__(self, config: MeshGPTConfig, stages: Mapping[str, Nets], device: torch.device) -> None:
        if "base" not in stages:
            raise UserError(f"stage base has not been trained yet (trained: {', '.join(stages)}); tessera resume goes on with it")
        self.config, self.stages, self.device = config, stages, device
        self.prompts, self.tokens = Prompts(config.text, device), tokens_of(config)
        generator: Any = stages["base"]["generator"]
        self.lean = Lean(generator, device.type == "cuda" and config.engine.precision == "bf16")
        self._samplers = Kept[Sampler]()

    @property
    def nets(self) -> Nets:
        """Those of the generator, and the tokenizer where there is one."""
        return {**self.stages.get("tokenizer", {}), **self.stages["base"]}

    @torch.no_grad()
    def __call__(self, chunk: Chunk) -> list[CleanedMesh]:
        """A mesh for every row that is asked for."""
        options = chunk.options
        assert isinstance(options, MeshSampleConfig)
        ids, faces = self.draw(chunk, options)
        return meshes_of(self.tokens, self.nets, ids, faces, self.config.data.bins)

    def draw(self, chunk: Chunk, options: MeshSampleConfig) -> tuple[Tensor, Tensor]:
        """ids b f t and the faces of each, of the rows that are asked for."""
        nets = self.stages["base"]
        negative = None if chunk.negatives is None or options.guidance == 1 else self.prompts(nets, chunk.negatives)
        lengths, most = torch.full_like(chunk.seeds, options.faces), options.max_faces or self.config.data.max_faces
        ids, faces = self.sampler(options)(
            self.prompts(nets, chunk.captions), chunk.seeds, most, negative=negative, lengths=lengths,
            known=self.begun(chunk, most), num_asked=chunk.num_asked,
        )  # fmt: skip
        return ids[: chunk.num_asked], faces[: chunk.num_asked]

    def sampler(self, options: MeshSampleConfig) -> Sampler:
        """One for each set of options: on a GPU it keeps what it recorded."""
        plain = AutoregressiveSampleConfig.part_of(options)
        return self._samplers.find(plain.model_dump_json(), lambda: Sampler(Writer(self.lean, plain, self.tokens.constraint)))

    def begun(self, chunk: Chunk, most: int) -> Known | None:
        """The faces of a partial mesh, which lies where and is as large as it will be in the whole one."""
        if chunk.mesh is None:
            return None
        corners = torch.from_numpy(part_in_bins(chunk.mesh, self.config, most))[None].to(self.device)
        faces = torch.tensor([corners.shape[1]], device=self.device)
        size = len(chunk.seeds)
        return Known(self.tokens.encode(self.nets, corners, faces).expand(size, -1, -1), faces.expand(size))

    @torch.no_grad()
    def loss(self, meshes: Sequence[Mesh], captions: Sequence[str | None]) -> dict[str, float]:
        """Of held-out meshes: nats a token, bits a face and a mesh, and bits of the first faces."""
        losses, nets = AutoregressiveLosses(self.config.base.loss), self.stages["base"]
        sums: dict[str, Tensor] = {}
        total = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(meshes), LOSS_CHUNK):
            part = [in_bins(self.config, standardise(mesh)[0]) for mesh in meshes[first : first + LOSS_CHUNK]]
            some = tuple(captions[first : first + LOSS_CHUNK])
            corners, faces = padded(part)
            corners, faces = corners.to(self.device), faces.to(self.device)
            batch = SequenceBatch(
                ids=self.tokens.encode(self.nets, corners, faces), lengths=faces, text=self.prompts(nets, some),
                valid=torch.ones_like(faces, dtype=torch.bool), positions=torch.arange(len(part)), keys=("",) * len(part),
                captions=some,
            )  # fmt: skip
            loss = losses.measure(nets, batch, Context(0, 0, batch.positions))
            total += torch.stack([loss.total.double(), loss.weight.double()]).cpu()
            sums = {name: sums.get(name, 0) + value.double().cpu() for name, value in loss.stats.items()}
        return {"loss": float(total[0] / total[1])} | digest(sums)

    def through_tokens(self, meshes: Sequence[Mesh]) -> list[CleanedMesh]:
        """What the tokenizer keeps of meshes."""
        return through_tokens(self.config, self.nets, meshes, self.device)


@torch.no_grad()
def through_tokens(config: MeshGPTConfig, nets: Nets, meshes: Sequence[Mesh], device: torch.device) -> list[CleanedMesh]:
    """The same without a generator: the nets are those of the tokenizer's stage."""
    bins, tokens, made = config.data.bins, tokens_of(config), []
    for mesh in meshes:
        corners, faces = padded([in_bins(config, standardise(mesh)[0])])
        ids = tokens.encode(nets, corners.to(device), faces.to(device))
        made += meshes_of(tokens, nets, ids, faces.to(device), bins)
    return made


def part_in_bins(mesh: Mesh, config: MeshGPTConfig, most: int) -> Corners:
    """A part of a mesh that drawing can go on with, or the user's error."""
    used = mesh.vertices[np.unique(mesh.faces)]
    if not (np.abs(used) <= 1).all():
        low, high = used.min(initial=np.inf), used.max(initial=-np.inf)
        raise UserError(
            f"the mesh to go on with reaches from {low:.4g} to {high:.4g}; expected a part as it lies in the whole mesh, whose "
            f"box is [-1, 1] along each axis: move and scale it"
        )
    corners = in_bins(config, mesh)
    if not len(corners):
        raise UserError(
            f"the mesh to go on with has no triangle left of {len(mesh.faces):,} in {config.data.bins} bins over [-1, 1]; give a "
            f"part as large as it is in the whole mesh"
        )
    if len(corners) > most:
        raise UserError(
            f"the mesh to go on with has {len(corners):,} faces, more than sample.max_faces={most}; raise it, or give a "
            f"smaller part"
        )
    return corners


def padded(parts: Sequence[npt.NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Corners b f c 3 of meshes with f faces or fewer, and how many each has."""
    faces = torch.tensor([len(part) for part in parts])
    corners = torch.zeros(len(parts), int(faces.max()), *parts[0].shape[1:], dtype=torch.int64)
    for row, part in enumerate(parts):
        corners[row, : len(part)] = torch.from_numpy(part)
    return corners, faces
