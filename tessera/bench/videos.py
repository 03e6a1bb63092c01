"""Cases of clips: both trainings, encoding and sampling at the size of phenaki-pytorch's, long clips, and the loader.

What share of its time training waits for the loader it measures itself: `time/wait_share` in metrics.jsonl.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.batches import VideoBatch, num_latent, to_uint8
from tessera.bench.images import read_batches, reduced, trainer
from tessera.bench.masked import Size, captions, compile_for_sampling, drawing, facts, fitted, generator, timed_training, variant
from tessera.bench.timing import alone, device, settle, time_call, time_steps
from tessera.compiling import compile_module
from tessera.config import OptimConfig, VideoDataConfig
from tessera.data.clips import ClipLoader
from tessera.data.opening import open_source
from tessera.data.order import Cut
from tessera.generators.masked.frames import FrameMaskConfig
from tessera.generators.masked.losses import MaskedLossConfig
from tessera.generators.masked.model import MaskedConfig
from tessera.generators.masked.replay import GraphedSampler
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.generators.masked.stage import MaskedStageConfig
from tessera.generators.masked.windows import Span, Window, draw_long
from tessera.media.clip_facts import AvMissing
from tessera.media.clip_files import encode_gif, encode_mp4
from tessera.media.clips import Clip
from tessera.nn.perceptual import VGG16Distance
from tessera.nn.quantizers import FSQConfig
from tessera.tokenizers.image.critic import PenaltyConfig
from tessera.tokenizers.video.conv import CausalConvConfig
from tessera.tokenizers.video.critic import FrameCriticConfig
from tessera.tokenizers.video.cvivit import CViViTConfig
from tessera.tokenizers.video.losses import VideoLossConfig
from tessera.tokenizers.video.model import VideoTokenizer
from tessera.tokenizers.video.stage import VideoTokenizerStageConfig, build_stage

CODES = FSQConfig(levels=(8, 8, 8, 5, 5, 5))  # 64,000 where the peer's LFQ has 65,536

CVIVIT = CViViTConfig(width=512, heads=8, spatial_depth=4, temporal_depth=4, patch=32, time_patch=2, window=9, quantizer=CODES)
"""Patches, width and layers of the peer. It adds relative biases and a convolution in every temporal layer, ours rotates."""

CONV = CausalConvConfig(widths=(64, 128, 256, 256, 512, 512), blocks=(1, 1, 1, 1, 2, 2), time_downsamples=1, quantizer=CODES)
"""The default backbone with the peer's tokens and about as many parameters."""

TOKENIZER = VideoTokenizerStageConfig(
    model=CVIVIT,
    loss=VideoLossConfig(l1=0.0, l2=1.0, temporal=0.0, seen_frames=1),
    critic=FrameCriticConfig(
        widths=(80, 160, 320, 640, 640, 640, 640),
        start_step=0,
        warmup_steps=0,
        adaptive=True,
        penalty=PenaltyConfig(weight=10.0, every=1),
    ),
    optim=OptimConfig(lr=1e-4),
)
"""The peer's terms: L2 of all frames; VGG16, hinge with adaptive weight and penalty at every step, on one random frame of each
clip. Its critic has residual blocks of two convolutions and attention, ours one convolution a level, widened to about as many
parameters and operations. Its VGG16 ends in two dense layers and is trained, ours compares five maps and is fixed."""

GENERATOR = MaskedStageConfig(
    model=MaskedConfig(width=512, depth=6, heads=8),
    loss=MaskedLossConfig(label_smoothing=0.0, text_dropout_prob=0.25),
    optim=OptimConfig(lr=1e-4),
)
"""Width, depth and heads of the peer as it is timed, and like it no smoothing of labels. A quarter of the captions is dropped, as
the peer means to; it drops none. The peer has a relative bias and depthwise convolutions, ours rotations and adaptive norms."""

DRAW = MaskedSampleConfig(steps=18, guidance=5.0, guidance_ramp=False, order="confidence")
"""As the peer draws: constant guidance, both branches in every step, the surest tokens first."""

OVERLAP = 3  # latent frames that a window of a long clip goes on from


def shape() -> tuple[int, int]:
    """Frames of a clip and their side: 17 of 256 px, on a CPU 5 of 32."""
    return (5, 32) if reduced() else (17, 256)


def tokenizer_config(model: CViViTConfig | CausalConvConfig) -> VideoTokenizerStageConfig:
    """With either backbone; on a CPU thin, with patches of 8 px: 3 x 4 x 4 tokens."""
    config = TOKENIZER.model_copy(update={"model": model})
    if not reduced():
        return config
    assert config.critic is not None
    if isinstance(model, CViViTConfig):
        thin: Any = model.model_copy(
            update={"width": 64, "heads": 2, "spatial_depth": 1, "temporal_depth": 1, "patch": 8, "window": 3}
        )
    else:
        thin = model.model_copy(update={"widths": (8, 16, 16, 32), "blocks": (1,) * 4})
    critic = config.critic.model_copy(update={"widths": (8, 16, 16)})
    return config.model_copy(update={"model": thin, "critic": critic})


