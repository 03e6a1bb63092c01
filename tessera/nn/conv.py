"""Convolution blocks of the tokenizers: residual block, halving, doubling. Pictures are b c h w, channels last in memory."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def initialise(conv: nn.Conv2d, gain: float = 1.0) -> nn.Conv2d:
    """Normal with deviation gain / sqrt(fan in), biases 0: an input of unit variance leaves with variance gain^2."""
    fan_in = conv.weight[0].numel()
    nn.init.normal_(conv.weight, std=gain / math.sqrt(fan_in)) if gain else nn.init.zeros_(conv.weight)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


class GroupNorm(nn.GroupNorm):
    """At most 32 groups, of at least 4 channels where the width allows.

    torch's own kernel for GPUs copies channels-last pictures to the other layout and back. When compiled, the same norm is
    written as a line for each channel, whose slope and height come from that channel's own mean and variance. So every sum over
    pixels, in the backward pass, too, is of one channel: neighbours in memory are summed side by side, in one reading for all of
    them, and what surrounds the line becomes one kernel with it.
    """

    def __init__(self, width: int) -> None:
        groups = math.gcd(32, width)
        while groups > 1 and width // groups < 4:
            groups //= 2
        super().__init__(groups, width)

    def forward(self, x: Tensor, change: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """b c h w -> b c h w; with a scale and a shift, b c each, then times 1 + scale, plus shift: a line takes both in."""
        if not torch.compiler.is_compiling():
            normal = super().forward(x)
            return normal if change is None else normal * (1 + across(change[0])) + across(change[1])
        slope, height = Line.apply(x, self.weight, self.bias, self.num_groups, self.eps)
        if change is not None:
            scale, shift = change
            slope, height = slope * (1 + scale), height * (1 + scale) + shift
        return (x.float() * across(slope) + across(height)).to(x.dtype)

    def along(self, x: Tensor, direction: Tensor) -> Tensor:
        """Derivative of the output at x along a direction; with z the standardised x and r its inverse deviation,
        r (d - mean(d) - z mean(z d)), means over each group."""
        standard, inverse_deviation = self.standardise(x)
        d = self.group(direction)
        d = d - d.mean((1, 3), keepdim=True) - standard * (standard * d).mean((1, 3), keepdim=True)
        return self.ungroup(d * inverse_deviation, x) * self.weight.view(-1, 1, 1)

    def standardise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Zero mean and unit deviation over each group: b n g k, and the inverse deviation, b 1 g 1."""
        x = self.group(x)
        variance, mean = torch.var_mean(x, (1, 3), correction=0, keepdim=True)
        inverse_deviation = torch.rsqrt(variance + self.eps)
        return (x - mean) * inverse_deviation, inverse_deviation

    def group(self, x: Tensor) -> Tensor:
        """b (g k) h w -> b (h w) g k in fp32; a view of channels-last pictures."""
        return rearrange(x.float(), "b (g k) h w -> b (h w) g k", g=self.num_groups)

    def ungroup(self, x: Tensor, like: Tensor) -> Tensor:
        """b (h w) g k -> b (g k) h w, in the given picture's kind of number."""
        return rearrange(x, "b (h w) g k -> b (g k) h w", w=like.shape[-1]).to(like.dtype)


