"""The VGG16 distance: the public network's shapes, frozen, and a distance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tessera.config import UserError
from tessera.nn.perceptual import PerceptualConfig, VGG16Distance, load_vgg16
from tessera.pipeline import resolve
from tessera.recipes import RECIPES
from tests.nn.public_nets import public_layout

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


# ---- weights from a file


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Sequential, Path]:
    """A network with random weights and its file by torchvision's names, classifier included."""
    torch.manual_seed(1)
    chain, path = public_layout("vgg"), tmp_path_factory.mktemp("vgg") / "vgg16.safetensors"
    tensors = {f"features.{name}": value for name, value in chain.state_dict().items()}
    save_file({**tensors, "classifier.0.bias": torch.zeros(7)}, path)
    return chain, path


def test_a_file_with_public_names_gives_the_public_features(public: tuple[nn.Sequential, Path]) -> None:
    chain, path = public
    net, x = load_vgg16(path), pictures(1, size=32)
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())
    seen = ((x + 1) / 2 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    found = iter(net.features(x))
    for place, layer in enumerate(chain):
        seen = layer(seen)
        if place in (3, 8, 15, 22, 29):  # relu1_2, relu2_2, relu3_3, relu4_3, relu5_3
            torch.testing.assert_close(next(found), seen, rtol=1e-3, atol=1e-5)


def test_a_file_with_our_own_names(public: tuple[nn.Sequential, Path], tmp_path: Path) -> None:
    net = load_vgg16(public[1])
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, tmp_path / "own.safetensors")
    again = load_vgg16(tmp_path / "own.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["vgg16.pth", "vgg16.pt", "vgg16.bin"])
def test_nothing_pickled_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match=r"is a pickle, which can run code; convert it once: python -c .*save_file"):
        load_vgg16(tmp_path / name)


def test_what_is_no_vgg16_is_refused(public: tuple[nn.Sequential, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*gone.safetensors; name a VGG16 as safetensors, or set"):
        load_vgg16(tmp_path / "gone.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_vgg16(tmp_path / "text.safetensors")
    tensors = load_file(public[1])
    save_file({"conv1.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"lacks 26 of 26 tensors, the first features.0.weight; found conv1.weight; expected"):
        load_vgg16(tmp_path / "other.safetensors")
    save_file({name: value for name, value in tensors.items() if name != "features.28.bias"}, tmp_path / "short.safetensors")
    with pytest.raises(UserError, match=r"lacks 1 of 26 tensors, the first features.28.bias"):
        load_vgg16(tmp_path / "short.safetensors")
    save_file({**tensors, "features.5.weight": torch.zeros(64)}, tmp_path / "shape.safetensors")
    with pytest.raises(UserError, match=r"features.5.weight has the shape \[64\]; expected \[128, 64, 3, 3\]"):
        load_vgg16(tmp_path / "shape.safetensors")


def test_the_path_is_kept_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert PerceptualConfig(path=Path("vgg16.safetensors")).path == tmp_path / "vgg16.safetensors"


def test_the_recipe_reads_the_file_when_it_builds(public: tuple[nn.Sequential, Path], tmp_path: Path) -> None:
    start = resolve("muse", preset="tiny", sets=[f"tokenizer.loss.perceptual={{path: {public[1]}, weight: 0.5}}"])
    stage = RECIPES["muse"].steps(start)[0].build()
    assert set(stage.frozen) == {"perceptual"}
    assert start.tokenizer.loss.perceptual.weight == 0.5
    broken = resolve("muse", preset="tiny", sets=[f"tokenizer.loss.perceptual.path={tmp_path}/gone.safetensors"])
    with pytest.raises(UserError, match="there is no file"):
        RECIPES["muse"].steps(broken)[0].build()
