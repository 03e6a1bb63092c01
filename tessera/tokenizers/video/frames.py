"""The backbone without time: every frame goes through the image tokenizer's networks by itself.

Their layers keep their names, so the weights of an image tokenizer are those of this one, and the reverse.
"""

from __future__ import annotations

from typing import Literal

from einops import rearrange
from torch import Tensor

from tessera.tokenizers.image import model as image
from tessera.tokenizers.video.conv import Memory


class FramesConfig(image.ConvConfig):
    """The image tokenizer on every frame by itself: as many latent frames as frames, and nothing along time."""

    kind: Literal["frames"] = "frames"
    """The kind of network."""

    @classmethod
    def of(cls, config: image.ImageTokenizerConfig) -> FramesConfig:
        """The same network as an image tokenizer."""
        return cls.model_validate({**config.model_dump(), "kind": "frames"})

    @property
    def time_stride(self) -> int:
        """Frames per latent frame."""
        return 1


class Encoder(image.Encoder):
    """b c t h w -> b d t h/s w/s"""

    def forward(self, x: Tensor) -> Tensor:
        """Frames are a batch of pictures."""
        return rearrange(super().forward(rearrange(x, "b c t h w -> (b t) c h w")), "(b t) d h w -> b d t h w", b=len(x))


class Decoder(image.Decoder):
    """b d t h/s w/s -> b c t h w"""

    def forward(  # type: ignore[override]  # of clips, which may be decoded in parts
        self, codes: Tensor, memory: Memory | None = None, keep: bool = False
    ) -> tuple[Tensor, Memory]:
        """Not squashed. No frame knows of others, so there is nothing to keep."""
        frames = super().forward(rearrange(codes, "b d t h w -> (b t) d h w"))
        return rearrange(frames, "(b t) c h w -> b c t h w", b=len(codes)), ()
