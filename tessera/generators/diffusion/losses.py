"""The loss: noise a sample, let the network guess, count the error by its level. Everything random is a function of seed, step
and place in the stream."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.generators.diffusion.algebra import aligned, step_back, widening
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.processes import NUM_STEPS, Process, recalling
from tessera.generators.diffusion.weights import PlainWeightConfig, WeightConfig, weights
from tessera.randomness import fraction, mix, normal, uniform

TIME, NOISE, UNTOLD, RECALL = range(51, 55)  # streams of random numbers
GOLDEN = (math.sqrt(5) - 1) / 2
RECALL_PROB = 0.5  # Chen et al. 2022, section 3.2
BINS = (-6, -3, 0, 3, 6)  # levels between which losses are logged apart


class DiffusionLossConfig(Config):
    """How a denoiser is trained."""

    weight: WeightConfig = PlainWeightConfig()
    """What errors count at each level."""
    text_dropout_prob: float = Field(0.2, ge=0, le=1)
    """How often the text is taken away. Guidance leans on what is guessed without."""
    embedding_dropout_prob: float = Field(0.1, ge=0, le=1)
    """How often the embedding is taken away, and the text with it where that is taken at least as often."""
    bound_weight: float = Field(0.001, ge=0)
    """With a learned variance: weight of the variational bound, which teaches it."""


@dataclass(frozen=True, slots=True)
class Example:
    """What a denoiser learns from a batch."""

    clean: Tensor  # b ...
    condition: Condition
    valid: Tensor  # b bool: False counts nothing


Read = Callable[[Nets, Any, Context], Example]  # whatever it draws is a function of the context


@dataclass(frozen=True, slots=True)
class DiffusionLosses:
    """The turn and the validation measure, for one configuration."""

    config: DiffusionLossConfig
    process: Process
    read: Read
    recalls: bool = False  # whether the network takes an earlier guess

    def turn(self, nets: Nets, batch: Any, context: Context) -> Loss:
        """Noise, take some conditions away, guess."""
        example = self.read(nets, batch, context)
        number = uniform(mix(context.seed, context.step) >> 1, context.positions, 1, UNTOLD)[:, 0]
        told = example.condition.without(number < self.config.text_dropout_prob, number < self.config.embedding_dropout_prob)
        return self.guess(nets, replace(example, condition=told), context, RECALL_PROB)

    def measure(self, nets: Nets, batch: Any, context: Context) -> Loss:
        """Validation: told everything, and noise and levels that do not change with the step, so that numbers compare."""
        context = replace(context, step=0)
        example = self.read(nets, batch, context)
        return self.guess(nets, example, context, 1.0)

    def guess(self, nets: Nets, example: Example, context: Context, recall_prob: float) -> Loss:
        """Sums over valid samples of a sample's mean error; some, or all, are told an earlier guess where there are any."""
        net, clean, process = nets["generator"], example.clean.float(), self.process
        numbers = spread(context.seed, context.step, context.positions)
        level = process.trained(numbers).float()
        noise = normal(mix(context.seed, context.step) >> 1, context.positions, clean[0].numel(), NOISE).view_as(clean)
        x, condition = process.family.noised(clean, noise, level), example.condition
        if self.recalls:  # always two passes, so that shapes and cost are the same for all batches
            with torch.no_grad():
                before = process.guess(net, x, level, recalling(condition, torch.zeros_like(x))).clean
            chance = uniform(mix(context.seed, context.step) >> 1, context.positions, 1, RECALL)[:, 0]
            condition = recalling(condition, before * aligned(chance < recall_prob, x))
        predicted, between = process.output(net, x, level, condition)
        clean_share, noise_share = process.shares(aligned(level, x))
        error = mean_of((predicted - clean_share * clean - noise_share * noise) ** 2)
        each = error * weights(self.config.weight, process, level, numbers).float()
        parts = {}
        if between is not None:
            guessed = process.clean_of(x, predicted.detach(), level)
            bound = mean_of(divergence(process, numbers, clean, guessed, between))
            each = each + self.config.bound_weight * NUM_STEPS * bound
            parts["bound"] = (NUM_STEPS * bound * example.valid).sum().detach()
        each = torch.where(example.valid, each, 0)
        return Loss(each.sum(), example.valid.sum().float(), parts, by_level(each.detach(), level, example.valid))


def spread(seed: int, step: int, positions: Tensor) -> Tensor:
    """b in (0, 1): uniform over steps for each sample, and spread evenly over any samples that follow each other (Weyl)."""
    turns = positions.double() * GOLDEN + fraction(mix(seed, step, TIME))
    return (turns - turns.floor()).clamp(1e-9, 1 - 1e-9)


def divergence(process: Process, numbers: Tensor, clean: Tensor, guessed: Tensor, between: Tensor) -> Tensor:
    """As clean, nats: of one of the steps back, the true one from that with the guess and its variance (Nichol and Dhariwal 2021,
    equation 5). The last step is none to the clean sample, but to the cleanest level, so all have a density."""
    time = numbers.clamp(min=1 / NUM_STEPS)
    level, target = (aligned(process.level_at(when).float(), clean) for when in (time, time - 1 / NUM_STEPS))
    _, clean_share, std = step_back(process.family, level, target)
    wider = between * widening(process.family, level, target)
    return 0.5 * (wider + torch.expm1(-wider) + (clean_share * (clean - guessed) / std) ** 2 * torch.exp(-wider))


def mean_of(error: Tensor) -> Tensor:
    """b ... -> b."""
    return error.flatten(1).mean(1)


def by_level(each: Tensor, level: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Sums of losses, and numbers of samples, of each bin."""
    number = torch.stack([level > edge for edge in BINS]).sum(0)
    zeros = torch.zeros(len(BINS) + 1, dtype=torch.float64, device=each.device)
    return {"losses": zeros.index_add(0, number, each.double()), "samples": zeros.index_add(0, number, valid.double())}


def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
    """The loss between levels, where there are samples."""
    ends = [f"below_{BINS[0]}", *(f"{low}_to_{high}" for low, high in itertools.pairwise(BINS)), f"above_{BINS[-1]}"]
    named = zip(ends, stats["losses"].tolist(), stats["samples"].tolist(), strict=True)
    return {f"loss_at_level_{name}": loss / count for name, loss, count in named if count}
