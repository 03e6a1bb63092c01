"""One algebra for all kinds of diffusion: x = alpha * clean + sigma * noise, and the level, log(alpha^2 / sigma^2), says how much
of each there is.

A level may be infinite: -inf is noise alone, +inf the clean sample. What a network predicts is a sum of clean and noise too, so
the two sums are solved for whatever is wanted. Functions take levels of any shape; `aligned` brings those of a batch to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

Prediction = Literal["velocity", "noise", "clean", "v", "edm"]


class Family(ABC):
    """How large clean and noise are at a level."""

    @abstractmethod
    def alpha(self, level: Tensor) -> Tensor:
        """Of clean."""

    @abstractmethod
    def sigma(self, level: Tensor) -> Tensor:
        """Of noise."""

    def straight(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, time): with clean and noise fixed, x / scale moves on a straight line, from clean at time 0 to noise at 1."""
        return self.alpha(level) + self.sigma(level), torch.sigmoid(-level / 2)

    def noised(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """x at levels b."""
        level = aligned(level, clean)
        return self.alpha(level) * clean + self.sigma(level) * noise

    def noisier(self, level: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(a, s): a * x + s * fresh noise takes x from a level down to another, as if it had been noised so at once."""
        scale = self.alpha(target) / self.alpha(level)
        return scale, self.sigma(target) * torch.sqrt(-torch.expm1(target - level))


class Straight(Family):
    """Rectified flow (Liu et al. 2022): alpha + sigma = 1, and sigma is the time."""

    def alpha(self, level: Tensor) -> Tensor:
        return torch.sigmoid(level / 2)

    def sigma(self, level: Tensor) -> Tensor:
        return torch.sigmoid(-level / 2)


class Preserving(Family):
    """Variance preserving (Ho et al. 2020): alpha^2 + sigma^2 = 1."""

    def alpha(self, level: Tensor) -> Tensor:
        return torch.sigmoid(level).sqrt()

    def sigma(self, level: Tensor) -> Tensor:
        return torch.sigmoid(-level).sqrt()


class Exploding(Family):
    """Noise on top of the sample (Karras et al. 2022): alpha = 1. Has no level -inf."""

    def alpha(self, level: Tensor) -> Tensor:
        return torch.ones_like(level)

    def sigma(self, level: Tensor) -> Tensor:
        return torch.exp(-level / 2)

    def straight(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """As it is, on and on: time is sigma."""
        return self.alpha(level), self.sigma(level)


def shares(prediction: Prediction, family: Family, level: Tensor, data_std: float = 1.0) -> tuple[Tensor, Tensor]:
    """(u, w): the network predicts u * clean + w * noise."""
    zero, one = torch.zeros_like(level), torch.ones_like(level)
    if prediction == "velocity":
        return -one, one
    if prediction == "noise":
        return zero, one
    if prediction == "clean":
        return one, zero
    sigma = family.sigma(level)
    if prediction == "v":  # Salimans and Ho 2022, section 4
        return -sigma, family.alpha(level)
    # Karras et al. 2022, equation 8: (clean - c_skip x) / c_out with alpha = 1
    size = torch.sqrt(sigma**2 + data_std**2)
    return sigma / (data_std * size), -data_std / size


def solved(
    prediction: Prediction, family: Family, x: Tensor, output: Tensor, level: Tensor, data_std: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(clean, noise) of x and what a network made of it, at levels b.

    Exact wherever it can be known: noise tells nothing of clean at level -inf, nor clean of noise at +inf.
    """
    level = aligned(level, x)
    clean_share, noise_share = shares(prediction, family, level, data_std)
    alpha, sigma = family.alpha(level), family.sigma(level)
    determinant = noise_share * alpha - clean_share * sigma
    clean = output if prediction == "clean" else (noise_share * x - sigma * output) / determinant
    noise = output if prediction == "noise" else (alpha * output - clean_share * x) / determinant
    return clean, noise


def step_back(family: Family, level: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, s): a cleaner x, given x and clean, is a * x + b * clean + s * noise (Kingma et al. 2021, appendix A.4)."""
    gained = -torch.expm1(level - target)  # of the SNR, how much is new
    sigma, kept = family.sigma(target), torch.exp((level - target) / 2)
    return sigma / family.sigma(level) * kept, family.alpha(target) * gained, sigma * gained.sqrt()


def widening(family: Family, level: Tensor, target: Tensor) -> Tensor:
    """Logarithm of the largest variance of a step back, that of the noise which the step takes away, by the least, that of
    `step_back`."""
    return 2 * (family.sigma(level).log() - family.sigma(target).log())


def aligned(level: Tensor, x: Tensor) -> Tensor:
    """b -> b 1 ..., beside x."""
    return level.view(-1, *[1] * (x.ndim - 1))
