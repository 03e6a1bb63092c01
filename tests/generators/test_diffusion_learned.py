"""What a small net learns of each process is drawn without a threshold: nets err, and no sampler may make much of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.contracts import Context, Nets
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.losses import DiffusionLossConfig, DiffusionLosses, Example
from tessera.generators.diffusion.processes import DdpmConfig, EdmConfig, FlowConfig, Process, ProcessConfig, build_process
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler

WIDTH, STEPS, BATCH = 8, 400, 256
PLACES = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
SPREAD = 0.1
PROCESSES: dict[str, ProcessConfig] = {
    "flow": FlowConfig(),
    "edm": EdmConfig(data_std=1.0),
    "v": DdpmConfig(predicts="v"),
    "clean": DdpmConfig(predicts="clean"),
    **{f"noise, {name}": DdpmConfig(predicts="noise", schedule=name) for name in ("cosine", "linear", "jsd")},  # type: ignore[arg-type]
}


class Small(nn.Module):
    """Of a vector and its level."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH + 17, 192), nn.Linear(192, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(3))

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        waves = level[:, None] * 2.0 ** torch.arange(-4, 4)
        h = self.enter(torch.cat([x, level[:, None] / 10, waves.sin(), waves.cos()], dim=1))
        for layer in self.layers:
            h = h + layer(F.silu(h))
        return self.leave(F.silu(h))


def read(nets: Nets, batch: Tensor, context: Context) -> Example:
    return Example(batch, Condition(), torch.ones(len(batch), dtype=torch.bool))


def learned(process: Process) -> nn.Module:
    torch.manual_seed(0)
    net, losses = Small(), DiffusionLosses(DiffusionLossConfig(), process, read)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / STEPS)
        batch = PLACES[torch.randint(4, (BATCH,))] + SPREAD * torch.randn(BATCH, WIDTH)
        loss = losses.turn({"generator": net}, batch, Context(0, step, torch.arange(BATCH) + step * BATCH))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    return net.eval()


@pytest.mark.parametrize("name", PROCESSES)
def test_every_sampler_draws_what_was_learned(name: str) -> None:
    process = build_process(PROCESSES[name])
    net = learned(process)
    for sampler, eta in (("dpm", 0.0), ("euler", 0.0), ("heun", 0.0), ("ddim", 0.5), ("ancestral", 0.0)):
        options: dict[str, Any] = {"sampler": sampler, "eta": eta, "steps": 32, "threshold": "none"}
        drawn = DiffusionSampler(net, process, DiffusionSampleConfig(**options))((WIDTH,), Condition(), torch.arange(512))
        off, which = (drawn[:, None] - PLACES).norm(dim=2).min(dim=1)
        near = (off < 4 * SPREAD * math.sqrt(WIDTH)).float().mean()
        assert near > 0.8, (sampler, float(near))
        assert off.max() < 4, (sampler, float(off.max()))
        shares = torch.bincount(which, minlength=4) / len(which)
        assert shares.min() > 0.12, (sampler, shares)
