"""The root config of the recipe, and its presets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tessera.config import (
    Config,
    EngineConfig,
    EvaluateConfig,
    ImageDataConfig,
    ListedEmbeddingsConfig,
    OptimConfig,
    ShardEmbeddingsConfig,
    TarEmbeddingsConfig,
    UserError,
)
from tessera.generators.diffusion.degrade import Degradation, NoiseConfig
from tessera.generators.diffusion.denoisers import Denoiser
from tessera.generators.diffusion.dit import DiTConfig
from tessera.generators.diffusion.guidance import GuidanceConfig
from tessera.generators.diffusion.prior import PriorConfig
from tessera.generators.diffusion.processes import DdpmConfig
from tessera.generators.diffusion.sample import DiffusionSampleConfig, SamplerConfig
from tessera.generators.diffusion.stage import DiffusionStageConfig
from tessera.generators.diffusion.unet import UNetConfig
from tessera.text.encoders import ByteTextConfig, NoTextConfig, TextConfig
from tessera.tokenizers.pair.clip import ClipConfig
from tessera.tokenizers.pair.losses import PairLossConfig
from tessera.tokenizers.pair.model import EmbedderConfig
from tessera.tokenizers.pair.stage import EmbedderStageConfig


class TrainedPairConfig(Config):
    """By the pair that the stage `pair` trains on the user's data."""

    kind: Literal["pair"] = "pair"
    """Where embeddings come from."""
    path: str | None = None
    """RUN/pair of another run or export, to use instead of training one in this run."""


EmbeddingsConfig = Annotated[
    TrainedPairConfig | ClipConfig | TarEmbeddingsConfig | ShardEmbeddingsConfig | ListedEmbeddingsConfig,
    Field(discriminator="kind"),
]


class PriorStageConfig(DiffusionStageConfig):
    """Training of the prior."""

    model: PriorConfig = PriorConfig()
    """The transformer."""


class BaseConfig(DiffusionStageConfig):
    """Training of the decoder, which draws a small picture of an embedding and text."""

    model: Denoiser = UNetConfig()
    """The network."""
    self_conditioning: bool = False
    """Take the network's own earlier guess of the picture (Chen et al. 2022)."""


class SuperresConfig(DiffusionStageConfig):
    """Training of an upsampler. It sees the smaller picture, and neither text nor embedding."""

    model: Denoiser = UNetConfig(attention=(False, False, True), cross=(False, False, False), efficient=True)
    """The network."""
    batch_size: int = Field(64, ge=1)
    """Samples per update, over all ranks; larger pictures take more memory."""
    resolution: int = Field(128, ge=16)
    """Height and width of its pictures in pixels."""
    low: Degradation = NoiseConfig()
    """How the smaller picture is spoiled in training, as a drawn one would be."""
    crop: int | None = Field(None, ge=16)
    """Train on parts of so many pixels a side; null: on whole pictures. It draws whole ones."""


class PriorSampleConfig(SamplerConfig):
    """How embeddings are drawn."""

    steps: int = Field(16, ge=1)
    """From noise to clean."""
    threshold: Literal["none", "static", "dynamic"] = "none"
    """None: an embedding is no picture."""
    guidance: float = Field(1.0, ge=0)
    """Pull of the text. 1 is none."""
    candidates: int = Field(2, ge=1, le=64)
    """Embeddings that are drawn for each picture; the one that is nearest to the text's is taken. Embeddings from files have no
    text beside them: there it is always one."""

    @property
    def complete(self) -> DiffusionSampleConfig:
        """As the sampler takes it."""
        return guided(self, GuidanceConfig(text=self.guidance))


