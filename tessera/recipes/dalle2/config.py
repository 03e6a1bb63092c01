"""The root config of the recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_serializer, model_serializer, model_validator

from tessera.config import (
    Config,
    EngineConfig,
    EvaluateConfig,
    ImageDataConfig,
    ListedEmbeddingsConfig,
    ShardEmbeddingsConfig,
    TarEmbeddingsConfig,
    UserError,
)
from tessera.config.base import plain
from tessera.generators.diffusion.degrade import Degradation, NoiseConfig
from tessera.generators.diffusion.denoisers import Denoiser
from tessera.generators.diffusion.guidance import GuidanceConfig
from tessera.generators.diffusion.prior import PriorConfig
from tessera.generators.diffusion.sample import DiffusionSampleConfig, SamplerConfig
from tessera.generators.diffusion.stage import DiffusionStageConfig
from tessera.generators.diffusion.unet import UNetConfig
from tessera.recipes.dalle2.sizes import refuse_base, refuse_blur, refuse_pair, refuse_upsampler
from tessera.text.encoders import ByteTextConfig, NoTextConfig, TextConfig
from tessera.tokenizers.image.model import ImageTokenizerConfig
from tessera.tokenizers.pair.clip import ClipConfig
from tessera.tokenizers.pair.stage import EmbedderStageConfig


class TrainedPairConfig(Config):
    """By the pair that the stage `embedder` trains on the user's data."""

    kind: Literal["pair"] = "pair"
    """Where embeddings come from."""
    path: str | None = None
    """RUN/embedder of another run or export, to use instead of training one in this run."""


EmbeddingsConfig = Annotated[
    TrainedPairConfig | ClipConfig | TarEmbeddingsConfig | ShardEmbeddingsConfig | ListedEmbeddingsConfig,
    Field(discriminator="kind"),
]


class CascadeStageConfig(DiffusionStageConfig):
    """Training of a stage that draws, here or elsewhere."""

    path: str | None = None
    """RUN/STAGE of another run or export, to use instead of training it in this run."""


class PriorStageConfig(CascadeStageConfig):
    """Training of the prior."""

    model: PriorConfig = PriorConfig()
    """The transformer."""

    @property
    def data_std(self) -> float:
        """Of embeddings of length sqrt(e)."""
        return 1.0


class LatentConfig(Config):
    """The continuous latent of an image tokenizer, before a code is chosen."""

    path: str
    """RUN/tokenizer of a muse run or export."""
    model: ImageTokenizerConfig | None = None
    """Its architecture; filled in from there."""


class BaseConfig(CascadeStageConfig):
    """Training of the decoder, which draws a small picture of an embedding and text."""

    model: Denoiser = UNetConfig()
    """The network."""
    self_conditioning: bool = False
    """Take the network's own earlier guess of the picture (Chen et al. 2022)."""
    latent: LatentConfig | None = None
    """Draw the latent of a tokenizer, which makes pixels of it, each channel scaled to variance 1; null: draw pixels."""

    @property
    def data_std(self) -> float:
        """Of latents that is what they are scaled to."""
        return super().data_std if self.latent is None else 1.0


class UpsamplerConfig(CascadeStageConfig):
    """Training of an upsampler. It sees the smaller picture, and no embedding."""

    model: Denoiser = UNetConfig(attention=(False, False, True), cross=(False, False, False), efficient=True)
    """The network."""
    batch_size: int = Field(64, ge=1)
    """Samples per update, over all ranks; larger pictures take more memory."""
    resolution: int = Field(128, ge=16)
    """Height of its pictures in pixels, and their width where they are square."""
    low: Degradation = NoiseConfig()
    """How the smaller picture is spoiled in training, as a drawn one would be."""
    crop: int | None = Field(None, ge=16)
    """Train on parts of so many pixels a side; null: on whole pictures. It draws whole ones."""
    text: bool = False
    """Tell it the caption, too: its mean everywhere, its words in the middle, and at the levels of its model's `cross`."""


class PriorSampleConfig(SamplerConfig):
    """How embeddings are drawn."""

    steps: int = Field(16, ge=1)
    """From noise to clean."""
    threshold: Literal["none", "static", "dynamic"] = "none"
    """None: an embedding is no picture."""
    guidance: float = Field(1.0, ge=0, le=1000)
    """Pull of the text. 1 is none."""
    candidates: int = Field(2, ge=1, le=64)
    """Embeddings that are drawn for each picture; the one that is nearest to the text's is taken. Embeddings from files have no
    text beside them: there it is always one."""

    @property
    def complete(self) -> DiffusionSampleConfig:
        """As the sampler takes it."""
        return guided(self, GuidanceConfig(text=self.guidance))


