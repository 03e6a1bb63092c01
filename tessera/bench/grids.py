"""Cases of clips made token by token, counted in tokens: training and sampling at the size of nuwa-pytorch's, every order of
decoding, and how time and memory grow with a clip's length."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import Text, TextStates, TokenBatch
from tessera.bench.images import reduced, trainer
from tessera.bench.masked import variant
from tessera.bench.timing import device, tell, time_call, time_steps
from tessera.compiling import compile_module
from tessera.config import OptimConfig
from tessera.generators.autoregressive.grid_losses import GridLossConfig
from tessera.generators.autoregressive.grid_model import GridAutoregressive, GridConfig
from tessera.generators.autoregressive.grid_sample import GridSampleConfig, GridSampler, GridWriter
from tessera.generators.autoregressive.grid_stage import GridStageConfig, build_nets, build_stage
from tessera.nn import nearby
from tessera.nn.nearby import NearbyConfig
from tessera.nn.quantizers import FSQConfig
from tessera.recipes.precision import full_precision
from tessera.recording import Lean
from tessera.text.bytes import ByteEncoder, ByteTextConfig
from tessera.tokenizers.video.frames import FramesConfig
from tessera.tokenizers.video.model import VideoTokenizer

TOKENIZER = FramesConfig(widths=(128, 128, 256, 512), blocks=(0, 0, 0, 2), quantizer=FSQConfig(levels=(8, 8, 8, 4, 4)))
"""Every frame by itself, with the widths, blocks and 8,192 codes of the peer's VQGanVAE of width 128. The peer compares with a
codebook of 512 channels and has attention at the bottom, ours rounds and has none."""

TEXT = ByteTextConfig(length=64, width=512, depth=6, heads=8)
"""Layers and places of the peer's text encoder, which is trained with the generator. The peer embeds 49,408 words, ours bytes."""

GENERATOR = GridStageConfig(
    model=GridConfig(
        width=512, depth=12, heads=8,
        nearby=NearbyConfig(frames=5, height=3, width=3, dilation=(1, 2, 4), first_whole=True, first_step=2),
    ),
    loss=GridLossConfig(text_dropout_prob=0.2),
    optim=OptimConfig(lr=1e-4),
)  # fmt: skip
"""Width, heads, window, dilations and share of dropped captions of the peer, and as many parameters in layers: the peer's 8 have
two feed-forwards each, ours one. So ours looks 12 times at the clip and the text, the peer 8 times. Its window only has what is
above, on the left and before, ours all sides and, as presets have it, all earlier diagonals of a first frame; it mixes heads and
shifts channels, ours rotates. Ours has a slot more in each row."""

DRAW = GridSampleConfig(guidance=2.0, top_k=819)
"""As the peer draws: guidance 2, among the tenth of the codes that are most probable."""

NUM_CLIPS = 2  # in a step of training, as the peer is timed

ORDERS: dict[str, tuple[GridSampleConfig, bool]] = {
    "sequential, eager": (DRAW.model_copy(update={"order": "sequential"}), False),
    "sequential": (DRAW.model_copy(update={"order": "sequential"}), True),
    "wavefront": (DRAW.model_copy(update={"order": "wavefront"}), True),
}
"""How clips are drawn, and whether passes are recorded."""

WAYS: dict[str, dict[str, Any]] = {
    "dense": {"execution": "dense"},
    "causal": {"frames": 2**16, "whole": True},
    "nearby": {"execution": "blocks"},
}
"""How a clip is looked at in training: the window by a mask over all pairs, everything before, and the window by tiles."""


FIRST: dict[str, dict[str, Any]] = {"window": {"first_whole": False, "first_step": 0}, "raster": {"first_step": 0}}
"""How a variant sees its first frame: through the window alone, or cell by cell."""


def grid() -> tuple[int, int, int]:
    """Of the peer's tokens, 10 frames of 16 x 16; on a CPU 3 of 4 x 4."""
    return (3, 4, 4) if reduced() else (10, 16, 16)


def looking(config: GridStageConfig, changes: Mapping[str, Any]) -> GridStageConfig:
    """With other values of what a cell sees."""
    seen = config.model.nearby.model_copy(update=changes)
    return config.model_copy(update={"model": config.model.model_copy(update={"nearby": seen})})


def fitted(config: GridStageConfig) -> GridStageConfig:
    """The config of a variant; thin on a CPU."""
    for word in variant() & FIRST.keys():
        config = looking(config, FIRST[word])
    model = config.model
    if "layers8" in variant():
        model = model.model_copy(update={"depth": 8})
    if reduced():
        model = model.model_copy(update={"width": 64, "depth": 3, "heads": 2, "inner_width": 32})
    return config.model_copy(update={"model": model})


def text_config() -> ByteTextConfig:
    """Thin on a CPU."""
    return ByteTextConfig(length=8, width=64, depth=1, heads=2) if reduced() else TEXT