class Dalle2SampleConfig(SamplerConfig):
    """How pictures are drawn; each value can be changed per call. What stands here itself is the decoder's."""

    guidance: float = Field(3.0, ge=0)
    """Pull of the text in the decoder. 1 is none."""
    embedding_guidance: float = Field(1.0, ge=0)
    """Pull of the embedding in the decoder. 1 is none; as large as `guidance` it spares a branch."""
    guidance_levels: tuple[float, float] | None = None
    """Lowest and highest level (log-SNR) with guidance; others cost one branch. null: all."""
    prior: PriorSampleConfig = PriorSampleConfig()
    """The prior."""
    superres: SamplerConfig = SamplerConfig(steps=16)
    """The upsamplers, where there are any."""
    start: Literal["prior", "superres", "superres2"] = "prior"
    """The first stage that draws: an upsampler alone starts from a picture of yours."""
    chunk: int = Field(16, ge=1, le=1024)
    """Pictures drawn at once. Always so many: the last chunk is padded, so a picture never depends on what else is asked."""
    compile: bool = False
    """Compile the networks before the first picture, for half a minute or more. For many pictures, on a GPU."""

    @model_validator(mode="after")
    def _levels(self) -> Dalle2SampleConfig:
        if self.guidance_levels is not None and self.guidance_levels[0] > self.guidance_levels[1]:
            raise ValueError(f"guidance_levels {list(self.guidance_levels)}: the lower one comes first")
        return self

    @property
    def complete(self) -> DiffusionSampleConfig:
        """The decoder's part, as the sampler takes it."""
        pull = GuidanceConfig(text=self.guidance, embedding=self.embedding_guidance, levels=self.guidance_levels)
        return guided(self, pull)


NO_GUIDANCE = GuidanceConfig(text=1.0)


def guided(config: SamplerConfig, guidance: GuidanceConfig = NO_GUIDANCE) -> DiffusionSampleConfig:
    """With that guidance; by default with none."""
    return DiffusionSampleConfig(**{name: getattr(config, name) for name in SamplerConfig.model_fields}, guidance=guidance)


