"""Image cases: the tokenizer at the size of muse-maskgit-pytorch's VQGanVAE, the default model, and the loader alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from tessera.batches import Batch, ImageBatch
from tessera.bench.timing import alone, device, time_call, time_steps
from tessera.compiling import compile_module
from tessera.config import EngineConfig, ImageDataConfig, OptimConfig
from tessera.contracts import Stage
from tessera.data.loader import ImageLoader
from tessera.data.order import Cut
from tessera.data.sources import ImageFolder
from tessera.data.synth.shapes import write_shapes
from tessera.engine.dist import World
from tessera.engine.state import place
from tessera.engine.step import Setting, train_step
from tessera.nn.perceptual import VGG16Distance
from tessera.nn.quantizers import FSQConfig
from tessera.recipes.muse.config import small
from tessera.tokenizers.image.critic import CriticConfig, PenaltyConfig
from tessera.tokenizers.image.losses import ImageLossConfig
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig
from tessera.tokenizers.image.stage import ImageTokenizerStageConfig, build_stage

PEER = ImageTokenizerStageConfig(
    model=ImageTokenizerConfig(
        widths=(256, 256, 512, 1024, 2048),
        blocks=(0, 0, 0, 0, 1),
        decoder_blocks=(0, 0, 0, 0, 2),  # the peer's gated block is twice as wide
        quantizer=FSQConfig(levels=(8, 8, 8, 5, 5, 5)),
    ),
    loss=ImageLossConfig(l1=1.0, l2=0.0),
    critic=CriticConfig(
        widths=(256, 256, 512, 1024, 2048),
        start_step=0,
        warmup_steps=0,
        adaptive=True,
        penalty=PenaltyConfig(weight=10.0, every=1),
    ),
    optim=OptimConfig(lr=1e-4),
)
"""Widths, block plan and loss terms of the peer at dim=256: L1, VGG16, hinge with adaptive weight, penalty at every step."""


def reduced() -> bool:
    """On a CPU the cases run at a fraction of their size, only to show that they run; the row says so."""
    return device().type == "cpu"


def peer_config() -> ImageTokenizerStageConfig:
    """The peer's plan, an eighth as wide on a CPU."""
    if not reduced():
        return PEER
    thin = tuple(width // 8 for width in PEER.model.widths)
    assert PEER.critic is not None
    return PEER.model_copy(
        update={
            "model": PEER.model.model_copy(update={"widths": thin}),
            "critic": PEER.critic.model_copy(update={"widths": thin}),
        }
    )


def pictures(num: int, size: int) -> ImageBatch:
    """Random pixels on the device."""
    images = torch.randint(0, 256, (num, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageBatch.stack(list(images), [str(i) for i in range(num)], [None] * num, range(num)).to(device())


def trainer(stage: Stage, first_step: int, *, graphs: bool = False, compiled: bool = True) -> Callable[[Batch], Any]:
    """One real training step on a batch, every turn included."""
    gpu = device().type == "cuda"
    engine = EngineConfig(compile=gpu and compiled, cuda_graphs=gpu and graphs, precision="bf16" if gpu else "fp32")
    state = place(stage, 0, engine, device())
    state.step = first_step
    setting = Setting.of(World(0, 1, device()), 10**6, engine)
    return lambda batch: train_step(state, stage, [batch], setting)


def stepper(stage: Stage, batch: Batch, first_step: int, graphs: bool = False) -> Callable[[], Any]:
    """The same on one batch."""
    step = trainer(stage, first_step, graphs=graphs)
    return lambda: step(batch)


def train_case(data: Path | None) -> dict[str, Any]:
    """Both turns at 256 px, batch 8, the same terms as the peer, with EMA on top."""
    size, num = (64, 2) if reduced() else (256, 8)
    stage = build_stage(peer_config(), 3, perceptual=VGG16Distance())
    parameters = sum(p.numel() for net in stage.nets.values() for p in net.parameters())
    row = time_steps(stepper(stage, pictures(num, size), 0), num, repeats=3 if reduced() else 20, warm=1 if reduced() else 5)
    return row | {"batch": num, "size": size, "parameters_m": round(parameters / 1e6, 1), "reduced": reduced()}


@torch.no_grad()
def encode_case(data: Path | None) -> dict[str, Any]:
    """Pictures to ids with the peer's encoder plan."""
    size, num = (64, 2) if reduced() else (256, 8)
    net = ImageTokenizer(peer_config().model, 3).to(device()).eval()
    if not reduced():
        compile_module(net.encoder)
    images = pictures(num, size).images

    def call() -> Any:
        with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
            return net.encode(images)

    return time_call(call, num, repeats=5 if reduced() else 50) | {"batch": num, "size": size, "reduced": reduced()}


def train_default_case(data: Path | None) -> dict[str, Any]:
    """The small preset's own model and losses, critic included, at 64 px and its batch size."""
    config = small()
    num = 4 if reduced() else config.tokenizer.batch_size
    stage = build_stage(config.tokenizer, 3)
    row = time_steps(
        stepper(stage, pictures(num, 64), 10**5, graphs=True), num, repeats=3 if reduced() else 20, warm=1 if reduced() else 5
    )
    return row | {"batch": num, "size": 64, "reduced": reduced()}


def loader_case(data: Path | None) -> dict[str, Any]:
    """Reading, decoding, cropping and stacking alone, to 64 px in batches of 64, with as many workers as there are cores."""
    import os

    with tempfile.TemporaryDirectory() as folder:
        if data is None:
            data = Path(folder) / "shapes"
            write_shapes(data, 2000, 0)
        workers = min(16, os.cpu_count() or 1)
        config = ImageDataConfig(path=str(data), resolution=64, workers=workers, crop="random", zoom=1.25, flip=True)
        source = ImageFolder.open(data, min_side=80)
        cut = Cut(64, None, 0, 1)
        loader = ImageLoader(source, config, cut, seed=0, device=device(), validation_samples=64, preview_samples=8)
        rate = read_batches(loader.batches(0), 2 * workers, 5)
    return {"items_per_s": round(rate, 1), "workers": workers, "samples": len(source)}


def read_batches(batches: Generator[Sequence[Any], None, None], warm: int, seconds: float) -> float:
    """Samples a second, read for so long; the first steps wait for processes to start. Closes the stream."""
    for _ in range(warm):
        next(batches)
    with alone():
        start, num = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds:
            num += sum(len(batch.keys) for batch in next(batches))
    batches.close()
    return num / passed
