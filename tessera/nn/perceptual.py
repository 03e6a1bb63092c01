"""Perceptual distance: how differently a fixed VGG16 sees two pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.conv import channels_last, store_channels_last

PLAN = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # widths; a max-pool between groups


class VGG16Distance(nn.Module):
    """Mean squared distance of channel-normalised features after each of the five groups (Zhang et al. 2018, without
    learned channel weights). Simonyan and Zisserman's network D. It starts with random weights."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList()
        width_in = 3
        for widths in PLAN:
            self.groups.append(
                nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip((width_in, *widths), widths, strict=False))
            )
            width_in = widths[-1]
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1), persistent=False)
        store_channels_last(self)

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        """b c h w in [-1, 1], twice -> b. Gradients flow into the first only; grey is repeated, alpha left out."""
        with torch.no_grad():
            target = self.features(real)
        distances = [
            (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square().sum(1).flatten(1).mean(1)
            for a, b in zip(self.features(made), target, strict=True)
        ]
        return torch.stack(distances).mean(0)

    def features(self, x: Tensor) -> list[Tensor]:
        """Five maps, each half the size of the one before."""
        x = x[:, :3].expand(-1, 3, -1, -1)
        x = ((x + 1) / 2 - self.mean) / self.deviation
        found = []
        for index, group in enumerate(self.groups):
            x = F.max_pool2d(x, 2) if index else channels_last(x)
            assert isinstance(group, nn.ModuleList)
            for conv in group:
                x = F.relu(conv(x))
            found.append(x.float())
        return found
