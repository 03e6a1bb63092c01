"""Presets of recipes of clips: what a size has whatever draws, and for each kind of generator its network and how it draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from tessera.config import Config, EngineConfig, Kinds, OptimConfig, VideoDataConfig
from tessera.generators.autoregressive.grid_losses import GridLossConfig
from tessera.generators.autoregressive.grid_model import GridConfig
from tessera.generators.masked.model import MaskedConfig
from tessera.nn.nearby import NearbyConfig
from tessera.nn.quantizers import FSQConfig
from tessera.recipes.clips.config import (
    KIND,
    AutoregressiveBaseConfig,
    AutoregressiveClipSampleConfig,
    AutoregressiveClipsConfig,
    ClipsConfig,
    MaskedBaseConfig,
    MaskedClipSampleConfig,
    MaskedClipsConfig,
)
from tessera.text.encoders import ByteTextConfig, TextConfig
from tessera.tokenizers.video.conv import CausalConvConfig
from tessera.tokenizers.video.stage import VideoTokenizerStageConfig

Name = Literal["phenaki", "nuwa"]
Size = Literal["tiny", "small", "base", "large"]

TYPES: dict[str, type[ClipsConfig]] = {"masked": MaskedClipsConfig, "autoregressive": AutoregressiveClipsConfig}
MASKED_OPTIM = OptimConfig(lr=3e-4, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=5000)
LOSS = GridLossConfig(sketch_gaps_prob=0.2)
NEARBY = NearbyConfig(first_whole=True, first_step=2)
AUTOREGRESSIVE_OPTIM = OptimConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=5000)


class Preset(Config):
    """One size, for either generator."""

    data: VideoDataConfig
    text: TextConfig = ByteTextConfig()
    tokenizer: VideoTokenizerStageConfig = VideoTokenizerStageConfig()
    engine: EngineConfig
    masked: MaskedBaseConfig
    masked_sample: MaskedClipSampleConfig = MaskedClipSampleConfig()
    autoregressive: AutoregressiveBaseConfig
    autoregressive_sample: AutoregressiveClipSampleConfig = AutoregressiveClipSampleConfig(
        guidance=3.0, temperature=0.9, min_share=0.1
    )


def tiny() -> Preset:
    """For a CPU: 9 frames of 32 px, 3 x 8 x 8 tokens of 1,000 codes, five to seven minutes on two cores (docs/recipes)."""
    return Preset(
        data=VideoDataConfig(resolution=32, frames=9, start="first", workers=0),
        text=ByteTextConfig(length=64, width=64, depth=1, heads=4),
        tokenizer=VideoTokenizerStageConfig(
            model=CausalConvConfig(widths=(16, 32, 64), blocks=(0, 1, 1)),
            critic=None,
            optim=OptimConfig(lr=3e-3, warmup_steps=20),
            ema_decay=0.99,
            batch_size=4,
            steps=1200,
        ),
        masked=MaskedBaseConfig(
            model=MaskedConfig(width=64, depth=4, heads=4),
            optim=OptimConfig(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=50),
            ema_decay=0.99,
            batch_size=16,
            steps=1000,
        ),
        masked_sample=MaskedClipSampleConfig(steps=16, guidance=4.0, min_share=0.3, remask=0.1),
        autoregressive_sample=AutoregressiveClipSampleConfig(guidance=2.0, temperature=0.9, min_share=0.1),
        autoregressive=AutoregressiveBaseConfig(
            loss=LOSS,
            model=GridConfig(width=64, depth=4, heads=4, inner_width=64, nearby=NEARBY),
            optim=OptimConfig(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.03, warmup_steps=50),
            ema_decay=0.99,
            batch_size=16,
            steps=1400,
        ),
        engine=EngineConfig(
            log_every_steps=50, validate_every_steps=300, preview_every_steps=300, save_every_steps=300, validation_samples=64
        ),
    )


def small() -> Preset:
    """17 frames of 64 px, 5 x 8 x 8 tokens of 1,000 codes, for one GPU. Not yet trained to the end."""
    return Preset(
        data=VideoDataConfig(resolution=64, workers=8),
        masked=MaskedBaseConfig(model=MaskedConfig(dropout=0.1)),
        autoregressive=AutoregressiveBaseConfig(
            loss=LOSS, model=GridConfig(width=384, depth=10, heads=6, dropout=0.1, nearby=NEARBY)
        ),
        engine=EngineConfig(precision="bf16", compile=True, cuda_graphs=True),
    )


def base() -> Preset:
    """17 frames of 128 px, 5 x 16 x 16 tokens of 64,000 codes, for one large GPU and 100,000 clips or more. Not yet trained to
    the end."""
    wider = NEARBY.model_copy(update={"height": 7, "width": 7})
    return Preset(
        data=VideoDataConfig(resolution=128, crop="random", zoom=1.25, fps=8, image_share=0.2, workers=16),
        text=ByteTextConfig(length=256, width=512, depth=6, heads=8),
        tokenizer=VideoTokenizerStageConfig(
            model=CausalConvConfig(
                widths=(96, 192, 384, 512), blocks=(2, 2, 2, 2), quantizer=FSQConfig(levels=(8, 8, 8, 5, 5, 5))
            ),
            optim=OptimConfig(lr=2e-4, warmup_steps=1000),
            ema_decay=0.9999,
            batch_size=64,
            steps=200_000,
        ),
        masked=MaskedBaseConfig(
            model=MaskedConfig(width=768, depth=16, heads=12, dropout=0.1), optim=MASKED_OPTIM, ema_decay=0.9999,
            batch_size=128, steps=300_000,
        ),
        autoregressive=AutoregressiveBaseConfig(
            loss=LOSS,
            model=GridConfig(width=768, depth=16, heads=12, dropout=0.1, nearby=wider),
            optim=AUTOREGRESSIVE_OPTIM, ema_decay=0.9999, batch_size=128, steps=300_000,
        ),
        engine=EngineConfig(
            precision="bf16", compile=True, micro_batch_size=32, validate_every_steps=2000, save_every_steps=5000
        ),
    )  # fmt: skip


def large() -> Preset:
    """17 frames of 256 px, 5 x 32 x 32 tokens, a generator of 400 million parameters, for several GPUs. Not yet trained to the
    end."""
    start = base()
    masked = {"model": MaskedConfig(width=1152, depth=20, heads=9), "batch_size": 256, "steps": 500_000}
    nearby = start.autoregressive.model.nearby.model_copy(update={"dilation": (1, 2)})
    autoregressive = masked | {"model": GridConfig(width=1152, depth=20, heads=9, nearby=nearby)}
    return start.model_copy(
        update={
            "data": start.data.model_copy(update={"resolution": 256}),
            "masked": start.masked.model_copy(update=masked),
            "autoregressive": start.autoregressive.model_copy(update=autoregressive),
        }
    )


SIZES: Mapping[Size, Callable[[], Preset]] = {"tiny": tiny, "small": small, "base": base, "large": large}


def preset_of(recipe: Name, size: Size, own: str, kind: str | None = None) -> ClipsConfig:
    """The config of a recipe: with its own kind of generator, or the one that is asked for."""
    made = SIZES[size]()
    if (kind or own) == "masked":
        return MaskedClipsConfig(
            recipe=recipe, preset=size, data=made.data, text=made.text, tokenizer=made.tokenizer, base=made.masked,
            engine=made.engine, sample=made.masked_sample,
        )  # fmt: skip
    return AutoregressiveClipsConfig(
        recipe=recipe, preset=size, data=made.data, text=made.text, tokenizer=made.tokenizer, base=made.autoregressive,
        engine=made.engine, sample=made.autoregressive_sample,
    )  # fmt: skip


def presets_of(recipe: Name, own: str) -> dict[str, Callable[..., ClipsConfig]]:
    """All sizes of a recipe."""
    return {size: partial(preset_of, recipe, size, own) for size in SIZES}


def kinds_of(own: str) -> Kinds[ClipsConfig]:
    """Both root configs; a recipe's own kind is that of a config that does not say."""
    return Kinds(KIND, {own: TYPES[own], **TYPES})
