"""On a GPU: recorded passes of diffusion are the plain ones, compiled ones nearly so, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.batches import PairBatch, TextStates
from tessera.compiling import compile_module
from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Context, Nets, Stage
from tessera.engine.dist import World
from tessera.engine.state import place
from tessera.engine.step import Setting, train_step
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.degrade import NoiseConfig, degrade, draw_levels, resize
from tessera.generators.diffusion.denoisers import COMPILED, RECORDED, build_denoiser
from tessera.generators.diffusion.dit import DiTConfig
from tessera.generators.diffusion.guidance import GuidanceConfig
from tessera.generators.diffusion.losses import DiffusionLossConfig, Example
from tessera.generators.diffusion.processes import DdpmConfig, EdmConfig, FlowConfig, ProcessConfig, build_process
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler, Setup, State
from tessera.generators.diffusion.stage import DiffusionStageConfig, build_stage
from tessera.generators.diffusion.unet import UNetConfig
from tessera.generators.diffusion.weights import SigmoidWeightConfig
from tests.generators.denoiser_toys import stirred

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]
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


# --- training and drawing with real networks

NUM, SIDE, WIDTH = 8, 16, 32
NETS = {
    "unet": UNetConfig(widths=(32, 64), blocks=(1, 1), attention=(False, True), cross=(False, True), head_width=32),
    "dit": DiTConfig(width=64, depth=2, heads=2, patch=2),
}
STAGES: dict[str, dict[str, Any]] = {
    "flow": {"process": FlowConfig()},
    "edm": {"process": EdmConfig(), "loss": DiffusionLossConfig(weight=SigmoidWeightConfig())},
    "ddpm": {"process": DdpmConfig(learned_variance=True)},
}


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within, whatever makes the host wait for the device is an error."""
    setting = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(setting)


def network(kind: str, recalls: bool = False, variance: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = build_denoiser(
        NETS[kind], channels=3, size=(SIDE, SIDE), text_width=WIDTH, embedding_width=WIDTH, low=True,
        self_conditioning=recalls, variance=variance,
    )  # fmt: skip
    return stirred(net).to(DEVICE)


def told(num: int = NUM) -> Condition:
    torch.manual_seed(1)
    mask = torch.arange(5)[None] < 1 + torch.arange(num)[:, None] % 5
    text = TextStates(torch.randn(num, 5, WIDTH), mask, torch.randn(num, WIDTH)).to(DEVICE)
    low = torch.randn(num, 3, SIDE, SIDE).to(DEVICE)
    return Condition(
        text=text, embedding=torch.randn(num, WIDTH).to(DEVICE), low=low, low_level=torch.full((num,), 3.0).to(DEVICE)
    )


def pairs() -> PairBatch:
    condition, images = told(), torch.rand(NUM, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2)) * 2 - 1
    assert condition.text is not None
    every = torch.ones(NUM, dtype=torch.bool, device=DEVICE)
    return PairBatch(images.to(DEVICE), condition.embedding, condition.text, every, torch.arange(NUM), ("",) * NUM, (None,) * NUM)


