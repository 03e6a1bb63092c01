"""From captions to tokens by a masked generator: the way that is asked for is the one that draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera.generators.masked.sample import Drawer, MaskedSampleConfig, sample
from tessera.recipes.masked import TokenDrawer
from tessera.text.bytes import ByteTextConfig
from tests.generators.masked_toys import GRID, critic, encoder, generator

CAPTIONS, SEEDS = ["red thing", "blue thing"], torch.tensor([3, 4])


def test_the_order_of_a_request_reaches_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    nets: dict[str, Any] = {"generator": generator(), "critic": critic(), "text": encoder()}
    draw = TokenDrawer(ByteTextConfig(length=24, width=32, depth=1, heads=2), torch.device("cpu"), bf16=False)
    heard: list[str] = []
    for name in ("first", "doubtful"):
        own = getattr(Drawer, name)

        def spied(drawer: Drawer, *rest: Any, own: Any = own, name: str = name) -> Any:
            heard.append(f"{name} {drawer.config.order}")
            return own(drawer, *rest)

        monkeypatch.setattr(Drawer, name, spied)
    drawn = {}
    for order, call in (("halton", "first"), ("confidence", "first"), ("critic", "doubtful"), ("halton", "first")):
        heard.clear()
        config = MaskedSampleConfig(steps=4, order=order)  # type: ignore[arg-type]
        found = draw("base", nets, config, CAPTIONS, SEEDS)
        assert heard == [f"{call} {order}"] * 4
        wanted = sample(nets["generator"], draw.prompts(nets, CAPTIONS), SEEDS, config, critic=nets["critic"])
        assert torch.equal(found, wanted.unflatten(1, GRID))
        drawn[order] = found.flatten().tolist()
    assert len(set(map(tuple, drawn.values()))) == 3
