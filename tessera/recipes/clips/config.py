"""The root config of recipes of clips. Tokenizer, data and measures are the same whatever draws; `base` and `sample` are those of
one generator or the other, and `base.model.kind` says which."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tessera.batches import num_frames, num_latent
from tessera.config import MAX_FPS, Config, EngineConfig, VideoDataConfig, VideoEvaluateConfig
from tessera.generators.autoregressive.grid_model import GridConfig
from tessera.generators.autoregressive.grid_sample import GridSampleConfig
from tessera.generators.autoregressive.grid_stage import GridStageConfig
from tessera.generators.masked.frames import FrameMaskConfig
from tessera.generators.masked.losses import MaskedLossConfig
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.generators.masked.stage import MaskedStageConfig
from tessera.nn.positions import refuse_narrow
from tessera.nn.quantizers import ResidualConfig
from tessera.recipes.needs import NeedsConfig
from tessera.recipes.sizes import refuse_halvings, refuse_resolution
from tessera.text.encoders import ByteTextConfig, TextConfig
from tessera.tokenizers.video.cvivit import CViViTConfig
from tessera.tokenizers.video.model import VideoTokenizerConfig
from tessera.tokenizers.video.stage import VideoTokenizerStageConfig

KIND = "base.model.kind"  # the key that chooses between the generators


class MaskedBaseConfig(MaskedStageConfig):
    """Training of the generator."""

    loss: MaskedLossConfig = MaskedLossConfig(frames=FrameMaskConfig())
    """What is hidden, and how guesses are scored."""
    batch_size: int = Field(128, ge=1)
    """Samples per update, over all ranks."""
    needs: NeedsConfig = NeedsConfig()
    """Where its tokens come from."""


class AutoregressiveBaseConfig(GridStageConfig):
    """Training of the generator."""

    model: GridConfig = GridConfig(width=384, depth=10, heads=6)
    """The network."""
    batch_size: int = Field(128, ge=1)
    """Samples per update, over all ranks."""
    needs: NeedsConfig = NeedsConfig()
    """Where its tokens come from."""


class ClipSampleConfig(Config):
    """What is asked of clips, whatever draws them."""

    frames: int | None = Field(None, ge=1, le=1_000_000)
    """Frames of a clip; null: as many as a training clip has. A longer one goes on from its last frames. 1 draws a picture."""
    fps: float | None = Field(None, gt=0, le=MAX_FPS)
    """Frames a second of the files; null: as the training data has them."""
    chunk: int = Field(8, ge=1, le=1024)
    """Clips drawn at once. Always so many: the last chunk is padded, so a clip never depends on what else is asked."""


class MaskedClipSampleConfig(ClipSampleConfig, MaskedSampleConfig):
    """How clips are drawn; each value can be changed per call."""

    overlap: int | None = Field(None, ge=1)
    """Frames that a window takes over from the one before, in whole tokens; the rest of it is new. null: half of it."""
    compile: bool = False
    """Compile the networks before the first clip, which takes half a minute or more. For many clips on a GPU, or long ones."""


class AutoregressiveClipSampleConfig(ClipSampleConfig, GridSampleConfig):
    """How clips are drawn; each value can be changed per call."""


class ClipsConfig(Config):
    """What both root configs have."""

    recipe: Literal["phenaki", "nuwa"] = "phenaki"
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
    base: MaskedBaseConfig | AutoregressiveBaseConfig
    """Stage 2: captions to tokens."""
    engine: EngineConfig = EngineConfig()
    """How training runs."""
    sample: MaskedClipSampleConfig | AutoregressiveClipSampleConfig
    """How clips are drawn."""
    evaluate: VideoEvaluateConfig = VideoEvaluateConfig()
    """How the trained model is judged."""

    @model_validator(mode="after")
    def _fits(self) -> ClipsConfig:
        if self.base.needs.tokenizer is None:  # else the tokenizer is not known before it is opened
            refuse_sizes(self)
            refuse_untrained(self)
        return self

    @property
    def grid(self) -> tuple[int, ...]:
        """The token grid of a training clip: steps of time, rows, columns, and codes a place where there are several."""
        return grid_of(self.tokenizer.model, self.data)


class MaskedClipsConfig(ClipsConfig):
    """A masked generator."""

    base: MaskedBaseConfig = MaskedBaseConfig()
    """Stage 2: captions to tokens."""
    sample: MaskedClipSampleConfig = MaskedClipSampleConfig()
    """How clips are drawn."""

    @model_validator(mode="after")
    def _no_sketches(self) -> MaskedClipsConfig:
        if self.data.sketch != "none":
            raise ValueError(
                f"data.sketch is {self.data.sketch}, and a masked generator learns nothing from sketches; leave it out, or set "
                f"{KIND}=autoregressive"
            )
        return self


class AutoregressiveClipsConfig(ClipsConfig):
    """An autoregressive generator."""

    recipe: Literal["phenaki", "nuwa"] = "nuwa"
    """The recipe's name."""
    base: AutoregressiveBaseConfig = AutoregressiveBaseConfig()
    """Stage 2: captions to tokens."""
    sample: AutoregressiveClipSampleConfig = AutoregressiveClipSampleConfig()
    """How clips are drawn."""

    @model_validator(mode="after")
    def _sketches(self) -> AutoregressiveClipsConfig:
        source, window = self.data.sketch, self.base.model.sketch_window
        if source != "none" and not window:
            raise ValueError(f"data.sketch is {source}, and base.model.sketch_window 0 looks at no sketch; set it to 3")
        if source == "none" and window:
            raise ValueError(
                f"base.model.sketch_window is {window}, and data.sketch none brings no sketches; set data.sketch to edges or "
                f"files, or the window to 0"
            )
        return self

    @model_validator(mode="after")
    def _order(self) -> AutoregressiveClipsConfig:
        if self.base.model.nearby.whole and self.sample.order == "wavefront":
            raise ValueError("sample.order wavefront needs a window, and base.model.nearby.whole sees whole frames; use auto")
        return self


