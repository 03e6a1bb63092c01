"""Cases of the masked generator: training and sampling at the size of muse-maskgit-pytorch's MaskGit, and 400 M parameters.

Variants are words in the environment, TESSERA_BENCH="blocks unmasked"; without it a case runs as it is reported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import TextStates, TokenBatch
from tessera.bench.images import peer_config, reduced, trainer
from tessera.bench.timing import device, time_call, time_steps
from tessera.compiling import compile_module
from tessera.config import OptimConfig, UserError, nearest
from tessera.generators.masked import model as model_module
from tessera.generators.masked.losses import MaskedLossConfig
from tessera.generators.masked.model import MaskedConfig, MaskedTransformer
from tessera.generators.masked.replay import GraphedSampler
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.generators.masked.stage import MaskedStageConfig, build_nets, build_stage
from tessera.nn.attention import Attention
from tessera.recipes.muse.config import large
from tessera.recipes.precision import full_precision
from tessera.tokenizers.image.model import ImageTokenizer

WORDS = {
    "eager": "the network is not compiled",
    "blocks": "each block is compiled by itself, and not the whole network; training then has no CUDA graphs",
    "unmasked": "cross-attention sees every text state: no mask, so dropped captions are not dropped",
    "whole": "the vocabulary in one piece, as the peer has it, not as two digits",
    "heads64": "400m: heads of 64 channels, not 128",
    "frames": "clips: whole frames are shown or taken away, as presets train, which masks attention",
    "fp32": "sampling: pixels in full precision, not bf16; video.ar: ids too",
    "layers8": "video.ar: 8 layers as the peer has, which then are two thirds of its parameters",
    "dit": "image.diffusion: a transformer over patches of 4 x 4 with as many operations, and four fifths of the parameters",
    "window": "video.ar: the first frame is seen through the window alone",
    "raster": "video.ar: cells of the first frame see all before them in raster order, and are drawn one by one",
    "dense": "video.ar.lengths: only a mask over all pairs",
    "causal": "video.ar.lengths: only everything before",
    "nearby": "video.ar.lengths: only FlexAttention's tiles",
}

PEER = MaskedStageConfig(
    model=MaskedConfig(width=512, depth=8, heads=8),
    loss=MaskedLossConfig(label_smoothing=0.0, text_dropout_prob=0.25),
    optim=OptimConfig(lr=1e-4),
)
"""Width, depth and heads of the peer as it is timed, its share of dropped captions, and like it no smoothing of labels."""

LARGE = large().base
"""About 400 M parameters: widths that are multiples of 128 in every product, the inner one of the feed-forward too."""

DRAW = MaskedSampleConfig(steps=18, guidance=3.0, guidance_ramp=False, order="confidence")
"""As the peer draws: constant guidance, both branches in every step, the surest tokens first."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a case is besides its network."""

    grid: tuple[int, ...]  # of tokens
    batch: int
    vocab_size: int
    text: tuple[int, int]  # states and their width


def variant() -> frozenset[str]:
    """The words of TESSERA_BENCH."""
    words = frozenset(os.environ.get("TESSERA_BENCH", "").split())
    for word in sorted(words - WORDS.keys()):
        hint = nearest(word, WORDS)
        raise UserError(
            f"TESSERA_BENCH has {word!r}{f'; did you mean {hint!r}?' if hint else ''}; there are {', '.join(sorted(WORDS))}"
        )
    return words


class Unmasked(Attention):
    """Attention that ignores its mask: what a mask costs is the difference."""

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, turns: Tensor | None = None
    ) -> Tensor:
        """As that of Attention."""
        return super().forward(x, context, None, turns)


@contextmanager
def digits(whole: bool) -> Iterator[None]:
    """Networks built within write a large vocabulary as one digit, if asked."""
    before = model_module.LARGE_VOCABULARY
    model_module.LARGE_VOCABULARY = 2**62 if whole else before
    try:
        yield
    finally:
        model_module.LARGE_VOCABULARY = before


