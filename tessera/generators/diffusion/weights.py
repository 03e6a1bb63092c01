"""What the error of a prediction counts, by its level. Papers weigh the error of the noise or of clean; both are turned into
weights of what the network predicts."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from tessera.config import Config
from tessera.generators.diffusion.processes import Process


class PlainWeightConfig(Config):
    """All levels alike."""

    kind: Literal["none"] = "none"
    """The mean squared error of what is predicted."""


class P2WeightConfig(Config):
    """Less of what is nearly clean (Choi et al. 2022, equation 8): the noise's error over (k + SNR)^gamma."""

    kind: Literal["p2"] = "p2"
    """P2."""
    gamma: float = Field(1.0, ge=0)
    """The exponent."""
    k: float = Field(1.0, gt=0)
    """Bounds the weight of low levels."""


class MinSnrWeightConfig(Config):
    """The clean sample's error times the SNR, but no more than gamma (Hang et al. 2023, equation 8)."""

    kind: Literal["min_snr"] = "min_snr"
    """Min-SNR."""
    gamma: float = Field(5.0, gt=0)
    """The largest weight."""


class SigmoidWeightConfig(Config):
    """The noise's error times sigmoid(bias - level), over all levels alike, however they are drawn (Kingma and Gao 2023)."""

    kind: Literal["sigmoid"] = "sigmoid"
    """Sigmoid."""
    bias: float = 0.0
    """The level from which on the weight falls; lower for larger pictures."""


WeightConfig = Annotated[
    PlainWeightConfig | P2WeightConfig | MinSnrWeightConfig | SigmoidWeightConfig, Field(discriminator="kind")
]


def weights(config: WeightConfig, process: Process, level: Tensor, numbers: Tensor) -> Tensor:
    """b: of the squared error of what is predicted, at levels that were drawn by these numbers."""
    if isinstance(config, P2WeightConfig):
        return per_noise(process, level) * (config.k + level.exp()) ** -config.gamma
    if isinstance(config, MinSnrWeightConfig):
        return per_clean(process, level) * level.exp().clamp(max=config.gamma)
    if isinstance(config, SigmoidWeightConfig):
        return per_noise(process, level) * torch.sigmoid(config.bias - level) / density(process, numbers)
    return torch.ones_like(level)


def per_clean(process: Process, level: Tensor) -> Tensor:
    """The squared error of clean by that of what is predicted: x is given, so one error makes the other."""
    return (process.family.sigma(level) / determinant(process, level)) ** 2


def per_noise(process: Process, level: Tensor) -> Tensor:
    """The squared error of noise by that of what is predicted."""
    return (process.family.alpha(level) / determinant(process, level)) ** 2


def determinant(process: Process, level: Tensor) -> Tensor:
    """Of the two sums, x and what is predicted."""
    clean_share, noise_share = process.shares(level)
    return noise_share * process.family.alpha(level) - clean_share * process.family.sigma(level)


def density(process: Process, numbers: Tensor) -> Tensor:
    """b: how densely levels are trained where these numbers draw them; infinite where many are drawn as one."""
    slope: Tensor = torch.func.jvp(process.trained, (numbers,), (torch.ones_like(numbers),))[1]
    return -1 / slope
