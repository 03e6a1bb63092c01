"""The root config of the recipe, and its presets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tessera.batches import num_frames, num_latent
from tessera.config import MAX_FPS, Config, EngineConfig, OptimConfig, VideoDataConfig, VideoEvaluateConfig
from tessera.generators.masked.frames import FrameMaskConfig
from tessera.generators.masked.losses import MaskedLossConfig
from tessera.generators.masked.model import MaskedConfig
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.generators.masked.stage import MaskedStageConfig
from tessera.nn.quantizers import FSQConfig, ResidualConfig
from tessera.recipes.needs import NeedsConfig
from tessera.recipes.sizes import refuse_halvings, refuse_resolution
from tessera.text.encoders import ByteTextConfig, TextConfig
from tessera.tokenizers.video.conv import CausalConvConfig
from tessera.tokenizers.video.cvivit import CViViTConfig
from tessera.tokenizers.video.model import VideoTokenizerConfig
from tessera.tokenizers.video.stage import VideoTokenizerStageConfig


class BaseConfig(MaskedStageConfig):
    """Training of the generator."""

    loss: MaskedLossConfig = MaskedLossConfig(frames=FrameMaskConfig())
    """What is hidden, and how guesses are scored."""
    batch_size: int = Field(128, ge=1)
    """Samples per update, over all ranks."""
    needs: NeedsConfig = NeedsConfig()
    """Where its tokens come from."""


class PhenakiSampleConfig(MaskedSampleConfig):
    """How clips are drawn; each value can be changed per call."""

    frames: int | None = Field(None, ge=1, le=1_000_000)
    """Frames of a clip; null: as many as a training clip has. A longer one is drawn window by window. 1 draws a picture."""
    overlap: int | None = Field(None, ge=1)
    """Frames that a window takes over from the one before, in whole tokens; the rest of it is new. null: half of it."""
    fps: float | None = Field(None, gt=0, le=MAX_FPS)
    """Frames a second of the files; null: as the training data has them."""
    chunk: int = Field(8, ge=1, le=1024)
    """Clips drawn at once. Always so many: the last chunk is padded, so a clip never depends on what else is asked."""
    compile: bool = False
    """Compile the networks before the first clip, which takes half a minute or more. For many clips on a GPU, or long ones."""


class PhenakiConfig(Config):
    """Root config of the recipe."""

    recipe: Literal["phenaki"] = "phenaki"
    """The recipe's name."""
    preset: Literal["tiny", "small", "base", "large"] = "small"
    """Where the values come from that neither the file nor --set names."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random is a function of it: initial weights, order, augmentation, dropout."""
    data: VideoDataConfig = VideoDataConfig()
    """The user's files."""
    text: TextConfig = ByteTextConfig()
    """How captions are read."""
    tokenizer: VideoTokenizerStageConfig = VideoTokenizerStageConfig()
    """Stage 1: clips to tokens."""
    base: BaseConfig = BaseConfig()
    """Stage 2: captions to tokens."""
    engine: EngineConfig = EngineConfig()
    """How training runs."""
    sample: PhenakiSampleConfig = PhenakiSampleConfig()
    """How clips are drawn."""
    evaluate: VideoEvaluateConfig = VideoEvaluateConfig()
    """How the trained model is judged."""

    @model_validator(mode="after")
    def _fits(self) -> PhenakiConfig:
        if self.data.sketch != "none":
            raise ValueError(f"data.sketch is {self.data.sketch}, and this recipe learns nothing from sketches; leave it out")
        if self.base.needs.tokenizer is None:  # else the tokenizer is not known before it is opened
            refuse_sizes(self)
            refuse_untrained(self)
        return self

    @property
    def grid(self) -> tuple[int, ...]:
        """The token grid of a training clip: steps of time, rows, columns, and codes a place where there are several."""
        return grid_of(self.tokenizer.model, self.data)


def grid_of(model: VideoTokenizerConfig, data: VideoDataConfig) -> tuple[int, ...]:
    """Steps of time, rows, columns, and codes a place where there are several."""
    steps, side = num_latent(data.frames, model.time_stride), data.resolution // model.stride
    quantizer = model.quantizer
    return (steps, side, side, quantizer.num_quantizers) if isinstance(quantizer, ResidualConfig) else (steps, side, side)


