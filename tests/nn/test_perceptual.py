"""The VGG16 distance: the public network's shapes, frozen, and a distance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.perceptual import VGG16Distance

# Convolutions of torchvision's vgg16().features, in order: (out, in).
PUBLIC = [(64, 3), (64, 64), (128, 64), (128, 128), (256, 128), (256, 256), (256, 256)]
PUBLIC += [(512, 256), (512, 512), (512, 512), (512, 512), (512, 512), (512, 512)]


@pytest.fixture(scope="module")
def net() -> VGG16Distance:
    torch.manual_seed(0)
    return VGG16Distance().eval().requires_grad_(False)


def pictures(num: int, channels: int = 3, size: int = 16) -> Tensor:
    return torch.rand(num, channels, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_layers_are_those_of_the_public_network(net: VGG16Distance) -> None:
    convs = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert [tuple(conv.weight.shape) for conv in convs] == [(a, b, 3, 3) for a, b in PUBLIC]
    assert sum(p.numel() for p in net.parameters()) == 14_714_688  # 138,357,544 less the classifier's 123,642,856
    assert not [name for name in net.state_dict() if "weight" not in name and "bias" not in name]


def test_features_are_the_public_networks(net: VGG16Distance) -> None:
    """relu1_2, relu2_2, relu3_3, relu4_3, relu5_3 of a plain chain that shares the weights."""
    x = pictures(1, size=32)
    chain = (x + 1) / 2
    chain = (chain - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    convs = iter(module for module in net.modules() if isinstance(module, nn.Conv2d))
    found = net.features(x)
    for index, num in enumerate((2, 2, 3, 3, 3)):
        for _ in range(num):
            chain = F.relu(next(convs)(chain))
        assert found[index].shape == (1, (64, 128, 256, 512, 512)[index], 32 >> index, 32 >> index)
        torch.testing.assert_close(found[index], chain)
        chain = F.max_pool2d(chain, 2)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_equal_pictures_have_no_distance(net: VGG16Distance, channels: int) -> None:
    x = pictures(2, channels)
    assert net(x, x).tolist() == [0, 0]
    others = net(x.flip(0), x)
    assert others.shape == (2,)
    assert bool((others > 0).all())


def test_grey_is_repeated_and_alpha_left_out(net: VGG16Distance) -> None:
    a, b = pictures(2), pictures(2).roll(3, -1)
    alpha = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(net(torch.cat([a, alpha], 1), torch.cat([b, 1 - alpha], 1)), net(a, b))
    grey_a, grey_b = a[:, :1], b[:, :1]
    torch.testing.assert_close(net(grey_a, grey_b), net(grey_a.repeat(1, 3, 1, 1), grey_b.repeat(1, 3, 1, 1)))


def test_gradients_flow_into_the_made_picture_only(net: VGG16Distance) -> None:
    made, real = pictures(1).requires_grad_(True), pictures(1).roll(1, -1).requires_grad_(True)
    net(made, real).sum().backward()
    assert made.grad is not None
    assert made.grad.abs().max() > 0
    assert real.grad is None
    assert all(p.grad is None for p in net.parameters())


def test_the_distance_of_a_picture_does_not_depend_on_its_batch(net: VGG16Distance) -> None:
    a, b = pictures(3), pictures(3).roll(2, -1)
    torch.testing.assert_close(torch.cat([net(x[None], y[None]) for x, y in zip(a, b, strict=True)]), net(a, b))
