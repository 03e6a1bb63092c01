"""From a request's chunk to pictures: text, tokens, a finer grid of tokens, pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tessera.batches import TokenBatch, from_uint8, to_uint8
from tessera.config import UserError
from tessera.contracts import Chunk, Context, Nets
from tessera.generators.masked.losses import MaskedLosses
from tessera.generators.masked.replay import GraphedSampler
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.media.images import to_picture
from tessera.randomness import mix_text, uniform
from tessera.recipes.captions import Prompts
from tessera.recipes.muse.config import MuseConfig, MuseSampleConfig
from tessera.recipes.precision import full_precision

LOSS_CHUNK = 64  # pictures
_VARIATION = mix_text("variation") >> 1


class Painter:
    """Draws with the trained nets of a run. Rows of a chunk do not see each other."""

    def __init__(self, config: MuseConfig, stages: Mapping[str, Nets], device: torch.device) -> None:
        if "base" not in stages:
            raise UserError(f"stage base has not been trained yet (trained: {', '.join(stages)}); tessera resume goes on with it")
        self.config, self.stages, self.device = config, stages, device
        self.prompts = Prompts(config.text, device)
        self._samplers: dict[tuple[str, str], GraphedSampler] = {}
        self._bf16 = device.type == "cuda" and config.engine.precision == "bf16"
        self._compiled = False

    @property
    def resolution(self) -> int:
        """That of the last trained generator."""
        fine = self.config.superres
        return self.config.data.resolution if fine is None or "superres" not in self.stages else fine.resolution

    @torch.no_grad()
    def __call__(self, chunk: Chunk) -> list[Image.Image]:
        """A picture for every row."""
        return [to_picture(array) for array in pictures(self.pixels(chunk))]

    def pixels(self, chunk: Chunk) -> Tensor:
        """b c h w in [-1, 1]."""
        options = chunk.options
        assert isinstance(options, MuseSampleConfig)
        if options.compile and not self._compiled:
            self.compile()
        known, redraw = self.start(chunk, options)
        ids = self.tokens("base", base_options(options), chunk, known, None)
        if self.config.superres is None or "superres" not in self.stages:
            images = self.decode("tokenizer", ids)
        else:
            fine = self.tokens("superres", options.superres, chunk, None, ids.flatten(1))
            images = self.decode("fine_tokenizer" if "fine_tokenizer" in self.stages else "tokenizer", fine)
        return images if redraw is None or chunk.pictures is None else torch.where(redraw, images, chunk.pictures)

    def compile(self) -> None:
        """Generators as a whole, and of tokenizers what makes pixels. Steps that were recorded before are forgotten."""
        self._compiled = True
        self._samplers.clear()
        for nets in self.stages.values():
            for name, part in (("generator", None), ("tokenizer", "decoder")):
                if name in nets:
                    module: Any = nets[name] if part is None else getattr(nets[name], part)
                    module.compile()

    def tokens(self, stage: str, options: MaskedSampleConfig, chunk: Chunk, known: Tensor | None, low: Tensor | None) -> Tensor:
        """ids b ... of one generator."""
        nets = self.stages[stage]
        generator: Any = nets["generator"]
        text = self.prompts(nets, chunk.captions)
        negative = None if chunk.negatives is None or options.guidance == 1 else self.prompts(nets, chunk.negatives)
        if options.order == "critic" and "critic" not in nets:
            raise UserError(f"order critic needs a critic, and {stage} has none; train one: {stage}.critic.kind=net, or head")
        key = stage, options.model_dump_json()
        if key not in self._samplers:
            self._samplers[key] = GraphedSampler(generator, options, nets.get("critic"), self._bf16)
        return self._samplers[key](text, chunk.seeds, negative, known, low).unflatten(1, generator.grid)

    def start(self, chunk: Chunk, options: MuseSampleConfig) -> tuple[Tensor | None, Tensor | None]:
        """Tokens of base that stay, b n, and which pixels of the picture are drawn anew, b 1 h w; nothing of both without one."""
        if chunk.pictures is None:
            return None, None
        generator: Any = self.stages["base"]["generator"]
        size = generator.grid[:2]
        if chunk.redraw is None:  # a variation: any places, by the seed
            share = uniform(_VARIATION, chunk.seeds, size[0] * size[1])
            open_cells = share < options.variation
            redraw = None
            pixels = chunk.pictures
        else:
            cells = F.adaptive_max_pool2d(chunk.redraw[:, None].float(), size)
            ring = 2 * options.mask_ring + 1
            cells = F.max_pool2d(cells, ring, stride=1, padding=options.mask_ring)
            open_cells = cells.flatten(1) > 0
            redraw = F.interpolate(cells, size=chunk.pictures.shape[-2:], mode="nearest") > 0
            known_mean = (chunk.pictures * ~redraw).sum((2, 3), keepdim=True) / (~redraw).sum((2, 3), keepdim=True).clamp(min=1)
            pixels = torch.where(redraw, known_mean, chunk.pictures)  # what is drawn over must not shine through
        with full_precision(self.device):
            coarse = at_size(pixels, self.config.data.resolution)
            ids = self.stages["tokenizer"]["tokenizer"].encode(coarse).flatten(1)  # type: ignore[operator]
        return ids.masked_fill(
            open_cells.repeat_interleave(ids.shape[1] // open_cells.shape[1], dim=1), generator.mask_id
        ), redraw

    @torch.no_grad()
    def loss(self, pixels: npt.NDArray[np.uint8], captions: Sequence[str | None]) -> dict[str, float]:
        """Cross-entropy of hidden tokens at the base's resolution, in nats, and the share guessed right."""
        nets, size = self.stages["base"], self.config.data.resolution
        losses, sums = MaskedLosses(self.config.base.loss), torch.zeros(3, dtype=torch.float64)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        for first in range(0, len(images), LOSS_CHUNK):
            part = at_size(from_uint8(images[first : first + LOSS_CHUNK].to(self.device)), size)
            with full_precision(self.device):
                ids = self.stages["tokenizer"]["tokenizer"].encode(part)  # type: ignore[operator]
            some = tuple(captions[first : first + LOSS_CHUNK])
            positions = torch.arange(first, first + len(part), device=self.device)
            everything = torch.ones(len(part), dtype=torch.bool, device=self.device)
            batch = TokenBatch(ids, self.prompts(nets, some), everything, positions, ("",) * len(part), some)
            loss = losses.measure(nets, batch, Context(0, 0, positions))
            sums += torch.stack([loss.total, loss.weight, loss.parts["right"]]).double().cpu()
        total, weight, right = sums.tolist()
        return {"loss": total / weight, "right": right / weight}

    def decode(self, stage: str, ids: Tensor) -> Tensor:
        """Tokens to pixels, by the stage's tokenizer, at the precision that it was trained with; ids need more, pixels do not."""
        tokenizer: Any = self.stages[stage]["tokenizer"]
        exact = full_precision(self.device)
        with torch.autocast(self.device.type, torch.bfloat16) if self._bf16 else exact:
            images: Tensor = tokenizer.decode(ids)
        return images.float()


def base_options(options: MuseSampleConfig) -> MaskedSampleConfig:
    """What concerns the first generator."""
    return MaskedSampleConfig(**{name: getattr(options, name) for name in MaskedSampleConfig.model_fields})


def at_size(images: Tensor, size: int) -> Tensor:
    """b c h w in [-1, 1], scaled as the data of training is: bicubic, antialiased, clamped."""
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, size=(size, size), mode="bicubic", antialias=True).clamp(-1, 1)


def pictures(images: Tensor) -> list[npt.NDArray[np.uint8]]:
    """b c h w in [-1, 1] -> arrays of h w c."""
    return list(to_uint8(images).permute(0, 2, 3, 1).cpu().numpy())
