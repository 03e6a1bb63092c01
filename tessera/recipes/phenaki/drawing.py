"""From a request's chunk to clips: text, windows of tokens, frames; piece by piece, so that a long clip takes no more memory of
the device than a short one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tessera.batches import TokenBatch, from_uint8, num_frames, num_latent, to_uint8
from tessera.config import UserError
from tessera.contracts import Chunk, Nets, Scene
from tessera.generators.masked.windows import NoRoom, Piece, Span, Window, draw_long
from tessera.media.clip_facts import DEFAULT_FPS
from tessera.media.clips import Clip, Frames
from tessera.media.framing import filled
from tessera.recipes.masked import TokenDrawer, encode_exactly, judged_batch, options_of, token_loss
from tessera.recipes.phenaki.config import PhenakiConfig, PhenakiSampleConfig, largest_overlap
from tessera.recipes.precision import full_precision
from tessera.tokenizers.video.model import VideoTokenizer

LOSS_CHUNK = 16  # clips


class Animator:
    """Draws with the trained nets of a run. Rows of a chunk do not see each other."""

    def __init__(self, config: PhenakiConfig, stages: Mapping[str, Nets], device: torch.device) -> None:
        if "base" not in stages:
            raise UserError(f"stage base has not been trained yet (trained: {', '.join(stages)}); tessera resume goes on with it")
        self.config, self.nets, self.device = config, stages["base"], device
        tokenizer, generator = stages["tokenizer"]["tokenizer"], stages["base"]["generator"]
        assert isinstance(tokenizer, VideoTokenizer)
        self.tokenizer, self.generator, self.time_stride = tokenizer, generator, config.tokenizer.model.time_stride
        self._bf16 = device.type == "cuda" and config.engine.precision == "bf16"
        self.draw_tokens = TokenDrawer(config.text, device, self._bf16)
        self._compiled = False

    @torch.no_grad()
    def __call__(self, chunk: Chunk) -> list[Clip]:
        """A clip for every row."""
        options = chunk.options
        assert isinstance(options, PhenakiSampleConfig)
        if options.compile and not self._compiled:
            self.compile()
        frames = torch.cat(list(self.frames(chunk)), dim=2)
        if chunk.frames is not None and chunk.given is not None:
            kept = kept_frames(chunk.given, self.time_stride)
            start = frames[:, :, : len(kept)]
            start.copy_(torch.where(kept[:, None, None].cpu(), to_uint8(chunk.frames).cpu(), start))
        fps = options.fps or DEFAULT_FPS
        return [Clip(clip.numpy(), fps) for clip in frames.permute(0, 2, 3, 4, 1).contiguous()]

    def compile(self) -> None:
        """The generator as a whole, and of the tokenizer what makes pixels. Steps that were recorded before are forgotten."""
        self._compiled = True
        self.draw_tokens.forget()
        self.generator.compile()
        self.tokenizer.decoder.compile()

    def frames(self, chunk: Chunk) -> Iterator[Tensor]:
        """b c t h w uint8 on the host, the next frames of all rows; of every take as many as were asked."""
        takes = takes_of(scenes_of(chunk, self.config))
        memory, take, left = None, -1, 0
        for piece in self.pieces(chunk, takes):
            if piece.begins:
                memory, take = None, take + 1
                left = sum(scene.frames for scene in takes[take])
            for ids in piece.ids.split(self.config.grid[0], dim=1):  # what was given may be long
                with torch.autocast(self.device.type, torch.bfloat16) if self._bf16 else full_precision(self.device):
                    made, memory = self.tokenizer.decode_more(ids, memory)
                yield to_uint8(made[:, :, :left]).cpu()
                left -= min(left, made.shape[2])

    def pieces(self, chunk: Chunk, takes: Sequence[Sequence[Scene]]) -> Iterator[Piece]:
        """Latent frames of the whole clip."""
        options = chunk.options
        scenes = [scene for take in takes for scene in take]
        captions = [chunk.captions if chunk.scenes is None else [scene.caption] * len(chunk.seeds) for scene in scenes]

        def draw_window(window: Window) -> Tensor:
            return self.draw_tokens(
                "base", self.nets, options_of(options), captions[window.scene], window.seeds, negatives=chunk.negatives,
                known=window.known, frames=window.frames,
            ).flatten(1)  # fmt: skip

        grid, mask_id = self.config.grid, self.config.tokenizer.model.quantizer.vocab_size
        if chunk.given is not None:
            refuse_beyond_cut(chunk.given, takes[0])
        spans, given = spans_of(takes, self.time_stride), self.start(chunk)
        overlap = (grid[0] - 1) // 2 if options.overlap is None else latents_in(options.overlap, self.time_stride)
        try:
            return draw_long(draw_window, grid, mask_id, chunk.seeds, spans, max(1, overlap), given)
        except NoRoom:
            raise UserError(self.no_room()) from None

    def no_room(self) -> str:
        """What to say where no window can go on from the one before."""
        most, frames = largest_overlap(self.config), self.config.data.frames
        if most:
            return f"an overlap leaves no room for new frames in a window of {frames}; use at most {most}: sample.overlap, scenes"
        return (
            f"this model was trained on clips of {frames} frames, in which nothing can go on from anything; ask for at most so "
            f"many at a time (a scene with overlap 0 starts anew), or train with more: data.frames"
        )

    def start(self, chunk: Chunk) -> Tensor | None:
        """Latents of given frames, b k h w, hidden where none are given; all rows have the same."""
        if chunk.frames is None or chunk.given is None:
            return None
        refuse_between_places(chunk.given, self.time_stride)
        ends = (torch.arange(num_latent(len(chunk.given), self.time_stride)) * self.time_stride).clamp(max=len(chunk.given) - 1)
        known = kept_frames(chunk.given, self.time_stride)[ends]
        known = known[: int(known.nonzero().max()) + 1]
        ids = encode_exactly(self.tokenizer, hold(chunk.frames[:1], chunk.given, num_frames(len(known), self.time_stride)))
        ids = ids.masked_fill(~known.view(1, -1, *[1] * (ids.ndim - 2)), self.config.tokenizer.model.quantizer.vocab_size)
        return ids.expand(len(chunk.seeds), *ids.shape[1:])

    def loss(self, real: Sequence[Frames], captions: Sequence[str | None]) -> dict[str, float]:
        """Cross-entropy of hidden tokens of real clips (t h w c at the model's resolution), in nats, and the share right."""
        return token_loss(self.config.base.loss, self.nets, self.real_tokens(real, captions))

    def real_tokens(self, real: Sequence[Frames], captions: Sequence[str | None]) -> Iterator[TokenBatch]:
        """Batches of their tokens, with encoded captions; a clip that is too long is cut."""
        most = self.config.data.frames
        for first in range(0, len(real), LOSS_CHUNK):
            clips = [clip[:most] for clip in real[first : first + LOSS_CHUNK]]
            frames = torch.from_numpy(np.stack([filled(clip, most) for clip in clips])).to(self.device)
            ids = encode_exactly(self.tokenizer, from_uint8(frames.movedim(-1, 1)))
            lengths = torch.tensor([num_latent(len(clip), self.time_stride) for clip in clips], device=self.device)
            some = tuple(captions[first : first + LOSS_CHUNK])
            yield replace(judged_batch(ids, self.draw_tokens.prompts(self.nets, some), some, first), lengths=lengths)


# --- scenes


def scenes_of(chunk: Chunk, config: PhenakiConfig) -> Sequence[Scene]:
    """Those that were asked for, or one, whose caption differs from row to row."""
    if chunk.scenes is not None:
        return chunk.scenes
    return [Scene("", chunk.options.frames or config.data.frames)]


def takes_of(scenes: Sequence[Scene]) -> list[list[Scene]]:
    """Scenes that go on from each other; a hard cut begins another take."""
    takes: list[list[Scene]] = []
    for scene in scenes:
        if not takes or scene.overlap == 0:
            takes.append([replace(scene, overlap=0)])
        else:
            takes[-1].append(scene)
    return takes


def spans_of(takes: Sequence[Sequence[Scene]], time_stride: int) -> list[Span]:
    """In latent frames. Scenes within a take end with a latent, up to a time stride late; the take ends where it should."""
    spans = []
    for take in takes:
        asked = done = 0
        for scene in take:
            asked += scene.frames
            latents = num_latent(asked, time_stride) - done
            if latents < 1:
                raise UserError(
                    f"the scene {scene.caption!r} ({scene.frames} of {time_stride} frames that a token holds) is too short to be "
                    f"drawn; ask for at least {time_stride} frames"
                )
            done += latents
            spans.append(Span(latents, None if scene.overlap is None else latents_in(scene.overlap, time_stride)))
    return spans


def latents_in(frames: int, time_stride: int) -> int:
    """So many frames at a clip's end, in whole latents."""
    return -(-frames // time_stride)


# --- given frames


def kept_frames(given: Tensor, time_stride: int) -> Tensor:
    """t bool: given frames that are kept as they are: those of latents whose last frame is given."""
    ends = torch.arange(len(given), device=given.device).add(time_stride - 1) // time_stride * time_stride
    return given & given[ends.clamp(max=len(given) - 1)]


def refuse_between_places(given: Tensor, time_stride: int) -> None:
    """A frame in the middle of a latent cannot be given alone; the last ones of a beginning are left to the generator."""
    places = set(given.nonzero().flatten().tolist())
    beginning = next(place for place in range(len(given) + 1) if place not in places)
    kept = set(kept_frames(given, time_stride).nonzero().flatten().tolist())
    if lost := sorted(place for place in places - kept if place >= beginning):
        below = lost[0] // time_stride * time_stride
        raise UserError(
            f"a keyframe at frame {lost[0]}: a token holds {time_stride} frames, so single ones can be given at multiples of "
            f"{time_stride}; use {below} or {below + time_stride}"
        )
    if not kept:
        raise UserError(f"none of the given frames {sorted(places)} can be kept; give frame 0, or multiples of {time_stride}")


def refuse_beyond_cut(given: Tensor, take: Sequence[Scene]) -> None:
    """Given frames belong to the scenes before the first hard cut."""
    last, frames = int(given.nonzero().max()), sum(scene.frames for scene in take)
    if last >= frames:
        raise UserError(f"frame {last} is given, and a hard cut comes before it: frames can be given up to {frames - 1}")


def hold(frames: Tensor, given: Tensor, length: int) -> Tensor:
    """b c t h w, the first `length` frames, each that is not given replaced by the next given one, or by the last."""
    places = torch.arange(len(given), device=frames.device)
    after = torch.where(given, places, len(given)).flip(0).cummin(0).values.flip(0)
    before = torch.where(given, places, -1).cummax(0).values
    source = torch.where(after < len(given), after, before)
    return frames.index_select(2, source[torch.arange(length, device=frames.device).clamp(max=len(given) - 1)])
