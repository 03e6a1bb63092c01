"""What all recipes share whose generator learns from cached tokens: its step, its tokens, and facts of its previews."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import TextStates, TokenBatch
from tessera.contracts import Context, Loader, Nets, Preview, Stage, Tokenizer, Train
from tessera.generators.autoregressive.grid_stage import GridStageConfig
from tessera.generators.masked.stage import MaskedStageConfig
from tessera.recipes.precision import full_precision
from tessera.text.encoders import NoTextConfig, PrecomputedTextConfig, TextConfig

MakeNets = Callable[[], dict[str, nn.Module]]
MakeLoader = Callable[[Nets, Any], Loader]
MakePreview = Callable[[Nets, Nets, Any, Context], Preview]


def generator_step(
    name: str, stage: MaskedStageConfig | GridStageConfig, text: TextConfig, make_nets: MakeNets,
    make_stage: Callable[[dict[str, nn.Module]], Stage], feed: MakeLoader, preview: MakePreview, needs: Mapping[str, str],
) -> Train:  # fmt: skip
    """The training of a generator."""
    return Train(
        name=name,
        batch_size=stage.batch_size,
        steps=stage.steps,
        build=lambda: replace(make_stage(make_nets()), preview=preview),
        serves=make_nets,
        feed=feed,
        needs=needs,
        captioned=not isinstance(text, (NoTextConfig, PrecomputedTextConfig)),
    )


@torch.no_grad()
def encode_exactly(tokenizer: nn.Module, x: Tensor) -> Tensor:
    """As `Session.encode` does, so that cached ids are those that a user gets."""
    assert isinstance(tokenizer, Tokenizer)
    with full_precision(x.device):
        return tokenizer.encode(x)


def judged_batch(ids: Tensor, text: TextStates, captions: tuple[str | None, ...], first: int) -> TokenBatch:
    """Tokens of real samples, the first being number `first`, as a measure of the held-out loss takes them."""
    positions = torch.arange(first, first + len(ids), device=ids.device)
    everything = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    return TokenBatch(ids, text, everything, positions, ("",) * len(ids), captions)


def facts_of(batch: TokenBatch, seeds: Tensor) -> dict[str, Any]:
    """For the JSON beside a preview."""
    return {"keys": list(batch.keys), "captions": list(batch.captions), "seeds": seeds.tolist()}
