"""What recipes with a masked generator share: its nets, its previews, and drawing tokens from captions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import TokenBatch
from tessera.config import UserError
from tessera.contracts import Context, Nets, Train
from tessera.generators.masked.losses import MaskedLossConfig, MaskedLosses
from tessera.generators.masked.model import Low
from tessera.generators.masked.replay import GraphedSampler
from tessera.generators.masked.sample import MaskedSampleConfig, sample
from tessera.generators.masked.stage import MaskedStageConfig, build_nets, build_stage
from tessera.recipes.captions import Prompts
from tessera.recipes.generator import MakeLoader, MakeNets, MakePreview, generator_step
from tessera.recording import Kept
from tessera.text.encoders import TextConfig, build_encoder, encode_text, text_width


def masked_nets(
    text: TextConfig, stage: MaskedStageConfig, vocab_size: int, grid: Sequence[int], low: Low | None = None
) -> dict[str, nn.Module]:
    """Fresh ones for a token grid, with a text encoder of their own where one is trained."""
    encoder = build_encoder(text)
    return build_nets(stage, vocab_size=vocab_size, grid=grid, text_width=text_width(text), encoder=encoder, low=low)


def masked_step(
    name: str, stage: MaskedStageConfig, text: TextConfig, make_nets: MakeNets, feed: MakeLoader, preview: MakePreview,
    needs: Mapping[str, str],
) -> Train:  # fmt: skip
    """The training of a masked generator."""
    return generator_step(name, stage, text, make_nets, lambda nets: build_stage(stage, nets), feed, preview, needs)


class TokenDrawer:
    """Captions to tokens by the masked generators of a run. A sampler is kept for each way to draw, with its recordings."""

    def __init__(self, text: TextConfig, device: torch.device, bf16: bool) -> None:
        self.prompts, self.bf16 = Prompts(text, device), bf16
        self._samplers = Kept[GraphedSampler]()

    def forget(self) -> None:
        """Steps that were recorded, because the networks have changed."""
        self._samplers.clear()

    def __call__(
        self, stage: str, nets: Nets, options: MaskedSampleConfig, captions: Sequence[str | None], seeds: Tensor, *,
        negatives: Sequence[str | None] | None = None, known: Tensor | None = None, low: Tensor | None = None,
        frames: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """ids b ... on the grid of the stage's generator; `known`, `low` and `frames` as `masked.sample` takes them."""
        generator: Any = nets["generator"]
        text = self.prompts(nets, captions)
        negative = None if negatives is None or options.guidance == 1 else self.prompts(nets, negatives)
        if options.order == "critic" and "critic" not in nets:
            raise UserError(f"order critic needs a critic, and {stage} has none; train one: {stage}.critic.kind=net, or head")
        sampler = self._samplers.find(
            (stage, options.model_dump_json()), lambda: GraphedSampler(generator, options, nets.get("critic"), self.bf16)
        )
        return sampler(text, seeds, negative, known, low, frames).unflatten(1, generator.grid)


def draw_preview(
    options: MaskedSampleConfig, nets: Nets, batch: TokenBatch, low: Tensor | None = None, frames: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Ids drawn from the batch's captions with the seeds 0, 1, ..., and those seeds."""
    generator: Any = nets["generator"]
    seeds, text = torch.arange(len(batch.keys), device=batch.ids.device), encode_text(nets, batch.text)
    return sample(generator, text, seeds, options, low=low, critic=nets.get("critic"), frames=frames), seeds


@torch.no_grad()
def token_loss(config: MaskedLossConfig, nets: Nets, batches: Iterable[TokenBatch]) -> dict[str, float]:
    """Cross-entropy of hidden tokens, in nats, and the share guessed right."""
    losses, sums = MaskedLosses(config), torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        loss = losses.measure(nets, batch, Context(0, 0, batch.positions))
        sums += torch.stack([loss.total, loss.weight, loss.parts["right"]]).double().cpu()
    total, weight, right = sums.tolist()
    return {"loss": total / weight, "right": right / weight}