def fresh_nets(config: GridStageConfig, shape: tuple[int, int, int]) -> dict[str, nn.Module]:
    """Generator and text encoder on the device."""
    torch.manual_seed(0)
    words = text_config()
    made = build_nets(
        fitted(config), vocab_size=TOKENIZER.quantizer.vocab_size, grid=shape, text_width=words.width, encoder=ByteEncoder(words)
    )
    return {name: net.to(device()) for name, net in made.items()}


def tokenizer() -> VideoTokenizer:
    """A fresh one on the device, to be used."""
    torch.manual_seed(0)
    thin = TOKENIZER.model_copy(update={"widths": (16, 16, 32, 32)})
    return VideoTokenizer(thin if reduced() else TOKENIZER, 3).to(device()).eval()


def captions(num: int) -> Text:
    """Random bytes that use the whole length."""
    return Text(torch.randint(1, 257, (num, text_config().length), generator=torch.Generator().manual_seed(1))).to(device())


def tokens(num: int, shape: tuple[int, int, int]) -> TokenBatch:
    """Random ones with such captions, on the device."""
    generator = torch.Generator().manual_seed(0)
    return TokenBatch(
        ids=torch.randint(0, TOKENIZER.quantizer.vocab_size, (num, *shape), generator=generator),
        text=captions(num),
        valid=torch.ones(num, dtype=torch.bool),
        positions=torch.arange(num),
        keys=tuple(str(i) for i in range(num)),
        captions=(None,) * num,
    ).to(device())


def pixels(num: int) -> Tensor:
    """b c t h w in [-1, 1], at random."""
    frames, height, width = grid()
    shape = (num, 3, frames, height * TOKENIZER.stride, width * TOKENIZER.stride)
    return torch.rand(shape, device=device(), generator=torch.Generator(device()).manual_seed(0)) * 2 - 1


