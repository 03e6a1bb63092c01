"""Small nets and clips for the tests of the video tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import VideoBatch
from tessera.contracts import Context
from tessera.nn.quantizers import FSQConfig, QuantizerConfig
from tessera.tokenizers.video.conv import CausalConvConfig
from tessera.tokenizers.video.cvivit import CViViTConfig
from tessera.tokenizers.video.frames import FramesConfig
from tessera.tokenizers.video.model import Backbone, VideoTokenizer

LEVELS = FSQConfig(levels=(8, 5, 5))
KINDS = ("conv", "cvivit", "frames")


def model_config(kind: str, quantizer: QuantizerConfig = LEVELS) -> Backbone:
    """Stride 4, time stride 4; of `frames` 1."""
    if kind == "conv":
        return CausalConvConfig(widths=(8, 8, 12), blocks=(1, 1, 1), quantizer=quantizer)
    if kind == "frames":
        return FramesConfig(widths=(8, 8, 12), blocks=(1, 1, 1), quantizer=quantizer)
    return CViViTConfig(width=16, heads=2, spatial_depth=1, temporal_depth=2, patch=4, window=2, quantizer=quantizer)


def rouse(net: nn.Module) -> nn.Module:
    """No parameter is 0 any more, so that no path is hidden by its start."""
    for parameter in net.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return net


def tokenizer(kind: str, quantizer: QuantizerConfig = LEVELS) -> VideoTokenizer:
    torch.manual_seed(0)
    made = rouse(VideoTokenizer(model_config(kind, quantizer), 3))
    assert isinstance(made, VideoTokenizer)
    return made


def noise(num: int, length: int, size: int = 8, seed: int = 2) -> Tensor:
    return torch.rand(num, 3, length, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def batch(lengths: Sequence[int], length: int = 9, size: int = 16, valid: Sequence[bool] | None = None) -> VideoBatch:
    """Noise, behind the clips' ends, too."""
    num = len(lengths)
    mask = torch.ones(num, dtype=torch.bool) if valid is None else torch.tensor(valid)
    names = tuple(map(str, range(num)))
    return VideoBatch(noise(num, length, size), torch.tensor(lengths), mask, torch.arange(num), names, (None,) * num)


def cut(whole: VideoBatch, part: slice) -> VideoBatch:
    tensors = (whole.frames[part], whole.lengths[part], whole.valid[part], whole.positions[part])
    return VideoBatch(*tensors, whole.keys[part], whole.captions[part])


def at(step: int, data: VideoBatch, handed: dict[str, Any] | None = None) -> Context:
    return Context(step, 0, data.positions, handed or {})
