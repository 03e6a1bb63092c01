"""dalle2-pytorch: pictures by diffusion."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from peers.steps import peer_stepper
from tessera.bench.images import reduced
from tessera.bench.timing import device, time_call, time_steps

UNUSED = {
    "torchvision": (),  # VGG16 of its VQGAN
    "torchvision.transforms": (),
    "kornia": (),  # crops and blur of upsamplers
    "kornia.filters": ("gaussian_blur2d",),
    "kornia.augmentation": (),
    "x_clip": ("CLIP",),  # embeddings, which are given here
    "coca_pytorch": ("CoCa",),
    "accelerate": ("Accelerator", "DistributedType"),  # its trainer; `peer_stepper` makes updates here
    "ema_pytorch": ("EMA",),
    "pytorch_warmup": (),
}
"""Modules that it imports and that neither case calls, with the names that it takes of them."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within, what is not used need not be installed."""
    missing = [name for name in UNUSED if importlib.util.find_spec(name.split(".")[0]) is None]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update({part: type(part, (), {}) for part in UNUSED[name]})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


class Peer:
    """dalle2-pytorch at the size its README shows: a U-Net of width 128 with four levels, 64 px, text and embedding beside it.

    It draws with learned variance and DDIM; both branches of guidance are passes of their own, as it makes them. Its progress
    bars are not drawn.
    """

    def __init__(self) -> None:
        self.side, self.width, self.embedding, self.text = (16, 16, 64, (7, 64)) if reduced() else (64, 128, 512, (77, 512))
        self.num_trained, self.num_drawn, self.steps = (2, 2, 2) if reduced() else (32, 16, 50)

    @functools.cached_property
    def package(self) -> Any:
        with stand_ins():
            from dalle2_pytorch import dalle2_pytorch
        dalle2_pytorch.tqdm = lambda passes, **_: passes
        return dalle2_pytorch

    def decoder(self, **options: Any) -> Any:
        """One U-Net of 64 px."""
        unet = self.package.Unet(
            dim=self.width,
            image_embed_dim=self.embedding,
            text_embed_dim=self.text[1],
            cond_dim=self.width,
            channels=3,
            dim_mults=(1, 2, 4, 8),
            cond_on_text_encodings=True,
            cond_on_image_embeds=True,
        )
        made = self.package.Decoder(unet=unet, image_sizes=(self.side,), timesteps=1000, learned_variance=True, **options)
        return made.to(device())

    def told(self, num: int) -> dict[str, torch.Tensor]:
        """Embeddings and text."""
        shapes = {"image_embed": (num, self.embedding), "text_encodings": (num, *self.text)}
        return {name: torch.randn(shape, device=device()) for name, shape in shapes.items()}

    def train(self) -> dict[str, Any]:
        """One update, bf16; a tenth of the embeddings and half of the captions are taken away."""
        decoder, told = self.decoder(image_cond_drop_prob=0.1, text_cond_drop_prob=0.5), self.told(self.num_trained)
        images = torch.rand(self.num_trained, 3, self.side, self.side, device=device())
        parameters = list(decoder.parameters())
        step = peer_stepper(parameters, lambda: decoder(images, unet_number=1, **told))
        row = time_steps(step, self.num_trained, **({"repeats": 2, "warm": 1} if reduced() else {}))
        return row | {"parameters_m": round(sum(p.numel() for p in parameters if p.requires_grad) / 1e6, 1)}

    @torch.no_grad()
    def sample(self) -> dict[str, Any]:
        """50 steps with guidance 2, bf16."""
        decoder, told = self.decoder(sample_timesteps=(self.steps,)), self.told(self.num_drawn)

        def call() -> Any:
            with torch.autocast(device().type, torch.bfloat16):
                return decoder.sample(cond_scale=2.0, **told)

        return time_call(call, self.num_drawn, repeats=2, warm=1) | {"steps": self.steps}


CASES: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "image.diffusion.train": Peer.train,
    "image.diffusion.sample": Peer.sample,
}