class Dalle2Config(Config):
    """Root config of the recipe."""

    recipe: Literal["dalle2"] = "dalle2"
    """The recipe's name."""
    preset: Literal["tiny", "small", "base", "large"] = "small"
    """Where the values come from that neither the file nor --set names."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random is a function of it: initial weights, order, augmentation, noise."""
    data: ImageDataConfig = ImageDataConfig()
    """The user's files; `resolution` is that of the decoder."""
    text: TextConfig = ByteTextConfig()
    """How captions are read."""
    embeddings: EmbeddingsConfig = TrainedPairConfig()
    """Where the embeddings of pictures come from."""
    embedding_width: int | None = Field(None, ge=1)
    """Channels of embeddings that are not made by a pair; filled in from where they lie."""
    pair: EmbedderStageConfig = EmbedderStageConfig()
    """Stage 1, where embeddings come from none else: pictures and captions to embeddings."""
    prior: PriorStageConfig = PriorStageConfig()
    """Stage 2: captions to embeddings of pictures."""
    base: BaseConfig = BaseConfig()
    """Stage 3: embeddings and captions to small pictures."""
    superres: SuperresConfig | None = None
    """Stage 4: small pictures to larger ones; null does without."""
    superres2: SuperresConfig | None = None
    """Stage 5: those to still larger ones; null does without."""
    engine: EngineConfig = EngineConfig()
    """How training runs."""
    sample: Dalle2SampleConfig = Dalle2SampleConfig()
    """How pictures are drawn."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """How the trained model is judged."""

    @model_validator(mode="after")
    def _embeddings_fit(self) -> Dalle2Config:
        if isinstance(self.embeddings, TrainedPairConfig) and isinstance(self.text, NoTextConfig):
            raise ValueError("embeddings.kind=pair learns from captions, and text.kind=none has none; choose another of either")
        if isinstance(self.prior.process, DdpmConfig) and self.prior.process.learned_variance:
            raise ValueError("prior.process.learned_variance is for pictures; an embedding has none: set it to false")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Dalle2Config:
        refuse_side(self.base.model, self.data.resolution, "data.resolution", "base.model")
        if self.superres2 is not None and self.superres is None:
            raise ValueError("superres2 enlarges what superres draws, and there is no superres; name it superres")
        below, name_below = self.data.resolution, "data.resolution"
        for name, stage in self.upsamplers.items():
            if stage.resolution <= below:
                raise ValueError(
                    f"{name}.resolution {stage.resolution} must be larger than {name_below} {below}; use {2 * below}"
                )
            refuse_side(stage.model, stage.resolution, f"{name}.resolution", f"{name}.model")
            refuse_crop(stage, name)
            below, name_below = stage.resolution, f"{name}.resolution"
        return self

    @property
    def upsamplers(self) -> dict[str, SuperresConfig]:
        """By the names of their stages, in order."""
        named = {"superres": self.superres, "superres2": self.superres2}
        return {name: stage for name, stage in named.items() if stage is not None}

    def seen_by(self, upsampler: str) -> int:
        """Height and width of the smaller pictures that an upsampler sees."""
        return self.data.resolution if upsampler == "superres" or self.superres is None else self.superres.resolution

    @property
    def has_pair(self) -> bool:
        """Whether embeddings are made by a trained pair."""
        return isinstance(self.embeddings, TrainedPairConfig)

    @property
    def channels_of_embeddings(self) -> int:
        """Of all of them."""
        if self.has_pair:
            return self.pair.model.width
        if self.embedding_width is None:
            raise UserError("embedding_width is not known; training fills it in from the embeddings, or set it yourself")
        return self.embedding_width


def refuse_side(model: UNetConfig | DiTConfig, side: int, name: str, place: str) -> None:
    """Halvings, or patches, must come out even."""
    stride = model.stride if isinstance(model, UNetConfig) else model.patch
    if side % stride:
        below, above = side // stride * stride, -(-side // stride) * stride
        raise ValueError(
            f"{name} {side} cannot be divided by {stride}, as {place} asks; "
            f"use {' or '.join(str(near) for near in (below, above) if near >= 16)}, or another {place}"
        )


def refuse_crop(stage: SuperresConfig, name: str) -> None:
    """Parts that the network takes, and that are parts."""
    if stage.crop is None:
        return
    if isinstance(stage.model, DiTConfig):
        raise ValueError(f"{name}.crop: a dit draws the size alone that it learned from; set crop to null, or model.kind to unet")
    if stage.crop > stage.resolution:
        raise ValueError(f"{name}.crop {stage.crop} is larger than {name}.resolution {stage.resolution}; lower it, or set null")
    refuse_side(stage.model, stage.crop, f"{name}.crop", f"{name}.model")


def tiny() -> Dalle2Config:
    """For a CPU: 16 px, then 32, minutes on two cores (docs/recipes/dalle2.md)."""
    return Dalle2Config(
        preset="tiny",
        data=ImageDataConfig(resolution=16, workers=0),
        text=ByteTextConfig(length=48, width=64, depth=1, heads=4),
        pair=EmbedderStageConfig(
            model=EmbedderConfig(width=32, widths=(16, 32, 64)), loss=PairLossConfig(group=32),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05, warmup_steps=20), ema_decay=0.99,
            batch_size=64, steps=600,
        ),
        prior=PriorStageConfig(
            model=PriorConfig(width=64, depth=2, heads=2),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=20), ema_decay=0.99,
            batch_size=64, steps=600,
        ),
        base=BaseConfig(
            model=UNetConfig(
                widths=(32, 64), blocks=(1, 1), attention=(False, True), cross=(False, True), head_width=32
            ),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=50), ema_decay=0.99,
            batch_size=32, steps=1000,
        ),
        superres=SuperresConfig(
            resolution=32,
            model=UNetConfig(
                widths=(32, 64), blocks=(1, 1), attention=(False, False), cross=(False, False), head_width=32, efficient=True
            ),
            optim=OptimConfig(lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01, warmup_steps=50), ema_decay=0.99,
            batch_size=16, steps=500,
        ),
        engine=EngineConfig(
            log_every_steps=50, validate_every_steps=300, preview_every_steps=300, save_every_steps=300, validation_samples=128
        ),
        sample=Dalle2SampleConfig(
            steps=12, prior=PriorSampleConfig(steps=8), superres=SamplerConfig(steps=6)
        ),
    )  # fmt: skip


def small() -> Dalle2Config:
    """32 px, then 64, for one GPU. Not yet trained."""
    return Dalle2Config(
        preset="small",
        data=ImageDataConfig(resolution=32, workers=8),
        base=BaseConfig(model=UNetConfig(dropout=0.1)),
        superres=SuperresConfig(
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
        pair=EmbedderStageConfig(
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
        superres=SuperresConfig(
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
    finest = SuperresConfig(
        resolution=1024,
        model=UNetConfig(
            widths=(128, 256, 512, 1024), blocks=(2, 2, 2, 2), attention=(False, False, False, False),
            cross=(False, False, False, False), efficient=True,
        ),
        crop=256, ema_decay=0.9999, batch_size=128, steps=200_000,
    )  # fmt: skip
    return start.model_copy(update={"preset": "large", "base": decoder, "superres2": finest})
