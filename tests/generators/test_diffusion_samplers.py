"""Every sampler with every process, step by step, beside the schedulers of `diffusers`, on the same made-up network.

| | euler | heun | dpm | ddim, eta 0 to 1 | ancestral |
|---|---|---|---|---|---|
| flow | FlowMatchEuler | FlowMatchHeun | DPMSolverMultistep | DDIM, rescaled | EulerAncestral, rescaled |
| edm | EDMEuler | Heun | EDMDPMSolverMultistep | DDIM, rescaled | EulerAncestral |
| ddpm: noise, clean, v | Euler, rescaled | FlowMatchHeun, rescaled | DPMSolverMultistep | DDIM | DDPM, three variances |

Rescaled: the scheduler keeps x in another family. At one level clean and noise have one ratio in all of them, so theirs is ours
times a number that the level alone decides, and the network is asked about ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
)
from diffusers.schedulers import scheduling_ddpm, scheduling_euler_ancestral_discrete
from torch import Tensor

from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.processes import DdpmConfig, Process, build_process
from tessera.generators.diffusion.sample import FRESH, DiffusionSampler, noise_like, threshold
from tessera.generators.diffusion.samplers import passes_of, resampled
from tessera.randomness import mix_tensors
from tests.generators.diffusion_toys import crooked, process, sampler_of, walk

STEPS = 6
THEIR_NAMES = {"noise": "epsilon", "clean": "sample", "v": "v_prediction"}


def noise() -> Tensor:
    return torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(7))


def guess_at(level: Tensor, x: Tensor) -> Tensor:
    return crooked(x, level.float(), Condition())


def output_at(made: Process, level: Tensor, x: Tensor, clean: Tensor | None = None) -> Tensor:
    """What the network puts out, in fp64: a scheduler's own words for it. `clean` if it was guessed of another's x."""
    x, level = x.double(), level.double()
    clean, family = (guess_at(level, x.float()) if clean is None else clean).double(), made.family
    u, w = made.shares(level)
    return (u * clean + w * (x - family.alpha(level) * clean) / family.sigma(level)).float()


def agree(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 2e-5) -> None:
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            one, other.float(), atol=tolerance, rtol=tolerance, msg=lambda text, at=index: f"step {at}: {text}"
        )


def flow_levels(sigmas: Tensor) -> Tensor:
    return -2 * torch.logit(sigmas.double())


def of_ratio(ratio: Tensor) -> Tensor:
    """Levels of sigma / alpha."""
    return -2 * ratio.double().log()


def of_kept(scheduler: Any) -> Tensor:
    """Levels of a discrete schedule, at its timesteps."""
    kept = scheduler.alphas_cumprod.double()[scheduler.timesteps.long()]
    return torch.log(kept) - torch.log1p(-kept)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_euler(shift: float) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS).tolist())
    made, x = process("flow"), noise()
    ours = sampler_of(made, crooked, sampler="euler", steps=STEPS, grid="uniform", shift=shift)
    torch.testing.assert_close(made.family.sigma(ours.levels).float(), theirs.sigmas)
    found = walk(ours, x)
    wanted = []
    for time, sigma in zip(theirs.timesteps, theirs.sigmas, strict=False):
        clean = guess_at(flow_levels(sigma), x)
        x = theirs.step((x - clean) / sigma, time, x, return_dict=False)[0]
        wanted.append(x)
    agree(found, wanted)


@pytest.mark.parametrize("name", ["flow", "noise", "clean", "v"])
def test_heun(name: str) -> None:
    """DDPM goes along flow's path: theirs keeps x / (alpha + sigma)."""
    theirs, made = FlowMatchHeunDiscreteScheduler(), process(name)
    theirs.sigma_max = 1.0 if name == "flow" else 0.99  # of noise alone a network that predicts it says nothing
    theirs.set_timesteps(STEPS)
    levels, x = flow_levels(torch.unique(theirs.sigmas).flip(0)[:-1]), noise()
    scales = (made.family.alpha(levels) + made.family.sigma(levels)).float()
    found = walk(sampler_of(made, crooked, levels, sampler="heun", steps=STEPS), x * scales[0])
    wanted = []
    for index, time in enumerate(theirs.timesteps):
        sigma, scale = theirs.sigmas[index], scales[(index + 1) // 2]
        x = theirs.step((x - guess_at(flow_levels(sigma), x * scale)) / sigma, time, x, return_dict=False)[0]
        if theirs.state_in_first_order or index == len(theirs.timesteps) - 1:
            wanted.append(x * scales[len(wanted) + 1] if len(wanted) + 1 < STEPS else x)
    agree(found, wanted, 2e-5 if name == "flow" else 1e-4)


def test_flow_dpm() -> None:
    theirs = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=2.0, final_sigmas_type="zero"
    )
    theirs.set_timesteps(STEPS)
    made, x = process("flow"), noise()
    found = walk(sampler_of(made, crooked, flow_levels(theirs.sigmas[:-1]), sampler="dpm", steps=STEPS), x)
    wanted = []
    for index, time in enumerate(theirs.timesteps):
        sigma = theirs.sigmas[index]
        x = theirs.step((x - guess_at(flow_levels(sigma), x)) / sigma, time, x, return_dict=False)[0]
        wanted.append(x)
    agree(found, wanted, 1e-4)


