"""Three kinds of diffusion: which levels are trained and drawn through, what the network predicts, and how it is asked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config
from tessera.generators.diffusion.algebra import Exploding, Family, Prediction, Preserving, Straight, aligned, shares, solved
from tessera.generators.diffusion.condition import Condition

LIMIT = 20.0  # of the levels of DDPM; the cosine schedule of 1,000 steps ends at -19.8
NOISE_START = -7.0  # clean is 3 % of x there; below it would be a small difference of two numbers, divided by less still
NUM_STEPS = 1000  # that DDPM's time is divided into: the cleanest level, and the steps of the variational bound
REACH = 5.0  # standard deviations of the trained levels: beyond them the network has seen nothing
PIXELS_STD = 0.5  # of pictures in [-1, 1], about (Karras et al. 2022, table 1)
BEFORE_LIMIT = 4.0  # of an earlier guess: predicted noise says next to nothing of clean at low levels, and gives any number

Schedule = Literal["cosine", "linear", "quadratic", "jsd", "sigmoid"]


class FlowConfig(Config):
    """Rectified flow: the network predicts noise - clean."""

    kind: Literal["flow"] = "flow"
    """Rectified flow."""
    mean: float = 0.0
    """Of the logit of the times that are trained; above 0 more noise."""
    std: float = Field(1.0, gt=0)
    """Of the logit of the times that are trained."""
    shift: float = Field(1.0, gt=0)
    """Noise of all levels times this, against clean. Large pictures show through more noise: their side / 64 is usual."""


class EdmConfig(Config):
    """EDM: noise on top of the sample, the network's input and output of unit variance."""

    kind: Literal["edm"] = "edm"
    """EDM."""
    mean: float = -1.2
    """Of the logarithm of the noise that is trained."""
    std: float = Field(1.2, gt=0)
    """Of the logarithm of the noise that is trained."""
    data_std: float | None = Field(None, gt=0)
    """Standard deviation of what is drawn. null: 0.5 of pixels; 1 of embeddings and latents, which are scaled to it."""
    least: float = Field(0.002, gt=0)
    """The least noise."""
    most: float = Field(80.0, gt=0)
    """The most noise, where drawing starts."""
    shift: float = Field(1.0, gt=0)
    """Noise of all levels times this. Large pictures show through more noise: their side / 64 is usual."""

    @model_validator(mode="after")
    def _ends(self) -> EdmConfig:
        if self.least >= self.most:
            raise ValueError(f"least noise {self.least} must be below the most, {self.most}")
        return self


class DdpmConfig(Config):
    """DDPM, in continuous time."""

    kind: Literal["ddpm"] = "ddpm"
    """DDPM."""
    schedule: Schedule = "cosine"
    """How noise grows with time."""
    predicts: Literal["noise", "clean", "v"] = "noise"
    """What the network puts out."""
    learned_variance: bool = False
    """Whether it also puts out, in as many channels more, the variance of a step of the ancestral sampler."""
    shift: float = Field(1.0, gt=0)
    """Noise of all levels times this, against clean. Large pictures show through more noise: their side / 64 is usual."""


