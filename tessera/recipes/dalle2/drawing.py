"""From a request's chunk to pictures: text, an embedding, a small picture, larger ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tessera.batches import PairBatch, TextStates, from_uint8
from tessera.compiling import compile_parts
from tessera.config import Config, UserError
from tessera.contracts import Chunk, Context, Nets, Way
from tessera.generators.diffusion.denoisers import COMPILED
from tessera.generators.diffusion.losses import DiffusionLosses
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler
from tessera.generators.diffusion.stage import DiffusionStageConfig
from tessera.media.images import to_picture
from tessera.nn.attention import EncoderBlock
from tessera.randomness import mix_tensors
from tessera.recipes.captions import Prompts
from tessera.recipes.dalle2.config import (
    OF_UPSAMPLERS,
    Dalle2Config,
    Dalle2SampleConfig,
    PriorSampleConfig,
    UpsamplerSampleConfig,
)
from tessera.recipes.dalle2.embeddings import Sphere, between
from tessera.recipes.dalle2.latent import from_canvas, to_canvas
from tessera.recipes.dalle2.nets import imagined, read_base, recalls, sampler_of, told_base, told_prior, told_upsampler
from tessera.recipes.pictures import at_size, covered, covered_cells, pictures
from tessera.recipes.precision import full_precision
from tessera.recording import Kept

LOSS_CHUNK = 64  # pictures
OF_OTHERS = [name for name in Dalle2SampleConfig.model_fields if name not in OF_UPSAMPLERS]


def way_to_draw(config: Dalle2Config, trained: Collection[str]) -> Way | None:
    """With these stages; None: none of them draws. A decoder without a prior has no way from text to an embedding."""
    names, start = list(config.upsamplers), config.sample.start
    upsamplers = [name for name in names if name in trained]
    if "base" not in trained or start != "prior" or upsamplers != names[: len(upsamplers)]:
        return Way("image", start if start in upsamplers else upsamplers[-1]) if upsamplers else None
    if "prior" in trained:
        return Way("prompt")
    embedded = config.embeddings.kind in ("pair", "clip")  # others come from files alone
    return Way("image" if embedded else "embedding", lacks="prior")


class Painter:
    """Draws with the trained nets of a run. Rows of a chunk do not see each other."""

    def __init__(self, config: Dalle2Config, stages: Mapping[str, Nets], device: torch.device) -> None:
        if not {"base", *config.upsamplers} & set(stages):
            raise UserError(f"no stage that draws has been trained yet (trained: {', '.join(stages)}); tessera resume goes on")
        self.config, self.stages, self.device = config, stages, device
        self.prompts = Prompts(config.text, device)
        self.sphere = Sphere(config, stages.get("embedder", {}), self.prompts)
        self._bf16 = device.type == "cuda" and config.engine.precision == "bf16"
        self._samplers = Kept[DiffusionSampler]()
        self._compiled = False

    # --- sizes

    @property
    def resolution(self) -> int:
        """The height of pictures: that of the last trained upsampler, or of the decoder."""
        sizes = [stage.resolution for name, stage in self.config.upsamplers.items() if name in self.stages]
        return sizes[-1] if sizes else self.config.data.resolution

    def start_size(self, options: Dalle2SampleConfig) -> tuple[int, int]:
        """Height and width of a picture that drawing starts from: what the first stage sees, or as large as what is drawn."""
        start = self.start(options)
        if start == "prior":
            return self.size_at(self.resolution)
        self.path(start)
        return self.size_at(self.config.seen_by(start))

    def start(self, options: Dalle2SampleConfig) -> str:
        """The first stage that draws: as asked, but where base is not trained, so that prior leads nowhere, an upsampler."""
        if options.start != "prior" or "base" in self.stages:
            return options.start
        return next(name for name in self.config.upsamplers if name in self.stages)

    def size_at(self, resolution: int) -> tuple[int, int]:
        """Height and width of pictures of that height."""
        return self.config.data.at(resolution).size

    def path(self, start: str) -> list[str]:
        """The trained upsamplers from there on, each of which needs the one before."""
        names = list(self.config.upsamplers)
        if start != "prior" and start not in self.stages:
            there = ", ".join(["prior", *(name for name in names if name in self.stages)])
            raise UserError(f"sample.start={start}: no such stage is trained here; drawing can start at {there}")
        found = names if start == "prior" else names[names.index(start) :]
        last = max((number for number, name in enumerate(found, 1) if name in self.stages), default=0)
        if missing := [name for name in found[:last] if name not in self.stages]:
            raise UserError(f"{found[last - 1]} enlarges what {missing[0]} draws, which is not trained yet; train it, too")
        return found[:last]

    def stages_for(self, options: Dalle2SampleConfig) -> list[str]:
        """All that are trained; of a cascade that starts from a picture of the user's, those from there on."""
        start = self.start(options)
        return list(self.stages) if start == "prior" else self.path(start)

    @property
    def embedding_width(self) -> int:
        """Of embeddings that may be given in the place of pictures."""
        return self.config.channels_of_embeddings

    # --- drawing

    @torch.no_grad()
    def __call__(self, chunk: Chunk) -> list[Image.Image]:
        """A picture for every row."""
        return [to_picture(array) for array in pictures(self.pixels(chunk))]

    def pixels(self, chunk: Chunk) -> Tensor:
        """b c h w in [-1, 1]."""
        options = chunk.options
        assert isinstance(options, Dalle2SampleConfig)
        self.refuse_idle_repeats(options)
        if options.compile and not self._compiled:
            self.compile()
        start = self.start(options)
        upsamplers = self.path(start)
        if start != "prior":
            return self.enlarged(chunk, self.given(chunk, start, options), upsamplers, options)
        redraw = None if chunk.redraw is None else self.coarse(chunk.redraw)
        small = self.decode(chunk, self.embeddings(chunk, options), options, redraw)
        images = self.enlarged(chunk, small, upsamplers, options)
        if redraw is None or chunk.pictures is None:
            return images
        anew = F.interpolate(redraw.float(), size=images.shape[-2:], mode="nearest") > 0
        return torch.where(anew, images, chunk.pictures)

    def given(self, chunk: Chunk, start: str, options: Dalle2SampleConfig) -> Tensor:
        """The picture that an upsampler alone starts from."""
        alone = f"sample.start={start}" if options.start == start else f"base is not trained, and {start} alone"
        if chunk.pictures is None or chunk.pictures.ndim == 2:
            raise UserError(f"{alone} enlarges a picture; give one: --image FILE, or image in a request")
        if chunk.redraw is not None:
            raise UserError(f"{alone} enlarges a whole picture; leave mask and outpaint out")
        if chunk.towards is not None:
            raise UserError(f"{alone} enlarges one picture, without its embedding; leave towards out")
        if chunk.negatives is not None and options.upsampler.guidance == 1:
            raise UserError(
                "a negative prompt needs guidance, and sample.upsampler.guidance is 1; raise it, or leave the prompt out"
            )
        self.refuse_other_stages(start, options)
        return chunk.pictures

    def refuse_other_stages(self, start: str, options: Dalle2SampleConfig) -> None:
        """Values of this call for prior and base, which do not draw where an upsampler starts. The JSON of a picture has none."""
        for name in OF_OTHERS:
            if (value := getattr(options, name)) != getattr(self.config.sample, name):
                shown = "" if isinstance(value, Config) else f"={value}"
                theirs = name in UpsamplerSampleConfig.model_fields and name != "resample_times"
                own = f"set sample.upsampler.{name}, or " if theirs else ""
                raise UserError(
                    f"sample.{name}{shown} is not for {start}, which draws here without prior and base; {own}leave it out"
                )

    def embeddings(self, chunk: Chunk, options: Dalle2SampleConfig) -> Tensor:
        """b e: of the picture that is to be varied, or between it and another, or drawn of the prompt."""
        if chunk.pictures is None or chunk.redraw is not None:
            return self.imagine(chunk, options.prior)
        found = self.embedded(chunk.pictures)
        if chunk.towards is None:
            return found
        if chunk.at is None:
            raise UserError(
                "one sample is no way from image to towards; ask for 2 or more (-n 8), or name its place in a request: at: 0.5"
            )
        return between(found, self.embedded(chunk.towards), chunk.at)

    def embedded(self, given: Tensor) -> Tensor:
        """b e of pictures, or what is an embedding already."""
        return given if given.ndim == 2 else self.sphere.pictures(given)

    def imagine(self, chunk: Chunk, options: PriorSampleConfig) -> Tensor:
        """b e of unit length, by the prior: the best of several."""
        if "prior" not in self.stages:
            raise UserError("stage prior is not trained yet, so there is no way from text to an embedding; give an image to vary")
        text, negative = (self.told_prior(captions) for captions in (chunk.captions, chunk.negatives))
        assert text is not None
        sampler, wanted = self.sampler("prior", self.config.prior, options.complete), None
        if self.sphere.known and options.candidates > 1:
            wanted = self.sphere.captions(chunk.captions)
        return imagined(sampler, self.config.channels_of_embeddings, text, chunk.seeds, options.candidates, wanted, negative)

    def told_prior(self, captions: Sequence[str | None] | None) -> TextStates | None:
        """What the prior hears of prompts."""
        return None if captions is None else told_prior(self.prior_nets, self.prompts.read(captions))

    @property
    def prior_nets(self) -> Nets:
        """Its own, and the pair beside them, as in training."""
        return {**self.stages["prior"], **self.stages.get("embedder", {})}

    def decode(self, chunk: Chunk, embeddings: Tensor, options: Dalle2SampleConfig, redraw: Tensor | None = None) -> Tensor:
        """b c h w of the decoder's size; where `redraw` (b 1 h w of what it draws) is false the picture stays."""
        nets = self.base_nets
        condition = told_base(self.config, self.prompts(nets, chunk.captions), embeddings)
        negative = None if chunk.negatives is None else self.prompts(nets, chunk.negatives)
        sampler = self.sampler("base", self.config.base, self.config.drawn_by(options))
        if redraw is None or chunk.pictures is None:
            return self.decoded(sampler(self.config.canvas, condition, chunk.seeds, negative))
        known = at_size(chunk.pictures, self.config.data.size)
        anew = F.interpolate(redraw.float(), size=known.shape[-2:], mode="nearest") > 0
        with full_precision(self.device):
            canvas = known if self.config.base.latent is None else to_canvas(nets, covered(known, anew))
        drawn = self.decoded(sampler(self.config.canvas, condition, chunk.seeds, negative, canvas, ~redraw))
        return torch.where(anew, drawn, known)

    def decoded(self, drawn: Tensor) -> Tensor:
        """Pixels of what base drew, at the precision that a tokenizer was trained with."""
        with torch.autocast(self.device.type, torch.bfloat16) if self._bf16 else full_precision(self.device):
            return from_canvas(self.base_nets, drawn)

    @property
    def base_nets(self) -> Nets:
        """Its own, and the tokenizer beside them, as in training."""
        return {**self.stages["base"], **self.stages.get("tokenizer", {})}

    def coarse(self, redraw: Tensor) -> Tensor:
        """b 1 h w of what base draws: what is drawn anew in part is drawn anew, and of latents those around, which know of it."""
        return covered_cells(redraw, self.config.canvas[1:], ring=0 if self.config.base.latent is None else 1) > 0

    def enlarged(self, chunk: Chunk, images: Tensor, upsamplers: Sequence[str], options: Dalle2SampleConfig) -> Tensor:
        """Through these stages, one after another."""
        self.refuse_idle_guidance(upsamplers, options)
        for number, name in enumerate(upsamplers, 1):
            stage, own = self.config.upsamplers[name], mix_tensors(chunk.seeds, torch.tensor(-number))
            sampler, size = self.sampler(name, stage, options.upsampler.complete), self.size_at(stage.resolution)
            states, negative = (
                self.prompts(self.stages[name], captions) if stage.text and captions is not None else None
                for captions in (chunk.captions, chunk.negatives)
            )
            condition = told_upsampler(stage, images, size, own, states)
            images = sampler((images.shape[1], *size), condition, own, negative)
        return images

    def refuse_idle_repeats(self, options: Dalle2SampleConfig) -> None:
        """Values of this call that nothing would follow."""
        known = self.config.sample
        for name, asked, there in (("prior", options.prior, known.prior), ("upsampler", options.upsampler, known.upsampler)):
            if asked.resample_times != there.resample_times:
                raise UserError(
                    f"sample.{name}.resample_times={asked.resample_times} would change nothing: base alone draws to fit what is "
                    f"known (sample.resample_times); leave it out"
                )

    def refuse_idle_guidance(self, upsamplers: Sequence[str], options: Dalle2SampleConfig) -> None:
        """A pull that nothing would follow. An upsampler that is not trained yet will."""
        if not upsamplers and any(stage.text for stage in self.config.upsamplers.values()):
            return
        if options.upsampler.guidance != 1 and not any(self.config.upsamplers[name].text for name in upsamplers):
            raise UserError(
                f"sample.upsampler.guidance={options.upsampler.guidance:g} pulls towards the text, and no upsampler that draws "
                f"here is told it; leave it at 1, or train one with upsampler1.text=true"
            )

    def sampler(self, name: str, stage: DiffusionStageConfig, options: DiffusionSampleConfig) -> DiffusionSampler:
        """Kept for each way to draw, with its recordings."""
        net = self.stages[name]["generator"]
        return self._samplers.find(
            (name, options.model_dump_json()), lambda: sampler_of(net, stage, options, bf16=self._bf16, records=True)
        )

    def compile(self) -> None:
        """All denoisers, layer by layer. Steps that were recorded before are forgotten."""
        self._compiled = True
        self._samplers.clear()
        for nets in self.stages.values():
            if "generator" in nets:
                compile_parts(nets["generator"], (*COMPILED, EncoderBlock))

    # --- of real pictures

    @torch.no_grad()
    def redrawn(
        self, pixels: npt.NDArray[np.uint8], captions: Sequence[str | None], seed: int, options: Dalle2SampleConfig
    ) -> npt.NDArray[np.uint8]:
        """n h w c -> as many, drawn of their own embeddings and captions, so without the prior; seeds from there on."""
        images, made = self.real(pixels), list[npt.NDArray[np.uint8]]()
        for first in range(0, len(images), options.chunk):
            some = images[first : first + options.chunk]
            chunk = Chunk(captions[first : first + options.chunk], self.numbers(seed + first, len(some)), options, pictures=some)
            small = self.decode(chunk, self.embeddings(chunk, options), options)
            made += pictures(self.enlarged(chunk, small, self.path("prior"), options))
        return np.stack(made)

    @torch.no_grad()
    def loss(self, pixels: npt.NDArray[np.uint8], captions: Sequence[str | None]) -> dict[str, float]:
        """The decoder's, with real embeddings; nothing where pictures cannot be embedded."""
        if not self.sphere.known or "base" not in self.stages:
            return {}
        base, images = self.config.base, self.real(pixels)
        losses = DiffusionLosses(base.loss, base.build_process(), partial(read_base, self.config), recalls(base))
        sums = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(images), LOSS_CHUNK):
            batch = self.judged(images[first : first + LOSS_CHUNK], tuple(captions[first : first + LOSS_CHUNK]), first)
            loss = losses.measure(self.base_nets, batch, Context(0, 0, batch.positions))
            sums += torch.stack([loss.total, loss.weight]).double().cpu()
        total, weight = sums.tolist()
        return {"loss": total / weight}

    def judged(self, images: Tensor, captions: tuple[str | None, ...], first: int) -> PairBatch:
        """Real pictures, the first being number `first`, as a loss takes them."""
        everything = torch.ones(len(images), dtype=torch.bool, device=self.device)
        return PairBatch(
            at_size(images, self.config.data.size), self.sphere.pictures(images), self.prompts.read(captions), everything,
            self.numbers(first, len(images)), ("",) * len(images), captions,
        )  # fmt: skip

    def real(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """n h w c -> n c h w in [-1, 1] on the device."""
        return from_uint8(torch.from_numpy(pixels).permute(0, 3, 1, 2).to(self.device))

    def numbers(self, first: int, count: int) -> Tensor:
        """So many from there on."""
        return torch.arange(first, first + count, device=self.device)
