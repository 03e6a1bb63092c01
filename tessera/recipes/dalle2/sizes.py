"""Sizes of pictures that the networks do not take, told with those that they do: ValueErrors for the validator of the config."""

from __future__ import annotations

import math

from tessera.config import ImageDataConfig
from tessera.generators.diffusion.degrade import BlurConfig, Degradation
from tessera.generators.diffusion.dit import DiTConfig
from tessera.generators.diffusion.unet import UNetConfig
from tessera.recipes.sizes import refuse_other_proportions, sides_near


def refuse_base(model: UNetConfig | DiTConfig, data: ImageDataConfig, pixels: int) -> None:
    """Each value of what is drawn has so many pixels a side: 1, or the stride of a tokenizer."""
    asked = "base.model" if pixels == 1 else f"base.model over latents of {pixels} pixels"
    for name, side in zip(("data.resolution", "data.width"), data.size, strict=True):
        refuse_side(pixels * stride_of(model), side, name, asked)


def refuse_pair(levels: int, data: ImageDataConfig) -> None:
    """Each level but the first halves the picture, of which something has to be left."""
    if min(data.size) >> (levels - 1) == 0:
        most = min(data.size).bit_length()
        raise ValueError(
            f"embedder.model.widths has {levels} levels, and pictures of {data.size[0]} x {data.size[1]} can be halved for "
            f"{most}; name {most} widths at most"
        )


def refuse_upsampler(model: UNetConfig | DiTConfig, data: ImageDataConfig, resolution: int, crop: int | None, name: str) -> None:
    """Its pictures must have the proportions of the data, and both sides be what the network takes; so must crops."""
    refuse_other_proportions(data, resolution, f"{name}.resolution")
    height, width = data.at(resolution).size
    refuse_side(stride_of(model), height, f"{name}.resolution", f"{name}.model")
    if width % stride_of(model):
        near = sides_near(height, height_unit(data, stride_of(model)))
        raise ValueError(
            f"{name}.resolution {height} is {width} pixels wide, which cannot be divided by {stride_of(model)}, as {name}.model "
            f"asks; use {near}, or another {name}.model"
        )
    if crop is not None:
        refuse_crop(model, (height, width), crop, name)


def refuse_crop(model: UNetConfig | DiTConfig, size: tuple[int, int], crop: int, name: str) -> None:
    """Parts that the network takes, and that are parts."""
    if isinstance(model, DiTConfig):
        raise ValueError(f"{name}.crop: a dit draws the size alone that it learned from; set crop to null, or model.kind to unet")
    if crop > min(size):
        whole = f"{size[0]}" if size[0] == size[1] else f"{size[0]} x {size[1]}"
        raise ValueError(f"{name}.crop {crop} is larger than {name}.resolution {whole}; lower it, or set null")
    refuse_side(stride_of(model), crop, f"{name}.crop", f"{name}.model")


def refuse_blur(low: Degradation, small: tuple[int, int], name: str) -> None:
    """It mirrors borders, so it must not reach beyond the smaller picture."""
    if isinstance(low, BlurConfig) and low.radius >= min(small):
        raise ValueError(
            f"{name}.low reaches {low.radius} pixels to each side, and {name} sees pictures of {small[0]} x {small[1]}; "
            f"use sigmas and sample_sigma of {math.floor((min(small) - 1) * 10 / 3) / 10} at most"
        )


def height_unit(data: ImageDataConfig, stride: int) -> int:
    """Heights of which both sides can be divided are multiples of it: p k and q k, for sides of p to q."""
    p, q = (side // math.gcd(*data.size) for side in data.size)
    return p * math.lcm(stride // math.gcd(stride, p), stride // math.gcd(stride, q))


def stride_of(model: UNetConfig | DiTConfig) -> int:
    """What must divide both sides."""
    return model.stride if isinstance(model, UNetConfig) else model.patch


def refuse_side(stride: int, side: int, name: str, place: str) -> None:
    """Halvings, or patches, must come out even."""
    if side % stride:
        near = sides_near(side, stride)
        raise ValueError(f"{name} {side} cannot be divided by {stride}, as {place} asks; use {near}, or another {place}")
