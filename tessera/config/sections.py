"""The sections that every recipe's config has: data, engine, evaluation, and an optimizer per trained net."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tessera.config.base import Config

MAX_FPS = 240  # frames a second


class DataConfig(Config):
    """Where the samples come from, whatever they are."""

    path: str | None = None
    """Folder of the user's files, relative to where the command runs; `--data` sets it. A run saves it absolute."""
    split: Literal["auto", "hash"] = "auto"
    """`auto`: the folders train/ and validation/ (val, valid, test) are the split where both exist; `hash`: never."""
    class_folders: bool = True
    """Where nothing else gives captions and all samples lie in class folders, a folder's name is their caption."""
    validation_fraction: float = Field(0.05, ge=0.0, le=0.5)
    """Share of the groups held back for validation, chosen by a hash of the group key."""
    group_near_duplicates: bool = False
    """Put samples that look almost the same into one group. Reads every sample once at each start."""
    group_by: str | None = None
    """Column of the metadata whose value is the group key; samples of one group fall on one side of the split."""
    corrupt_budget: float = Field(0.01, ge=0.0, le=1.0)
    """Share of the samples that may turn out unreadable in training. Each is replaced by another and named in the log;
    past this share the run stops with its state saved. 0 stops at the first."""
    uncaptioned_budget: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the samples that may lack a caption where a stage learns from captions; more stop the run before it starts."""
    workers: int = Field(2, ge=0, le=256)
    """Processes that read and decode; 0 reads in the training process."""
    prefetch: int = Field(4, ge=1, le=64)
    """Batches that each worker keeps ready."""


class ImageDataConfig(DataConfig):
    """Pictures: where they come from and how they are cut."""

    resolution: int = Field(64, ge=16)
    """Height of training pictures in pixels, and their width where none is named."""
    width: int | None = Field(None, ge=16)
    """Width of pictures that are not square; resolution is then their height, here and wherever else one is named: their widths
    follow. null: as wide as high."""
    channels: Literal[1, 3, 4] = 3
    """1 grey, 3 RGB, 4 RGBA."""
    background: tuple[int, int, int] = (255, 255, 255)
    """Colour under transparent pixels when channels is 1 or 3."""
    crop: Literal["center", "random"] = "center"
    """Which part of a picture of other proportions; `random` draws another one each epoch."""
    zoom: float = Field(1.0, ge=1.0, le=4.0)
    """With a random crop: up to how many times the picture is enlarged before it is cut."""
    flip: bool | Literal["always"] = False
    """Mirror half of the pictures left to right, drawn per epoch; `true` leaves those whose captions say left or right as they
    are, `always` does not look at captions."""
    views: int = Field(8, ge=1, le=256)
    """With random crops or mirror images: how many of a picture are turned into tokens, the centre among them."""

    @model_validator(mode="after")
    def _combinations(self) -> ImageDataConfig:
        if self.zoom > 1 and self.crop == "center":
            raise ValueError(f"zoom {self.zoom} has no effect with crop: center; set crop: random, or leave zoom out")
        if not all(0 <= value <= 255 for value in self.background):
            raise ValueError(f"background {list(self.background)} is no colour; expected three numbers from 0 to 255")
        return self

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.resolution, self.width or self.resolution

    @property
    def square(self) -> bool:
        """Whether both are the same."""
        return self.size[0] == self.size[1]

    def at(self, resolution: int) -> Self:
        """The same pictures with another height, and as wide as their proportions say, to the nearest pixel."""
        height, width = self.size
        other = None if self.width is None else round(resolution * width / height)
        return self.model_copy(update={"resolution": resolution, "width": other})


class VideoDataConfig(ImageDataConfig):
    """Clips: where they come from, which frames of them are taken, and how they are cut. A picture is a clip of one frame."""

    width: int | None = Field(None, ge=16)
    """Clips are square: leave it out."""
    channels: Literal[1, 3] = 3
    """1 grey, 3 RGB."""
    frames: int = Field(17, ge=1, le=1024)
    """Frames of a training clip. A shorter one is taken whole; what is missing counts nowhere."""
    fps: float | None = Field(None, gt=0, le=MAX_FPS)
    """Take frames at this rate, by their times; null: as they are stored."""
    stride: int = Field(1, ge=1, le=64)
    """Without fps: take every n-th frame."""
    start: Literal["random", "first"] = "random"
    """Where a longer clip is cut: anywhere, drawn per epoch, or at its beginning. Validation takes its middle, or that."""
    fit: Literal["crop", "letterbox"] = "crop"
    """How a frame that is not square becomes one: cut, or shrunk, with bars of the background."""
    image_share: float | None = Field(None, ge=0, lt=1)
    """Share of the samples that are single pictures: picture files of the folder where it has any, else frames of clips.
    null: picture files are samples like any other."""
    sketch: Literal["none", "edges", "files"] = "none"
    """What a generator that draws from sketches learns from: nothing, the outlines of the clips themselves, or files beside them:
    NAME.sketch.gif of the clip NAME, or segmentation maps."""

    @model_validator(mode="after")
    def _frames(self) -> VideoDataConfig:
        if not self.square:
            raise ValueError(f"width {self.width}, resolution {self.resolution}: clips are square; leave width out")
        if self.fps is not None and self.stride > 1:
            raise ValueError(f"fps {self.fps:g} and stride {self.stride} both say which frames are taken; leave one of them out")
        if self.fit == "letterbox" and self.crop == "random":
            raise ValueError("fit: letterbox leaves nothing to cut, so crop: random has no effect; leave one of them out")
        return self


class MeshDataConfig(DataConfig):
    """Meshes: where they come from, how fine their coordinates are, and how they vary."""

    up: Literal["y", "z"] = "y"
    """The axis that points up in the files; inside, z does."""
    bins: int = Field(128, ge=16, le=1024)
    """Steps of a coordinate over the box: vertices in one bin are one vertex."""
    max_faces: int = Field(800, ge=1, le=100_000)
    """A mesh with more triangles is rejected."""
    name_captions: bool = True
    """Where nothing else gives captions, the words of a file's name are its caption, or those of its folder's."""
    scale: float = Field(1.0, ge=1.0, le=4.0)
    """Each axis is stretched or shrunk by up to this factor, drawn per epoch; 1: never."""
    yaw: Literal["none", "quarters", "any"] = "none"
    """Turn about the up axis, drawn per epoch: by multiples of 90 degrees, or by any angle."""
    shift: float = Field(0.0, ge=0.0, le=0.5)
    """Furthest move along each axis, drawn per epoch, in half widths of the box; never out of it."""


class OptimConfig(Config):
    """AdamW for one net; the learning rate is a function of the step."""

    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the two moment estimates."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay; never on norms, biases and other parameters of fewer than two axes."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    warmup_steps: int = Field(100, ge=0)
    """Linear rise of the learning rate from 0, counted from the turn's first step."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Fall of the learning rate after the warm-up, over the stage's steps."""
    final_lr_share: float = Field(0.05, ge=0, le=1)
    """Share of lr that is left at the last step (cosine, linear)."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients of a turn are scaled down to this norm; null does not clip."""

    @model_validator(mode="after")
    def _betas(self) -> OptimConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must lie in [0, 1)")
        return self


