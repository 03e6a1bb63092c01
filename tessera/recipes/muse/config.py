"""The root config of the recipe, and its presets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tessera.config import Config, EngineConfig, EvaluateConfig, ImageDataConfig, OptimConfig
from tessera.generators.masked.model import MaskedConfig
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.generators.masked.stage import MaskedStageConfig
from tessera.nn.positions import refuse_narrow
from tessera.nn.quantizers import FSQConfig, ResidualConfig
from tessera.recipes.needs import NeedsConfig
from tessera.recipes.sizes import refuse_halvings, refuse_other_proportions, refuse_resolution
from tessera.text.encoders import ByteTextConfig, TextConfig
from tessera.tokenizers.image.critic import CriticConfig
from tessera.tokenizers.image.model import ImageTokenizerConfig
from tessera.tokenizers.image.stage import ImageTokenizerStageConfig

GENERATOR_OPTIM = OptimConfig(lr=3e-4, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=5000)


class BaseConfig(MaskedStageConfig):
    """Training of the generator."""

    needs: NeedsConfig = NeedsConfig()
    """Where its tokens come from."""


class SuperresConfig(MaskedStageConfig):
    """Training of the second generator, which draws a finer grid from a coarse one."""

    model: MaskedConfig = MaskedConfig(width=256, depth=6, heads=4)
    """The transformer."""
    batch_size: int = Field(64, ge=1)
    """Samples per update, over all ranks; a finer grid takes more memory."""
    resolution: int = Field(128, ge=16)
    """Height of its pictures in pixels, and their width where they are square."""
    enlarged: bool = True
    """Train the tokenizer, where it serves this grid, too, on pictures of both sizes."""
    needs: NeedsConfig = NeedsConfig()
    """Where the tokens of its own grid come from; by default the same tokenizer."""
    tokenizer: ImageTokenizerConfig | None = None
    """The tokenizer that `needs.tokenizer` names; filled in from there."""


class MuseSampleConfig(MaskedSampleConfig):
    """How pictures are drawn; each value can be changed per call."""

    superres: MaskedSampleConfig = MaskedSampleConfig(steps=8, guidance=1.0)
    """The second generator, where there is one."""
    variation: float = Field(0.6, gt=0, le=1)
    """With a picture and no mask: the share of its tokens that is drawn anew."""
    mask_ring: int = Field(1, ge=0, le=8)
    """With a mask: how many cells around it are drawn anew too, because their tokens know something of what was there."""
    chunk: int = Field(16, ge=1, le=1024)
    """Pictures drawn at once. Always so many: the last chunk is padded, so a picture never depends on what else is asked."""
    compile: bool = False
    """Compile the networks before the first picture, for half a minute or more; each one after it then takes half the time on a
    GPU. For many pictures."""


class MuseConfig(Config):
    """Root config of the recipe."""

    recipe: Literal["muse"] = "muse"
    """The recipe's name."""
    preset: Literal["tiny", "small", "base", "large"] = "small"
    """Where the values come from that neither the file nor --set names."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random is a function of it: initial weights, order, augmentation, dropout."""
    data: ImageDataConfig = ImageDataConfig()
    """The user's files."""
    text: TextConfig = ByteTextConfig()
    """How captions are read."""
    tokenizer: ImageTokenizerStageConfig = ImageTokenizerStageConfig()
    """Stage 1: pictures to tokens."""
    base: BaseConfig = BaseConfig()
    """Stage 2: captions to tokens."""
    superres: SuperresConfig | None = None
    """Stage 3: tokens to those of a finer grid; null does without."""
    engine: EngineConfig = EngineConfig()
    """How training runs."""
    sample: MuseSampleConfig = MuseSampleConfig()
    """How pictures are drawn."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """How the trained model is judged."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> MuseConfig:
        refuse_resolution(self.data, self.tokenizer.model.stride)
        if (critic := self.tokenizer.critic) is not None:
            refuse_halvings(critic.widths, min(self.data.size), "picture")
        refuse_narrow(self.base.model.width, self.base.model.heads, len(grid_of(self.tokenizer.model, self.data)), "base.model.")
        return self

    @model_validator(mode="after")
    def _superres_fits(self) -> MuseConfig:
        if self.superres is None:
            return self
        fine, stride = self.superres.resolution, self.fine_tokenizer.stride
        if fine % stride or fine <= self.data.resolution:
            raise ValueError(
                f"superres.resolution {fine} must be larger than data.resolution {self.data.resolution} "
                f"and a multiple of the tokenizer's stride {stride}; use {2 * self.data.resolution}"
            )
        refuse_other_proportions(self.data, fine, "superres.resolution")
        if (width := self.data.at(fine).size[1]) % stride:
            raise ValueError(
                f"superres.resolution {fine} makes pictures {width} pixels wide, which cannot be divided by the tokenizer's "
                f"stride {stride}; use {2 * self.data.resolution}"
            )
        model, axes = self.superres.model, len(grid_of(self.fine_tokenizer, self.data))
        refuse_narrow(model.width, model.heads, axes, "superres.model.")
        return self

    @property
    def fine_tokenizer(self) -> ImageTokenizerConfig:
        """The tokenizer of the superres stage."""
        own = None if self.superres is None else self.superres.tokenizer
        return own or self.tokenizer.model