def read(nets: Nets, batch: PairBatch, context: Context) -> Example:
    """Told everything, the smaller picture spoiled as for an upsampler."""
    where = (context.seed, context.step, context.positions)
    assert batch.images is not None
    assert isinstance(batch.text, TextStates)
    levels = draw_levels(NoiseConfig(), *where)
    low = degrade(NoiseConfig(), resize(batch.images, (SIDE // 2, SIDE // 2), 1.0), (SIDE, SIDE), levels, *where)
    return Example(batch.images, Condition(batch.text, batch.embeddings, low=low, low_level=levels), batch.valid)


def stage_of(net: nn.Module, config: DiffusionStageConfig, recalls: bool) -> Stage:
    return build_stage(config, {"generator": net}, read, recalls=recalls, compiled=COMPILED, recorded=RECORDED)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("recalls", [False, True])
def test_a_turn_does_not_wait_for_the_device(name: str, recalls: bool) -> None:
    config = DiffusionStageConfig(**STAGES[name])
    stage = stage_of(network("unet", recalls, name == "ddpm"), config, recalls)
    batch, positions = pairs(), torch.arange(NUM, device=DEVICE)

    def turn(step: int) -> None:
        stage.turns[0].loss(stage.nets, batch, Context(step, 0, positions)).total.backward()

    turn(0)  # the first time, libraries set themselves up
    with without_waiting():
        turn(1)
    assert all(p.grad is None or p.grad.isfinite().all() for p in stage.nets["generator"].parameters())


@pytest.mark.parametrize(
    ("kind", "recalls", "precision"), [("unet", False, "fp32"), ("unet", True, "bf16"), ("dit", False, "bf16")]
)
def test_compiled_and_recorded_steps_lose_what_eager_ones_lose(kind: str, recalls: bool, precision: str) -> None:
    config = DiffusionStageConfig(optim=OptimConfig(lr=1e-3, warmup_steps=0))

    def lost(fast: bool) -> list[float]:
        torch.compiler.reset()
        engine = EngineConfig(compile=fast, cuda_graphs=fast, precision=precision)
        stage = stage_of(network(kind, recalls), config, recalls)
        state, setting, batch = place(stage, 0, engine, DEVICE), Setting.of(World(0, 1, DEVICE), 100, engine), pairs()
        reports = [train_step(state, stage, [batch], setting) for _ in range(8)]
        return [report.turns[0].numbers()["generator/loss"] for report in reports]

    eager, fast = lost(False), lost(True)
    assert fast == pytest.approx(eager, rel=2e-3 if precision == "fp32" else 3e-2)
    assert len(set(fast)) == len(fast), "every step has noise and weights of its own"


def guided(**options: Any) -> DiffusionSampleConfig:
    return DiffusionSampleConfig(steps=6, guidance=GuidanceConfig(text=3.0, embedding=2.0), **options)


@pytest.mark.parametrize(("kind", "recalls"), [("unet", False), ("dit", True)])
def test_a_compiled_and_recorded_step_draws_what_a_plain_one_draws(kind: str, recalls: bool) -> None:
    torch.compiler.reset()
    net, process, seeds = network(kind, recalls).eval(), build_process(FlowConfig()), torch.arange(NUM, device=DEVICE)
    wanted = Plain(net, process, guided(), recalls=recalls)((3, SIDE, SIDE), told(), seeds)
    compile_module(net)
    sampler = DiffusionSampler(net, process, guided(), recalls=recalls)
    for _ in range(2):
        torch.testing.assert_close(sampler((3, SIDE, SIDE), told(), seeds), wanted, rtol=1e-2, atol=1e-2)
    assert len(sampler.recordings) == 1, "three branches in every step"


@pytest.mark.parametrize("process", [stage["process"] for stage in STAGES.values()])
@pytest.mark.parametrize("sampler", ["dpm", "ancestral"])
@pytest.mark.parametrize("inpaints", [False, True])
@pytest.mark.parametrize("records", [False, True])
def test_drawing_does_not_wait_for_the_device(process: ProcessConfig, sampler: str, inpaints: bool, records: bool) -> None:
    net = network("unet", variance=isinstance(process, DdpmConfig)).eval()
    config = guided(sampler=sampler, threshold="dynamic", resample_times=2)
    draw = DiffusionSampler(net, build_process(process), config, records=records, bf16=True)
    condition, seeds = told(), torch.arange(NUM, device=DEVICE)
    known = torch.zeros(NUM, 3, SIDE, SIDE, device=DEVICE) if inpaints else None
    kept = torch.arange(SIDE, device=DEVICE).expand(NUM, 1, SIDE, SIDE) < 4 if inpaints else None
    first = draw((3, SIDE, SIDE), condition, seeds, known=known, kept=kept)
    with without_waiting():
        second = draw((3, SIDE, SIDE), condition, seeds, known=known, kept=kept)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)