class EngineConfig(Config):
    """How training runs, whatever is trained."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes products under autocast; weights, EMA and optimizer stay fp32."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Most samples a rank puts through at once; smaller than its share of the batch means accumulation. null: all."""
    parallel: Literal["replicate", "shard"] = "replicate"
    """With several ranks: each holds all weights, or only its slice of the large nets' (FSDP2). Both give the same losses, and
    each resumes what the other saved. Slices save memory and cost traffic."""
    compile: bool = False
    """torch.compile on the modules that the stage names."""
    cuda_graphs: bool = False
    """With compile, on a GPU: replay recorded launches. Several times as fast where the model is small and launching is the
    limit; each new shape of batch is launched twice before it is recorded."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass instead of keeping their activations: less memory, about a third slower."""
    deterministic: bool = False
    """Deterministic kernels on the GPU: slower, repeatable."""
    log_every_steps: int = Field(10, ge=1)
    """Rhythm of metrics.jsonl and of the progress line."""
    preview_every_steps: int = Field(500, ge=1)
    """Rhythm of the pictures in samples/."""
    validate_every_steps: int = Field(500, ge=1)
    """Rhythm of the validation pass; a new best is saved at once."""
    save_every_steps: int = Field(1000, ge=1)
    """Rhythm of checkpoints."""
    keep_checkpoints: int = Field(3, ge=1)
    """How many of the newest checkpoints stay; best, and the one resumed from, stay anyway."""
    validation_samples: int = Field(512, ge=1)
    """Most samples of the validation split that one pass measures."""
    preview_samples: int = Field(8, ge=1, le=64)
    """Samples that previews show."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """On a non-finite loss or gradient: stop before the update (exit 3), or leave that update out and go on.
    On a GPU `skip` costs one wait for the device each step."""
    max_skips: int = Field(10, ge=1)
    """With nonfinite: skip, this many updates left out in a row stop the run."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Besides metrics.jsonl, which is always written. Each needs its extra: `track` (TensorBoard), `wandb`, `trackio`. None asks
    for an account or uses the network: W&B is offline unless the variable WANDB_MODE says otherwise."""
    timeout_s: int = Field(600, ge=10)
    """How long a rank waits for the others before it gives up."""

    @model_validator(mode="after")
    def _graphs(self) -> EngineConfig:
        if self.cuda_graphs and not self.compile:
            raise ValueError("cuda_graphs has no effect without compile; set compile: true, or leave cuda_graphs out")
        if self.cuda_graphs and self.parallel == "shard":
            raise ValueError("cuda_graphs cannot record what parallel: shard sends between ranks; leave one of them out")
        return self


class JudgingConfig(Config):
    """How a trained model is judged, whatever it draws."""

    n: int = Field(256, ge=1)
    """Held-out samples and captions that are asked for; fewer where fewer are held out."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Which samples, and everything random in the judging: noise, points on a surface, weights of nets that judge."""
    train_samples: int = Field(10_000, ge=1)
    """Most training samples that are read: to look for copies, and to fit the nets that judge pictures."""