def facts(num: int, shape: tuple[int, int, int], nets: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What belongs to every row of this file."""
    parameters = {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()}
    net = nets["generator"]
    assert isinstance(net, GridAutoregressive)
    return {
        "batch": num, "grid": list(shape), "tokens": math.prod(shape), "width": net.width, "depth": len(net.blocks),
        "parameters_m": round(sum(parameters.values()) / 1e6, 1), "generator_m": round(parameters["generator"] / 1e6, 1),
        "items": "tokens", "variant": " ".join(sorted(variant())), "reduced": reduced(),
    }  # fmt: skip


def bf16() -> Any:
    """For the tokenizer, on a GPU; in full precision if asked."""
    if "fp32" in variant():
        return full_precision(device())
    return torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda")


def timed_training(*, from_pixels: bool) -> dict[str, Any]:
    """A whole step of the engine, text encoder included; compiled and recorded, as presets train. Operations are counted with the
    dense mask, all pairs."""
    words, shape, num = variant(), grid(), NUM_CLIPS
    nets, net = fresh_nets(GENERATOR, shape), tokenizer()
    compiled = "eager" not in words
    step = trainer(build_stage(fitted(GENERATOR), nets), 0, graphs=compiled and "blocks" not in words, compiled=compiled)
    batch, frames = tokens(num, shape), pixels(num)
    if compiled and not reduced():
        compile_module(net.encoder)

    def call() -> Any:
        if not from_pixels:
            return step(batch)
        with torch.no_grad(), bf16():
            ids = net.encode(frames)
        return step(replace(batch, ids=ids))

    repeats, warm = (2, 1) if reduced() else (20, 5)
    return time_steps(call, num * math.prod(shape), repeats=repeats, warm=warm) | facts(num, shape, nets)


def train_case(data: Path | None) -> dict[str, Any]:
    """From pixels and text: a frozen tokenizer encodes 10 frames of 128 px, then 2,560 tokens of 8,192, width 512, depth 12,
    batch 2, with 64 places of text and their encoder of 6 layers."""
    return timed_training(from_pixels=True)


def train_tokens_case(data: Path | None) -> dict[str, Any]:
    """The same from tokens that were made before, as presets train."""
    return timed_training(from_pixels=False)


def ready_to_draw(config: GridStageConfig) -> tuple[GridAutoregressive, nn.Module, dict[str, nn.Module]]:
    """Generator and text encoder, to be used; and both by name."""
    nets = fresh_nets(config, grid())
    net = nets["generator"].eval()
    assert isinstance(net, GridAutoregressive)
    return net, nets["text"].eval(), nets


@torch.no_grad()
def sample_case(data: Path | None) -> dict[str, Any]:
    """One frame of one clip with guidance, by diagonals, from bytes to pixels. Operations are not counted: what is timed are
    launches and small products."""
    net, encoder, nets = ready_to_draw(GENERATOR)
    picture, sampler = tokenizer(), GridSampler(GridWriter(Lean(net, device().type == "cuda"), DRAW))
    text, seeds, shape = captions(1), torch.arange(1, device=device()), (1, *grid()[1:])

    def call() -> Tensor:
        with bf16():
            states: TextStates = encoder(text)
        ids = torch.cat(list(sampler(states, seeds, 1)), dim=1)
        with bf16():
            return picture.decode(ids)

    repeats, warm = (2, 1) if reduced() else (20, 3)
    row = time_call(call, math.prod(shape), repeats=repeats, warm=warm, count=False)
    return row | facts(1, shape, nets) | {"guidance": DRAW.guidance, "passes": sampler.writer.plans(device()).num_passes(1)}


@torch.no_grad()
def decode_case(data: Path | None) -> dict[str, Any]:
    """Tokens of whole clips with guidance, in each order, for 1, 8 and 64 clips at once. All frames are seen through the window,
    since a first frame that is seen whole has one order. Without recordings only the first frame: one cell after another, every
    pass is as long as the others."""
    net, encoder, nets = ready_to_draw(looking(GENERATOR, FIRST["window"]))
    sizes = (1, 2) if reduced() else (1, 8, 64)
    rows: dict[str, dict[int, Any]] = {name: {} for name in ORDERS}
    for name, (config, graphs) in ORDERS.items():
        frames = grid()[0] if graphs else 1
        writer = GridWriter(Lean(net, device().type == "cuda"), config)
        for num in sizes:
            sampler = GridSampler(writer, recorded=graphs)  # anew: a recording keeps its buffers
            rows[name][num] = timed_order(sampler, encoder(captions(num)), num, frames)
    last = rows["wavefront"][sizes[-1]]
    about = {"guidance": DRAW.guidance, "orders": rows}
    return {"items_per_s": last["items_per_s"]} | facts(sizes[-1], grid(), nets) | about


def timed_order(sampler: GridSampler, text: TextStates, num: int, frames: int) -> dict[str, Any]:
    """Clips from encoded text to tokens."""
    seeds = torch.arange(num, device=device())

    def call() -> Tensor:
        return torch.cat(list(sampler(text, seeds, frames)), dim=1)

    row = time_call(call, num * frames * math.prod(grid()[1:]), repeats=1 if reduced() else 3, warm=1, count=False)
    return row | {"frames": frames, "passes": sampler.writer.plans(device()).num_passes(frames)}


def lengths() -> tuple[int, ...]:
    """Frames of 16 x 16 tokens: 1,024 to 65,536 of them; on a CPU of 4 x 4."""
    return (2, 4) if reduced() else (4, 16, 32, 64, 128, 256)


def lengths_case(data: Path | None) -> dict[str, Any]:
    """A training step on 65,536 tokens, as many short clips or few long ones, down to one, so that only attention differs;
    compiled, not recorded. null where memory was not enough. `crossover` is the shortest length from which on nearby attention
    is the faster one. Words of TESSERA_BENCH choose among the ways."""
    ways = [way for way in WAYS if way in variant()] or list(WAYS)
    rows: dict[str, dict[int, Any]] = {way: {} for way in ways}
    area = math.prod(grid()[1:])
    for frames in lengths():
        for way in ways:
            rows[way][frames * area] = timed_length(way, frames, lengths()[-1] // frames)
            tell({"way": way, "tokens": frames * area, "row": rows[way][frames * area]})
            release()
    about = {"lengths": rows, "crossover": {way: crossover(rows, way) for way in ways if way != "nearby"}}
    best = [row["items_per_s"] for row in rows[ways[-1]].values() if row is not None]
    return {"items_per_s": best[-1] if best else None, "items": "tokens", "reduced": reduced(), **about}


def timed_length(way: str, frames: int, num: int) -> dict[str, Any] | None:
    """Of one way, for clips of one length; None if there is not enough memory."""
    torch.compiler.reset()  # another length would make shapes dynamic
    asked = WAYS[way] | ({"execution": "bands"} if way == "nearby" and reduced() else {})  # tiles cannot train on a CPU
    config, shape = looking(GENERATOR, FIRST["window"] | asked), (frames, *grid()[1:])  # all frames are seen alike
    try:
        step = trainer(build_stage(fitted(config), fresh_nets(config, shape)), 0)
        batch = tokens(num, shape)
        repeats, warm = (1, 1) if reduced() else (5, 2)
        row = time_steps(lambda: step(batch), num * math.prod(shape), repeats=repeats, warm=warm, count=False)
    except torch.OutOfMemoryError:
        return None
    return row | {"batch": num}


def release() -> None:
    """What one length took, its masks among it."""
    nearby._made.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def crossover(rows: Mapping[str, Mapping[int, Any]], other: str) -> int | None:
    """The shortest length from which on nearby attention takes less time than another way, or the other one has no room."""
    found = None
    for length, row in reversed(list(rows.get("nearby", {}).items())):
        beside = rows[other][length]
        if row is None or (beside is not None and beside["ms"] <= row["ms"]):
            break
        found = length
    return found


CASES: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "video.ar.train": train_case,
    "video.ar.train.tokens": train_tokens_case,
    "video.ar.sample": sample_case,
    "video.ar.decode": decode_case,
    "video.ar.lengths": lengths_case,
}
