"""Small denoisers and conditions for their tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.batches import TextStates
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.denoisers import build_denoiser
from tessera.generators.diffusion.dit import DiT, DiTConfig
from tessera.generators.diffusion.unet import UNet, UNetConfig
from tessera.nn.attention import pool

SIZE, CHANNELS, TEXT, EMBEDDING, WORDS = (8, 12), 3, 10, 12, 5
UNET = UNetConfig(widths=(16, 32), blocks=(1, 2), attention=(False, True), cross=(True, True), head_width=8, embedding_tokens=3)
EFFICIENT = UNetConfig(widths=(16, 24), blocks=(1, 2), attention=(False, True), cross=(False, True), head_width=8, efficient=True)
DIT = DiTConfig(patch=2, width=32, depth=2, heads=4, embedding_tokens=3)
KINDS = {"unet": UNET, "efficient": EFFICIENT, "dit": DIT}
EVERYTHING: dict[str, Any] = {"text_width": TEXT, "embedding_width": EMBEDDING, "low": True, "self_conditioning": True}


def denoiser(kind: str = "unet", size: tuple[int, int] = SIZE, **options: Any) -> UNet | DiT:
    """Off its start, where most of it adds nothing."""
    torch.manual_seed(0)
    return stirred(build_denoiser(KINDS[kind], channels=CHANNELS, size=size, **options)).eval()


def stirred(net: Any) -> Any:
    """Whatever starts at 0 starts elsewhere."""
    for parameter in net.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.5 / max(1, parameter[0].numel()) ** 0.5)
    return net


def words(num: int, seed: int = 0) -> TextStates:
    """Captions of different lengths, none of them empty."""
    states = torch.randn(num, WORDS, TEXT, generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(WORDS)[None] < 1 + (torch.arange(num) + seed)[:, None] % WORDS
    return TextStates(states, mask, pool(states, mask))


def told(x: Tensor, options: dict[str, Any], seed: int = 0) -> Condition:
    """All that a denoiser with these options may be told."""
    rng, num = torch.Generator().manual_seed(seed), len(x)
    return Condition(
        text=words(num, seed) if options.get("text_width") else None,
        embedding=torch.randn(num, EMBEDDING, generator=rng) if options.get("embedding_width") else None,
        low=torch.randn(x.shape, generator=rng) if options.get("low") else None,
        low_level=torch.randn(num, generator=rng) if options.get("low") else None,
        before=torch.randn(x.shape, generator=rng) if options.get("self_conditioning") else None,
    )


def noise(num: int = 3, size: tuple[int, int] = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(num, CHANNELS, *size, generator=torch.Generator().manual_seed(seed))


def levels(num: int = 3) -> Tensor:
    return torch.linspace(-4, 5, num)
