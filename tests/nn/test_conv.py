"""Convolution blocks: the fast forms against the plain ones, and what initialisation promises."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.conv import Downsample, GroupNorm, ResidualBlock, Upsample, channels_last, initialise, store_channels_last


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_upsample(block: Upsample, x: Tensor) -> Tensor:
    """What the docstring says, with the enlarged input."""
    larger = F.interpolate(F.silu(block.norm(x)), scale_factor=2, mode="nearest")
    return F.conv2d(larger, block.conv.weight, block.conv.bias, padding=1)


@pytest.mark.parametrize("shape", [(2, 8, 4, 4), (1, 8, 3, 5), (3, 8, 1, 1), (1, 8, 1, 7)])
def test_upsample_is_nearest_neighbour_and_a_convolution(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    block = Upsample(8, 12).double()
    assert block.conv.bias is not None
    nn.init.normal_(block.conv.bias)
    x = noise(*shape).double().requires_grad_(True)
    made, plain = block(x), plain_upsample(block, x)
    assert made.shape == (shape[0], 12, 2 * shape[2], 2 * shape[3])
    torch.testing.assert_close(made, plain, rtol=0, atol=1e-12)
    pull = noise(*made.shape, seed=1).double()
    wanted = [x, *block.parameters()]
    fast = torch.autograd.grad((made * pull).sum(), wanted)
    slow = torch.autograd.grad((plain * pull).sum(), wanted)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_upsample_leaves_no_checkerboard() -> None:
    torch.manual_seed(0)
    block = Upsample(8, 4).double()
    inner = block(torch.ones(1, 8, 6, 6, dtype=torch.float64) * noise(1, 8, 1, 1).double())[..., 2:-2, 2:-2]
    torch.testing.assert_close(inner, inner[..., :1, :1].expand_as(inner), rtol=0, atol=1e-12)


def test_downsample_halves() -> None:
    torch.manual_seed(0)
    block = Downsample(8, 12)
    assert block(noise(2, 8, 6, 10)).shape == (2, 12, 3, 5)
    x = noise(1, 8, 4, 4)
    torch.testing.assert_close(block(x), F.conv2d(F.silu(block.norm(x)), block.conv.weight, block.conv.bias, 2, 1))


@pytest.mark.parametrize("gain", [1.0, 1.4])
@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_initialisation_keeps_the_variance_it_states(gain: float, kernel: int) -> None:
    torch.manual_seed(0)
    conv = initialise(nn.Conv2d(64, 96, kernel), gain)
    deviation = gain / math.sqrt(64 * kernel**2)
    assert conv.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert conv.weight.mean().abs() < 0.03 * deviation
    made = conv(noise(8, 64, 16, 16))
    assert made.var().item() == pytest.approx(gain**2, rel=0.08)
    assert conv.bias is not None
    assert conv.bias.abs().max() == 0


def test_a_gain_of_zero_is_zero() -> None:
    conv = initialise(nn.Conv2d(4, 4, 3), gain=0)
    assert conv.weight.abs().max() == 0
    assert initialise(nn.Conv2d(4, 4, 3, bias=False)).bias is None


@pytest.mark.parametrize("width", [4, 24, 64])
def test_a_residual_block_starts_as_the_identity_and_can_learn(width: int) -> None:
    torch.manual_seed(0)
    block, x = ResidualBlock(width), noise(2, width, 5, 3)
    made = block(x)
    assert torch.equal(made, x)
    made.square().sum().backward()
    assert block.conv2.weight.grad is not None
    assert block.conv2.weight.grad.abs().max() > 0


def test_dropout_only_in_training() -> None:
    torch.manual_seed(0)
    block, x = ResidualBlock(8, dropout=0.5), noise(1, 8, 4, 4)
    nn.init.normal_(block.conv2.weight)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_groups_of_a_norm() -> None:
    chosen = {width: GroupNorm(width).num_groups for width in (4, 8, 12, 24, 32, 48, 64, 96, 128, 192, 256, 1024, 7)}
    assert chosen == {4: 1, 8: 2, 12: 2, 24: 4, 32: 8, 48: 8, 64: 16, 96: 16, 128: 32, 192: 32, 256: 32, 1024: 32, 7: 1}
    for width, groups in chosen.items():
        assert width % groups == 0
        assert groups <= 32
        assert groups == 1 or width // groups >= 4


@pytest.mark.parametrize("size", [(5, 3), (1, 1)])
def test_the_norm_as_it_is_compiled_and_its_derivative(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    norm, x, direction = GroupNorm(24), noise(2, 24, *size), noise(2, 24, *size) * 3
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x, twin = channels_last(3 * x + 1).requires_grad_(True), (3 * x + 1).double().requires_grad_(True)

    def by_torch(y: torch.Tensor) -> torch.Tensor:
        return F.group_norm(y, norm.num_groups, norm.weight.double(), norm.bias.double(), norm.eps)

    wanted, wanted_along = torch.func.jvp(by_torch, (twin,), (direction.double(),))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    made, along = norm(x), norm.along(x, channels_last(direction))
    torch.testing.assert_close(made, wanted.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(along, wanted_along.float(), rtol=1e-3, atol=1e-4)
    assert made.is_contiguous(memory_format=torch.channels_last)
    grads = torch.autograd.grad(made.square().sum() + along.sum(), [x, norm.weight, norm.bias])
    expected = torch.autograd.grad(wanted.square().sum() + wanted_along.sum(), [twin, norm.weight, norm.bias])
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", [(5, 3), (1, 1)])
def test_the_norm_takes_scale_and_shift_into_its_line(size: tuple[int, int], compiled: bool) -> None:
    torch.manual_seed(0)
    norm, given = GroupNorm(24), [channels_last(3 * noise(2, 24, *size) + 1), noise(2, 24), noise(2, 24)]
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    ours = [*(tensor.requires_grad_(True) for tensor in given), norm.weight, norm.bias]
    x, scale, shift, weight, bias = twins = [tensor.detach().double().requires_grad_(True) for tensor in ours]
    wanted = F.group_norm(x, norm.num_groups, weight, bias, norm.eps) * (1 + scale[..., None, None]) + shift[..., None, None]
    call = torch.compile(norm, backend="aot_eager", fullgraph=True) if compiled else norm
    made, outward = call(ours[0], (ours[1], ours[2])), noise(2, 24, *size)
    torch.testing.assert_close(made, wanted.float(), rtol=1e-4, atol=1e-5)
    grads, expected = torch.autograd.grad(made, ours, outward), torch.autograd.grad(wanted, twins, outward.double())
    for found, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, right.float(), rtol=1e-3, atol=1e-3)


def test_channels_last_is_kept_from_one_convolution_to_the_next() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(ResidualBlock(16), Downsample(16, 16), ResidualBlock(16), Upsample(16, 16))
    store_channels_last(net)
    x = noise(2, 16, 8, 8)
    made = net(channels_last(x))
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in net.parameters() if p.ndim == 4)
    store_first = net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    torch.testing.assert_close(store_first(x.contiguous()), made)