def grid_of(model: VideoTokenizerConfig, data: VideoDataConfig) -> tuple[int, ...]:
    """Steps of time, rows, columns, and codes a place where there are several."""
    steps, side = num_latent(data.frames, model.time_stride), data.resolution // model.stride
    quantizer = model.quantizer
    return (steps, side, side, quantizer.num_quantizers) if isinstance(quantizer, ResidualConfig) else (steps, side, side)


def refuse_sizes(config: ClipsConfig) -> None:
    """Frames, tokens and windows that do not fit each other."""
    model, data = config.tokenizer.model, config.data
    refuse_resolution(data, model.stride)
    if (data.frames - 1) % model.time_stride:
        more = num_frames(num_latent(data.frames, model.time_stride), model.time_stride)
        raise ValueError(
            f"data.frames {data.frames} is not 1 more than a multiple of the tokenizer's time stride {model.time_stride}; "
            f"use {more - model.time_stride} or {more}"
        )
    if not isinstance(config, MaskedClipsConfig):
        return
    refuse_narrow(config.base.model.width, config.base.model.heads, len(config.grid), "base.model.")
    overlap, most = config.sample.overlap, largest_overlap(config)
    if overlap is not None and overlap > most:
        raise ValueError(
            f"sample.overlap {overlap} leaves no room for new frames in a window of {data.frames}; "
            f"{f'use at most {most}, or null' if most else 'set it to null'}"
        )


def refuse_untrained(config: ClipsConfig) -> None:
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


def largest_overlap(config: ClipsConfig) -> int:
    """Frames that a window can take over at most: it has no first latent then, and one is new. 0: it cannot go on."""
    return max(0, config.grid[0] - 2) * config.tokenizer.model.time_stride
