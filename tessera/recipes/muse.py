"""Muse: text to image by masked tokens. So far its first stage, the image tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator
from torch import Tensor

from tessera.batches import ImageBatch, to_uint8
from tessera.config import Config, DataConfig, EngineConfig, OptimConfig
from tessera.contracts import Context, Nets, Preview, Recipe, Stage, Train
from tessera.media.images import encode_png
from tessera.media.sheets import sheet
from tessera.nn.perceptual import load_vgg16
from tessera.nn.quantizers import FSQConfig
from tessera.nn.similarity import psnr
from tessera.tokenizers.image.critic import CriticConfig
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig
from tessera.tokenizers.image.stage import ImageTokenizerStageConfig, build_stage


class MuseConfig(Config):
    """Root config of the recipe."""

    recipe: Literal["muse"] = "muse"
    """The recipe's name."""
    preset: Literal["tiny", "small", "base", "large"] = "small"
    """Where the values come from that neither the file nor --set names."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random is a function of it: initial weights, order, augmentation, dropout."""
    data: DataConfig = DataConfig()
    """The user's files."""
    tokenizer: ImageTokenizerStageConfig = ImageTokenizerStageConfig()
    """Stage 1: pictures to tokens."""
    engine: EngineConfig = EngineConfig()
    """How training runs."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> MuseConfig:
        resolution, stride = self.data.resolution, self.tokenizer.model.stride
        if resolution % stride:
            below, above = resolution // stride * stride, -(-resolution // stride) * stride
            raise ValueError(
                f"data.resolution {resolution} cannot be divided by the tokenizer's stride {stride}; "
                f"use {' or '.join(str(size) for size in (below, above) if size >= 16)}, "
                f"or another number of tokenizer.model.widths"
            )
        critic = self.tokenizer.critic
        if critic is not None and resolution < 2 ** (len(critic.widths) - 1):
            raise ValueError(
                f"tokenizer.critic.widths halve a picture of {resolution} pixels {len(critic.widths) - 1} times; name fewer"
            )
        return self


def tiny() -> MuseConfig:
    """For a CPU: 32 px, 64 tokens of 1,000 codes, 0.9 million parameters, minutes on two cores (docs/recipes/muse.md)."""
    return MuseConfig(
        preset="tiny",
        data=DataConfig(resolution=32, workers=0),
        tokenizer=ImageTokenizerStageConfig(
            model=ImageTokenizerConfig(widths=(16, 48, 96), blocks=(0, 1, 2)),
            critic=CriticConfig(widths=(16, 32, 64), start_step=1200, warmup_steps=100, weight=0.02),
            optim=OptimConfig(lr=2e-3, warmup_steps=20),
            critic_optim=OptimConfig(lr=2e-4, betas=(0.5, 0.9), warmup_steps=20, schedule="constant"),
            ema_decay=0.99,
            batch_size=16,
            steps=1500,
        ),
        engine=EngineConfig(
            log_every_steps=50, validate_every_steps=300, preview_every_steps=300, save_every_steps=300, validation_samples=128
        ),
    )


def small() -> MuseConfig:
    """64 px, 64 tokens of 1,000 codes, one GPU, minutes (measured figures in docs/recipes/muse.md)."""
    return MuseConfig(
        preset="small",
        data=DataConfig(resolution=64, workers=8),
        tokenizer=ImageTokenizerStageConfig(),
        engine=EngineConfig(precision="bf16", compile=True, cuda_graphs=True),
    )


def base() -> MuseConfig:
    """256 px, 256 tokens of 64,000 codes, for one large GPU and 100,000 pictures or more. Not yet trained to the end."""
    return MuseConfig(
        preset="base",
        data=DataConfig(resolution=256, crop="random", zoom=1.25, workers=16),
        tokenizer=ImageTokenizerStageConfig(
            model=ImageTokenizerConfig(
                widths=(128, 128, 256, 256, 512), blocks=(2, 2, 2, 2, 2), quantizer=FSQConfig(levels=(8, 8, 8, 5, 5, 5))
            ),
            critic=CriticConfig(widths=(64, 128, 256, 512), start_step=20_000, warmup_steps=2000),
            optim=OptimConfig(lr=2e-4, warmup_steps=1000),
            ema_decay=0.9999,
            batch_size=128,
            steps=200_000,
        ),
        engine=EngineConfig(
            precision="bf16", compile=True, micro_batch_size=64, validate_every_steps=2000, save_every_steps=5000
        ),
    )


def large() -> MuseConfig:
    """As base, with twice the width and three blocks a level, for several GPUs. Not yet trained to the end."""
    start = base()
    tokenizer = start.tokenizer.model_copy(
        update={
            "model": ImageTokenizerConfig(
                widths=(192, 256, 384, 512, 768), blocks=(3, 3, 3, 3, 3), quantizer=FSQConfig(levels=(8, 8, 8, 5, 5, 5))
            ),
            "batch_size": 256,
        }
    )
    return start.model_copy(update={"preset": "large", "tokenizer": tokenizer})


def steps(config: MuseConfig) -> Sequence[Train]:
    """The stages in the order in which they train."""

    def build_tokenizer() -> Stage:
        wanted = config.tokenizer.loss.perceptual
        perceptual = None if wanted is None else load_vgg16(wanted.path)
        stage = build_stage(config.tokenizer, config.data.channels, perceptual)
        return replace(stage, preview=preview_reconstructions)

    return [
        Train(
            name="tokenizer",
            batch_size=config.tokenizer.batch_size,
            steps=config.tokenizer.steps,
            build=build_tokenizer,
            serves=lambda: {"tokenizer": ImageTokenizer(config.tokenizer.model, config.data.channels)},
        )
    ]


def preview_reconstructions(raw: Nets, averaged: Nets, batch: ImageBatch, context: Context) -> Preview:
    """Three rows: the pictures, and what averaged and raw weights make of them."""
    rows = {"real": batch.images}
    facts: dict[str, object] = {"keys": list(batch.keys), "captions": list(batch.captions)}
    for name, nets in (("ema", averaged), ("raw", raw)):
        rows[name] = nets["tokenizer"](batch.images).images.clamp(-1, 1)
        facts[f"psnr_{name}"] = [round(value, 3) for value in psnr(rows[name], batch.images).tolist()]
    picture = sheet(
        [pictures(images) for images in rows.values()],
        row_names=list(rows),
        captions=[caption or "" for caption in batch.captions],
        scale=max(1, 96 // batch.images.shape[-1]),
    )
    return Preview("png", encode_png(picture), facts)


def pictures(images: Tensor) -> list[npt.NDArray[np.uint8]]:
    """b c h w in [-1, 1] -> arrays of h w c."""
    return list(to_uint8(images).permute(0, 2, 3, 1).cpu().numpy())


MUSE = Recipe(
    name="muse",
    summary="text to image: conv tokenizer, then masked tokens (this version trains the tokenizer)",
    config_type=MuseConfig,
    presets={"tiny": tiny, "small": small, "base": base, "large": large},
    steps=steps,
)
