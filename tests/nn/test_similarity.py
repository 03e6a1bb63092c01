"""PSNR and SSIM against loops over windows in NumPy, and by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tessera.nn.similarity import psnr, ssim


def pictures(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(*shape, generator=rng) * 2 - 1
    return x, (x + 0.3 * torch.randn(*shape, generator=rng)).clamp(-1, 1)


def ssim_by_loops(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    """One picture, c h w: every window by itself, with weighted moments."""
    offsets = np.arange(11) - 5
    line = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights = np.outer(line, line) / line.sum() ** 2
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    values = []
    for channel in range(x.shape[0]):
        for top in range(x.shape[1] - 10):
            for left in range(x.shape[2] - 10):
                a = x[channel, top : top + 11, left : left + 11]
                b = y[channel, top : top + 11, left : left + 11]
                mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
                var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
                cov = (weights * (a - mean_a) * (b - mean_b)).sum()
                values.append((2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    return float(np.mean(values))


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (1, 1, 11, 11), (2, 4, 13, 19)])
def test_ssim_is_the_mean_over_windows(shape: tuple[int, ...]) -> None:
    x, y = pictures(*shape)
    by_hand = [ssim_by_loops(a.double().numpy(), b.double().numpy()) for a, b in zip(x, y, strict=True)]
    assert ssim(x, y).tolist() == pytest.approx(by_hand, abs=2e-5)
    assert ssim(y, x).tolist() == pytest.approx(by_hand, abs=2e-5)


def test_ssim_of_flat_pictures_by_hand() -> None:
    x, y = torch.full((1, 3, 12, 12), 0.5), torch.full((1, 3, 12, 12), -0.25)
    c1 = (0.01 * 2) ** 2
    assert ssim(x, y).item() == pytest.approx((2 * 0.5 * -0.25 + c1) / (0.5**2 + 0.25**2 + c1), abs=1e-5)


def test_equal_pictures() -> None:
    x, _ = pictures(3, 3, 16, 16)
    assert ssim(x, x).tolist() == pytest.approx([1, 1, 1], abs=1e-6)
    assert psnr(x, x).tolist() == pytest.approx([100, 100, 100])


def test_psnr_of_a_constant_shift_by_hand() -> None:
    x = torch.zeros(2, 3, 8, 8)
    shift = torch.tensor([0.2, 2.0]).view(2, 1, 1, 1)
    assert psnr(x, x + shift).tolist() == pytest.approx([20, 0], abs=1e-4)  # range 2: 20 log10(2 / shift)


def test_psnr_of_bytes_is_the_usual_one() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 5, 3, 9, 7))
    usual = [10 * math.log10(255**2 / np.mean((p - q) ** 2.0)) for p, q in zip(a, b, strict=True)]
    assert psnr(torch.from_numpy(a) / 127.5 - 1, torch.from_numpy(b) / 127.5 - 1).tolist() == pytest.approx(usual, abs=1e-4)


def test_each_picture_by_itself_and_in_full_precision() -> None:
    x, y = pictures(4, 3, 16, 16)
    for measure in (psnr, ssim):
        together = measure(x, y)
        assert together.shape == (4,)
        torch.testing.assert_close(torch.cat([measure(a[None], b[None]) for a, b in zip(x, y, strict=True)]), together)
        with torch.autocast("cpu", torch.bfloat16):
            inside = measure(x, y)
        assert torch.equal(inside, together)