class Line(torch.autograd.Function):
    """Slope and height, b c in fp32, of each channel's line. A group's variance is the mean of its channels' own, and of how far
    their means lie apart.

    Backwards it is a line again: what a group's mean and variance make of one pixel's change depends on that pixel's value alone.
    So beside the sums of slope and height, which the line itself brings, nothing is summed over pixels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float) -> tuple[Tensor, Tensor]:
        """x b c h w"""
        variances, means = torch.var_mean(x.float(), (2, 3), correction=0)
        variance, mean = (found.unflatten(1, (num_groups, -1)) for found in (variances, means))
        center = mean.mean(2, keepdim=True)
        inverse_deviation = torch.rsqrt((variance + (mean - center).square()).mean(2, keepdim=True) + eps)
        slope = inverse_deviation * weight.view(num_groups, -1)
        ctx.save_for_backward(x, weight, center, inverse_deviation)
        return slope.flatten(1), (bias.view(num_groups, -1) - center * slope).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, height: Tensor) -> tuple[Tensor | None, ...]:
        """With r the inverse deviation, m the mean and s the number of values in a group: slope = r weight, height = bias -
        m r weight, dm/dx = 1 / s, dr/dx = -r^3 (x - m) / s."""
        x, weight, center, inverse_deviation = ctx.saved_tensors
        groups, num = center.shape[1], x[0].numel() // center.shape[1]
        slope, height = (given.unflatten(1, (groups, -1)) for given in (slope, height))
        by_deviation, weights = slope - center * height, weight.view(groups, -1)
        rise = -(inverse_deviation**3) * (weights * by_deviation).sum(2, keepdim=True) / num
        start = -inverse_deviation * (weights * height).sum(2, keepdim=True) / num - rise * center
        rise, start = (across(found.expand_as(slope).flatten(1)) for found in (rise, start))
        of_weight = (inverse_deviation * by_deviation).sum(0).flatten()
        return (x.float() * rise + start).to(x.dtype), of_weight, height.sum(0).flatten(), None, None


def across(channels: Tensor) -> Tensor:
    """b c -> b c 1 1, for all pixels."""
    return channels[:, :, None, None]


class ResidualBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))). The second convolution starts at 0, so the block starts as the identity."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = GroupNorm(width), GroupNorm(width)
        self.conv1 = initialise(nn.Conv2d(width, width, 3, padding=1))
        self.conv2 = initialise(nn.Conv2d(width, width, 3, padding=1), gain=0)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """b c h w -> b c h w"""
        h = self.conv1(F.silu(self.norm1(x)))
        h = F.dropout(F.silu(self.norm2(h)), self.dropout, self.training)
        return x + self.conv2(h)


class Downsample(nn.Module):
    """Halves height and width: norm, silu, 4 x 4 convolution of stride 2 (even, so that no pixel is off centre)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.norm = GroupNorm(width_in)
        self.conv = initialise(nn.Conv2d(width_in, width_out, 4, stride=2, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """b c h w -> b c' h/2 w/2"""
        return self.conv(F.silu(self.norm(x)))


class Upsample(nn.Module):
    """Doubles height and width: norm, silu, nearest neighbour, 3 x 3 convolution; no checkerboard.

    The last two are computed as one transposed convolution of stride 2. Doubling pixels is a 2 x 2 box, so its kernel is
    the 3 x 3 kernel convolved with that box: 4 x 4, the same numbers out, 4 products a pixel instead of 9, no enlarged input.
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.norm = GroupNorm(width_in)
        self.conv = initialise(nn.Conv2d(width_in, width_out, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """b c h w -> b c' 2h 2w"""
        return F.conv_transpose2d(F.silu(self.norm(x)), self.kernel(), self.conv.bias, stride=2, padding=1)

    def kernel(self) -> Tensor:
        """in out 4 4. A transposed convolution flips its kernel, a convolution does not: hence the flip."""
        flipped = self.conv.weight.transpose(0, 1).flip(2, 3)
        return (
            F.pad(flipped, (0, 1, 0, 1))
            + F.pad(flipped, (1, 0, 0, 1))
            + F.pad(flipped, (0, 1, 1, 0))
            + F.pad(flipped, (1, 0, 1, 0))
        )


def store_channels_last(module: nn.Module) -> None:
    """Kernels in the same layout, so that the pictures' layout is kept from one convolution to the next."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotations lack it


def channels_last(x: Tensor) -> Tensor:
    """The memory layout in which convolutions on tensor cores need no transposes."""
    return x.contiguous(memory_format=torch.channels_last)