def fitted(config: MaskedStageConfig, words: frozenset[str]) -> MaskedStageConfig:
    """The config of a variant; thin on a CPU."""
    model = config.model
    if "heads64" in words:
        model = model.model_copy(update={"heads": model.width // 64})
    if reduced():
        model = model.model_copy(update={"width": 64, "depth": 2, "heads": 2})
    return config.model_copy(update={"model": model})


def generator(config: MaskedStageConfig, size: Size, words: frozenset[str]) -> MaskedTransformer:
    """A fresh one on the device."""
    torch.manual_seed(0)
    with digits("whole" in words):
        nets = build_nets(config, vocab_size=size.vocab_size, grid=size.grid, text_width=size.text[1])
    net = nets["generator"]
    assert isinstance(net, MaskedTransformer)
    if "unmasked" in words:
        for block in net.blocks:
            block.cross.__class__ = Unmasked
    return net.to(device())


def captions(num: int, size: Size) -> TextStates:
    """Random states of captions that use the whole length."""
    length, width = size.text
    states = torch.randn(num, length, width, generator=torch.Generator().manual_seed(1))
    return TextStates(states, torch.ones(num, length, dtype=torch.bool), states.mean(1)).to(device())


def tokens(num: int, size: Size) -> TokenBatch:
    """Random tokens with such captions, on the device."""
    ids = torch.randint(0, size.vocab_size, (num, *size.grid), generator=torch.Generator().manual_seed(0))
    keys = tuple(str(i) for i in range(num))
    return TokenBatch(
        ids=ids,
        text=captions(num, size),
        valid=torch.ones(num, dtype=torch.bool),
        positions=torch.arange(num),
        keys=keys,
        captions=(None,) * num,
    ).to(device())


def facts(size: Size, net: MaskedTransformer, words: frozenset[str]) -> dict[str, Any]:
    """What belongs to every row of this file."""
    return {
        "batch": size.batch,
        "tokens": math.prod(size.grid),
        "vocab_size": size.vocab_size,
        "digits": list(net.digits),
        "width": net.width,
        "depth": len(net.blocks),
        "parameters_m": round(sum(p.numel() for p in net.parameters()) / 1e6, 1),
        "variant": " ".join(sorted(words)),
        "reduced": reduced(),
    }


def timed_training(config: MaskedStageConfig, size: Size, share: int, *, graphs: bool) -> dict[str, Any]:
    """A whole step of the engine: hiding, forward, backward, norm, fused AdamW, EMA. Operations are counted on one `share`-th
    of the batch, because uncompiled a step takes several times the memory."""
    words = variant()
    config = fitted(config, words)
    net = generator(config, size, words)
    graphs = graphs and not {"eager", "blocks"} & words
    step = trainer(build_stage(config, {"generator": net}), 0, graphs=graphs, compiled="eager" not in words)
    batch, part = tokens(size.batch, size), tokens(size.batch // share, size)
    repeats, warm = (3, 1) if reduced() else (20, 5)
    row = time_steps(lambda: step(batch), size.batch, repeats=repeats, warm=warm, counted=(lambda: step(part), share))
    return row | facts(size, net, words)


def train_case(data: Path | None) -> dict[str, Any]:
    """From tokens: 256 of 65,536, width 512, depth 8, batch 64, text 77 x 512; compiled and recorded, as preset small trains."""
    size = Size((4, 4), 4, 65_536, (7, 64)) if reduced() else Size((16, 16), 64, 65_536, (77, 512))
    return timed_training(PEER, size, 1, graphs=True)


def large_case(data: Path | None) -> dict[str, Any]:
    """The generator of preset large, 400 M parameters, 1,024 tokens of 65,536, a micro-batch of 64, text 77 x 512."""
    size = Size((4, 4), 8, 65_536, (7, 64)) if reduced() else Size((32, 32), 64, 65_536, (77, 512))
    return timed_training(LARGE, size, 8, graphs=False)


@torch.no_grad()
def sample_case(data: Path | None) -> dict[str, Any]:
    """18 steps with guidance 3, batch 16, decoded to 256 px by the tokenizer of `image.tokenizer.*`, whose 64,000 codes are the
    vocabulary here."""
    words = variant()
    plan = peer_config().model
    vocab_size = plan.quantizer.vocab_size
    size = Size((4, 4), 2, vocab_size, (7, 64)) if reduced() else Size((16, 16), 16, vocab_size, (77, 512))
    config = fitted(PEER, words)
    net = generator(config, size, words).eval()
    tokenizer = ImageTokenizer(plan, 3).to(device()).eval()
    compile_for_sampling(net, tokenizer.decoder, words)
    call, plain = drawing(net, DRAW, tokenizer.decode, size, "fp32" in words)
    repeats, warm = (3, 1) if reduced() else (10, 3)
    row = time_call(call, size.batch, repeats=repeats, warm=warm, counted=(plain, 1))
    return row | facts(size, net, words) | {"size": size.grid[-1] * plan.stride, "steps": DRAW.steps, "guidance": DRAW.guidance}


def compile_for_sampling(net: MaskedTransformer, decoder: nn.Module | None, words: frozenset[str]) -> None:
    """As a variant has it; not on a CPU."""
    if reduced():
        return
    if decoder is not None:
        compile_module(decoder)
    for module in [] if "eager" in words else net.blocks if "blocks" in words else [net]:
        compile_module(module)


def drawing(
    net: MaskedTransformer, how: MaskedSampleConfig, pixels: Callable[[Tensor], Tensor], size: Size, exact: bool
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Captions to pixels by recorded steps, and the same step by step, which is what can be counted."""
    gpu = device().type == "cuda"
    sampler = GraphedSampler(net, how, bf16=gpu)
    text, seeds = captions(size.batch, size), torch.arange(size.batch, device=device())

    def decode(ids: Tensor) -> Tensor:
        grid = ids.unflatten(1, size.grid)
        if exact:
            with full_precision(device()):
                return pixels(grid)
        with torch.autocast(device().type, torch.bfloat16, enabled=gpu):
            return pixels(grid)

    def plain() -> Tensor:
        setup, state = sampler.drawer.prepare(text, seeds, None, None, None)
        for _ in range(how.steps):
            state = sampler.step(setup, state)
        return decode(state.ids)

    return lambda: decode(sampler(text, seeds)), plain
