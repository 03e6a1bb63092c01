"""Perceptual distance: how differently a fixed VGG16 sees two pictures. Its weights come from the user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tessera.config import Config, UserError
from tessera.nn.conv import channels_last, store_channels_last

PLAN = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # widths; a max-pool between groups

KEY = "tokenizer.loss.perceptual"  # where a config names the file
PUBLIC = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # the convolutions' places in torchvision's vgg16().features


class PerceptualConfig(Config):
    """Perceptual distance by a VGG16 from a local file."""

    path: Path
    """vgg16.safetensors with torchvision's names, relative to where the command runs. A run saves it absolute."""
    weight: float = Field(1.0, gt=0)
    """Weight of the term."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.absolute()


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


def load_vgg16(path: Path, key: str = f"{KEY}.path") -> VGG16Distance:
    """From safetensors, by torchvision's names (features.0.weight) or ours (groups.0.0.weight); others, as of the classifier, are
    passed over. `key` names the file in a config."""
    net = VGG16Distance()
    public = [f"features.{place}.{kind}" for place in PUBLIC for kind in ("weight", "bias")]
    fill(net, read_tensors(path, key, "a VGG16"), public, f"{path} is no VGG16 without batch norm")
    return net.eval().requires_grad_(False)


def fill(net: nn.Module, found: Mapping[str, Tensor], public: Sequence[str], refusal: str) -> None:
    """Weights of a file into a net, by our names or by public ones, in the same order."""
    own = net.state_dict()
    names = list(own) if next(iter(own)) in found else public
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(
            f"{refusal}: it lacks {len(missing)} of {len(names)} tensors, the first {missing[0]}; "
            f"found {', '.join(sorted(found)[:4]) or 'nothing'}; expected torchvision's names, {public[0]} to {public[-1]}"
        )
    for name, tensor in zip(names, own.values(), strict=True):
        if found[name].shape != tensor.shape:
            raise UserError(f"{refusal}: {name} has the shape {list(found[name].shape)}; expected {list(tensor.shape)}")
    net.load_state_dict({ours: found[name].float() for name, ours in zip(names, own, strict=True)})


def converter(path: Path) -> str:
    """What makes safetensors of a pickle, for the user to run."""
    return (
        f"import torch; from safetensors.torch import save_file; "
        f"save_file(torch.load('{path}', map_location='cpu', weights_only=True), '{path.with_suffix('.safetensors')}')"
    )


def read_tensors(path: Path, key: str, what: str) -> dict[str, Tensor]:
    """A safetensors file, or the reason why it is none. Nothing pickled is read: such a file can run code."""
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}; name {what} as safetensors, or set {key.rpartition('.')[0]}=null")
    if path.suffix in (".pth", ".pt", ".bin", ".ckpt", ".pkl"):
        raise UserError(f'{key}: {path} is a pickle, which can run code; convert it once: python -c "{converter(path)}"')
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(
            f'{key}: {path} cannot be read as safetensors ({error}); convert it: python -c "{converter(path)}"'
        ) from error
