"""Clips by an autoregressive generator: a latent frame after another, for as long as is asked. What it sees of the last frames
lies in a ring, so a long clip takes no more memory than a short one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.batches import TokenBatch
from tessera.config import UserError
from tessera.contracts import Chunk, Context, Nets, Scene, Stage
from tessera.generators.autoregressive.grid_losses import GridLosses, digest, generator_of, sketch_of
from tessera.generators.autoregressive.grid_sample import GridSampleConfig, GridSampler, GridWriter
from tessera.generators.autoregressive.grid_stage import build_nets, build_stage
from tessera.generators.masked.windows import Piece
from tessera.randomness import mix_tensors
from tessera.recipes.captions import Prompts
from tessera.recipes.clips.config import KIND, AutoregressiveClipSampleConfig, AutoregressiveClipsConfig
from tessera.recipes.clips.given import given_latents
from tessera.recipes.clips.scenes import goes_on, no_going_on, spans_of
from tessera.recording import Kept, Lean
from tessera.text.encoders import build_encoder, encode_text, text_width
from tessera.tokenizers.video.model import VideoTokenizer

TAKE = 42  # stream of random numbers


@dataclass(frozen=True, slots=True)
class AutoregressiveClips:
    """Its training."""

    config: AutoregressiveClipsConfig

    def nets(self) -> dict[str, nn.Module]:
        """Fresh ones."""
        config, grid = self.config, self.config.grid
        return build_nets(
            config.base, vocab_size=config.tokenizer.model.quantizer.vocab_size, grid=grid[:3],
            text_width=text_width(config.text), codes=grid[3] if len(grid) > 3 else None, encoder=build_encoder(config.text),
        )  # fmt: skip

    def stage(self, nets: dict[str, nn.Module]) -> Stage:
        """How they are trained."""
        return build_stage(self.config.base, nets)

    def preview(self, nets: Nets, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Ids drawn from the captions and sketches of a batch, as its own are, and their seeds."""
        seeds = torch.arange(len(batch.keys), device=batch.ids.device)
        sampler = GridSampler(GridWriter(Lean(generator_of(nets)), GridSampleConfig.part_of(self.config.sample)), recorded=False)
        sketch = sketch_of(nets, batch, torch.zeros_like(batch.valid)[:, None])
        text = encode_text(nets, batch.text)
        return torch.cat(list(sampler(text, seeds, batch.ids.shape[1], lengths=batch.lengths, sketch=sketch)), dim=1), seeds

    def opens(self, nets: Nets, tokenizer: VideoTokenizer, device: torch.device, bf16: bool) -> AutoregressiveLatents:
        """Its use."""
        return AutoregressiveLatents(self.config, nets, tokenizer, device, bf16)


