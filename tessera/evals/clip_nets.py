"""The net that judges clips: eight frames of each, spread over its length, and how each differs from the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tessera.batches import from_uint8
from tessera.evals.nets import GRID, PictureNet, run_net, shrink
from tessera.media.clips import Frames
from tessera.nn.conv import Downsample, GroupNorm, ResidualBlock, initialise

FRAMES = 8  # of a clip that are looked at; a shorter one shows some twice. Tempo is lost, order is not
CHUNK = 64  # clips that go through a net at once
_WIDTHS = (32, 48, 96)


def spread(clip: Frames, num: int) -> Frames:
    """t h w c -> num h w c: the first frame, the last, and others evenly between them."""
    return clip[np.linspace(0, len(clip) - 1, num).round().astype(np.int64)]


def shrink_clips(clips: Sequence[Frames], side: int, num: int = FRAMES) -> Tensor:
    """n clips of any length -> n c num side side, uint8."""
    parts = [shrink(np.concatenate([spread(c, num) for c in clips[i : i + CHUNK]]), side) for i in range(0, len(clips), CHUNK)]
    return rearrange(torch.cat(parts), "(n t) c h w -> n c t h w", t=num).contiguous()


class TimeBlock(nn.Module):
    """x + conv(silu(norm(x))) over three frames; starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = GroupNorm(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv.weight)

    def forward(self, x: Tensor, num: int) -> Tensor:
        """(b t) c h w -> the same"""
        h, w = x.shape[2:]
        y = self.conv(rearrange(F.silu(self.norm(x)), "(b t) c h w -> (b h w) c t", t=num))
        return x + rearrange(y, "(b h w) c t -> (b t) c h w", h=h, w=w)


class ClipNet(nn.Module):
    """Clips -> features: a patch convolution of frames and their differences to a 16 x 16 grid, two levels with convolutions over
    time, and one linear layer over the mean in time, where places count, beside the maximum over time and place."""

    def __init__(self, channels: int, side: int, width: int) -> None:
        super().__init__()
        self.channels, self.side, self.width = channels, side, width
        first, second, third = _WIDTHS
        stride = side // GRID
        kernel = stride * 2 if stride > 1 else 3
        self.stem = initialise(nn.Conv2d(2 * channels, first, kernel, stride, padding=(kernel - stride + 1) // 2))
        self.halve = nn.ModuleList([Downsample(first, second), Downsample(second, third)])
        self.level = ResidualBlock(second)
        self.times = nn.ModuleList([TimeBlock(second), TimeBlock(third), TimeBlock(third)])
        self.out = nn.Linear(third * (GRID // 4) ** 2 + third, width)

    def forward(self, x: Tensor) -> Tensor:
        """b c t side side in [-1, 1] -> b width"""
        num = x.shape[2]
        change = torch.diff(x, dim=2, prepend=x[:, :, :1])
        x = self.stem(rearrange(torch.cat([x, change], 1), "b c t h w -> (b t) c h w"))
        x = self.times[0](self.level(self.halve[0](x)), num)
        x = self.times[2](self.times[1](self.halve[1](x), num), num)
        x = rearrange(F.silu(x), "(b t) c h w -> b t c h w", t=num)
        out = self.out(torch.cat([x.mean(1).flatten(1), x.amax((1, 3, 4))], 1))
        return F.layer_norm(out, (self.width,))  # as for pictures


@torch.no_grad()
def run_clip_net(net: nn.Module, clips: Sequence[Frames], side: int, width: int) -> npt.NDArray[np.float32]:
    """n clips -> n width, on the net's device, in chunks."""
    device = next(net.parameters()).device
    parts = [
        net(from_uint8(shrink_clips(clips[start : start + CHUNK], side).to(device))).float().cpu()
        for start in range(0, len(clips), CHUNK)
    ]
    return torch.cat(parts).numpy() if parts else np.zeros((0, width), np.float32)


def run_tower(net: PictureNet | ClipNet, media: Any) -> npt.NDArray[np.float32]:
    """n pictures, or n clips, -> n width."""
    return run_clip_net(net, media, net.side, net.width) if isinstance(net, ClipNet) else run_net(net, media)
