"""Times an old package and Tessera side by side: same process, same card, same pictures, same batch.

    PYTHONPATH=PEERS python bench/beside.py [image.tokenizer.train image.tokenizer.encode]

needs muse-maskgit-pytorch and what it imports (torchvision among them) on the path. The peer runs as its authors ship it:
both turns, each with its own forward, Adam, bf16 autocast (TF32 where its bf16 fails). VGG16 has random weights on both
sides. Prints one JSON row a case with the ratio; both operation counts come from torch's own formulas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torchvision

from tessera.bench import CASES
from tessera.bench.timing import device, device_facts, time_call

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def peer_stepper(parameters: list[torch.nn.Parameter], loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """One update as the peer's trainer makes it."""
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer_cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """muse-maskgit-pytorch at the size its README shows."""
    from muse_maskgit_pytorch import VQGanVAE

    vgg = torchvision.models.vgg16(weights=None)
    vgg.classifier = torch.nn.Sequential(*vgg.classifier[:-2])
    vae = VQGanVAE(dim=256, codebook_size=65536, vgg=vgg).to(device())
    images = torch.rand(8, 3, 256, 256, device=device())
    critic = set(vae.discr.parameters())
    first = peer_stepper([p for p in vae.parameters() if p not in critic], lambda: vae(images, return_loss=True))
    second = peer_stepper(list(critic), lambda: vae(images, return_discr_loss=True))

    def train() -> dict[str, Any]:
        return time_call(lambda: (first(), second()), 8)

    def encode() -> dict[str, Any]:
        with torch.no_grad():
            return time_call(lambda: vae.encode(images), 8, repeats=50)

    return {"image.tokenizer.train": train, "image.tokenizer.encode": encode}


def main() -> None:
    """One pair of rows a case."""
    names = sys.argv[1:] or ["image.tokenizer.train", "image.tokenizer.encode"]
    peers = peer_cases()
    rows = {name: {"peer": peers[name]()} for name in names}
    del peers
    torch.cuda.empty_cache()
    torch.backends.cudnn.benchmark = True  # as our pipeline sets it; the peer's trainer does not
    for name, row in rows.items():
        row["ours"] = CASES[name](None)
        ratio = row["ours"]["items_per_s"] / row["peer"]["items_per_s"]
        print(json.dumps({"case": name, **row, "ratio": round(ratio, 2), **device_facts()}), flush=True)


if __name__ == "__main__":
    main()