def refuse_sizes(config: PhenakiConfig) -> None:
    """Frames, tokens and windows that do not fit each other."""
    model, data, overlap, most = config.tokenizer.model, config.data, config.sample.overlap, largest_overlap(config)
    refuse_resolution(data.resolution, model.stride)
    if (data.frames - 1) % model.time_stride:
        more = num_frames(num_latent(data.frames, model.time_stride), model.time_stride)
        raise ValueError(
            f"data.frames {data.frames} is not 1 more than a multiple of the tokenizer's time stride {model.time_stride}; "
            f"use {more - model.time_stride} or {more}"
        )
    if overlap is not None and overlap > most:
        raise ValueError(
            f"sample.overlap {overlap} leaves no room for new frames in a window of {data.frames}; "
            f"{f'use at most {most}, or null' if most else 'set it to null'}"
        )


def refuse_untrained(config: PhenakiConfig) -> None:
    """A tokenizer that this run trains on clips that are too small for it, or for its critic."""
    model, data, critic = config.tokenizer.model, config.data, config.tokenizer.critic
    if isinstance(model, CViViTConfig) and model.window > config.grid[0]:
        raise ValueError(
            f"tokenizer.model.window {model.window} is more than the {config.grid[0]} latent frames of a training clip "
            f"(data.frames {data.frames}, time stride {model.time_stride}): longer clips would be decoded as was never "
            f"trained; use at most {config.grid[0]}, or more frames"
        )
    if critic is not None:
        refuse_halvings(critic.widths, data.resolution, "frame")


def largest_overlap(config: PhenakiConfig) -> int:
    """Frames that a window can take over at most: it has no first latent then, and one is new. 0: it cannot go on."""
    return max(0, config.grid[0] - 2) * config.tokenizer.model.time_stride


GENERATOR_OPTIM = OptimConfig(lr=3e-4, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=5000)


def tiny() -> PhenakiConfig:
    """For a CPU: 9 frames of 32 px, 3 x 8 x 8 tokens of 1,000 codes, five minutes on two cores (docs/recipes/phenaki.md)."""
    return PhenakiConfig(
        preset="tiny",
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
        base=BaseConfig(
            model=MaskedConfig(width=64, depth=4, heads=4),
            loss=MaskedLossConfig(frames=FrameMaskConfig(prefix_prob=0.1, between_prob=0.05, later_prob=0.1, shorter_prob=0.05)),
            optim=OptimConfig(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=50),
            ema_decay=0.99,
            batch_size=16,
            steps=1000,
        ),
        engine=EngineConfig(
            log_every_steps=50, validate_every_steps=300, preview_every_steps=300, save_every_steps=300, validation_samples=64
        ),
        sample=PhenakiSampleConfig(steps=16, guidance=4.0, min_share=0.3, remask=0.1),
    )


def small() -> PhenakiConfig:
    """17 frames of 64 px, 5 x 8 x 8 tokens of 1,000 codes, for one GPU. Not yet trained to the end."""
    return PhenakiConfig(
        preset="small",
        data=VideoDataConfig(resolution=64, workers=8),
        base=BaseConfig(model=MaskedConfig(dropout=0.1)),
        engine=EngineConfig(precision="bf16", compile=True, cuda_graphs=True),
    )


def base() -> PhenakiConfig:
    """17 frames of 128 px, 5 x 16 x 16 tokens of 64,000 codes, for one large GPU and 100,000 clips or more. Not yet trained to
    the end."""
    return PhenakiConfig(
        preset="base",
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
        base=BaseConfig(
            model=MaskedConfig(width=768, depth=16, heads=12, dropout=0.1), optim=GENERATOR_OPTIM, ema_decay=0.9999,
            batch_size=128, steps=300_000,
        ),
        engine=EngineConfig(
            precision="bf16", compile=True, micro_batch_size=32, validate_every_steps=2000, save_every_steps=5000
        ),
    )  # fmt: skip


def large() -> PhenakiConfig:
    """17 frames of 256 px, 5 x 32 x 32 tokens, a generator of 400 million parameters, for several GPUs. Not yet trained to the
    end."""
    start = base()
    generator = start.base.model_copy(
        update={"model": MaskedConfig(width=1152, depth=20, heads=9), "batch_size": 256, "steps": 500_000}
    )
    return start.model_copy(
        update={"preset": "large", "data": start.data.model_copy(update={"resolution": 256}), "base": generator}
    )
