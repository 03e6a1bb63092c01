"""Clips by a masked generator: a window at a time, each going on from the last tokens of the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.batches import TokenBatch
from tessera.compiling import compile_module
from tessera.config import UserError
from tessera.contracts import Chunk, Nets, Scene, Stage
from tessera.generators.masked.frames import plain_frames
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.generators.masked.stage import build_stage
from tessera.generators.masked.windows import NoRoom, Piece, Window, draw_long
from tessera.recipes.captions import Prompts
from tessera.recipes.clips.config import MaskedClipSampleConfig, MaskedClipsConfig, largest_overlap
from tessera.recipes.clips.given import given_latents
from tessera.recipes.clips.scenes import latents_in, no_going_on, spans_of
from tessera.recipes.masked import TokenDrawer, draw_preview, masked_nets, token_loss
from tessera.tokenizers.video.model import VideoTokenizer


@dataclass(frozen=True, slots=True)
class MaskedClips:
    """Its training."""

    config: MaskedClipsConfig

    def nets(self) -> dict[str, nn.Module]:
        """Fresh ones."""
        config = self.config
        return masked_nets(config.text, config.base, config.tokenizer.model.quantizer.vocab_size, config.grid)

    def stage(self, nets: dict[str, nn.Module]) -> Stage:
        """How they are trained."""
        return build_stage(self.config.base, nets)

    def preview(self, nets: Nets, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Ids drawn from the captions of a batch, as its own are, and their seeds."""
        assert batch.lengths is not None
        present = plain_frames(batch.lengths, batch.ids.shape[1]).present
        ids, seeds = draw_preview(self.config.sample, nets, batch, frames=present)
        return ids.view_as(batch.ids), seeds

    def opens(self, nets: Nets, tokenizer: VideoTokenizer, device: torch.device, bf16: bool) -> MaskedLatents:
        """Its use."""
        return MaskedLatents(self.config, nets, tokenizer, device, bf16)


class MaskedLatents:
    """Latent frames by trained nets."""

    def __init__(
        self, config: MaskedClipsConfig, nets: Nets, tokenizer: VideoTokenizer, device: torch.device, bf16: bool
    ) -> None:
        self.config, self.nets, self.tokenizer = config, nets, tokenizer
        self.draw_tokens = TokenDrawer(config.text, device, bf16)
        self._compiled = False

    @property
    def prompts(self) -> Prompts:
        """What reads captions."""
        return self.draw_tokens.prompts

    def compile(self) -> None:
        """The generator as a whole, and of the tokenizer what makes pixels. Steps that were recorded before are forgotten."""
        self._compiled = True
        self.draw_tokens.forget()
        compile_module(self.nets["generator"])
        compile_module(self.tokenizer.decoder)

    def pieces(self, chunk: Chunk, takes: Sequence[Sequence[Scene]]) -> Iterator[Piece]:
        """Those of the whole clip, a window after another."""
        options, stride = chunk.options, self.tokenizer.time_stride
        assert isinstance(options, MaskedClipSampleConfig)
        if options.compile and not self._compiled:
            self.compile()
        scenes = [scene for take in takes for scene in take]
        captions = [chunk.captions if chunk.scenes is None else [scene.caption] * len(chunk.seeds) for scene in scenes]

        def draw_window(window: Window) -> Tensor:
            return self.draw_tokens(
                "base", self.nets, MaskedSampleConfig.part_of(options), captions[window.scene], window.seeds,
                negatives=chunk.negatives, known=window.known, frames=window.frames,
            ).flatten(1)  # fmt: skip

        grid = self.config.grid
        spans, given = spans_of(takes, stride), given_latents(chunk, self.tokenizer)
        overlap = (grid[0] - 1) // 2 if options.overlap is None else latents_in(options.overlap, stride)
        try:
            return draw_long(draw_window, grid, self.tokenizer.vocab_size, chunk.seeds, spans, max(1, overlap), given)
        except NoRoom:
            raise UserError(self.no_room()) from None

    def no_room(self) -> str:
        """What to say where no window can go on from the one before."""
        most, frames = largest_overlap(self.config), self.config.data.frames
        if most:
            return f"an overlap leaves no room for new frames in a window of {frames}; use at most {most}: sample.overlap, scenes"
        return no_going_on(self.config)

    def loss(self, batches: Iterable[TokenBatch]) -> dict[str, float]:
        """Cross-entropy of hidden tokens, in nats, and the share right."""
        return token_loss(self.config.base.loss, self.nets, batches)
