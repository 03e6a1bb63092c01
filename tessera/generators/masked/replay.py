"""Sampling on a GPU without the host in the way: one step is recorded as a CUDA graph and replayed for all of them."""

from __future__ import annotations

import contextlib
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.generators.masked.model import MaskedTransformer
from tessera.generators.masked.sample import Drawer, MaskedSampleConfig, Setup, State

WARM_UP_STEPS = 3  # libraries choose kernels and take workspaces in their first calls, which must not be recorded


class GraphedSampler:
    """`sample` with fixed options. The first call of each batch size and text length records; on a CPU it is the plain loop.

    Weights are read where they lie: updating them in place is seen, moving the network to another place is not.
    """

    def __init__(
        self, net: MaskedTransformer, config: MaskedSampleConfig, critic: nn.Module | None = None,
        bf16: bool = False,
    ) -> None:  # fmt: skip
        self.drawer, self.bf16 = Drawer(net, config, critic), bf16
        self.recordings: dict[tuple[Any, ...], Recording] = {}

    @torch.no_grad()
    def __call__(
        self, text: TextStates, seeds: Tensor, negative: TextStates | None = None, known: Tensor | None = None,
        low: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """ids b n; arguments as those of `sample`."""
        setup, state = self.drawer.prepare(text, seeds, negative, known, low)
        if seeds.device.type == "cuda":
            shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in (*tensors_of(setup), *tensors_of(state)))
            if shapes not in self.recordings:
                self.recordings[shapes] = Recording(self, setup, state)
            return self.recordings[shapes].play(setup, state, self.drawer.config.steps)
        for _ in range(self.drawer.config.steps):
            state = self.step(setup, state)
        return state.ids

    def step(self, setup: Setup, state: State) -> State:
        """One step at the chosen precision."""
        with self._autocast(state.ids.device):
            return self.drawer.step_once(setup, state)

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A cached cast would outlive the recording that made it, so nothing is cached."""
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if self.bf16 else contextlib.nullcontext()


class Recording:
    """A step on buffers of its own, which it updates in place."""

    def __init__(self, sampler: GraphedSampler, setup: Setup, state: State) -> None:
        self.setup, self.state = cloned(setup), cloned(state)  # the caller's tensors are not ours to overwrite
        stream = torch.cuda.Stream(state.ids.device)
        stream.wait_stream(torch.cuda.current_stream(state.ids.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                sampler.step(self.setup, self.state)
        torch.cuda.current_stream(state.ids.device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(state.ids.device), torch.cuda.graph(self.graph):
            copy_tensors(self.state, sampler.step(self.setup, self.state))

    def play(self, setup: Setup, state: State, steps: int) -> Tensor:
        """ids b n after all steps."""
        copy_tensors(self.setup, setup)
        copy_tensors(self.state, state)
        for _ in range(steps):
            self.graph.replay()
        return self.state.ids.clone()


def tensors_of(item: Any) -> list[Tensor]:
    """All tensors of a dataclass and of those in it, in the order of their fields."""
    if isinstance(item, Tensor):
        return [item]
    return [tensor for part in fields(item) for tensor in tensors_of(getattr(item, part.name))] if is_dataclass(item) else []


def cloned(item: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(item, Tensor):
        return item.clone()
    if not is_dataclass(item) or isinstance(item, type):
        return item
    return replace(item, **{part.name: cloned(getattr(item, part.name)) for part in fields(item)})


def copy_tensors(into: Any, source: Any) -> None:
    """Overwrites tensors with those of the same dataclass."""
    for old, new in zip(tensors_of(into), tensors_of(source), strict=True):
        old.copy_(new)
