"""What meshgpt-pytorch draws after so many minutes of training, judged as `tessera evaluate` judges a run: same meshes, same
held-out shapes, same measures. It is trained and asked without captions: its text encoders need weights that are downloaded.

    PYTHONPATH=PEERS python bench/old_meshes.py DATA [--minutes 4 4] [--n 64] [--out FOLDER]

Minutes are for its autoencoder and its transformer. Learning rates are those of its trainers. On a GPU it has its default sizes,
in bf16; on a CPU it is as small as our preset tiny, with a codebook of 1,024, not 16,384, of which each step makes its products:
steps of the two then take a twentieth of a second and one second. Needs what bench/beside.py names for meshes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tessera.bench.timing import device
from tessera.data.canonical import to_mesh
from tessera.evals import write_evaluation
from tessera.evals.lines import lines
from tessera.evals.mesh_evaluate import MeshSubject, evaluate_meshes
from tessera.evals.mesh_material import load_meshes
from tessera.media.meshes import Mesh
from tessera.pipeline import resolve

BATCH = 16 if device().type == "cuda" else 8  # our preset's
AUTOENCODER: dict[str, Any] = {
    "encoder_dims_through_depth": (32, 64, 96), "decoder_dims_through_depth": (64, 64, 96, 96), "dim_codebook": 48,
    "codebook_size": 1024,
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {"dim": 128, "attn_depth": 4, "attn_heads": 4, "fine_attn_depth": 1, "fine_attn_heads": 4}
"""On a CPU."""


def main() -> None:
    """Autoencoder, transformer, samples, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder of meshes")
    parser.add_argument("--minutes", type=float, nargs=2, default=(4.0, 4.0))
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    from meshgpt_pytorch import MeshAutoencoder, MeshTransformer

    thin = device().type == "cpu"
    config = resolve("meshgpt", preset="tiny" if thin else "small", data=str(asked.data))
    judged = config.evaluate.model_copy(update={"n": asked.n})
    material = load_meshes(config.data, most_train=judged.train_samples, most_held_out=2 * asked.n, seed=judged.seed)
    torch.manual_seed(0)
    autoencoder = MeshAutoencoder(num_discrete_coors=config.data.bins, **(AUTOENCODER if thin else {})).to(device())
    longest = max(len(mesh.faces) for mesh in material.train.meshes)
    seconds = [60 * minutes for minutes in asked.minutes]
    taught(autoencoder, list(autoencoder.parameters()), 1e-4, material.train.meshes, seconds[0], "autoencoder")
    old = MeshTransformer(autoencoder, max_seq_len=6 * longest, **(TRANSFORMER if thin else {})).to(device())
    learned = [p for name, p in old.named_parameters() if not name.startswith("autoencoder")]
    taught(old, learned, 2e-4, material.train.meshes, seconds[1], "transformer")
    about = {"package": "meshgpt-pytorch", "minutes": list(asked.minutes), "parameters": sum(p.numel() for p in old.parameters())}
    subject = MeshSubject(
        sample=lambda captions, seed: drawn(old, len(captions), seed), about=about,
        reconstruct=lambda meshes: [reconstructed(autoencoder, mesh) for mesh in meshes],
    )  # fmt: skip
    found = evaluate_meshes(subject, material, judged, say=print)
    print("\n".join(lines(found.report)))
    if asked.out is not None:
        print(*write_evaluation(found, asked.out), sep="\n")


def taught(net: nn.Module, learned: list[nn.Parameter], lr: float, meshes: Sequence[Mesh], seconds: float, name: str) -> None:
    """For so long, on meshes at random."""
    optimizer, generator, steps = torch.optim.Adam([p for p in learned if p.requires_grad], lr=lr), np.random.default_rng(0), 0
    begun = told = time.monotonic()
    while time.monotonic() < begun + seconds:
        vertices, faces = padded([meshes[index] for index in generator.integers(len(meshes), size=BATCH)])
        with in_bf16():
            loss = net(vertices=vertices, faces=faces)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if time.monotonic() > told + 30:
            told = time.monotonic()
            print(f"{name}: step {steps}, {told - begun:.0f} s, loss {loss.item():.4f}", flush=True)
    print(f"{name}: {steps} steps of {BATCH} in {time.monotonic() - begun:.0f} s, loss {loss.item():.4f}", flush=True)


def padded(meshes: Sequence[Mesh]) -> tuple[Tensor, Tensor]:
    """Vertices b v 3 and faces b f 3, -1 where there is none."""
    vertices = [torch.from_numpy(mesh.vertices).float() for mesh in meshes]
    faces = [torch.from_numpy(mesh.faces).long() for mesh in meshes]
    fill: Callable[..., Tensor] = nn.utils.rnn.pad_sequence
    return tuple(fill(part, batch_first=True, padding_value=-1).to(device()) for part in (vertices, faces))  # type: ignore[return-value]


@torch.no_grad()
def drawn(old: Any, num: int, seed: int) -> list[Mesh]:
    """Without captions."""
    torch._C._jit_set_texpr_fuser_enabled(False)
    torch.manual_seed(seed)
    old.eval()
    made: list[Mesh] = []
    for first in range(0, num, BATCH):
        with in_bf16():
            corners, there = old.generate(batch_size=min(BATCH, num - first))
        made += [in_bins(one[own], old.autoencoder) for one, own in zip(corners, there, strict=True)]
    return made


@torch.no_grad()
def reconstructed(autoencoder: Any, mesh: Mesh) -> Mesh:
    """Through its codes."""
    vertices, faces = padded([mesh])
    with in_bf16():
        codes = autoencoder.tokenize(vertices=vertices, faces=faces)
        corners, there = autoencoder.decode_from_codes_to_faces(codes.flatten(1))
    return in_bins(corners[0][there[0]], autoencoder)


def in_bins(corners: Tensor, autoencoder: Any) -> Mesh:
    """f 3 3, centres of its bins in [-1, 1]."""
    bins = autoencoder.num_discrete_coors
    return to_mesh(((corners.float().cpu() + 1) / 2 * bins - 0.5).round().long().numpy(), bins)


def in_bf16() -> Any:
    """As its trainers do on a GPU."""
    return torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda")


if __name__ == "__main__":
    main()
