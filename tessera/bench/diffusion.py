"""Cases of diffusion: training and sampling of a decoder as large as dalle2-pytorch's, compiled and recorded as in presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.batches import PairBatch, TextStates
from tessera.bench.images import pictures, reduced, trainer
from tessera.bench.masked import Size, captions, variant
from tessera.bench.timing import device, time_call, time_steps
from tessera.compiling import compile_parts
from tessera.config import OptimConfig
from tessera.contracts import Context, Nets
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.denoisers import COMPILED, RECORDED, build_denoiser
from tessera.generators.diffusion.dit import DiTConfig
from tessera.generators.diffusion.guidance import GuidanceConfig
from tessera.generators.diffusion.losses import DiffusionLossConfig, Example
from tessera.generators.diffusion.processes import build_process
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler
from tessera.generators.diffusion.stage import DiffusionStageConfig, build_stage
from tessera.generators.diffusion.unet import UNetConfig

NET = UNetConfig(
    widths=(128, 256, 512, 768), blocks=(3, 2, 2, 3), attention=(False, False, False, False), cross=(False, True, True, True)
)
"""As many parameters and operations as the peer's of width 128: 186 M and 69 GFLOP forward a picture, there 187 M and 68. Its
levels are 128, 128, 256, 512 and, below, 1024 wide. As there, pixels look at text and embedding at all levels but the finest,
and at each other below the last one."""

OTHER = DiTConfig(patch=4, width=768, depth=15, heads=12)
"""The other network of the recipe, for whoever wants to know: 152 M parameters and 70 GFLOP forward a picture."""

STAGE = DiffusionStageConfig(
    loss=DiffusionLossConfig(text_dropout_prob=0.5, embedding_dropout_prob=0.1), optim=OptimConfig(lr=1e-4)
)
"""Rectified flow, and the peer's shares of what is taken away. The peer predicts noise and a variance, three channels more."""

DRAW = DiffusionSampleConfig(steps=50, guidance=GuidanceConfig(text=2.0, embedding=2.0))
"""The default sampler, and as the peer guides: one branch is told both, the other nothing."""


def side() -> int:
    """Of pictures, in pixels."""
    return 16 if reduced() else 64


def size(num: int) -> Size:
    """Of a batch; embeddings are as wide as text states."""
    return Size((side(), side()), num, 0, (7, 64) if reduced() else (77, 512))


def denoiser() -> nn.Module:
    """A fresh one on the device; thin on a CPU."""
    torch.manual_seed(0)
    config: UNetConfig | DiTConfig = NET
    if "dit" in variant():
        config = OTHER.model_copy(update={"patch": 2, "width": 128, "depth": 2, "heads": 2}) if reduced() else OTHER
    elif reduced():
        config = NET.model_copy(update={"widths": (16, 32, 64, 64), "head_width": 32, "blocks": (1, 1, 1, 1)})
    width = size(1).text[1]
    net = build_denoiser(config, channels=3, size=(side(), side()), text_width=width, embedding_width=width)
    return net.to(device())


def told(num: int) -> Condition:
    """Random text, and random embeddings."""
    embeddings = torch.randn(num, size(num).text[1], generator=torch.Generator().manual_seed(2))
    return Condition(text=captions(num, size(num)), embedding=embeddings.to(device()))


def pairs(num: int) -> PairBatch:
    """Random pictures with such conditions, on the device."""
    images, condition = pictures(num, side()), told(num)
    assert condition.text is not None
    return PairBatch(
        images.images, condition.embedding, condition.text, images.valid, images.positions, images.keys, images.captions
    )


def read(nets: Nets, batch: PairBatch, context: Context) -> Example:
    """From states and embeddings that were made before."""
    assert batch.images is not None
    assert isinstance(batch.text, TextStates)
    return Example(batch.images, Condition(text=batch.text, embedding=batch.embeddings), batch.valid)


def facts(num: int, net: nn.Module) -> dict[str, Any]:
    """What belongs to every row of this file."""
    return {
        "batch": num, "size": side(), "parameters_m": round(sum(p.numel() for p in net.parameters()) / 1e6, 1),
        "variant": " ".join(sorted(variant())), "reduced": reduced(),
    }  # fmt: skip


def train_case(data: Path | None) -> dict[str, Any]:
    """A whole step of the engine at 64 px, batch 32, text 77 x 512 and embeddings of 512: noise, forward, backward, norm, fused
    AdamW, EMA."""
    num, net, compiled = 4 if reduced() else 32, denoiser(), "eager" not in variant()
    stage = build_stage(STAGE, {"generator": net}, read, compiled=COMPILED, recorded=RECORDED)
    step, batch = trainer(stage, 0, graphs=compiled, compiled=compiled), pairs(num)
    repeats, warm = (3, 1) if reduced() else (20, 5)
    return time_steps(lambda: step(batch), num, repeats=repeats, warm=warm) | facts(num, net)


@torch.no_grad()
def sample_case(data: Path | None) -> dict[str, Any]:
    """50 steps with guidance 2, batch 16, 64 px: both branches of a step are one batch. Operations are those of one step, counted
    without a recording, times the steps."""
    num, net, how = 2 if reduced() else 16, denoiser().eval(), DRAW.model_copy(update={"steps": 2}) if reduced() else DRAW
    if not reduced() and "eager" not in variant():
        compile_parts(net, COMPILED)
    process, bf16, condition = build_process(STAGE.process), device().type == "cuda", told(num)
    shape, seeds = (3, side(), side()), torch.arange(num, device=device())
    drawn = DiffusionSampler(net, process, how, bf16=bf16)
    single = DiffusionSampler(net, process, how.model_copy(update={"steps": 1}), bf16=bf16, records=False)
    row = time_call(
        lambda: drawn(shape, condition, seeds), num, repeats=3 if reduced() else 10, warm=1 if reduced() else 3,
        counted=(lambda: single(shape, condition, seeds), how.steps),
    )  # fmt: skip
    return row | facts(num, net) | {"sampler": how.sampler, "steps": how.steps, "guidance": how.guidance.text}


CASES: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "image.diffusion.train": train_case,
    "image.diffusion.sample": sample_case,
}
