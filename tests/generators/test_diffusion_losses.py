"""The loss: weights as the papers define them, the variational bound, and randomness that is a function of the place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from tessera.batches import TextStates
from tessera.contracts import Context, Loss, Nets
from tessera.generators.diffusion.algebra import step_back, widening
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.losses import (
    BINS,
    NOISE,
    DiffusionLossConfig,
    DiffusionLosses,
    Example,
    digest,
    divergence,
    spread,
)  # fmt: skip
from tessera.generators.diffusion.processes import NUM_STEPS, DdpmConfig, EdmConfig, FlowConfig, build_process
from tessera.generators.diffusion.stage import DiffusionStageConfig, build_stage
from tessera.generators.diffusion.weights import MinSnrWeightConfig, P2WeightConfig, SigmoidWeightConfig, WeightConfig, weights
from tessera.randomness import mix, normal
from tests.generators.diffusion_toys import PROCESSES, gaussian, process

NUMBERS = torch.linspace(0.03, 0.97, 11, dtype=torch.float64)


@dataclass(frozen=True)
class Batch:
    clean: Tensor
    valid: Tensor
    text: TextStates | None = None
    embedding: Tensor | None = None

    def part(self, rows: slice) -> Batch:
        return Batch(*(None if part is None else part[rows] for part in (self.clean, self.valid)))


def read(nets: Nets, batch: Any, context: Context) -> Example:
    return Example(batch.clean, Condition(text=batch.text, embedding=batch.embedding), batch.valid)


class Line(nn.Module):
    """A small network that takes everything."""

    def __init__(self, channels: int = 4, outputs: int = 4, recalls: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(channels * (1 + recalls) + 1, 16), nn.Linear(16, outputs)
        self.heard: list[Condition] = []

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        self.heard.append(condition)
        parts = [x, level[:, None] / 10, *([] if condition.before is None else [condition.before])]
        return self.last(torch.tanh(self.first(torch.cat(parts, dim=1))))


def batch_of(num: int = 6) -> Batch:
    clean = torch.randn(num, 4, generator=torch.Generator().manual_seed(1))
    return Batch(clean, torch.ones(num, dtype=torch.bool))


def context_of(num: int = 6, step: int = 3, first: int = 40) -> Context:
    return Context(step, 5, torch.arange(first, first + num))


def losses_of(name: str = "flow", recalls: bool = False, **options: object) -> DiffusionLosses:
    return DiffusionLosses(DiffusionLossConfig(**options), process(name, told_all=False), read, recalls)


# --- weights


@pytest.mark.parametrize(
    "config",
    [P2WeightConfig(gamma=0.7, k=2.0), MinSnrWeightConfig(gamma=3.0), SigmoidWeightConfig(bias=-1.0)],
    ids=lambda c: c.kind,
)
def test_weights_of_ddpm_by_their_formulas(config: WeightConfig) -> None:
    """On the errors of noise, clean and v, whose ratios are SNR : 1 : SNR + 1."""
    made = process("noise")
    level = made.trained(NUMBERS)
    snr = level.exp()
    if isinstance(config, P2WeightConfig):
        of_noise = 1 / (2.0 + snr) ** 0.7
    elif isinstance(config, MinSnrWeightConfig):
        of_noise = snr.clamp(max=3.0) / snr
    else:
        tiny = 1e-5
        slope = (made.trained(NUMBERS + tiny) - made.trained(NUMBERS - tiny)) / (2 * tiny)
        of_noise = torch.sigmoid(-1.0 - level) * -slope
    for name, ratio in (("noise", 1), ("clean", snr), ("v", snr / (snr + 1))):
        torch.testing.assert_close(weights(config, process(name), level, NUMBERS), of_noise * ratio, rtol=1e-5, atol=1e-8)


def test_weights_of_flow_and_edm_by_their_formulas() -> None:
    config = MinSnrWeightConfig()
    flow, edm = process("flow"), process("edm")
    level = flow.trained(NUMBERS)
    time = torch.sigmoid(-level / 2)
    capped = level.exp().clamp(max=5.0)
    torch.testing.assert_close(weights(config, flow, level, NUMBERS), capped * time**2, msg="velocity = (x - clean) / time")
    level = edm.trained(NUMBERS)
    sigma = torch.exp(-level / 2)
    out = sigma * 0.5 / torch.sqrt(sigma**2 + 0.25)
    torch.testing.assert_close(weights(config, edm, level, NUMBERS), level.exp().clamp(max=5.0) * out**2)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("config", [P2WeightConfig(), MinSnrWeightConfig()], ids=lambda c: c.kind)
def test_one_guess_costs_the_same_whatever_is_predicted(name: str, config: WeightConfig) -> None:
    """An error of clean by 0.1 at one SNR, in every parametrisation."""
    made, level = process(name), torch.linspace(-6, 6, 11)
    clean, noise = torch.randn(2, 11, generator=torch.Generator().manual_seed(0))
    x = made.family.noised(clean, noise, level)
    wrong = clean + 0.1
    wrong_noise = (x - made.family.alpha(level) * wrong) / made.family.sigma(level)
    u, w = made.shares(level)
    error = (u * (wrong - clean) + w * (wrong_noise - noise)) ** 2 * weights(config, made, level, NUMBERS)
    snr = level.exp()
    wanted = snr / (1 + snr) if isinstance(config, P2WeightConfig) else snr.clamp(max=5.0)
    torch.testing.assert_close(error, 0.01 * wanted, rtol=2e-2, atol=1e-6)


def test_the_sigmoid_weight_does_not_depend_on_how_levels_are_drawn() -> None:
    """An integral over levels, here of the error of noise for a known guess: e^level / (1 + e^level)."""
    numbers = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    found = []
    for config in (
        FlowConfig(),
        FlowConfig(mean=0.3, std=1.5),
        EdmConfig(mean=-0.2),
        DdpmConfig(predicts="v"),
        DdpmConfig(schedule="jsd"),
    ):
        made = build_process(config)
        level = made.trained(numbers)
        u, w = made.shares(level)
        alpha, sigma = made.family.alpha(level), made.family.sigma(level)
        of_predicted = ((w * alpha - u * sigma) / alpha) ** 2  # its error for an error of noise of 1
        inside = level.abs() < 7
        each = weights(SigmoidWeightConfig(), made, level, numbers) * of_predicted * torch.sigmoid(level) * inside
        found.append(float(each.mean()))
    grid = torch.linspace(-7, 7, 20_001, dtype=torch.float64)
    wanted = float(torch.trapezoid(torch.sigmoid(-grid) * torch.sigmoid(grid), grid))
    assert found == pytest.approx([wanted] * 5, rel=2e-3)


# --- the loss


@pytest.mark.parametrize("name", PROCESSES)
def test_the_loss_by_hand(name: str) -> None:
    made, batch, context, net = process(name, told_all=False), batch_of(), context_of(), Line()
    loss = losses_of(name).turn({"generator": net}, batch, context)
    noise = normal(mix(5, 3) >> 1, context.positions, 4, NOISE)
    level = made.trained(spread(5, 3, context.positions)).float()
    x = made.family.noised(batch.clean, noise, level)
    u, w = (share[:, None] for share in made.shares(level))
    out = net(made.fed(x, level), level.clamp(*made.ends), Condition())
    torch.testing.assert_close(loss.total, F.mse_loss(out, u * batch.clean + w * noise, reduction="none").mean(1).sum())
    assert float(loss.weight) == 6
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize("name", ["flow", "v", "edm"])
def test_the_exact_denoiser_has_the_least_loss(name: str) -> None:
    """So that what is trained and what is sampled are one: any other affine guess is worse."""
    made = process(name)
    mean, covariance = torch.zeros(2), torch.diag(torch.tensor([0.5, 0.1]))
    exact = gaussian(made, mean, covariance)
    clean = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)) @ covariance.sqrt()

    class Net(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
            x, wide = x / made.fed(torch.ones_like(x), level), level[:, None]
            guess = self.scale * exact(x, wide, condition)
            u, w = made.shares(wide)
            return u * guess + w * (x - made.family.alpha(wide) * guess) / made.family.sigma(wide)

    batch = Batch(clean, torch.ones(4000, dtype=torch.bool))
    losses = DiffusionLosses(DiffusionLossConfig(), made, read)
    totals = [float(losses.measure({"generator": Net(scale)}, batch, context_of(4000)).total) for scale in (0.9, 1.0, 1.1)]
    assert totals[1] == min(totals)


def test_randomness_is_a_function_of_the_place() -> None:
    """Of two ranks or micro-batches each has its part of the whole, and other steps and seeds have other noise."""
    batch, context, nets, losses = batch_of(), context_of(), {"generator": Line(recalls=True)}, losses_of(recalls=True)
    whole = losses.turn(nets, batch, context)
    parts = [
        losses.turn(nets, batch.part(rows), replace(context, positions=context.positions[rows]))
        for rows in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    for name, stat in whole.stats.items():
        torch.testing.assert_close(sum(part.stats[name] for part in parts), stat)
    for other in (replace(context, step=4), replace(context, seed=6)):
        assert float(losses.turn(nets, batch, other).total) != float(whole.total)


def test_samples_that_fill_up_count_nothing() -> None:
    batch, net, losses = batch_of(), Line(), losses_of(weight=SigmoidWeightConfig())
    holed = Batch(torch.where(torch.arange(6)[:, None] < 4, batch.clean, torch.nan), torch.arange(6) < 4)
    found: Loss = losses.measure({"generator": net}, holed, context_of())
    wanted = losses.measure({"generator": net}, batch.part(slice(0, 4)), context_of(4))
    torch.testing.assert_close(found.total, wanted.total)
    assert float(found.weight) == 4
    torch.testing.assert_close(found.stats["losses"], wanted.stats["losses"])


def test_validation_does_not_change_with_the_step_and_tells_levels_apart() -> None:
    batch, losses, nets = batch_of(400), losses_of("v"), {"generator": Line()}
    first, later = (losses.measure(nets, batch, context_of(400, step=step)) for step in (3, 700))
    assert float(first.total) == float(later.total)
    numbers = digest(first.stats)
    assert list(numbers) == [
        "loss_at_level_below_-6", "loss_at_level_-6_to_-3", "loss_at_level_-3_to_0", "loss_at_level_0_to_3",
        "loss_at_level_3_to_6", "loss_at_level_above_6",
    ]  # fmt: skip
    level = losses.process.trained(spread(5, 0, context_of(400).positions))
    counts = [int(((level > low) & (level <= high)).sum()) for low, high in zip((-99, *BINS), (*BINS, 99), strict=True)]
    assert first.stats["samples"].tolist() == counts
    total = sum(number * count for number, count in zip(numbers.values(), counts, strict=True))
    assert total == pytest.approx(float(first.total), rel=1e-5)


def test_what_is_taken_away_is_nested() -> None:
    num = 4000
    text = TextStates(torch.ones(num, 1, 2), torch.ones(num, 1, dtype=torch.bool), torch.ones(num, 2))
    batch = Batch(torch.zeros(num, 4), torch.ones(num, dtype=torch.bool), text, torch.ones(num, 2))
    net = Line()
    losses_of(text_dropout_prob=0.3, embedding_dropout_prob=0.1).turn({"generator": net}, batch, context_of(num))
    told = net.heard[0]
    assert told.text is not None
    assert told.has_embedding is not None
    texts, embeddings = told.text.mask[:, 0], told.has_embedding
    assert float((~texts).float().mean()) == pytest.approx(0.3, abs=0.03)
    assert float((~embeddings).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert not (texts & ~embeddings).any(), "nothing, the embedding, both: what guidance asks for"
    net.heard.clear()
    losses_of(text_dropout_prob=0.3).measure({"generator": net}, batch, context_of(num))
    assert net.heard[0].text is not None
    assert net.heard[0].text.mask.all()


def test_half_of_the_samples_recall_a_guess() -> None:
    batch, net, losses = batch_of(1000), Line(recalls=True), losses_of(recalls=True)
    losses.turn({"generator": net}, batch, context_of(1000))
    first, second = (told.before for told in net.heard)
    assert first is not None
    assert second is not None
    assert not first.any()
    assert not second.requires_grad
    shown = second.abs().sum(1) > 0
    assert float(shown.float().mean()) == pytest.approx(0.5, abs=0.05)
    made, context = losses.process, context_of(1000)
    level = made.trained(spread(5, 3, context.positions)).float()
    x = made.family.noised(batch.clean, normal(mix(5, 3) >> 1, context.positions, 4, NOISE), level)
    guess = made.guess(net, x, level, Condition(before=torch.zeros_like(x))).clean.clamp(-4, 4)
    torch.testing.assert_close(second[shown], guess[shown])


# --- learned variance


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_bound_is_a_divergence_of_two_gaussians(schedule: str) -> None:
    made = build_process(DdpmConfig(schedule=schedule))
    draws = torch.Generator().manual_seed(0)
    clean, guessed, x = torch.randn(3, 11, 2, generator=draws)
    between = torch.rand(11, 2, generator=draws)
    found = divergence(made, NUMBERS, clean, guessed, between)
    level, target = (made.level_at(NUMBERS - back)[:, None] for back in (0, 1 / NUM_STEPS))
    kept, kept_before = torch.sigmoid(level), torch.sigmoid(target)  # Nichol and Dhariwal 2021, equations 9 to 15
    rate = 1 - kept / kept_before
    least = (1 - kept_before) / (1 - kept) * rate
    means = [
        kept_before.sqrt() * rate / (1 - kept) * some + (1 - rate).sqrt() * (1 - kept_before) / (1 - kept) * x
        for some in (clean, guessed)
    ]
    variance = torch.exp(between * rate.log() + (1 - between) * least.log())
    wanted = kl_divergence(Normal(means[0], least.sqrt()), Normal(means[1], variance.sqrt()))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-5)
    std = step_back(made.family, level, target)[2]
    torch.testing.assert_close(
        std**2 * torch.exp(widening(made.family, level, target)), rate, msg="the largest variance is the rate"
    )


@pytest.mark.parametrize("predicts", ["noise", "clean", "v"])
def test_the_bound_teaches_the_variance_and_nothing_else(predicts: str) -> None:
    """Of each parametrisation, the right mean: with an exact guess it is 0 where the fraction is 0."""
    made = build_process(DdpmConfig(predicts=predicts, learned_variance=True))
    batch, context, net = batch_of(), context_of(), Line(outputs=8)
    grads = []
    for weight in (0.0, 1.0):
        losses = DiffusionLosses(DiffusionLossConfig(bound_weight=weight), made, read)
        net.zero_grad()
        loss = losses.turn({"generator": net}, batch, context)
        loss.total.backward()
        grads.append(net.last.weight.grad.clone())
    torch.testing.assert_close(grads[0][:4], grads[1][:4], msg="the mean is taught by the error alone")
    assert not grads[0][4:].any()
    assert grads[1][4:].abs().sum() > 0

    class Right(nn.Module):
        def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
            alpha, sigma = made.family.alpha(level)[:, None], made.family.sigma(level)[:, None]
            u, w = (share[:, None] for share in made.shares(level))
            return torch.cat([u * batch.clean + w * (x - alpha * batch.clean) / sigma, torch.full_like(x, -1.0)], dim=1)

    made.ends = (-1e4, 1e4)
    loss = DiffusionLosses(DiffusionLossConfig(), made, read).turn({"generator": Right()}, batch, context)
    assert float(loss.parts["bound"]) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("predicts", ["noise", "clean", "v"])
def test_the_bound_is_finite_under_autocast(predicts: str) -> None:
    """Levels and deviations of neighbouring steps are no numbers for bf16; only what the network does is."""
    made, batch, context = build_process(DdpmConfig(predicts=predicts, learned_variance=True)), batch_of(64), context_of(64)
    losses, found, grads = DiffusionLosses(DiffusionLossConfig(), made, read), list[Loss](), list[Tensor]()
    for bf16 in (False, True):
        net = Line(outputs=8)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = losses.turn({"generator": net}, batch, context)
        loss.total.backward()
        found.append(loss)
        grads.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    exact, rounded = found
    assert rounded.total.dtype == torch.float32
    for one, other in ((rounded.total, exact.total), (rounded.parts["bound"], exact.parts["bound"])):
        assert one.item() == pytest.approx(other.item(), rel=5e-3)  # 1e-3 was found; nan and infinity are near nothing
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 0.02  # 0.004 was found


# --- the stage


def test_a_stage_learns() -> None:
    """A few plain updates on one point: the loss falls, and the stage names what the engine needs."""
    net = Line()
    stage = build_stage(DiffusionStageConfig(), {"generator": net}, read, compiled=(Line,))
    batch = Batch(torch.full((64, 4), 0.5), torch.ones(64, dtype=torch.bool))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    assert stage.measure is not None
    before = float(stage.measure(stage.nets, batch, context_of(64)).total)
    for step in range(150):
        optimizer.zero_grad()
        loss = stage.turns[0].loss(stage.nets, batch, context_of(64, step=step))
        (loss.total / loss.weight).backward()
        optimizer.step()
    assert float(stage.measure(stage.nets, batch, context_of(64)).total) < 0.5 * before
    assert stage.averaged == ("generator",)
    assert stage.compiled == (Line,)
