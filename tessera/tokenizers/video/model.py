"""Clips <-> a grid of ids, b k h w: the first latent frame holds the first frame alone, every later one `time_stride` frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from tessera.batches import num_frames, num_latent
from tessera.nn.quantizers import Quantized
from tessera.tokenizers.image.model import LatentTokenizer, check_size
from tessera.tokenizers.video import conv, cvivit
from tessera.tokenizers.video import frames as single
from tessera.tokenizers.video.conv import CausalConvConfig, Memory
from tessera.tokenizers.video.cvivit import CViViTConfig
from tessera.tokenizers.video.frames import FramesConfig

Backbone = CausalConvConfig | CViViTConfig | FramesConfig
VideoTokenizerConfig = Annotated[Backbone, Field(discriminator="kind")]


def held(frames: Tensor, lengths: Tensor) -> Tensor:
    """b c t h w with each clip's last frame behind its end, whatever was there: a latent frame may reach beyond it."""
    places = torch.arange(frames.shape[2], device=frames.device).minimum(lengths[:, None] - 1)
    return frames.gather(2, places[:, None, :, None, None].expand(frames.shape))


@dataclass(frozen=True, slots=True)
class VideoReconstruction:
    """A clip there and back."""

    frames: Tensor  # b c t h w; not clamped
    latents: Tensor  # b k h/s w/s d, as the encoder made them
    quantized: Quantized  # of (b k) h/s w/s d: a latent frame is a sample of its own, so terms are (b k)

    @property
    def ids(self) -> Tensor:
        """b k h/s w/s; with a residual quantizer b k h/s w/s q"""
        return self.quantized.ids.unflatten(0, self.latents.shape[:2])


class VideoTokenizer(LatentTokenizer):
    """The trained net. `contracts.Tokenizer` by its encode, decode and vocab_size.

    Strictly causal: a latent frame is a function of its own frames and earlier ones, a decoded frame of its own latent frame and
    earlier ones. Ids are b k h w, with a residual quantizer b k h w q; vocab_size is that of one id.
    """

    def __init__(self, config: Backbone, channels: int) -> None:
        super().__init__()
        self.stride, self.time_stride = config.stride, config.time_stride
        self.encoder: conv.Encoder | cvivit.Encoder | single.Encoder
        self.decoder: conv.Decoder | cvivit.Decoder | single.Decoder
        if isinstance(config, CausalConvConfig):
            self.encoder, self.decoder = conv.Encoder(config, channels), conv.Decoder(config, channels)
        elif isinstance(config, CViViTConfig):
            self.encoder, self.decoder = cvivit.Encoder(config, channels), cvivit.Decoder(config, channels)
        else:
            self.encoder, self.decoder = single.Encoder(config, channels), single.Decoder(config, channels)
        self.quantize_by(config.quantizer)

    def forward(self, frames: Tensor, valid: Tensor | None = None) -> VideoReconstruction:
        """There and back, with gradients: b c t h w in [-1, 1]; valid: b k, which latent frames the quantizer's terms count."""
        latents = self.latent(frames)
        rows = self.standardise(latents).flatten(0, 1)
        quantized = self.quantizer(rows, None if valid is None else valid.flatten())
        decoded, _ = self.decoder(self.grid(quantized.codes.unflatten(0, latents.shape[:2])))
        return VideoReconstruction(full(decoded), latents, quantized)

    def latent(self, frames: Tensor) -> Tensor:
        """b c t h w -> b k h/s w/s d, not yet bounded."""
        check_size(frames, self.stride)
        length = frames.shape[2]
        if length == 0 or (length - 1) % self.time_stride:
            near = num_frames(num_latent(max(length, 1), self.time_stride), self.time_stride)
            raise ValueError(
                f"a clip of {length} frames cannot be encoded: with time stride {self.time_stride} it must have "
                f"1 + {self.time_stride} n frames; fill it up to {near}, or cut it to {max(1, near - self.time_stride)}"
            )
        return rearrange(self.encoder(frames), "b d k h w -> b k h w d")

    def encode(self, x: Tensor) -> Tensor:
        """b c t h w -> b k h/s w/s, or b k h/s w/s q"""
        return self.quantizer.ids_of(self.standardise(self.latent(x)))

    def decode(self, ids: Tensor) -> Tensor:
        """b k h/s w/s, or b k h/s w/s q -> b c t h w in [-1, 1]"""
        return self.decode_latent(self.grid(self.quantizer.decode(ids)))

    def decode_more(self, ids: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """As `decode`, a part of a clip at a time: without a memory its start, 1 + s (k - 1) frames, then s k frames a call.

        Parts in a row equal the whole. The memory is of the next call; how much it is does not depend on the clip's length.
        """
        frames, memory = self.decoder(self.grid(self.quantizer.decode(ids)), memory, keep=True)
        return full(frames).clamp(-1, 1), memory

    def encode_latent(self, x: Tensor) -> Tensor:
        """b c t h w -> b d k h/s w/s: the latent before a code is chosen, as of the image tokenizer."""
        return rearrange(self.quantizer.prepare(self.standardise(self.latent(x))), "b k h w d -> b d k h w")

    def decode_latent(self, codes: Tensor) -> Tensor:
        """b d k h/s w/s -> b c t h w in [-1, 1]"""
        return full(self.decoder(codes)[0]).clamp(-1, 1)

    def grid(self, codes: Tensor) -> Tensor:
        """b k h w d -> b d k h w, in the net's own kind of number."""
        return rearrange(codes, "b k h w d -> b d k h w").to(self.latent_mean.dtype)


def full(x: Tensor) -> Tensor:
    """fp32 at least."""
    return x if x.dtype == torch.float64 else x.float()
