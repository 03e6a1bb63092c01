"""From a request's chunk to clips: text, latent frames, pixels; piece by piece, so that a long clip takes no more memory of the
device than a short one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tessera.batches import TokenBatch, from_uint8, num_latent, to_uint8
from tessera.config import UserError
from tessera.contracts import Chunk, Nets, Scene, Stage
from tessera.generators.masked.windows import Piece
from tessera.media.clip_facts import DEFAULT_FPS
from tessera.media.clips import Clip, Frames
from tessera.media.framing import filled
from tessera.recipes.captions import Prompts
from tessera.recipes.clips.autoregressive import AutoregressiveClips
from tessera.recipes.clips.config import AutoregressiveClipsConfig, ClipSampleConfig, ClipsConfig, MaskedClipsConfig
from tessera.recipes.clips.given import kept_frames, refuse_beyond_cut
from tessera.recipes.clips.masked import MaskedClips
from tessera.recipes.clips.scenes import scenes_of, takes_of
from tessera.recipes.generator import encode_exactly, judged_batch
from tessera.recipes.precision import full_precision
from tessera.tokenizers.video.model import VideoTokenizer

LOSS_CHUNK = 16  # clips


class Latents(Protocol):
    """Trained nets of a generator, as they draw latent frames."""

    @property
    def prompts(self) -> Prompts:
        """What reads captions."""

    def pieces(self, chunk: Chunk, takes: Sequence[Sequence[Scene]]) -> Iterator[Piece]:
        """Latent frames of the whole clip; `takes` are its scenes, cut where nothing goes on."""

    def loss(self, batches: Iterable[TokenBatch]) -> dict[str, float]:
        """Held-out loss of real tokens."""


class Generator(Protocol):
    """A kind of generator of clips: `base` of the recipe."""

    def nets(self) -> dict[str, nn.Module]:
        """Fresh ones."""

    def stage(self, nets: dict[str, nn.Module]) -> Stage:
        """How they are trained."""

    def preview(self, nets: Nets, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Ids drawn from the captions of a batch, as its own are, and their seeds."""

    def opens(self, nets: Nets, tokenizer: VideoTokenizer, device: torch.device, bf16: bool) -> Latents:
        """Trained ones in use."""


def generator_of(config: ClipsConfig) -> Generator:
    """The one that a config asks for."""
    if isinstance(config, MaskedClipsConfig):
        return MaskedClips(config)
    assert isinstance(config, AutoregressiveClipsConfig)
    return AutoregressiveClips(config)


class Animator:
    """Draws with the trained nets of a run. Rows of a chunk do not see each other."""

    def __init__(self, config: ClipsConfig, stages: Mapping[str, Nets], device: torch.device) -> None:
        if "base" not in stages:
            raise UserError(f"stage base has not been trained yet (trained: {', '.join(stages)}); tessera resume goes on with it")
        self.config, self.nets, self.device = config, stages["base"], device
        tokenizer = stages["tokenizer"]["tokenizer"]
        assert isinstance(tokenizer, VideoTokenizer)
        self.tokenizer, self.time_stride = tokenizer, config.tokenizer.model.time_stride
        self._bf16 = device.type == "cuda" and config.engine.precision == "bf16"
        self.latents = generator_of(config).opens(self.nets, tokenizer, device, self._bf16)

    @torch.no_grad()
    def __call__(self, chunk: Chunk) -> list[Clip]:
        """A clip for every row."""
        options = chunk.options
        assert isinstance(options, ClipSampleConfig)
        frames = torch.cat(list(self.frames(chunk)), dim=2)
        if chunk.frames is not None and chunk.given is not None:
            kept = kept_frames(chunk.given, self.time_stride)
            start = frames[:, :, : len(kept)]
            start.copy_(torch.where(kept[:, None, None].cpu(), to_uint8(chunk.frames).cpu(), start))
        fps = options.fps or DEFAULT_FPS
        return [Clip(clip.numpy(), fps) for clip in frames.permute(0, 2, 3, 4, 1).contiguous()]

    def frames(self, chunk: Chunk) -> Iterator[Tensor]:
        """b c t h w uint8 on the host, the next frames of all rows; of every take as many as were asked."""
        takes = takes_of(scenes_of(chunk, self.config))
        if chunk.given is not None:
            refuse_beyond_cut(chunk.given, takes[0])
        memory, take, left = None, -1, 0
        for piece in self.latents.pieces(chunk, takes):
            if piece.begins:
                memory, take = None, take + 1
                left = sum(scene.frames for scene in takes[take])
            for ids in piece.ids.split(self.config.grid[0], dim=1):  # what was given may be long
                with torch.autocast(self.device.type, torch.bfloat16) if self._bf16 else full_precision(self.device):
                    made, memory = self.tokenizer.decode_more(ids, memory)
                yield to_uint8(made[:, :, :left]).cpu()
                left -= min(left, made.shape[2])

    def loss(self, real: Sequence[Frames], captions: Sequence[str | None]) -> dict[str, float]:
        """Of tokens of real clips (t h w c at the model's resolution), as the generator measures it."""
        return self.latents.loss(self.real_tokens(real, captions))

    def real_tokens(self, real: Sequence[Frames], captions: Sequence[str | None]) -> Iterator[TokenBatch]:
        """Batches of their tokens, with encoded captions; a clip that is too long is cut."""
        most = self.config.data.frames
        for first in range(0, len(real), LOSS_CHUNK):
            clips = [clip[:most] for clip in real[first : first + LOSS_CHUNK]]
            frames = torch.from_numpy(np.stack([filled(clip, most) for clip in clips])).to(self.device)
            ids = encode_exactly(self.tokenizer, from_uint8(frames.movedim(-1, 1)))
            lengths = torch.tensor([num_latent(len(clip), self.time_stride) for clip in clips], device=self.device)
            some = tuple(captions[first : first + LOSS_CHUNK])
            yield replace(judged_batch(ids, self.latents.prompts(self.nets, some), some, first), lengths=lengths)
