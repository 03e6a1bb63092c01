"""What base draws where it has a `latent`: the values of an image tokenizer before a code is chosen, each channel of mean 0 and
variance 1 over the training pictures (Rombach et al. 2022, section 3.1 and appendix G). Without one it draws pixels.

Latents are decoded as they are, not through the nearest code: of tiny tokenizers on shapes (fsq, vq, lfq) that kept 0.07 to 0.25
dB more, with and without noise on the latents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tessera.batches import PairBatch
from tessera.contracts import Nets, Survey
from tessera.tokenizers.image.model import ImageTokenizer

SURVEYED = 1024  # training pictures
SCALE = "latent_scale"  # in the denoiser, so that it is saved, averaged and exported with it


class LatentScale(nn.Module):
    """Mean and deviation of each channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def forward(self, latents: Tensor) -> Tensor:
        """b d h w, as the tokenizer has them -> as the denoiser learns them"""
        return (latents.float() - self.mean[:, None, None]) / self.std[:, None, None]

    def undo(self, scaled: Tensor) -> Tensor:
        """The other way."""
        return scaled * self.std[:, None, None] + self.mean[:, None, None]


def scale_of(nets: Nets) -> LatentScale | None:
    """That of a stage's denoiser; None where it draws pixels."""
    found = dict(nets["generator"].named_children()).get(SCALE)
    assert found is None or isinstance(found, LatentScale)
    return found


def tokenizer_of(nets: Nets) -> ImageTokenizer:
    """The net beside it."""
    net = nets["tokenizer"]
    assert isinstance(net, ImageTokenizer)
    return net


@torch.no_grad()
def to_canvas(nets: Nets, images: Tensor) -> Tensor:
    """b c h w in [-1, 1] -> what base learns of them: the same, or scaled latents b d h/s w/s."""
    scale = scale_of(nets)
    return images if scale is None else scale(tokenizer_of(nets).encode_latent(images))


@torch.no_grad()
def from_canvas(nets: Nets, drawn: Tensor) -> Tensor:
    """What base drew -> b c h w in [-1, 1]."""
    scale = scale_of(nets)
    return drawn if scale is None else tokenizer_of(nets).decode_latent(scale.undo(drawn))


# --- measured before the first step


def survey_latents() -> Survey:
    """Fills the scale."""
    return Survey(sums_of, keep_scale, SURVEYED)


def sums_of(nets: Nets, batch: PairBatch) -> dict[str, Tensor]:
    """Values of the valid pictures: how many a channel, their sum and that of their squares."""
    assert batch.images is not None
    latents = tokenizer_of(nets).encode_latent(batch.images).double()
    valid = batch.valid.double()[:, None, None, None]
    count = valid.sum() * latents.shape[2] * latents.shape[3]
    return {"count": count, "sum": (latents * valid).sum((0, 2, 3)), "square": (latents.square() * valid).sum((0, 2, 3))}


def keep_scale(nets: Nets, sums: Mapping[str, Tensor]) -> None:
    """A channel that never changes is left as wide as it is: nothing is to be learned of it."""
    scale = scale_of(nets)
    assert scale is not None
    mean = sums["sum"] / sums["count"]
    variance = sums["square"] / sums["count"] - mean.square()
    scale.mean.copy_(mean)
    scale.std.copy_(torch.where(variance > 1e-8, variance, 1.0).sqrt())
