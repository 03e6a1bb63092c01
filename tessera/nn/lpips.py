"""LPIPS (Zhang et al. 2018): how differently AlexNet or VGG16 see two pictures, channels weighed as people judge. All weights
come from the user's files: the network's as torchvision has it, and the linear heads of the authors' package (version 0.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.config import LpipsConfig, UserError
from tessera.nn.perceptual import VGG16Distance, fill, load_vgg16, read_tensors

KEY = "evaluate.lpips"  # where a config names the files
LEAST = {"alex": 31, "vgg": 16}  # pixels of the shorter side, so that something is left at the last layer
PLACES = (0, 3, 6, 8, 10)  # the convolutions' places in torchvision's alexnet().features


class AlexNet(nn.Module):
    """The five convolutions of Krizhevsky 2014, "one weird trick". It starts with random weights."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(3, 64, 11, stride=4, padding=2),
                nn.Conv2d(64, 192, 5, padding=2),
                nn.Conv2d(192, 384, 3, padding=1),
                nn.Conv2d(384, 256, 3, padding=1),
                nn.Conv2d(256, 256, 3, padding=1),
            ]
        )
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1), persistent=False)

    def features(self, x: Tensor) -> list[Tensor]:
        """b c h w in [-1, 1] -> a map of each convolution; grey is repeated, alpha left out."""
        x, found = (x[:, :3].expand(-1, 3, -1, -1) - self.shift) / self.scale, []
        for index, layer in enumerate(self.layers):
            x = F.max_pool2d(x, 3, 2) if index in (1, 2) else x
            x = F.relu(layer(x))
            found.append(x)
        return found


class Lpips(nn.Module):
    """Two pictures -> their distance."""

    def __init__(self, kind: Literal["alex", "vgg"], net: AlexNet | VGG16Distance, heads: list[Tensor]) -> None:
        super().__init__()
        self.kind, self.net = kind, net
        self.heads = nn.ParameterList(heads)  # 1 c 1 1 of each map

    @property
    def least(self) -> int:
        """Pixels that the shorter side of a picture must have."""
        return LEAST[self.kind]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """b c h w in [-1, 1], twice -> b: sum over maps of the mean over places of the weighed squares (equation 1)."""
        maps = zip(self.net.features(a), self.net.features(b), self.heads, strict=True)
        found = [((F.normalize(x, dim=1) - F.normalize(y, dim=1)).square() * head).sum(1).mean((1, 2)) for x, y, head in maps]
        return torch.stack(found).sum(0)


def load_lpips(config: LpipsConfig) -> Lpips:
    """From the files that a config names, both safetensors."""
    kind, path, heads = config.net, Path(config.path), Path(config.heads)
    net = load_alexnet(path) if kind == "alex" else load_vgg16(path, f"{KEY}.path")
    widths = (64, 192, 384, 256, 256) if kind == "alex" else (64, 128, 256, 512, 512)
    found = read_tensors(heads, f"{KEY}.heads", "the heads of LPIPS")
    names = [f"lin{index}.model.1.weight" for index in range(len(widths))]
    for name, width in zip(names, widths, strict=True):
        shape = list(found[name].shape) if name in found else None
        if shape != [1, width, 1, 1]:
            has = f"no {name}" if shape is None else f"{name} shaped {shape}"
            raise UserError(
                f"{KEY}.heads: {heads} has {has}; expected {names[0]} to {names[-1]} of {kind}: [1, {width}, 1, 1] here"
            )
    return Lpips(kind, net, [found[name].float() for name in names]).eval().requires_grad_(False)


def load_alexnet(path: Path) -> AlexNet:
    """From safetensors, by torchvision's names (features.0.weight); others, as of the classifier, are passed over."""
    net = AlexNet()
    public = [f"features.{place}.{kind}" for place in PLACES for kind in ("weight", "bias")]
    fill(net, read_tensors(path, f"{KEY}.path", "an AlexNet"), public, f"{path} is no AlexNet")
    return net
