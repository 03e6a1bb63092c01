"""Video cases, counted in clips: both trainings and sampling at the size of phenaki-pytorch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.bench.images import reduced
from tessera.bench.masked import Size, timed_training
from tessera.config import OptimConfig
from tessera.generators.masked.losses import MaskedLossConfig
from tessera.generators.masked.model import MaskedConfig
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.generators.masked.stage import MaskedStageConfig

GENERATOR = MaskedStageConfig(
    model=MaskedConfig(width=512, depth=6, heads=8),
    loss=MaskedLossConfig(label_smoothing=0.0, text_dropout_prob=0.25),
    optim=OptimConfig(lr=1e-4),
)
"""Width, depth and heads of the peer as it is timed, and like it no smoothing of labels. A quarter of the captions is dropped, as
the peer means to; it drops none. The peer has a relative bias and depthwise convolutions, ours rotations and adaptive norms."""

DRAW = MaskedSampleConfig(steps=18, guidance=5.0, guidance_ramp=False, order="confidence")
"""As the peer draws: constant guidance, both branches in every step, the surest tokens first."""


def grid_size(batch: int, vocab_size: int) -> Size:
    """9 x 8 x 8 tokens with text of 64 x 768; small on a CPU."""
    return Size((3, 4, 4), 2, vocab_size, (7, 64)) if reduced() else Size((9, 8, 8), batch, vocab_size, (64, 768))


def train_generator_case(data: Path | None) -> dict[str, Any]:
    """From tokens: 576 of 65,536, width 512, depth 6, batch 16, text 64 x 768; compiled and recorded, as presets train.
    Ours writes ids as two digits of 256, and computes logits only where a token is hidden."""
    return timed_training(GENERATOR, grid_size(16, 65_536), 1, graphs=True) | {"items": "clips"}


CASES: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "video.maskgit.train": train_generator_case,
}
