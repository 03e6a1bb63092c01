"""LPIPS against its formula on plain chains of layers, and against torchmetrics with the published heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tessera.config import LpipsConfig, UserError
from tessera.nn.lpips import load_lpips
from tests.nn.public_nets import by_hand, write_lpips


@pytest.fixture(scope="module", params=["alex", "vgg"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Sequential, list[Tensor], LpipsConfig]:
    return write_lpips(tmp_path_factory.mktemp(request.param), request.param)


def pairs(num: int = 3, size: int = 40) -> tuple[Tensor, Tensor]:
    a, b = torch.rand(2, num, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return a, b


@torch.no_grad()
def test_the_distance_is_the_formula(made: tuple[nn.Sequential, list[Tensor], LpipsConfig]) -> None:
    chain, heads, config = made
    net, (a, b) = load_lpips(config), pairs()
    found = net(a, b)
    torch.testing.assert_close(found, by_hand(chain, heads, config.net, a, b), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found, net(b, a))
    assert net(a, a).tolist() == [0, 0, 0]
    torch.testing.assert_close(net(a[:, :1], b[:, :1]), net(a[:, :1].repeat(1, 3, 1, 1), b[:, :1].repeat(1, 3, 1, 1)))
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())


@torch.no_grad()
def test_the_smallest_picture_is_seen_and_a_smaller_one_is_not(made: tuple[nn.Sequential, list[Tensor], LpipsConfig]) -> None:
    net = load_lpips(made[2])
    assert net(*pairs(1, net.least)).isfinite().all()
    with pytest.raises(RuntimeError, match="too small"):
        net(*pairs(1, net.least - 1))


@torch.no_grad()
def test_the_distance_agrees_with_torchmetrics(
    made: tuple[nn.Sequential, list[Tensor], LpipsConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the published heads, which it brings; the network is random."""
    theirs: Any = pytest.importorskip("torchmetrics.functional.image.lpips")
    chain, _, config = made
    monkeypatch.setattr(theirs, "_get_tv_model_features", lambda net, pretrained=False: chain)
    oracle = theirs._LPIPS(net=config.net)
    heads = torch.load(Path(theirs.__file__).parent / "lpips_models" / f"{config.net}.pth", map_location="cpu", weights_only=True)
    save_file(heads, tmp_path / "heads.safetensors")
    net, (a, b) = load_lpips(config.model_copy(update={"heads": str(tmp_path / "heads.safetensors")})), pairs()
    torch.testing.assert_close(net(a, b), oracle(a, b).flatten(), rtol=1e-3, atol=1e-6)


def test_other_files_are_refused(tmp_path: Path) -> None:
    _, _, config = write_lpips(tmp_path, "alex")

    def refused(told: str, **changes: str) -> None:
        with pytest.raises(UserError, match=told):
            load_lpips(config.model_copy(update=changes))

    refused(
        r"evaluate\.lpips\.path: there is no file .*gone; name an AlexNet as safetensors, or set evaluate\.lpips=null",
        path="gone",
    )
    refused(r"evaluate\.lpips\.heads: there is no file", heads="gone")
    refused(r"is no VGG16 without batch norm: it lacks 22 of 26 tensors", net="vgg")
    (tmp_path / "alex.pth").write_bytes(b"\x80\x04")
    refused(r"evaluate\.lpips\.heads: .*is a pickle, which can run code; convert it once", heads=str(tmp_path / "alex.pth"))
    heads = load_file(config.heads)
    save_file({**heads, "lin2.model.1.weight": torch.zeros(1, 256, 1, 1)}, tmp_path / "vgg-heads.safetensors")
    refused(
        r"has lin2.model.1.weight shaped \[1, 256, 1, 1\]; .* of alex: \[1, 384, 1, 1\]",
        heads=str(tmp_path / "vgg-heads.safetensors"),
    )
    save_file({"lin0.model.1.weight": heads["lin0.model.1.weight"]}, tmp_path / "few.safetensors")
    refused(r"has no lin1.model.1.weight; expected lin0.model.1.weight to lin4", heads=str(tmp_path / "few.safetensors"))
    tensors = load_file(config.path)
    save_file({**tensors, "features.3.weight": torch.zeros(2)}, tmp_path / "shape.safetensors")
    refused(r"is no AlexNet: features.3.weight has the shape \[2\]", path=str(tmp_path / "shape.safetensors"))
