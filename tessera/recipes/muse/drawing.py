"""From a request's chunk to pictures: text, tokens, a finer grid of tokens, pixels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.batches import to_uint8
from tessera.config import UserError
from tessera.contracts import Chunk, Nets
from tessera.generators.masked.sample import sample
from tessera.recipes.captions import Prompts
from tessera.recipes.muse.config import MuseConfig


class Painter:
    """Draws with the trained nets of a run. Rows of a chunk do not see each other."""

    def __init__(self, config: MuseConfig, stages: Mapping[str, Nets], device: torch.device) -> None:
        if "base" not in stages:
            raise UserError(f"stage base has not been trained yet (trained: {', '.join(stages)}); tessera resume goes on with it")
        self.config, self.stages, self.device = config, stages, device
        self.prompts = Prompts(config.text, device)

    @torch.no_grad()
    def __call__(self, chunk: Chunk) -> Tensor:
        """b c h w in [-1, 1]."""
        nets, tokenizer = self.stages["base"], self.tokenizer("tokenizer")
        text = self.prompts(nets, chunk.captions)
        negative = None if chunk.negatives is None else self.prompts(nets, chunk.negatives)
        generator: Any = nets["generator"]
        ids = sample(
            generator, text, chunk.seeds, chunk.options, negative=negative, smoothing=self.config.base.loss.label_smoothing
        )
        with full_precision(self.device):
            images: Tensor = tokenizer.decode(ids.unflatten(1, generator.grid))
        return images

    def tokenizer(self, stage: str) -> Any:
        """The net that decodes."""
        return self.stages[stage]["tokenizer"]


def pictures(images: Tensor) -> list[npt.NDArray[np.uint8]]:
    """b c h w in [-1, 1] -> arrays of h w c."""
    return list(to_uint8(images).permute(0, 2, 3, 1).cpu().numpy())


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN rounds products to 10 bits by default, which tips ids; the CPU does not."""
    return torch.backends.cudnn.flags(allow_tf32=False) if device.type == "cuda" else nullcontext()
