"""The algebra of clean, noise and level, against formulas of the papers and brute force."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from tessera.config import Layer, UserError, build
from tessera.generators.diffusion.algebra import Exploding, Family, Preserving, Straight, solved, step_back
from tessera.generators.diffusion.processes import NUM_STEPS, DdpmConfig, EdmConfig, FlowConfig, Schedule, build_process
from tessera.generators.diffusion.sample import DiffusionSampleConfig
from tessera.generators.diffusion.samplers import levels_of
from tessera.generators.diffusion.stage import DiffusionStageConfig
from tests.generators.diffusion_toys import PROCESSES, Exact, process

FAMILIES = (Straight(), Preserving(), Exploding())
LEVELS = torch.tensor([-15.0, -6.0, -1.0, 0.0, 2.0, 9.0, 15.0])


def pair() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(7, 2, 3, generator=draws), torch.randn(7, 2, 3, generator=draws)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_a_level_is_the_logarithm_of_the_ratio_of_powers(family: Family) -> None:
    level = LEVELS.double()
    alpha, sigma = family.alpha(level), family.sigma(level)
    torch.testing.assert_close(torch.log(alpha**2 / sigma**2), level)


def test_what_makes_the_families() -> None:
    level = LEVELS.double()
    one = torch.ones_like(level)
    torch.testing.assert_close(Straight().alpha(level) + Straight().sigma(level), one)
    torch.testing.assert_close(Preserving().alpha(level) ** 2 + Preserving().sigma(level) ** 2, one)
    torch.testing.assert_close(Exploding().alpha(level), one)
    for family in FAMILIES[:2]:
        ends = torch.tensor([-math.inf, math.inf])
        assert family.alpha(ends).tolist() == [0, 1]
        assert family.sigma(ends).tolist() == [1, 0]


@pytest.mark.parametrize("name", PROCESSES)
def test_an_exact_output_gives_exact_clean(name: str) -> None:
    made, (clean, noise) = process(name), pair()
    low = LEVELS.clamp(*made.ends).clamp(min=-6 if name == "noise" else -15)  # in fp32 noise says little of clean below
    x = made.family.noised(clean, noise, low)
    net = Exact(made, lambda x, level, condition: clean)
    net_output = net(made.fed(x, low), low, None)
    found_clean, _ = solved(made.prediction, made.family, x, net_output, low, made.data_std)
    torch.testing.assert_close(found_clean, clean, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(made.guess(net, x, low, None).clean, clean, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "ends"), [("flow", [-math.inf, math.inf]), ("v", [-math.inf, math.inf]), ("edm", [-20, math.inf])]
)
def test_both_are_found_at_the_very_ends(name: str, ends: list[float]) -> None:
    made, level = process(name), torch.tensor(ends)
    clean, noise = (part[:2] for part in pair())
    x = made.family.noised(clean, noise, level)
    u, w = (share.view(-1, 1, 1) for share in made.shares(level))
    found = solved(made.prediction, made.family, x, u * clean + w * noise, level, made.data_std)
    torch.testing.assert_close(found, (clean, noise), atol=2e-2 if name == "edm" else 1e-6, rtol=1e-5)


def test_outputs_as_the_papers_define_them() -> None:
    clean, noise = pair()
    level = torch.linspace(-5, 5, 7)
    wide = level.view(-1, 1, 1)
    asked = {}
    for name in PROCESSES:
        made = process(name)
        u, w = made.shares(wide)
        asked[name] = u * clean + w * noise
    alpha, sigma = torch.sigmoid(wide).sqrt(), torch.sigmoid(-wide).sqrt()
    torch.testing.assert_close(asked["flow"], noise - clean)
    torch.testing.assert_close(asked["noise"], noise)
    torch.testing.assert_close(asked["clean"], clean)
    torch.testing.assert_close(asked["v"], alpha * noise - sigma * clean)
    scale, std = torch.exp(-wide / 2), 0.5
    skip, out = std**2 / (scale**2 + std**2), scale * std / torch.sqrt(scale**2 + std**2)
    torch.testing.assert_close(asked["edm"], (clean - skip * (clean + scale * noise)) / out)


def test_edm_feeds_and_asks_for_unit_variance() -> None:
    made = build_process(EdmConfig(data_std=0.3))
    draws = torch.Generator().manual_seed(1)
    level = torch.linspace(-8, 8, 5)
    clean, noise = 0.3 * torch.randn(5, 20_000, generator=draws), torch.randn(5, 20_000, generator=draws)
    fed = made.fed(made.family.noised(clean, noise, level), level)
    u, w = made.shares(level[:, None])
    for values in (fed, u * clean + w * noise):
        torch.testing.assert_close(values.std(1), torch.ones(5), atol=0.03, rtol=0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_a_step_back_is_bayes_rule(family: Family) -> None:
    """By brute force: densities of the cleaner x on a grid, times that of x given it."""
    level, target = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    clean, x = 0.8, -0.4
    scale, std = (float(part) for part in family.noisier(target, level))
    cleaner = np.linspace(-12, 12, 200_001)
    first = -((cleaner - float(family.alpha(target)) * clean) ** 2) / (2 * float(family.sigma(target)) ** 2)
    density = np.exp(first - (x - scale * cleaner) ** 2 / (2 * std**2))
    density /= density.sum()
    mean = (density * cleaner).sum()
    spread = np.sqrt((density * (cleaner - mean) ** 2).sum())
    base, guess, noise = (float(part) for part in step_back(family, level, target))
    assert base * x + guess * clean == pytest.approx(mean, abs=1e-8)
    assert noise == pytest.approx(spread, abs=1e-8)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_noise_upon_noise_is_noise_at_once(family: Family) -> None:
    for high, low in ((1.0, -2.0), (8.0, 7.9), (math.inf, 0.0)):
        level, target = torch.tensor([high, low], dtype=torch.float64)
        scale, std = family.noisier(level, target)
        torch.testing.assert_close(scale * family.alpha(level), family.alpha(target))
        torch.testing.assert_close(scale**2 * family.sigma(level) ** 2 + std**2, family.sigma(target) ** 2)


def test_a_fault_of_others_is_not_ours() -> None:
    """From (alpha 0.8, sigma 0.6) to (0.6, 0.8): differences of sigma instead of variances would give 0.325 for 0.64."""
    level, target = (torch.log(torch.tensor(a**2 / s**2)) for a, s in ((0.8, 0.6), (0.6, 0.8)))
    scale, std = Preserving().noisier(level, target)
    assert float(scale**2 * 0.36 + std**2) == pytest.approx(0.64, abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [("linear", "linear"), ("quadratic", "scaled_linear"), ("cosine", "squaredcos_cap_v2"), ("sigmoid", "sigmoid")],
)
def test_schedules_are_those_of_a_thousand_steps(schedule: str, theirs: str) -> None:
    kept = DDPMScheduler(NUM_STEPS, beta_start=1e-4, beta_end=0.02, beta_schedule=theirs).alphas_cumprod.double()
    time = torch.arange(1, NUM_STEPS + 1, dtype=torch.float64) / NUM_STEPS
    found = build_process(DdpmConfig(schedule=schedule)).level_at(time)
    wanted = torch.log(kept / (1 - kept))
    error = (found - wanted).abs()[20:-5]
    assert error.max() < 0.12, "rates against differences"
    assert (found - wanted).abs()[:20].max() < 0.2


def kept_of(schedule: str, num: int) -> npt.NDArray[np.float64]:
    """alpha^2 after each of so many steps, as the papers define it; their rates are those of 1,000 steps."""
    if schedule == "cosine":  # Nichol and Dhariwal 2021, equation 17
        squares = np.cos((np.arange(num + 1) / num + 0.008) / 1.008 * np.pi / 2) ** 2
        return squares[1:] / squares[0]
    first, last = 1e-4 * NUM_STEPS / num, 0.02 * NUM_STEPS / num
    rates = {
        "linear": np.linspace(first, last, num),
        "quadratic": np.linspace(first**0.5, last**0.5, num) ** 2,
        "sigmoid": first + (last - first) / (1 + np.exp(-np.linspace(-6, 6, num))),
        "jsd": 1 / np.linspace(num, 1, num),
    }
    return np.cumprod(1 - rates[schedule])


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_schedules_are_those_of_ever_shorter_steps(schedule: str) -> None:
    num = 1_000_000
    kept = kept_of(schedule, num)[num // 1000 - 1 : -1 : num // 1000]  # at the end of each step of a thousand, but the last
    found = build_process(DdpmConfig(schedule=schedule)).level_at(torch.arange(1, len(kept) + 1, dtype=torch.float64) / NUM_STEPS)
    np.testing.assert_allclose(found.numpy(), np.log(kept / (1 - kept)), atol=1e-3)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_levels_fall_over_time_and_stay_finite(schedule: str) -> None:
    level = build_process(DdpmConfig(schedule=schedule)).level_at(torch.linspace(0, 1, 2001, dtype=torch.float64))
    assert level.isfinite().all()
    assert (level.diff() <= 0).all()
    assert level[-1] < -4.5, "hardly anything is left at the end"
    assert build_process(DdpmConfig(schedule=schedule)).level_at(torch.tensor([0.0, 1.0])).isfinite().all(), "fp32"


@pytest.mark.parametrize("config", [FlowConfig, EdmConfig, DdpmConfig])
def test_a_shift_multiplies_noise_at_all_levels(config: type) -> None:
    plain, shifted = build_process(config()), build_process(config(shift=4.0))
    time = torch.linspace(0.05, 0.95, 9, dtype=torch.float64)
    for levels in ((plain.level_at(time), shifted.level_at(time)), (plain.trained(time), shifted.trained(time))):
        ratios = [torch.exp(-level / 2) for level in levels]
        torch.testing.assert_close(ratios[1], 4 * ratios[0])


def test_a_shift_of_flow_is_that_of_sd3() -> None:
    time = torch.linspace(0.05, 0.95, 9, dtype=torch.float64)
    shifted = build_process(FlowConfig(shift=3.0))
    torch.testing.assert_close(shifted.family.sigma(shifted.level_at(time)), 3 * time / (1 + 2 * time))


def test_levels_that_are_trained() -> None:
    """Logit-normal times, log-normal noise, uniform times, each by its quantiles."""
    numbers = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    flow = build_process(FlowConfig(mean=0.5, std=0.8))
    logits = torch.logit(flow.family.sigma(flow.trained(numbers)))
    assert (float(logits.mean()), float(logits.std())) == pytest.approx((0.5, 0.8), abs=2e-3)
    edm = build_process(EdmConfig())
    logs = edm.family.sigma(edm.trained(numbers)).log()
    assert (float(logs.mean()), float(logs.std())) == pytest.approx((-1.2, 1.2), abs=2e-3)
    ddpm = build_process(DdpmConfig())
    torch.testing.assert_close(ddpm.trained(numbers), ddpm.level_at(numbers))


def test_grids() -> None:
    flow, edm = build_process(FlowConfig()), build_process(EdmConfig())
    uniform = levels_of(flow, 4, "uniform")
    torch.testing.assert_close(flow.family.sigma(uniform), torch.tensor([1, 0.75, 0.5, 0.25, 0]).double())
    karras = edm.family.sigma(levels_of(edm, 5, "karras"))
    most, least = 80 ** (1 / 7), 0.002 ** (1 / 7)
    wanted = [(most + index / 4 * (least - most)) ** 7 for index in range(5)]
    torch.testing.assert_close(karras, torch.tensor([*wanted, 0]).double())
    shifted = flow.family.sigma(levels_of(flow, 4, "uniform", shift=2.0))
    torch.testing.assert_close(shifted, torch.tensor([1, 1.5 / 1.75, 1 / 1.5, 0.5 / 1.25, 0]).double())


@pytest.mark.parametrize("shift", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("grid", ["uniform", "karras"])
def test_predicted_noise_is_drawn_from_where_it_says_something_of_clean(grid: Literal["uniform", "karras"], shift: float) -> None:
    """However noise is shifted, in training or in drawing; what starts with less noise starts there."""
    for trained in (0.25, 1.0, 4.0):
        for schedule in get_args(Schedule):
            made = build_process(DdpmConfig(predicts="noise", schedule=schedule, shift=trained))
            levels = levels_of(made, 5, grid, shift)
            assert float(levels[0]) == pytest.approx(max(-7, made.ends[0] - 2 * math.log(shift)), abs=1e-6)
            assert (levels[1:] > levels[:-1]).all()
            free = build_process(DdpmConfig(predicts="v", schedule=schedule, shift=trained))
            assert float(levels_of(free, 5, grid, shift)[0]) == pytest.approx(free.ends[0] - 2 * math.log(shift))


def test_wrong_configs_are_refused() -> None:
    with pytest.raises(UserError, match="least noise 90"):
        build(DiffusionStageConfig, [Layer.of({"process": {"kind": "edm", "least": 90.0}}, "here")])
    with pytest.raises(UserError, match="is for the sampler ddim"):
        build(DiffusionSampleConfig, [Layer.of({"eta": 0.5}, "here")])
    with pytest.raises(UserError, match="the lower one comes first"):
        build(DiffusionSampleConfig, [Layer.of({"guidance": {"levels": [3.0, -3.0]}}, "here")])