def clips(num: int) -> VideoBatch:
    """Random pixels on the device, all frames there."""
    length, side = shape()
    frames = torch.randint(0, 256, (num, 3, length, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return VideoBatch(
        frames=frames,
        lengths=torch.full((num,), length),
        valid=torch.ones(num, dtype=torch.bool),
        positions=torch.arange(num),
        keys=tuple(str(i) for i in range(num)),
        captions=(None,) * num,
    ).to(device())


def clip_facts(num: int, parameters: int) -> dict[str, Any]:
    """What belongs to every row of a tokenizer."""
    length, side = shape()
    return {
        "batch": num, "frames": length, "size": side, "parameters_m": round(parameters / 1e6, 1), "items": "clips",
        "variant": " ".join(sorted(variant())), "reduced": reduced(),
    }  # fmt: skip


def timed_tokenizer(model: CViViTConfig | CausalConvConfig) -> dict[str, Any]:
    """Both turns, with EMA on top; compiled and recorded, as presets train."""
    words, num = variant(), 2 if reduced() else 4
    torch.manual_seed(0)
    stage = build_stage(tokenizer_config(model), 3, perceptual=VGG16Distance())
    step = trainer(stage, 0, graphs=not {"eager", "blocks"} & words, compiled="eager" not in words)
    batch, part = clips(num), clips(1)  # uncompiled, one clip after the other: all of them take too much memory
    repeats, warm = (2, 1) if reduced() else (20, 5)
    row = time_steps(lambda: step(batch), num, repeats=repeats, warm=warm, counted=(lambda: step(part), num))
    return row | clip_facts(num, sum(p.numel() for net in stage.nets.values() for p in net.parameters()))


def train_tokenizer_case(data: Path | None) -> dict[str, Any]:
    """C-ViViT of width 512, 17 frames of 256 px, patches of 2 x 32 x 32, batch 4, the terms of the peer."""
    return timed_tokenizer(CVIVIT)


def train_conv_case(data: Path | None) -> dict[str, Any]:
    """The same with the default backbone, which works on pixels, not on patches: about thirty times the operations."""
    return timed_tokenizer(CONV)


def tokenizer() -> VideoTokenizer:
    """A fresh C-ViViT on the device, to be used."""
    torch.manual_seed(0)
    return VideoTokenizer(tokenizer_config(CVIVIT).model, 3).to(device()).eval()


@torch.no_grad()
def encode_case(data: Path | None) -> dict[str, Any]:
    """Clips to ids with C-ViViT, batch 4; compiled and recorded."""
    net, num, words = tokenizer(), 2 if reduced() else 4, variant()
    if not reduced() and "eager" not in words:
        compile_module(net.encoder, recorded="blocks" not in words)
    frames = clips(num).frames

    def call() -> Any:
        with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
            return net.encode(frames)

    row = time_call(call, num, repeats=5 if reduced() else 50)
    return row | clip_facts(num, sum(p.numel() for p in net.parameters()))


def grid_size(batch: int, vocab_size: int) -> Size:
    """9 x 8 x 8 tokens with text of 64 x 768; small on a CPU."""
    return Size((3, 4, 4), 2, vocab_size, (7, 64)) if reduced() else Size((9, 8, 8), batch, vocab_size, (64, 768))


def train_generator_case(data: Path | None) -> dict[str, Any]:
    """From tokens: 576 of 65,536, width 512, depth 6, batch 16, text 64 x 768; compiled and recorded, as presets train.
    Ours writes ids as two digits of 256, and computes logits only where a token is hidden."""
    config = GENERATOR
    if "frames" in variant():
        config = config.model_copy(update={"loss": config.loss.model_copy(update={"frames": FrameMaskConfig()})})
    return timed_training(config, grid_size(16, 65_536), 1, graphs=True) | {"items": "clips"}


@torch.no_grad()
def sample_case(data: Path | None) -> dict[str, Any]:
    """18 steps with guidance 5, batch 4, decoded to 17 frames of 256 px by the C-ViViT of `video.tokenizer.*`, whose 64,000 codes
    are the vocabulary here."""
    words, pixels = variant(), tokenizer()
    size = grid_size(4, pixels.vocab_size)
    net = generator(fitted(GENERATOR, words), size, words).eval()
    compile_for_sampling(net, pixels.decoder, words)
    call, plain = drawing(net, DRAW, pixels.decode, size, "fp32" in words)
    repeats, warm = (3, 1) if reduced() else (10, 3)
    row = time_call(call, size.batch, repeats=repeats, warm=warm, counted=(plain, 1))
    length, side = shape()
    about = {"frames": length, "size": side, "steps": DRAW.steps, "guidance": DRAW.guidance, "items": "clips"}
    return row | facts(size, net, words) | about


@torch.no_grad()
def long_case(data: Path | None) -> dict[str, Any]:
    """Clips of 60 and of 600 frames by windows, each going on from three latent frames of the one before; frames leave for the
    host as they are made. Counted in frames; `gib` is the most that was taken at each length, `kept_mib` what the decoder keeps
    between two windows. Neither may grow."""
    words, pixels = variant(), tokenizer()
    size = grid_size(4, pixels.vocab_size)
    net = generator(fitted(GENERATOR, words), size, words).eval()
    compile_for_sampling(net, None, words)  # a window's memory has another shape in the second call than in the first
    sampler, text = GraphedSampler(net, DRAW, bf16=device().type == "cuda"), captions(size.batch, size)
    lengths = (9, 21) if reduced() else (60, 600)
    overlap = 1 if reduced() else OVERLAP

    def draw_window(window: Window) -> Tensor:
        return sampler(text, window.seeds, known=window.known, frames=window.frames)

    def draw(num_frames: int) -> tuple[int, int]:
        """How many frames came, and bytes of the decoder's memory."""
        seeds, memory, made = torch.arange(size.batch, device=device()), None, 0
        scene = Span(num_latent(num_frames, pixels.time_stride))
        for piece in draw_long(draw_window, size.grid, net.mask_id, seeds, [scene], overlap):
            with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
                frames, memory = pixels.decode_more(piece.ids, memory)
            made += to_uint8(frames).cpu().shape[2]
        return made, sum(part.nbytes for part in memory or ())

    rows = {length: timed_length(lambda length=length: draw(length), length, size.batch) for length in lengths}  # type: ignore[misc]
    last = rows[lengths[-1]]
    about = {"batch": size.batch, "size": shape()[1], "items": "frames", "variant": " ".join(sorted(words)), "reduced": reduced()}
    return {"items_per_s": last["frames_per_s"], "lengths": rows, **about}


def timed_length(draw: Callable[[], tuple[int, int]], length: int, batch: int) -> dict[str, Any]:
    """Frames a second of all clips together, and memory, of one length."""
    for _ in range(1 if reduced() else 2):
        draw()
    settle()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with alone():
        start = time.perf_counter()
        made, kept = draw()
        settle()
        seconds = time.perf_counter() - start
    row = {"frames_per_s": round(batch * length / seconds, 1), "made": made, "kept_mib": round(kept / 2**20, 3)}
    return row | ({"gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)} if torch.cuda.is_available() else {})


def made_up_clips(num: int) -> Iterator[Clip]:
    """Coloured clouds of 128 px that drift: 48 frames each."""
    rng = np.random.default_rng(0)
    for _ in range(num):
        clouds = np.kron(rng.integers(0, 256, (8, 8, 3)), np.ones((16, 16, 1))).astype(np.uint8)
        yield Clip(np.stack([np.roll(clouds, 3 * place, axis=(0, 1)) for place in range(48)]), 24.0)


def write_clips(folder: Path, num: int, copies: int) -> list[str]:
    """A folder of each kind that can be written, every clip several times: encoding is slow, and not what is timed. Returns their
    names."""
    kinds = {"gif": encode_gif, "mp4": encode_mp4}
    for index, clip in enumerate(made_up_clips(num)):
        for kind, encode in list(kinds.items()):
            try:
                content = encode(clip)
            except AvMissing:
                del kinds[kind]
                continue
            (folder / kind).mkdir(exist_ok=True)
            for copy in range(copies):
                (folder / kind / f"{index}-{copy}.{kind}").write_bytes(content)
    return list(kinds)


def loader_case(data: Path | None) -> dict[str, Any]:
    """Reading, decoding, cutting and stacking alone: 17 frames of 64 px from a random place of each clip, random crop, zoom and
    flip, batches of 16, with as many workers as there are cores; of the user's clips, or of clips of 48 frames of 128 px, as gif
    and, with PyAV, as mp4."""
    cores = min(16, os.cpu_count() or 1)
    with TemporaryDirectory() as folder:
        if data is not None:
            return {**load_clips(data, cores), "items": "clips"}
        kinds = write_clips(Path(folder), *((2, 4) if reduced() else (8, 16)))
        rows = {kind: load_clips(Path(folder) / kind, 0 if reduced() else cores) for kind in kinds}
    return {"items_per_s": rows["gif"]["items_per_s"], "items": "clips", **rows}


def load_clips(data: Path, workers: int) -> dict[str, Any]:
    """Clips a second from one folder."""
    config = VideoDataConfig(path=str(data), resolution=64, frames=17, workers=workers, crop="random", zoom=1.25, flip=True)
    source = open_source(data, config)
    loader = ClipLoader(source, config, Cut(16, None, 0, 1), seed=0, device=device(), validation_samples=0, preview_samples=0)
    rate = read_batches(loader.batches(0), 2 * workers, 0.5 if reduced() else 5)
    return {"items_per_s": round(rate, 1), "workers": workers, "samples": len(source)}


CASES: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "video.tokenizer.train": train_tokenizer_case,
    "video.tokenizer.conv.train": train_conv_case,
    "video.tokenizer.encode": encode_case,
    "video.maskgit.train": train_generator_case,
    "video.maskgit.sample": sample_case,
    "video.long": long_case,
    "video.loader": loader_case,
}
