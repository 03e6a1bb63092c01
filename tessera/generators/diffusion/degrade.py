"""The smaller picture that an upsampler sees: of the right size, spoiled to a known degree as a drawn one would be, enlarged.

Pictures are scaled with antialiasing, down and up. What is random is a function of seed, step and place in the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from tessera.config import Config
from tessera.randomness import mix, normal, uniform

LEVEL, NOISE, PLACE = range(31, 34)  # streams of random numbers
TINY = 1e-3  # pixels: the deviation of a blur that changes nothing


class NoiseConfig(Config):
    """Noise on the small picture, its level told to the network (Ho et al. 2021; Saharia et al. 2022)."""

    kind: Literal["noise"] = "noise"
    """The kind of degradation."""
    levels: tuple[float, float] = (0.0, 8.0)
    """Log-SNR in training, drawn evenly between the two: 0 is as much noise as picture, 8 hardly any."""
    sample_level: float = 3.0
    """Log-SNR of the noise that is put on a drawn picture before it is enlarged."""

    @model_validator(mode="after")
    def _order(self) -> NoiseConfig:
        if self.levels[0] > self.levels[1]:
            raise ValueError(f"levels {list(self.levels)}: the lower one comes first")
        return self


class BlurConfig(Config):
    """A Gaussian blur of the small picture, its deviation told to the network (Ho et al. 2021)."""

    kind: Literal["blur"] = "blur"
    """The kind of degradation."""
    sigmas: tuple[float, float] = (0.4, 0.8)
    """Deviation in training, drawn evenly between the two, in pixels of the small picture."""
    prob: float = Field(0.5, ge=0, le=1)
    """Share of samples that are blurred."""
    sample_sigma: float = Field(0.0, ge=0)
    """Deviation of the blur of a drawn picture before it is enlarged; 0: none."""

    @model_validator(mode="after")
    def _order(self) -> BlurConfig:
        if not 0 < self.sigmas[0] <= self.sigmas[1]:
            raise ValueError(f"sigmas {list(self.sigmas)} must be above 0, the lower one first")
        return self

    @property
    def radius(self) -> int:
        """Pixels that a blur reaches to each side: the same for all, so that shapes do not vary."""
        return max(1, math.ceil(3 * max(self.sigmas[1], self.sample_sigma)))


Degradation = Annotated[NoiseConfig | BlurConfig, Field(discriminator="kind")]


def draw_levels(config: NoiseConfig | BlurConfig, seed: int, step: int, positions: Tensor) -> Tensor:
    """b, for training: log-SNR of the noise, or in its place -2 log(sigma) of the blur, infinite without one."""
    number, chance = uniform(mix(seed, step) >> 1, positions, 2, LEVEL).unbind(1)
    low, high = config.levels if isinstance(config, NoiseConfig) else config.sigmas
    drawn = low + (high - low) * number
    return drawn if isinstance(config, NoiseConfig) else torch.where(chance < config.prob, level_of_blur(drawn), math.inf)


def sample_levels(config: NoiseConfig | BlurConfig, positions: Tensor) -> Tensor:
    """b, for drawing."""
    if isinstance(config, NoiseConfig):
        return torch.full(positions.shape, config.sample_level, device=positions.device)
    return level_of_blur(torch.full(positions.shape, config.sample_sigma, device=positions.device))


def level_of_blur(sigma: Tensor) -> Tensor:
    """On the scale of log-SNR, as noise of that deviation would have it."""
    return -2 * sigma.log()


def degrade(
    config: NoiseConfig | BlurConfig, small: Tensor, size: Sequence[int], levels: Tensor, seed: int, step: int, positions: Tensor
) -> Tensor:
    """b c h w -> b c h' w': each row spoiled to its own level, then enlarged. Not cut off at [-1, 1]: noise goes beyond."""
    if isinstance(config, BlurConfig):
        return resize(blur(small, torch.exp(-levels / 2), config.radius), size)
    noise = normal(mix(seed, step) >> 1, positions, small[0].numel(), NOISE).view(small.shape)
    return resize(add_noise(small, noise, levels), size)


def add_noise(x: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """b c h w of unit variance stay so: sqrt(sigmoid(level)) x + sqrt(sigmoid(-level)) noise has that log-SNR."""
    level = level[:, None, None, None]
    return level.sigmoid().sqrt() * x + (-level).sigmoid().sqrt() * noise


def blur(x: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """b c h w, each row by its own Gaussian, sigma b; borders are mirrored."""
    if min(x.shape[-2:]) <= radius:
        raise ValueError(
            f"pictures of {x.shape[-2]} x {x.shape[-1]} pixels are too small for a blur that reaches {radius} pixels"
        )
    places = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (places / sigma.clamp(min=TINY)[:, None]) ** 2)
    weights = (kernel / kernel.sum(1, keepdim=True)).to(x.dtype)[:, :, None, None, None].unbind(1)
    x = F.pad(x, (radius,) * 4, mode="reflect")
    for axis in (2, 3):  # sums of shifted pictures: a convolution would round to bf16 under autocast
        side = x.shape[axis] - 2 * radius
        x = torch.stack([x.narrow(axis, start, side) * weight for start, weight in enumerate(weights)]).sum(0)
    return x


def resize(x: Tensor, size: Sequence[int], limit: float | None = None) -> Tensor:
    """b c h w -> b c h' w': bicubic, its support widened when shrinking, as files are scaled. It overshoots at edges: pictures
    that are drawn or learned are cut off at the limit 1, latents have none."""
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    resized = F.interpolate(x, size=tuple(size), mode="bicubic", antialias=True)
    return resized if limit is None else resized.clamp(-limit, limit)


def draw_places(seed: int, step: int, positions: Tensor, full: Sequence[int], size: Sequence[int]) -> Tensor:
    """b 2: the upper left corner of a part of that size, anywhere in the whole."""
    if size[0] > full[0] or size[1] > full[1]:
        raise ValueError(f"a crop of {size[0]} x {size[1]} does not fit into pictures of {full[0]} x {full[1]}")
    numbers = uniform(mix(seed, step) >> 1, positions, 2, PLACE).double().unbind(1)
    rooms = (whole - part + 1 for whole, part in zip(full, size, strict=True))
    return torch.stack([(number * room).long() for number, room in zip(numbers, rooms, strict=True)], dim=1)


def crop(x: Tensor, places: Tensor, size: Sequence[int]) -> Tensor:
    """b c h w -> b c h' w': of each row the part whose corner is there. For target and condition alike, both at full size."""
    rows, columns = (places[:, axis, None] + torch.arange(side, device=x.device) for axis, side in enumerate(size))
    samples = torch.arange(len(x), device=x.device)[:, None, None]
    return x.movedim(1, -1)[samples, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