@pytest.mark.parametrize("sampler", ["euler", "dpm"])
def test_edm(sampler: str) -> None:
    theirs = EDMEulerScheduler() if sampler == "euler" else EDMDPMSolverMultistepScheduler()
    theirs.set_timesteps(STEPS)
    made, x = process("edm"), noise() * 80
    ours = sampler_of(made, crooked, sampler=sampler, steps=STEPS)
    torch.testing.assert_close(made.family.sigma(ours.levels).float(), theirs.sigmas.float(), rtol=1e-4, atol=1e-6)
    found = walk(ours, x)
    wanted = []
    for index, time in enumerate(theirs.timesteps):
        theirs.scale_model_input(x, time)  # it wants to be asked
        output = output_at(made, of_ratio(theirs.sigmas[index]), x)
        x = theirs.step(output, time, x, return_dict=False)[0]
        wanted.append(x)
    agree(found, wanted, 3e-4)


@pytest.mark.parametrize("name", ["noise", "clean", "v"])
def test_preserving_euler(name: str) -> None:
    """Theirs keeps x / alpha."""
    theirs = EulerDiscreteScheduler(prediction_type=THEIR_NAMES[name], timestep_spacing="linspace")
    theirs.set_timesteps(STEPS)
    made, levels = process(name), of_ratio(theirs.sigmas[:-1])
    x = noise() * float(theirs.sigmas[0])
    found = walk(sampler_of(made, crooked, levels, sampler="euler", steps=STEPS), x * made.family.alpha(levels[0]))
    wanted = []
    for index, time in enumerate(theirs.timesteps):
        theirs.scale_model_input(x, time)
        output = output_at(made, levels[index], x * made.family.alpha(levels[index]))
        x = theirs.step(output, time, x, return_dict=False)[0]
        wanted.append(x)
    alphas = made.family.alpha(torch.cat([levels[1:], torch.tensor([torch.inf])]))
    agree(found, [part * alpha for part, alpha in zip(wanted, alphas, strict=True)], 5e-4)


def test_heun_with_noise_on_top() -> None:
    theirs = HeunDiscreteScheduler(prediction_type="epsilon", timestep_spacing="linspace")
    theirs.set_timesteps(STEPS)
    levels, x = of_ratio(torch.unique(theirs.sigmas).flip(0)[:-1]), noise() * float(theirs.sigmas[0])
    found = walk(sampler_of(process("edm"), crooked, levels, sampler="heun", steps=STEPS), x)
    wanted = []
    for index, time in enumerate(theirs.timesteps):
        sigma = theirs.sigmas[index]
        x = theirs.step((x - guess_at(of_ratio(sigma), x)) / sigma, time, x, return_dict=False)[0]
        if theirs.state_in_first_order or index == len(theirs.timesteps) - 1:
            wanted.append(x)
    agree(found, wanted, 1e-4)


