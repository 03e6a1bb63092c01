"""Times an old package and Tessera side by side: same process, same card, same pictures or tokens, same batch.

    PYTHONPATH=PEERS python bench/beside.py [image.tokenizer.train image.tokenizer.encode image.maskgit.train ...]

needs muse-maskgit-pytorch and what it imports (torchvision and transformers among them) on the path; without names all cases
run. The peer runs as its authors ship it: the tokenizer's two turns, each with its own forward, Adam, bf16 autocast; its
MaskGit in TF32, because its bf16 fails. VGG16 has random weights on both sides, text is random states of 77 x 512. Prints one
JSON row a case with the ratio; both operation counts come from torch's own formulas. On a CPU both sides are small, only to
show that they run.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torchvision

from tessera.bench import CASES
from tessera.bench.images import reduced
from tessera.bench.timing import device, device_facts, time_call

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

CODES = 65536


def peer_stepper(parameters: list[torch.nn.Parameter], loss: Callable[[], torch.Tensor], bf16: bool = True) -> Callable[[], None]:
    """One update as the peer's trainer makes it."""
    optimizer = torch.optim.Adam([p for p in parameters if p.requires_grad], lr=1e-4)

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Peer:
    """muse-maskgit-pytorch at the size its README shows. What a case needs is built when it is first asked for."""

    def __init__(self) -> None:
        self.side, self.text = (4, (7, 64)) if reduced() else (16, (77, 512))  # of the token grid; text states and their width
        self.width, self.depth = (64, 2) if reduced() else (512, 8)
        self.num_pictures, self.num_grids, self.num_drawn = (2, 4, 2) if reduced() else (8, 64, 16)
        self.repeats = {"repeats": 2, "warm": 1} if reduced() else {}

    @functools.cached_property
    def vae(self) -> Any:
        from muse_maskgit_pytorch import VQGanVAE

        vgg = torchvision.models.vgg16(weights=None)
        vgg.classifier = torch.nn.Sequential(*vgg.classifier[:-2])
        return VQGanVAE(dim=32 if reduced() else 256, codebook_size=CODES, vgg=vgg).to(device())

    @functools.cached_property
    def images(self) -> torch.Tensor:
        size = 16 * self.side
        return torch.rand(self.num_pictures, 3, size, size, device=device())

    @functools.cached_property
    def maskgit(self) -> Any:
        from muse_maskgit_pytorch import MaskGit, MaskGitTransformer, t5

        t5.T5_CONFIGS["bench"] = {"config": SimpleNamespace(d_model=self.text[1])}
        transformer = MaskGitTransformer(
            num_tokens=CODES,
            seq_len=self.side**2,
            dim=self.width,
            depth=self.depth,
            dim_head=64,
            heads=8,
            ff_mult=4,
            t5_name="bench",
        ).to(device())
        transformer.encode_text = lambda texts: torch.randn(len(texts), *self.text, device=device())
        return MaskGit(vae=self.vae, transformer=transformer, image_size=16 * self.side, cond_drop_prob=0.25).to(device())

    def train_tokenizer(self) -> dict[str, Any]:
        """Both turns."""
        vae, images = self.vae, self.images
        critic = set(vae.discr.parameters())
        first = peer_stepper([p for p in vae.parameters() if p not in critic], lambda: vae(images, return_loss=True))
        second = peer_stepper(list(critic), lambda: vae(images, return_discr_loss=True))
        return time_call(lambda: (first(), second()), self.num_pictures, **self.repeats)

    @torch.no_grad()
    def encode(self) -> dict[str, Any]:
        """Pictures to ids."""
        return time_call(lambda: self.vae.encode(self.images), self.num_pictures, **(self.repeats or {"repeats": 50}))

    def train_maskgit(self) -> dict[str, Any]:
        """One update from tokens."""
        maskgit = self.maskgit
        ids = torch.randint(0, CODES, (self.num_grids, self.side, self.side), device=device())
        text = torch.randn(self.num_grids, *self.text, device=device())
        parameters = list(maskgit.transformer.parameters())
        step = peer_stepper(parameters, lambda: maskgit(ids, text_embeds=text), bf16=False)
        count = sum(p.numel() for p in parameters if p.requires_grad)
        return time_call(step, self.num_grids, **self.repeats) | {"parameters_m": round(count / 1e6, 1)}

    def sample(self) -> dict[str, Any]:
        """18 steps with guidance 3, and the pixels."""

        def call() -> Any:
            return self.maskgit.generate(texts=["a"] * self.num_drawn, timesteps=18, cond_scale=3.0, fmap_size=self.side)

        return time_call(call, self.num_drawn, repeats=3, warm=1)


PEER_CASES: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "image.tokenizer.train": Peer.train_tokenizer,
    "image.tokenizer.encode": Peer.encode,
    "image.maskgit.train": Peer.train_maskgit,
    "image.maskgit.sample": Peer.sample,
}


def main() -> None:
    """One pair of rows a case."""
    for name in sys.argv[1:]:
        if name not in PEER_CASES:
            sys.exit(f"the peer has no case {name!r}; there are {', '.join(PEER_CASES)}")
    names = [name for name in PEER_CASES if name in (sys.argv[1:] or PEER_CASES)]  # in order: MaskGit moves its vae to the CPU
    peer = Peer()
    rows = {name: {"peer": PEER_CASES[name](peer)} for name in names}
    del peer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch.backends.cudnn.benchmark = True  # as our pipeline sets it; the peer's trainer does not
    for name, row in rows.items():
        torch.compiler.reset()  # another case's shapes would make this one's dynamic
        row["ours"] = CASES[name](None)
        ratio = row["ours"]["items_per_s"] / row["peer"]["items_per_s"]
        print(json.dumps({"case": name, **row, "ratio": round(ratio, 2), **device_facts()}), flush=True)


if __name__ == "__main__":
    main()
