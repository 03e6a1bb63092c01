"""muse-maskgit-pytorch: pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from peers.steps import peer_stepper
from tessera.bench.images import reduced
from tessera.bench.timing import device, time_call, time_steps

CODES = 65536


class Peer:
    """muse-maskgit-pytorch at the size its README shows. What a case needs is built when it is first asked for."""

    def __init__(self) -> None:
        self.side, self.text = (4, (7, 64)) if reduced() else (16, (77, 512))  # of the token grid; text states and their width
        self.width, self.depth = (64, 2) if reduced() else (512, 8)
        self.num_pictures, self.num_grids, self.num_drawn = (2, 4, 2) if reduced() else (8, 64, 16)
        self.repeats = {"repeats": 2, "warm": 1} if reduced() else {}

    @functools.cached_property
    def vae(self) -> Any:
        import torchvision
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
        return time_steps(lambda: (first(), second()), self.num_pictures, **self.repeats)

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
        return time_steps(step, self.num_grids, **self.repeats) | {"parameters_m": round(count / 1e6, 1)}

    def sample(self) -> dict[str, Any]:
        """18 steps with guidance 3, and the pixels."""

        def call() -> Any:
            return self.maskgit.generate(texts=["a"] * self.num_drawn, timesteps=18, cond_scale=3.0, fmap_size=self.side)

        return time_call(call, self.num_drawn, repeats=3, warm=1)


CASES: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "image.tokenizer.train": Peer.train_tokenizer,
    "image.tokenizer.encode": Peer.encode,
    "image.maskgit.train": Peer.train_maskgit,
    "image.maskgit.sample": Peer.sample,
}
