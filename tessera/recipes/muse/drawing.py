"""From a request's chunk to pictures: text, tokens, a finer grid of tokens, pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tessera.batches import TokenBatch, from_uint8
from tessera.compiling import compile_module
from tessera.config import UserError
from tessera.contracts import Chunk, Nets
from tessera.generators.masked.sample import MaskedSampleConfig
from tessera.media.images import to_picture
from tessera.randomness import mix_text, uniform
from tessera.recipes.generator import encode_exactly, judged_batch
from tessera.recipes.masked import TokenDrawer, token_loss
from tessera.recipes.muse.config import MuseConfig, MuseSampleConfig
from tessera.recipes.pictures import at_size, covered, covered_cells, pictures
from tessera.recipes.precision import full_precision

LOSS_CHUNK = 64  # pictures
_VARIATION = mix_text("variation") >> 1


class Painter:
    """Draws with the trained nets of a run. Rows of a chunk do not see each other."""

    def __init__(self, config: MuseConfig, stages: Mapping[str, Nets], device: torch.device) -> None:
        if "base" not in stages:
            raise UserError(f"stage base has not been trained yet (trained: {', '.join(stages)}); tessera resume goes on with it")
        self.config, self.stages, self.device = config, stages, device
        self._bf16 = device.type == "cuda" and config.engine.precision == "bf16"
        self.draw_tokens = TokenDrawer(config.text, device, self._bf16)
        self._compiled = False

    @property
    def resolution(self) -> int:
        """The height of pictures: that of the last trained generator."""
        fine = self.config.superres
        return self.config.data.resolution if fine is None or "superres" not in self.stages else fine.resolution

    def start_size(self, options: MuseSampleConfig) -> tuple[int, int]:
        """Height and width of a picture that drawing starts from."""
        return self.config.data.at(self.resolution).size

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
        ids = self.tokens("base", MaskedSampleConfig.part_of(options), chunk, known, None)
        if self.config.superres is None or "superres" not in self.stages:
            images = self.decode("tokenizer", ids)
        else:
            fine = self.tokens("superres", options.superres, chunk, None, ids.flatten(1))
            images = self.decode("fine_tokenizer" if "fine_tokenizer" in self.stages else "tokenizer", fine)
        return images if redraw is None or chunk.pictures is None else torch.where(redraw, images, chunk.pictures)

    def compile(self) -> None:
        """Generators as a whole, and of tokenizers what makes pixels. Steps that were recorded before are forgotten."""
        self._compiled = True
        self.draw_tokens.forget()
        for nets in self.stages.values():
            for name, part in (("generator", None), ("tokenizer", "decoder")):
                if name in nets:
                    module: Any = nets[name] if part is None else getattr(nets[name], part)
                    compile_module(module)

    def tokens(self, stage: str, options: MaskedSampleConfig, chunk: Chunk, known: Tensor | None, low: Tensor | None) -> Tensor:
        """ids b ... of one generator."""
        return self.draw_tokens(
            stage, self.stages[stage], options, chunk.captions, chunk.seeds, negatives=chunk.negatives, known=known, low=low
        )

    def start(self, chunk: Chunk, options: MuseSampleConfig) -> tuple[Tensor | None, Tensor | None]:
        """Tokens of base that stay, b n, and which pixels of the picture are drawn anew, b 1 h w; nothing of both without one."""
        if chunk.towards is not None:
            raise UserError("recipe muse draws by tokens, and there are none between two pictures; towards is for recipe dalle2")
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
            cells = covered_cells(chunk.redraw, size, options.mask_ring)
            open_cells = cells.flatten(1) > 0
            redraw = F.interpolate(cells, size=chunk.pictures.shape[-2:], mode="nearest") > 0
            pixels = covered(chunk.pictures, redraw)
        ids = encode_exactly(self.stages["tokenizer"]["tokenizer"], at_size(pixels, self.config.data.size)).flatten(1)
        return ids.masked_fill(
            open_cells.repeat_interleave(ids.shape[1] // open_cells.shape[1], dim=1), generator.mask_id
        ), redraw

    def loss(self, pixels: npt.NDArray[np.uint8], captions: Sequence[str | None]) -> dict[str, float]:
        """Cross-entropy of hidden tokens at the base's resolution, in nats, and the share guessed right."""
        return token_loss(self.config.base.loss, self.stages["base"], self.real_tokens(pixels, captions))

    def real_tokens(self, pixels: npt.NDArray[np.uint8], captions: Sequence[str | None]) -> Iterator[TokenBatch]:
        """n h w c -> batches of their tokens, with encoded captions."""
        images, size = torch.from_numpy(pixels).permute(0, 3, 1, 2), self.config.data.size
        for first in range(0, len(images), LOSS_CHUNK):
            part = at_size(from_uint8(images[first : first + LOSS_CHUNK].to(self.device)), size)
            ids = encode_exactly(self.stages["tokenizer"]["tokenizer"], part)
            some = tuple(captions[first : first + LOSS_CHUNK])
            yield judged_batch(ids, self.draw_tokens.prompts(self.stages["base"], some), some, first)

    def decode(self, stage: str, ids: Tensor) -> Tensor:
        """Tokens to pixels, by the stage's tokenizer, at the precision that it was trained with; ids need more, pixels do not."""
        tokenizer: Any = self.stages[stage]["tokenizer"]
        exact = full_precision(self.device)
        with torch.autocast(self.device.type, torch.bfloat16) if self._bf16 else exact:
            images: Tensor = tokenizer.decode(ids)
        return images.float()