class AutoregressiveLatents:
    """Latent frames by trained nets. A sampler is kept for each way to draw, with its recordings."""

    def __init__(
        self, config: AutoregressiveClipsConfig, nets: Nets, tokenizer: VideoTokenizer, device: torch.device, bf16: bool
    ) -> None:
        self.config, self.nets, self.tokenizer, self.lean = config, nets, tokenizer, Lean(generator_of(nets), bf16)
        self.prompts = Prompts(config.text, device)
        self._samplers = Kept[GridSampler]()

    def sampler(self, options: AutoregressiveClipSampleConfig) -> GridSampler:
        """The one for these options."""
        own = GridSampleConfig.part_of(options)
        if self.config.base.model.nearby.whole and own.order == "wavefront":
            raise UserError("order wavefront needs a window, and this generator sees whole frames; use order auto")
        return self._samplers.find(own.model_dump_json(), lambda: GridSampler(GridWriter(self.lean, own)))

    def pieces(self, chunk: Chunk, takes: Sequence[Sequence[Scene]]) -> Iterator[Piece]:
        """Those of the whole clip: as many latent frames at once as a training clip has, for the sake of decoding."""
        options, stride = chunk.options, self.tokenizer.time_stride
        assert isinstance(options, AutoregressiveClipSampleConfig)
        refuse_overlaps(takes)
        refuse_gaps(chunk)
        given, sketch = given_latents(chunk, self.tokenizer), self.sketch(chunk)
        lengths = [[span.latents for span in spans_of([take], stride)] for take in takes]
        if max(map(sum, lengths)) > (most := self.config.grid[0]) and not goes_on(most):
            raise UserError(no_going_on(self.config))
        return self.drawn(chunk, self.sampler(options), takes, lengths, given, sketch)

    def drawn(
        self, chunk: Chunk, sampler: GridSampler, takes: Sequence[Sequence[Scene]], lengths: Sequence[Sequence[int]],
        given: Tensor | None, sketch: Tensor | None,
    ) -> Iterator[Piece]:  # fmt: skip
        """`pieces`, once all is checked. A take of no more than a training clip's length is told how long it is."""
        size, most = len(chunk.seeds), self.config.grid[0]
        negatives = None if chunk.options.guidance == 1 else chunk.negatives
        negative = None if negatives is None else self.prompts(self.nets, negatives)
        for index, (take, own) in enumerate(zip(takes, lengths, strict=True)):
            captions = [chunk.captions if chunk.scenes is None else [scene.caption] * size for scene in take]
            told = torch.full_like(chunk.seeds, sum(own) if sum(own) <= most else 0)
            frames = sampler.story(
                [(self.prompts(self.nets, some), count) for some, count in zip(captions, own, strict=True)],
                take_seeds(chunk.seeds, index), negative=negative, lengths=told, known=None if index else given,
                sketch=None if index else sketch,
            )  # fmt: skip
            yield from gathered(frames, most)

    def sketch(self, chunk: Chunk) -> Tensor | None:
        """Ids b k h w, with the generator's `nothing` where the sketch has no frame."""
        if chunk.sketch is None or chunk.sketched is None:
            return None
        missing = ~chunk.sketched.view(1, -1, *[1] * (chunk.sketch.ndim - 2))
        return chunk.sketch.masked_fill(missing, generator_of(self.nets).nothing)

    @torch.no_grad()
    def loss(self, batches: Iterable[TokenBatch]) -> dict[str, float]:
        """Nats and bits of a token, bits of a clip, and of a token of the first frame and of later ones; the share right."""
        losses, sums = GridLosses(self.config.base.loss), torch.zeros(3, dtype=torch.float64)
        stats: dict[str, Tensor] = {}
        for batch in batches:
            loss = losses.measure(self.nets, batch, Context(0, 0, batch.positions))
            sums += torch.stack([loss.total, loss.weight, loss.parts["right"]]).double().cpu()
            stats = {name: stats.get(name, 0) + value.double().cpu() for name, value in loss.stats.items()}
        total, weight, right = sums.tolist()
        return {"loss": total / weight, "right": right / weight} | digest(stats)


def take_seeds(seeds: Tensor, take: int) -> Tensor:
    """Noise of its own for what follows a hard cut; a clip's first take has that of the clip."""
    return seeds if not take else mix_tensors(seeds, *(torch.full_like(seeds, number) for number in (TAKE, take)))


def gathered(frames: Iterator[Tensor], most: int) -> Iterator[Piece]:
    """Latent frames of one take, so many at once."""
    some: list[Tensor] = []
    begins = True
    for frame in frames:
        some.append(frame)
        if len(some) == most:
            yield Piece(torch.cat(some, dim=1), begins)
            some, begins = [], False
    if some:
        yield Piece(torch.cat(some, dim=1), begins)


def refuse_overlaps(takes: Sequence[Sequence[Scene]]) -> None:
    """There are no windows that could overlap."""
    for scene in (scene for take in takes for scene in take[1:]):
        if scene.overlap is not None:
            raise UserError(
                f"the scene {scene.caption!r} has an overlap of {scene.overlap}, and this generator draws no windows: a scene "
                f"goes on from all that it sees of the last frames; leave overlap out, or write 0 for a hard cut"
            )


def refuse_gaps(chunk: Chunk) -> None:
    """What comes later cannot be given."""
    if chunk.given is None:
        return
    places = chunk.given.nonzero().flatten().tolist()
    beginning = next(place for place in range(len(chunk.given) + 1) if place not in places)
    if len(places) > beginning:
        raise UserError(
            f"frame {places[beginning]} is given and frame {beginning} is not: an autoregressive generator draws one frame after "
            f"another and cannot be told what comes later; give the first frames alone, or train with {KIND}=masked"
        )
