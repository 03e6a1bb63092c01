"""An update, for all peers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.bench.timing import device


def peer_stepper(parameters: list[torch.nn.Parameter], loss: Callable[[], torch.Tensor], bf16: bool = True) -> Callable[[], None]:
    """One update as the peer's trainer makes it."""
    optimizer = torch.optim.Adam([p for p in parameters if p.requires_grad], lr=1e-4)

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
