"""meshgpt-pytorch: meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from peers.steps import peer_stepper
from tessera.bench.images import reduced
from tessera.bench.timing import device, time_call, time_steps


class Peer:
    """meshgpt-pytorch at its defaults, 512 random faces of 260 vertices."""

    num_faces, num_vertices = (16, 24) if reduced() else (512, 260)

    @functools.cached_property
    def autoencoder(self) -> Any:
        from meshgpt_pytorch import MeshAutoencoder

        return MeshAutoencoder(num_discrete_coors=128).to(device())

    @functools.cached_property
    def transformer(self) -> Any:
        from meshgpt_pytorch import MeshTransformer

        return MeshTransformer(self.autoencoder, dim=512, max_seq_len=6 * self.num_faces).to(device())

    def train_autoencoder(self) -> dict[str, Any]:
        """One update."""
        num = 2 if reduced() else 16
        vertices = torch.rand(num, self.num_vertices, 3, device=device()) * 2 - 1
        faces = torch.stack(
            [torch.stack([torch.randperm(self.num_vertices)[:3] for _ in range(self.num_faces)]) for _ in range(num)]
        ).to(device())
        step = peer_stepper(list(self.autoencoder.parameters()), lambda: self.autoencoder(vertices=vertices, faces=faces))
        return time_steps(step, num * self.num_faces, repeats=2 if reduced() else 20, warm=1 if reduced() else 5, count=False)

    def train_transformer(self) -> dict[str, Any]:
        """One update from codes."""
        num = 2 if reduced() else 4
        parameters = [p for name, p in self.transformer.named_parameters() if not name.startswith("autoencoder")]
        codes = torch.randint(0, 16384, (num, 6 * self.num_faces), device=device())
        step = peer_stepper(parameters, lambda: self.transformer.forward_on_codes(codes, return_loss=True))
        return time_steps(step, num * self.num_faces, repeats=2 if reduced() else 20, warm=1 if reduced() else 5, count=False)

    @torch.no_grad()
    def sample(self) -> dict[str, Any]:
        """One mesh of up to 64 faces with its cache; counted are the faces it returns. TorchScript's fuser is off: what it makes
        of the peer's scan in bf16 is refused by this CUDA's compiler."""
        torch._C._jit_set_texpr_fuser_enabled(False)
        self.transformer.eval()
        made: list[int] = []

        def call() -> None:
            with torch.autocast(device().type, torch.bfloat16):
                codes = self.transformer.generate(batch_size=1, max_seq_len=24 if reduced() else 384, return_codes=True)
            made.append(int((codes >= 0).sum()) // 6)

        row = time_call(call, 1, repeats=1, warm=1, count=False)
        return row | {"items_per_s": round(made[-1] / row["ms"] * 1e3, 1), "faces_made": made[-1]}


CASES: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "mesh.tokenizer.train": Peer.train_autoencoder,
    "mesh.ar.train": Peer.train_transformer,
    "mesh.ar.sample": Peer.sample,
}