@pytest.mark.parametrize("name", ["noise", "clean", "v"])
def test_preserving_dpm(name: str) -> None:
    theirs = DPMSolverMultistepScheduler(prediction_type=THEIR_NAMES[name], final_sigmas_type="zero")
    theirs.set_timesteps(STEPS)
    made, x = process(name), noise()
    found = walk(sampler_of(made, crooked, of_ratio(theirs.sigmas[:-1]), sampler="dpm", steps=STEPS), x)
    wanted = []
    for index, time in enumerate(theirs.timesteps):
        x = theirs.step(output_at(made, of_ratio(theirs.sigmas[index]), x), time, x, return_dict=False)[0]
        wanted.append(x)
    agree(found, wanted, 2e-4)


@pytest.mark.parametrize("name", ["flow", "edm", "noise", "clean", "v"])
@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
def test_ddim(name: str, eta: float) -> None:
    """Theirs keeps x as DDPM does."""
    theirs = DDIMScheduler(
        beta_end=0.012, prediction_type=THEIR_NAMES.get(name, "epsilon"), clip_sample=False, timestep_spacing="trailing"
    )
    theirs.set_timesteps(8)
    made, words, x = process(name), process(name if name in THEIR_NAMES else "noise"), noise()
    levels = of_kept(theirs)
    scales = (made.family.alpha(levels) / words.family.alpha(levels)).float()
    found = walk(sampler_of(made, crooked, levels, sampler="ddim", eta=eta, steps=8), x * scales[0])
    wanted = []
    for index, time in enumerate(theirs.timesteps):
        keys = mix_tensors(torch.arange(len(x)), torch.tensor([index]))
        clean, fresh = guess_at(levels[index], x * scales[index]), noise_like(x, keys, FRESH)
        output = output_at(words, levels[index], x, clean)
        x = theirs.step(output, int(time), x, eta=eta, variance_noise=fresh, return_dict=False)[0]
        wanted.append(x)
    agree(found, [part * scale for part, scale in zip(wanted, [*scales[1:], 1], strict=True)], 2e-4)


def replay_noise(monkeypatch: pytest.MonkeyPatch, module: Any, x: Tensor) -> list[int]:
    """Their random numbers become ours; the list holds the step."""
    at = [0]
    keys = torch.arange(len(x))
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: noise_like(x, mix_tensors(keys, torch.tensor(at)), FRESH))
    return at


