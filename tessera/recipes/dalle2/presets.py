"""The presets of the recipe."""

from __future__ import annotations

from tessera.config import EngineConfig, ImageDataConfig, OptimConfig
from tessera.generators.diffusion.prior import PriorConfig
from tessera.generators.diffusion.unet import UNetConfig
from tessera.recipes.dalle2.config import (
    BaseConfig,
    Dalle2Config,
    Dalle2SampleConfig,
    PriorSampleConfig,
    PriorStageConfig,
    UpsamplerConfig,
    UpsamplerSampleConfig,
)
from tessera.text.encoders import ByteTextConfig
from tessera.tokenizers.pair.losses import PairLossConfig
from tessera.tokenizers.pair.model import EmbedderConfig
from tessera.tokenizers.pair.stage import EmbedderStageConfig


def tiny() -> Dalle2Config:
    """For a CPU: 16 px, then 32, minutes on two cores (docs/recipes/dalle2.md)."""
    return Dalle2Config(
        preset="tiny",
        data=ImageDataConfig(resolution=16, workers=0),
        text=ByteTextConfig(length=48, width=64, depth=1, heads=4),
        embedder=EmbedderStageConfig(
            model=EmbedderConfig(width=32, widths=(16, 32, 64)), loss=PairLossConfig(group=32),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05, warmup_steps=20), ema_decay=0.99,
            batch_size=64, steps=200,
        ),
        prior=PriorStageConfig(
            model=PriorConfig(width=64, depth=2, heads=2),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=20), ema_decay=0.99,
            batch_size=64, steps=250,
        ),
        base=BaseConfig(
            model=UNetConfig(
                widths=(32, 64), blocks=(1, 1), attention=(False, True), cross=(False, True), head_width=32
            ),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=50), ema_decay=0.99,
            batch_size=32, steps=1400,
        ),
        upsampler1=UpsamplerConfig(
            resolution=32,
            model=UNetConfig(
                widths=(32, 64), blocks=(1, 1), attention=(False, False), cross=(False, False), head_width=32, efficient=True
            ),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=50), ema_decay=0.99,
            batch_size=16, steps=700,
        ),
        engine=EngineConfig(
            log_every_steps=50, validate_every_steps=350, preview_every_steps=350, save_every_steps=350, validation_samples=128
        ),
        sample=Dalle2SampleConfig(
            steps=12, guidance=2.0, embedding_guidance=2.0, prior=PriorSampleConfig(steps=8, guidance=3.0, candidates=8),
            upsampler=UpsamplerSampleConfig(steps=6)
        ),
    )  # fmt: skip


def small() -> Dalle2Config:
    """32 px, then 64, for one GPU. Not yet trained."""
    return Dalle2Config(
        preset="small",
        data=ImageDataConfig(resolution=32, workers=8),
        base=BaseConfig(model=UNetConfig(dropout=0.1)),
        upsampler1=UpsamplerConfig(
            resolution=64,
            model=UNetConfig(
                widths=(64, 128, 256), blocks=(2, 2, 2), attention=(False, False, True), cross=(False, False, False)
            ),
            batch_size=128,
            steps=10_000,
        ),
        engine=EngineConfig(precision="bf16", compile=True, cuda_graphs=True),
    )


def base() -> Dalle2Config:
    """64 px, then 256, for one large GPU and 100,000 pictures or more. Not yet trained."""
    return Dalle2Config(
        preset="base",
        data=ImageDataConfig(resolution=64, workers=16),
        text=ByteTextConfig(length=256, width=512, depth=6, heads=8),
        embedder=EmbedderStageConfig(
            model=EmbedderConfig(width=256, widths=(64, 128, 256, 512), blocks=2), ema_decay=0.9999, batch_size=1024, steps=50_000
        ),
        prior=PriorStageConfig(model=PriorConfig(width=768, depth=12, heads=12), ema_decay=0.9999, batch_size=512, steps=200_000),
        base=BaseConfig(
            model=UNetConfig(
                widths=(192, 384, 576, 768), blocks=(3, 3, 3, 3), attention=(False, True, True, True),
                cross=(False, True, True, True), dropout=0.1,
            ),
            ema_decay=0.9999, batch_size=512, steps=300_000,
        ),
        upsampler1=UpsamplerConfig(
            resolution=256,
            model=UNetConfig(
                widths=(128, 256, 512, 1024), blocks=(2, 2, 4, 4), attention=(False, False, False, True),
                cross=(False, False, False, False), efficient=True,
            ),
            crop=64, ema_decay=0.9999, batch_size=256, steps=200_000,
        ),
        engine=EngineConfig(
            precision="bf16", compile=True, micro_batch_size=64, validate_every_steps=2000, save_every_steps=5000
        ),
    )  # fmt: skip


def large() -> Dalle2Config:
    """64 px, then 256, then 1024, with a decoder twice as wide, for several GPUs. Not yet trained."""
    start = base()
    decoder = start.base.model_copy(
        update={
            "model": UNetConfig(
                widths=(384, 768, 1152, 1536), blocks=(3, 3, 3, 3), attention=(False, True, True, True),
                cross=(False, True, True, True), dropout=0.1,
            ),
            "batch_size": 1024,
        }
    )  # fmt: skip
    finest = UpsamplerConfig(
        resolution=1024,
        model=UNetConfig(
            widths=(128, 256, 512, 1024), blocks=(2, 2, 2, 2), attention=(False, False, False, False),
            cross=(False, False, False, False), efficient=True,
        ),
        crop=256, ema_decay=0.9999, batch_size=128, steps=200_000,
    )  # fmt: skip
    return start.model_copy(update={"preset": "large", "base": decoder, "upsampler2": finest})


PRESETS = {"tiny": tiny, "small": small, "base": base, "large": large}