def grid_of(tokenizer: ImageTokenizerConfig, data: ImageDataConfig) -> tuple[int, ...]:
    """The token grid of a picture: rows, columns, and codes a place where there are several."""
    rows, columns = (side // tokenizer.stride for side in data.size)
    quantizer = tokenizer.quantizer
    return (rows, columns, quantizer.num_quantizers) if isinstance(quantizer, ResidualConfig) else (rows, columns)


def tiny() -> MuseConfig:
    """For a CPU: 32 px, 64 tokens of 1,000 codes, 1.9 million parameters, four minutes on two cores (docs/recipes/muse.md)."""
    return MuseConfig(
        preset="tiny",
        data=ImageDataConfig(resolution=32, workers=0),
        text=ByteTextConfig(length=48, width=64, depth=1, heads=4),
        tokenizer=ImageTokenizerStageConfig(
            model=ImageTokenizerConfig(widths=(16, 48, 96), blocks=(0, 1, 2)),
            critic=None,
            optim=OptimConfig(lr=2e-3, warmup_steps=20),
            critic_optim=OptimConfig(lr=2e-4, betas=(0.5, 0.9), warmup_steps=20, schedule="constant"),
            ema_decay=0.99,
            batch_size=16,
            steps=1200,
        ),
        base=BaseConfig(
            model=MaskedConfig(width=96, depth=4, heads=4, dropout=0.1),
            optim=OptimConfig(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=50),
            ema_decay=0.99,
            batch_size=32,
            steps=700,
        ),
        engine=EngineConfig(
            log_every_steps=50, validate_every_steps=300, preview_every_steps=300, save_every_steps=300, validation_samples=128
        ),
        sample=MuseSampleConfig(steps=12, guidance=5.0, min_share=0.3, remask=0.4),
    )


def small() -> MuseConfig:
    """64 px, 64 tokens of 1,000 codes, 38 million parameters, one GPU, minutes (measured figures in docs/recipes/muse.md)."""
    return MuseConfig(
        preset="small",
        data=ImageDataConfig(resolution=64, workers=8),
        tokenizer=ImageTokenizerStageConfig(),
        base=BaseConfig(model=MaskedConfig(dropout=0.1)),
        engine=EngineConfig(precision="bf16", compile=True, cuda_graphs=True),
    )


def base() -> MuseConfig:
    """256 px by 256 tokens of 64,000 codes, then 512 px by 1,024, for one large GPU and 100,000 pictures or more. Not yet trained
    to the end."""
    return MuseConfig(
        preset="base",
        data=ImageDataConfig(resolution=256, crop="random", zoom=1.25, workers=16),
        text=ByteTextConfig(length=256, width=512, depth=6, heads=8),
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
        base=BaseConfig(
            model=MaskedConfig(width=768, depth=16, heads=12, dropout=0.1), optim=GENERATOR_OPTIM, ema_decay=0.9999,
            batch_size=256, steps=300_000,
        ),
        superres=SuperresConfig(
            resolution=512, model=MaskedConfig(width=512, depth=12, heads=8, dropout=0.1), optim=GENERATOR_OPTIM,
            ema_decay=0.9999, batch_size=128, steps=200_000,
        ),
        engine=EngineConfig(
            precision="bf16", compile=True, micro_batch_size=64, validate_every_steps=2000, save_every_steps=5000
        ),
    )  # fmt: skip


def large() -> MuseConfig:
    """512 px by 1,024 tokens in one go: a wider tokenizer and a generator of 400 million parameters, for several GPUs. Not yet
    trained to the end."""
    start = base()
    tokenizer = start.tokenizer.model_copy(
        update={
            "model": ImageTokenizerConfig(
                widths=(192, 256, 384, 512, 768), blocks=(3, 3, 3, 3, 3), quantizer=FSQConfig(levels=(8, 8, 8, 5, 5, 5))
            ),
            "batch_size": 256,
        }
    )
    generator = start.base.model_copy(
        update={"model": MaskedConfig(width=1152, depth=20, heads=9), "batch_size": 512, "steps": 500_000}
    )
    return start.model_copy(
        update={
            "preset": "large",
            "data": start.data.model_copy(update={"resolution": 512}),
            "tokenizer": tokenizer,
            "base": generator,
            "superres": None,
        }
    )
