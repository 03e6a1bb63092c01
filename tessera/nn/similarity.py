"""How alike two pictures are. Pixels are in [-1, 1]; one number a picture comes back."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """b c h w, twice -> b, in decibel."""
    return decibel((x.float() - y.float()).square().flatten(1).mean(1))


def decibel(error: Tensor) -> Tensor:
    """Of mean squared errors. The range of pixel values is 2, so the peak is 4; equal pictures give 100."""
    return 10 * torch.log10(4 / error.clamp(min=4e-10))


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """Wang et al. 2004, equation 13: 11 x 11 Gaussian window of deviation 1.5, K = (0.01, 0.03), windows inside the picture."""
    window = _gaussian(x.device)
    x, y = x.float(), y.float()
    with torch.autocast(x.device.type, enabled=False), without_tf32(x.device):
        mean_x, mean_y = _blur(x, window), _blur(y, window)
        var_x, var_y = _blur(x * x, window) - mean_x**2, _blur(y * y, window) - mean_y**2
        covariance = _blur(x * y, window) - mean_x * mean_y
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    map_ = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return map_.flatten(1).mean(1)


def without_tf32(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Variances are small differences of large numbers."""
    cudnn = torch.backends.cudnn
    if device.type != "cuda" or not cudnn.enabled:
        return contextlib.nullcontext()
    return cudnn.flags(enabled=True, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False)


def _gaussian(device: torch.device) -> Tensor:
    offsets = torch.arange(-5, 6, device=device, dtype=torch.float32)
    weights = torch.exp(-offsets.square() / (2 * 1.5**2))
    return weights / weights.sum()


def _blur(x: Tensor, window: Tensor) -> Tensor:
    """Separable and the same for every channel."""
    channels = x.shape[1]
    x = F.conv2d(x, window.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return F.conv2d(x, window.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)