class LpipsConfig(Config):
    """LPIPS (Zhang et al. 2018) between pictures and their reconstructions, by weights of yours."""

    net: Literal["alex", "vgg"] = "alex"
    """The network that looks: numbers compare only on the same one. `alex` is what most report."""
    path: str
    """alexnet.safetensors or vgg16.safetensors with torchvision's names, relative to where the command runs."""
    heads: str
    """The linear heads of that network: alex.safetensors or vgg.safetensors with the names of the package lpips, version 0.1."""


class EvaluateConfig(JudgingConfig):
    """How a trained model of pictures is judged."""

    fit_steps: int = Field(300, ge=1)
    """Updates of each judging net; half a minute on one CPU core."""
    resamples: int = Field(100, ge=0)
    """Bootstrap resamples behind the interval of a distance; 0 gives none."""
    inception: str | None = None
    """The TorchScript file of Inception (inception-2015-12-05.pt), for FID, KID and IS as others report them. It is a program
    that is run, so name only one you trust. null fits a small extractor of our own."""
    extractor: str | None = None
    """An extractor.safetensors of another evaluation: distances of two runs compare only on the same one. null fits one."""
    lpips: LpipsConfig | None = None
    """Measure LPIPS, too."""


class VideoEvaluateConfig(JudgingConfig):
    """How a trained model of clips is judged."""

    train_samples: int = Field(2_000, ge=1)
    """Most training clips that are read: to look for copies, and to fit the nets that judge."""
    fit_steps: int = Field(300, ge=1)
    """Updates of each judging net; a minute or two on one CPU core."""
    resamples: int = Field(100, ge=0)
    """Bootstrap resamples behind the interval of a distance; 0 gives none."""
    extractor: str | None = None
    """An extractor.safetensors of another evaluation: distances of two runs compare only on the same one. null fits one."""
    stories: int = Field(32, ge=0)
    """Stories of three scenes that are drawn, to see whether their subject stays the same; 0 leaves them out."""


class MeshEvaluateConfig(JudgingConfig):
    """How a trained model of meshes is judged."""

    points: int | None = Field(None, ge=16, le=16_384)
    """Points on the surface of each shape, by which shapes are compared: distances compare only at one number. null: 2,048, as
    others take; without a GPU fewer where n is above 8: 16,384 / n, but 256 or more, because n squared pairs are compared."""
