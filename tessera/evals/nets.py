"""The small nets that evaluation fits to the training split, and how it fits them: with the engine's own step.

Enters: a uint8 stack of pictures and a target each. Leaves: averaged weights in eval mode, a function of data and seed. On a CPU
the same bits come out again; on a GPU, or another CPU, they may differ in rounding, so names carry a hash of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.batches import from_uint8
from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Best, LossFunction, Stage, Turn
from tessera.engine.dist import World
from tessera.engine.state import place
from tessera.engine.step import Setting, train_step
from tessera.nn.conv import Downsample, ResidualBlock, initialise
from tessera.randomness import mix, mix_array

Pictures: TypeAlias = npt.NDArray[np.uint8]  # n h w c

CPU = torch.device("cpu")
GRID = 16  # the first convolution cuts any picture into this many cells a side, so cost does not depend on resolution
_CHUNK = 256  # pictures that are resized or go through a net at once
_OPTIM = OptimConfig(lr=2e-3, weight_decay=0.01, warmup_steps=20)


def side_for(height: int) -> int:
    """The side at which a picture enters a net: 16, 32 or 64 pixels, never more than it has (16 at least)."""
    return max(side for side in (16, 32, 64) if side <= max(height, 16))


def shrink(pictures: Pictures, side: int) -> Tensor:
    """n h w c -> n c side side, uint8, antialiased."""
    if pictures.ndim != 4 or pictures.dtype != np.uint8:
        raise ValueError(f"pictures are {pictures.dtype} shaped {pictures.shape}; expected uint8, n x height x width x channels")
    if pictures.shape[1:3] == (side, side):
        return torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)))
    parts = [torch.empty(0, pictures.shape[3], side, side, dtype=torch.uint8)]
    for start in range(0, len(pictures), _CHUNK):
        part = torch.from_numpy(np.ascontiguousarray(pictures[start : start + _CHUNK].transpose(0, 3, 1, 2))).float()
        small = F.interpolate(part, (side, side), mode="bilinear", antialias=True, align_corners=False)
        parts.append(small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)


class PictureNet(nn.Module):
    """Pictures -> features: a patch convolution to a 16 x 16 grid, three levels, and one linear layer over what is left of the
    grid, so that places count, beside its maximum, so that what is seen in one place is known in another."""

    def __init__(self, channels: int, side: int, width: int) -> None:
        super().__init__()
        self.channels, self.side, self.width = channels, side, width
        stride = side // GRID
        kernel = stride * 2 if stride > 1 else 3
        self.stem = initialise(nn.Conv2d(channels, 32, kernel, stride, padding=(kernel - stride + 1) // 2))
        self.levels = nn.Sequential(ResidualBlock(32), Downsample(32, 64), ResidualBlock(64), Downsample(64, 96))
        self.out = nn.Linear(96 * (GRID // 4) ** 2 + 96, width)

    def forward(self, x: Tensor) -> Tensor:
        """b c side side in [-1, 1] -> b width"""
        x = F.silu(self.levels(self.stem(x)))
        out = self.out(torch.cat([x.flatten(1), x.amax((2, 3))], 1))
        return F.layer_norm(out, (self.width,))  # every sample of one length: no distance hangs on a few that stick out


@torch.no_grad()
def run_net(net: PictureNet, pictures: Pictures) -> npt.NDArray[np.float32]:
    """n h w c uint8 -> n width, on the net's device, in chunks."""
    device = net.out.weight.device
    small = shrink(pictures, net.side)
    parts = [net(from_uint8(chunk.to(device))).float().cpu() for chunk in small.split(_CHUNK)]
    return torch.cat(parts).numpy() if len(pictures) else np.zeros((0, net.width), np.float32)


@dataclass(frozen=True, slots=True)
class FitBatch:
    """Pictures and whatever a loss wants of each; a `contracts` batch."""

    images: Tensor  # b c h w uint8, float in [-1, 1] once moved
    targets: Tensor  # b ...
    positions: Tensor  # b int64, stays on the host
    keys: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    def to(self, device: torch.device) -> FitBatch:
        """Moves, and turns uint8 into [-1, 1]."""
        images = from_uint8(self.images.to(device))
        return replace(self, images=images, targets=self.targets.to(device))

    def pin_memory(self) -> FitBatch:
        """Everything is in memory already."""
        return self


@dataclass(frozen=True, slots=True)
class Fitting:
    """How long and on what a net is fitted."""

    steps: int = 300
    batch_size: int = 64
    seed: int = 0
    device: torch.device = CPU


def fit_net(build: Callable[[], nn.Module], loss: LossFunction, images: Tensor, targets: Tensor, fitting: Fitting) -> nn.Module:
    """A fresh net (called `net` in the loss) fitted by AdamW; its averaged weights, frozen. Global random state is left alone."""
    with torch.random.fork_rng(devices=[fitting.device] if fitting.device.type == "cuda" else []):
        torch.manual_seed(mix(fitting.seed, 0) >> 1)
        stage = Stage(
            nets={"net": build()},
            turns=[Turn(name="fit", trains=("net",), loss=loss, max_grad_norm=1.0)],
            optim={"net": _OPTIM},
            best=Best("loss", higher_is_better=False),
            averaged=("net",),
            ema_decay=0.99,
        )
        state = place(stage, fitting.seed, EngineConfig(), fitting.device)
        setting = Setting(World(0, 1, fitting.device), fitting.steps)
        for step in range(fitting.steps):
            batch = batch_at(images, targets, step, fitting)
            train_step(state, stage, [batch.to(fitting.device)], setting)
    return state.averages["net"]


def batch_at(images: Tensor, targets: Tensor, step: int, fitting: Fitting) -> FitBatch:
    """Drawn with replacement: rows are a function of (seed, position)."""
    positions = np.arange(step * fitting.batch_size, (step + 1) * fitting.batch_size)
    rows = torch.from_numpy((mix_array(mix(fitting.seed, 1), positions) % np.uint64(len(images))).astype(np.int64))
    return FitBatch(images[rows], targets[rows], torch.from_numpy(positions))


def weights_hash(net: nn.Module) -> str:
    """sha256 over names, shapes and fp32 values, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