ProcessConfig = Annotated[FlowConfig | EdmConfig | DdpmConfig, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class Guess:
    """What a network makes of a noised sample."""

    clean: Tensor  # as x
    fraction: Tensor | None = None  # as x: where a step's variance lies between the least and the most, as logarithms; [0, 1]


class Process(ABC):
    """Levels, and what a network's output means at each. Times are in [0, 1], 0 clean."""

    family: Family
    prediction: Prediction
    data_std: float = 1.0
    learned_variance: bool = False
    ends: tuple[float, float]  # the noisiest and the cleanest level that the network is told
    start: float = -math.inf  # the noisiest level that is drawn from: below it the prediction says nothing of clean

    @abstractmethod
    def level_at(self, time: Tensor) -> Tensor:
        """Along which drawing goes at an even pace."""

    @abstractmethod
    def trained(self, numbers: Tensor) -> Tensor:
        """Levels to train at, of uniform numbers; they fall as the numbers grow."""

    def fed(self, x: Tensor, level: Tensor) -> Tensor:
        """x as the network gets it, at levels b."""
        return x

    def shares(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """(u, w): the network predicts u * clean + w * noise."""
        return shares(self.prediction, self.family, level, self.data_std)

    def output(self, net: nn.Module, x: Tensor, level: Tensor, condition: Condition) -> tuple[Tensor, Tensor | None]:
        """The network's prediction at levels b, and the fraction of `Guess`."""
        out = net(self.fed(x, level), level.clamp(*self.ends), condition).float()
        if not self.learned_variance:
            return out, None
        predicted, spread = out.chunk(2, dim=1)
        return predicted, (spread + 1) / 2  # Nichol and Dhariwal 2021, equation 15, from [-1, 1]

    def guess(self, net: nn.Module, x: Tensor, level: Tensor, condition: Condition) -> Guess:
        """What the network takes for clean, at levels b."""
        predicted, fraction = self.output(net, x, level, condition)
        return Guess(self.clean_of(x, predicted, level), fraction)

    def clean_of(self, x: Tensor, predicted: Tensor, level: Tensor) -> Tensor:
        """Clean, of x and what was predicted, at levels b."""
        return solved(self.prediction, self.family, x, predicted, level, self.data_std)[0]


class Flow(Process):
    """Rectified flow with logit-normal times (Esser et al. 2024, section 3.1). A logit of time is half a level."""

    family, prediction = Straight(), "velocity"

    def __init__(self, config: FlowConfig) -> None:
        self.config, self.shift = config, 2 * math.log(config.shift)
        noisiest, cleanest = (-2 * (config.mean + side * config.std) - self.shift for side in (REACH, -REACH))
        self.ends = noisiest, cleanest

    def level_at(self, time: Tensor) -> Tensor:
        return -2 * torch.logit(time) - self.shift

    def trained(self, numbers: Tensor) -> Tensor:
        return normal_levels(numbers, self.config.mean, self.config.std) - self.shift


class Edm(Process):
    """Karras et al. 2022, table 1, last column."""

    family, prediction = Exploding(), "edm"

    def __init__(self, config: EdmConfig, data_std: float = PIXELS_STD) -> None:
        self.config, self.shift, self.data_std = config, 2 * math.log(config.shift), config.data_std or data_std
        self.ends = -2 * math.log(config.most) - self.shift, -2 * math.log(config.least) - self.shift

    def level_at(self, time: Tensor) -> Tensor:
        noisiest, cleanest = self.ends
        return cleanest + (noisiest - cleanest) * time

    def trained(self, numbers: Tensor) -> Tensor:
        return normal_levels(numbers, self.config.mean, self.config.std) - self.shift

    def fed(self, x: Tensor, level: Tensor) -> Tensor:
        return x * torch.rsqrt(self.family.sigma(aligned(level, x)) ** 2 + self.data_std**2)


class Ddpm(Process):
    """Ho et al. 2020, with any of five schedules, all times alike."""

    family = Preserving()

    def __init__(self, config: DdpmConfig) -> None:
        self.schedule, self.shift = SCHEDULES[config.schedule], 2 * math.log(config.shift)
        self.prediction: Prediction = config.predicts
        self.learned_variance = config.learned_variance
        if self.prediction == "noise":
            self.start = NOISE_START
        noisiest, cleanest = self.level_at(torch.tensor([1, 1 / NUM_STEPS], dtype=torch.float64)).tolist()
        self.ends = noisiest, cleanest

    def level_at(self, time: Tensor) -> Tensor:
        kept = self.schedule(time).clamp(-50, -1e-10)  # finite, and beyond the limit
        return (kept - torch.log(-torch.expm1(kept))).clamp(-LIMIT, LIMIT) - self.shift

    def trained(self, numbers: Tensor) -> Tensor:
        return self.level_at(numbers)


def build_process(config: ProcessConfig, data_std: float = PIXELS_STD) -> Process:
    """What a config describes, of data whose deviation is this where the config names none."""
    if isinstance(config, FlowConfig):
        return Flow(config)
    return Edm(config, data_std) if isinstance(config, EdmConfig) else Ddpm(config)


def recalling(condition: Condition, clean: Tensor) -> Condition:
    """The same with an earlier guess."""
    return replace(condition, before=clean.clamp(-BEFORE_LIMIT, BEFORE_LIMIT))


def normal_levels(numbers: Tensor, mean: float, std: float) -> Tensor:
    """Levels of noise whose logarithm, against clean, is normal; numbers in [0, 1] are its quantiles."""
    edge = 0.5 * math.erfc(REACH / math.sqrt(2))
    return -2 * (mean + std * torch.special.ndtri(numbers.clamp(edge, 1 - edge)))


# The logarithm of alpha^2 over time: integrals of the rates of noise that the schedules of 1,000 steps have. Linear, quadratic
# and sigmoid: the rate is 0.1 at first and 20 at the end.
LEAST_RATE, MOST_RATE = 0.1, 20.0


def linear(time: Tensor) -> Tensor:
    """Ho et al. 2020."""
    return -(LEAST_RATE * time + (MOST_RATE - LEAST_RATE) * time**2 / 2)


def quadratic(time: Tensor) -> Tensor:
    """The rate's root is linear."""
    first, last = math.sqrt(LEAST_RATE), math.sqrt(MOST_RATE)
    return -((first + (last - first) * time) ** 3 - first**3) / (3 * (last - first))


def sigmoid(time: Tensor) -> Tensor:
    """The rate rises as a sigmoid from -6 to 6."""
    risen = F.softplus(12 * time - 6) - math.log1p(math.exp(-6))
    return -(LEAST_RATE * time + (MOST_RATE - LEAST_RATE) * risen / 12)


def jsd(time: Tensor) -> Tensor:
    """Sohl-Dickstein et al. 2015: an equal share of the sample is lost in every step, so alpha^2 = 1 - time."""
    return torch.log1p(-time)


def cosine(time: Tensor) -> Tensor:
    """Nichol and Dhariwal 2021, equation 17."""
    offset = 0.008
    return 2 * (torch.cos((time + offset) / (1 + offset) * math.pi / 2).clamp(min=1e-20).log() - _log_cosine_start(offset))


def _log_cosine_start(offset: float) -> float:
    return math.log(math.cos(offset / (1 + offset) * math.pi / 2))


SCHEDULES: Mapping[Schedule, Callable[[Tensor], Tensor]] = {
    "cosine": cosine, "linear": linear, "quadratic": quadratic, "jsd": jsd, "sigmoid": sigmoid,
}  # fmt: skip
