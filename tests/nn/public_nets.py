"""AlexNet and VGG16 as torchvision lays them out, with random weights, and LPIPS on them by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tessera.config import LpipsConfig

# torchvision's features, as documented: places of the convolutions, and of the ReLUs that LPIPS reads.
SEEN = {"alex": (1, 4, 7, 9, 11), "vgg": (3, 8, 15, 22, 29)}
WIDTHS = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512)}


def public_layout(kind: str) -> nn.Sequential:
    if kind == "alex":
        return nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2),
        )  # fmt: skip
    layers: list[nn.Module] = []
    width_in = 3
    for group in ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3):
        for width in group:
            layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.ReLU()]
            width_in = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers)


def write_lpips(folder: Path, kind: str) -> tuple[nn.Sequential, list[Tensor], LpipsConfig]:
    """A network and heads with random weights, and their files."""
    torch.manual_seed(2)
    chain, heads = public_layout(kind), [torch.rand(1, width, 1, 1) for width in WIDTHS[kind]]
    path, linear = folder / f"{kind}.safetensors", folder / f"{kind}-heads.safetensors"
    save_file(
        {f"features.{name}": value for name, value in chain.state_dict().items()} | {"classifier.1.bias": torch.zeros(3)}, path
    )
    save_file({f"lin{index}.model.1.weight": head for index, head in enumerate(heads)}, linear)
    return chain.eval(), heads, LpipsConfig(net=kind, path=str(path), heads=str(linear))  # type: ignore[arg-type]


def by_hand(chain: nn.Sequential, heads: list[Tensor], kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Zhang et al. 2018, equation 1, as the package writes it down: scaled, normalised by channel, weighed, averaged, summed."""
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1), torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)
    x, y, total = (a - shift) / scale, (b - shift) / scale, torch.zeros(len(a))
    left = list(heads)
    for place, layer in enumerate(chain[:-1]):  # a pool at the end shrinks for a classifier
        x, y = layer(x), layer(y)
        if place in SEEN[kind]:
            one, other = (z / ((z**2).sum(1, keepdim=True).sqrt() + 1e-10) for z in (x, y))
            total = total + nn.functional.conv2d((one - other) ** 2, left.pop(0)).mean((1, 2, 3))
    return total
