"""On a GPU: recorded passes of diffusion are the plain ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.guidance import GuidanceConfig
from tessera.generators.diffusion.processes import FlowConfig, build_process
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler, Setup, State

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


class Plain(DiffusionSampler):
    """Without recordings."""

    def play(self, setup: Setup, state: State, shares: Sequence[float], count: int) -> State:
        for _ in range(count):
            state = self.step(setup, state, shares)
        return state


class Net(nn.Module):
    """Told a text and its guess before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out, self.told = nn.Conv2d(6, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1), nn.Linear(5, 16)

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        assert condition.text is not None
        assert condition.before is not None
        told = self.told(torch.cat([condition.text.pooled, level[:, None] / 10], dim=1))
        return self.out(torch.tanh(self.conv(torch.cat([x, condition.before], dim=1)) + told[..., None, None]))


@pytest.mark.parametrize("sampler", ["heun", "dpm", "ancestral"])
@pytest.mark.parametrize("inpaints", [False, True])
def test_replay_is_the_plain_loop(sampler: str, inpaints: bool) -> None:
    guidance = GuidanceConfig(text=3.0, levels=(-4.0, 4.0))
    config = DiffusionSampleConfig(sampler=sampler, steps=6, guidance=guidance, threshold="dynamic", resample_times=2)
    net, process = Net().to(DEVICE), build_process(FlowConfig())
    text = TextStates(torch.ones(3, 2, 4), torch.ones(3, 2, dtype=torch.bool), torch.randn(3, 4)).to(DEVICE)
    known = torch.zeros(3, 3, 8, 8, device=DEVICE) if inpaints else None
    kept = torch.arange(8, device=DEVICE).expand(3, 1, 8, 8) < 4 if inpaints else None
    seeds = torch.arange(3, device=DEVICE)
    wanted = Plain(net, process, config, recalls=True)((3, 8, 8), Condition(text=text), seeds, known=known, kept=kept)
    recorded = DiffusionSampler(net, process, config, recalls=True)
    for _ in range(2):  # the second time nothing is recorded anew
        found = recorded((3, 8, 8), Condition(text=text), seeds, known=known, kept=kept)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(recorded.recordings) == 2, "with guidance and without"


def test_bf16_draws() -> None:
    ours = DiffusionSampler(
        Net().to(DEVICE), build_process(FlowConfig()), DiffusionSampleConfig(steps=4), recalls=True, bf16=True
    )
    text = TextStates.none(2, 4).to(DEVICE)
    found = ours((3, 8, 8), Condition(text=text), torch.arange(2, device=DEVICE))
    assert found.dtype == torch.float32
    assert found.isfinite().all()