class UpsamplerSampleConfig(SamplerConfig):
    """How upsamplers draw."""

    steps: int = Field(16, ge=1)
    """From noise to clean."""
    guidance: float = Field(1.0, ge=0, le=1000)
    """Pull of the text in upsamplers that are told it. 1 is none."""

    @property
    def complete(self) -> DiffusionSampleConfig:
        """As the sampler takes it."""
        return guided(self, GuidanceConfig(text=self.guidance))


OF_UPSAMPLERS = ("upsampler", "start", "chunk", "compile")  # keys of the section below; others are for prior and base


class Dalle2SampleConfig(SamplerConfig):
    """How pictures are drawn; each value can be changed per call. What stands here itself is the decoder's."""

    guidance: float = Field(3.0, ge=0, le=1000)
    """Pull of the text in the decoder. 1 is none."""
    embedding_guidance: float = Field(1.0, ge=0, le=1000)
    """Pull of the embedding in the decoder. 1 is none; as large as `guidance` it spares a branch."""
    guidance_levels: tuple[float, float] | None = None
    """Lowest and highest level (log-SNR) with guidance; others cost one branch. null: all."""
    prior: PriorSampleConfig = PriorSampleConfig()
    """The prior."""
    upsampler: UpsamplerSampleConfig = UpsamplerSampleConfig()
    """The upsamplers, where there are any."""
    start: Literal["prior", "upsampler1", "upsampler2", "upsampler3", "upsampler4"] = "prior"
    """The first stage that draws: an upsampler alone starts from a picture of yours; where base is not trained, one does."""
    chunk: int = Field(16, ge=1, le=1024)
    """Pictures drawn at once. Always so many: the last chunk is padded, so a picture never depends on what else is asked."""
    compile: bool = False
    """Compile the networks before the first picture, for half a minute or more. For many pictures, on a GPU."""

    @model_validator(mode="after")
    def _levels(self) -> Dalle2SampleConfig:
        if self.guidance_levels is not None and self.guidance_levels[0] > self.guidance_levels[1]:
            raise ValueError(f"guidance_levels {list(self.guidance_levels)}: the lower one comes first")
        return self

    @model_serializer(mode="wrap")
    def _drawing(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Of a call that starts at an upsampler what is for upsamplers: the JSON beside a picture names what drew it."""
        kept = type(self).model_fields.keys() if self.start == "prior" else OF_UPSAMPLERS
        return {name: value for name, value in values(self).items() if name in kept}

    @property
    def complete(self) -> DiffusionSampleConfig:
        """The decoder's part, as the sampler takes it."""
        pull = GuidanceConfig(text=self.guidance, embedding=self.embedding_guidance, levels=self.guidance_levels)
        return guided(self, pull)


NO_GUIDANCE = GuidanceConfig(text=1.0)


def guided(config: SamplerConfig, guidance: GuidanceConfig = NO_GUIDANCE) -> DiffusionSampleConfig:
    """With that guidance; by default with none."""
    return DiffusionSampleConfig(**dict(SamplerConfig.part_of(config)), guidance=guidance)


UPSAMPLERS = ("upsampler1", "upsampler2", "upsampler3", "upsampler4")


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
    embedder: EmbedderStageConfig = EmbedderStageConfig()
    """Stage 1, where embeddings come from none else: pictures and captions to embeddings."""
    prior: PriorStageConfig = PriorStageConfig()
    """Stage 2: captions to embeddings of pictures."""
    base: BaseConfig = BaseConfig()
    """Stage 3: embeddings and captions to small pictures."""
    upsampler1: UpsamplerConfig | None = None
    """Stage 4: small pictures to larger ones; null does without."""
    upsampler2: UpsamplerConfig | None = None
    """Stage 5: those to still larger ones; null does without."""
    upsampler3: UpsamplerConfig | None = None
    """Stage 6: and so on."""
    upsampler4: UpsamplerConfig | None = None
    """Stage 7: the last that there can be."""
    engine: EngineConfig = EngineConfig()
    """How training runs."""
    sample: Dalle2SampleConfig = Dalle2SampleConfig()
    """How pictures are drawn."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """How the trained model is judged."""

    @field_serializer("sample")
    def _whole(self, sample: Dalle2SampleConfig) -> dict[str, Any]:
        """A run's section is complete, wherever its calls start."""
        return dict(plain(sample))

    @model_validator(mode="before")
    @classmethod
    def _few_upsamplers(cls, data: Any) -> Any:
        found = [name for name in data if re.fullmatch(r"upsampler\d+", name)] if isinstance(data, Mapping) else []
        if more := [name for name in found if name not in UPSAMPLERS]:
            raise ValueError(
                f"{more[0]}: there can be {len(UPSAMPLERS)} upsamplers: {', '.join(UPSAMPLERS)}; rename it, or do without"
            )
        return data

    @model_validator(mode="after")
    def _embeddings_fit(self) -> Dalle2Config:
        if isinstance(self.embeddings, TrainedPairConfig) and isinstance(self.text, NoTextConfig):
            raise ValueError("embeddings.kind=pair learns from captions, and text.kind=none has none; choose another of either")
        if told := [name for name, stage in self.upsamplers.items() if stage.text and isinstance(self.text, NoTextConfig)]:
            raise ValueError(f"{told[0]}.text=true tells captions, and text.kind=none has none; choose another of either")
        if self.prior.learned_variance:
            raise ValueError("prior.process.learned_variance is for pictures; an embedding has none: set it to false")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Dalle2Config:
        if self.taken:
            return self  # what comes from elsewhere brings its sizes: elsewhere.adopt looks again
        if self.has_pair:
            refuse_pair(len(self.embedder.model.widths), self.data)
        latent = None if self.base.latent is None else self.base.latent.model
        if self.base.latent is None or latent is not None:  # how many pixels a latent has is known once it is read
            refuse_base(self.base.model, self.data, 1 if latent is None else latent.stride)
        for name, wanted in zip(self.upsamplers, UPSAMPLERS, strict=False):
            if name != wanted:
                raise ValueError(f"{name} enlarges what {wanted} draws, and there is no {wanted}; name it {wanted}")
        below, name_below = self.data.resolution, "data.resolution"
        for name, stage in self.upsamplers.items():
            if stage.resolution <= below:
                raise ValueError(
                    f"{name}.resolution {stage.resolution} must be larger than {name_below} {below}; use {2 * below}"
                )
            refuse_upsampler(stage.model, self.data, stage.resolution, stage.crop, name)
            refuse_blur(stage.low, self.data.at(below).size, name)
            below, name_below = stage.resolution, f"{name}.resolution"
        return self

    @property
    def upsamplers(self) -> dict[str, UpsamplerConfig]:
        """By the names of their stages, in order."""
        return {name: stage for name in UPSAMPLERS if (stage := getattr(self, name)) is not None}

    def seen_by(self, upsampler: str) -> int:
        """Height of the smaller pictures that an upsampler sees."""
        place = list(self.upsamplers).index(upsampler)
        return self.data.resolution if not place else list(self.upsamplers.values())[place - 1].resolution

    @property
    def taken(self) -> dict[str, str]:
        """Stages that draw and come from elsewhere, and from where."""
        drawing: dict[str, CascadeStageConfig] = {"prior": self.prior, "base": self.base, **self.upsamplers}
        return {name: stage.path for name, stage in drawing.items() if stage.path is not None}

    @property
    def tokenizer(self) -> LatentConfig | None:
        """The tokenizer whose latent base draws, under the name that recipes have for theirs."""
        return self.base.latent

    @property
    def canvas(self) -> tuple[int, int, int]:
        """Channels, height and width of what base draws."""
        latent, (height, width) = self.base.latent, self.data.size
        if latent is None:
            return self.data.channels, height, width
        if latent.model is None:
            raise UserError("base.latent.model is not known; training fills it in from base.latent.path")
        return latent.model.quantizer.width, height // latent.model.stride, width // latent.model.stride

    def drawn_by(self, options: Dalle2SampleConfig) -> DiffusionSampleConfig:
        """How base draws. The threshold is one of pixels: latents have other limits."""
        return options.complete if self.base.latent is None else options.complete.model_copy(update={"threshold": "none"})

    @property
    def has_pair(self) -> bool:
        """Whether embeddings are made by a trained pair."""
        return isinstance(self.embeddings, TrainedPairConfig)

    @property
    def channels_of_embeddings(self) -> int:
        """Of all of them."""
        if self.has_pair:
            return self.embedder.model.width
        if self.embedding_width is None:
            raise UserError("embedding_width is not known; training fills it in from the embeddings, or set it yourself")
        return self.embedding_width