@pytest.mark.parametrize("name", ["noise", "clean", "v"])
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "learned_range"])
def test_ancestral(name: str, variance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learned fraction of 1 is the largest variance; theirs then has noise in the last step too, ours never."""
    theirs = DDPMScheduler(
        beta_schedule="linear", prediction_type=THEIR_NAMES[name], clip_sample=False, variance_type=variance,
        timestep_spacing="trailing",
    )  # fmt: skip
    theirs.set_timesteps(8)
    fraction = {"fixed_small": None, "fixed_large": 1.0, "learned_range": 0.3}[variance]
    made = build_process(DdpmConfig(predicts=name, learned_variance=fraction is not None))
    made.ends = (-1e4, 1e4)
    x, levels = noise(), of_kept(theirs)
    found = walk(sampler_of(made, crooked, levels, fraction, sampler="ancestral", steps=8), x)
    wanted, at = [], replay_noise(monkeypatch, scheduling_ddpm, x)
    for index, time in enumerate(theirs.timesteps):
        at[0], output = index, output_at(made, levels[index], x)
        if variance == "learned_range":
            output = torch.cat([output, torch.full_like(output, 2 * 0.3 - 1)], dim=1)
        x = theirs.step(output, int(time), x, return_dict=False)[0]
        wanted.append(x)
    last = -1 if variance == "fixed_large" else None
    agree(found[:last], wanted[:last], 3e-4)


@pytest.mark.parametrize("name", ["edm", "flow"])
def test_ancestral_with_noise_on_top(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs keeps x / alpha."""
    theirs = EulerAncestralDiscreteScheduler(beta_end=0.012, prediction_type="epsilon", timestep_spacing="linspace")
    theirs.set_timesteps(STEPS)
    levels, made = of_ratio(theirs.sigmas[:-1]), process(name)
    x, scales = noise() * float(theirs.sigmas[0]), made.family.alpha(levels).float()
    found = walk(sampler_of(made, crooked, levels, sampler="ancestral", steps=STEPS), x * scales[0])
    wanted, at = [], replay_noise(monkeypatch, scheduling_euler_ancestral_discrete, x)
    for index, time in enumerate(theirs.timesteps):
        at[0] = index
        theirs.scale_model_input(x, time)
        clean = guess_at(levels[index], x * scales[index])
        x = theirs.step((x - clean) / theirs.sigmas[index], time, x, return_dict=False)[0]
        wanted.append(x)
    agree(found, [part * scale for part, scale in zip(wanted, [*scales[1:], 1], strict=True)], 2e-4)


def test_dynamic_threshold() -> None:
    theirs = DDPMScheduler(thresholding=True, dynamic_thresholding_ratio=0.9, sample_max_value=1e6)
    guesses = noise() * torch.tensor([0.1, 1, 3, 10]).view(-1, 1, 1)
    for percentile in (0.9, 0.33, 1.0):
        theirs.register_to_config(dynamic_thresholding_ratio=percentile)
        torch.testing.assert_close(threshold(guesses, "dynamic", percentile), theirs._threshold_sample(guesses))
    torch.testing.assert_close(threshold(guesses, "static", 0.5), guesses.clamp(-1, 1))
    assert torch.equal(threshold(guesses, "none", 0.5), guesses)


def test_resampling_repeats_all_steps_but_the_last() -> None:
    made = process("v")
    ours = sampler_of(made, crooked, sampler="dpm", steps=4)
    passes = resampled(passes_of("dpm", made.family, ours.levels), made.family, ours.levels, 3)
    assert passes.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert (passes.up_noise > 0).tolist() == [True, True, False] * 3 + [False]
    torch.testing.assert_close(passes.level[1:], torch.where(passes.up_noise[:-1] > 0, passes.level[:-1], passes.level[1:]))
    scale, sigma = passes.up[:-1] * passes.alpha[:-1], passes.up[:-1] * passes.sigma[:-1]
    torch.testing.assert_close(scale, made.family.alpha(passes.level[1:]), msg="the level that the next pass is told")
    torch.testing.assert_close(torch.sqrt(sigma**2 + passes.up_noise[:-1] ** 2), made.family.sigma(passes.level[1:]))
    first_order = passes_of("euler", made.family, ours.levels)
    again = torch.tensor([1, 2, 4, 5, 7, 8])
    assert not passes.before[again].any(), "a step that is made again does not lean on the guess of another"
    torch.testing.assert_close(passes.guess[again], first_order.guess[passes.step[again]])
    assert passes.before[3].abs() > 0
    heun = resampled(passes_of("heun", made.family, ours.levels), made.family, ours.levels, 2)
    assert heun.step.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert (heun.up_noise > 0).tolist() == [False, True, False, False] * 3 + [False]


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm", "ddim", "ancestral"])
def test_companions_do_not_change_a_sample(sampler: str) -> None:
    made: DiffusionSampler = sampler_of(process("flow"), crooked, sampler=sampler, steps=5, eta=0.5 if sampler == "ddim" else 0.0)
    known, kept = torch.ones(5, 2, 3), torch.zeros(5, 1, 3, dtype=torch.bool)
    seeds = torch.tensor([11, 5, 8, 2, 9])
    for more in ((None, None), (known, kept)):
        together = made((2, 3), Condition(), seeds, known=more[0], kept=more[1])
        one = [None if part is None else part[:1] for part in more]
        alone = made((2, 3), Condition(), seeds[2:3], known=one[0], kept=one[1])
        torch.testing.assert_close(together[2:3], alone, rtol=0, atol=1e-6)
        assert (together[0] - together[1]).abs().max() > 0.01
