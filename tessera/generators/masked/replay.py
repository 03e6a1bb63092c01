"""Sampling on a GPU without the host in the way: one step is recorded as a CUDA graph and replayed for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.generators.masked.model import MaskedTransformer
from tessera.generators.masked.sample import Drawer, MaskedSampleConfig, Setup, State
from tessera.recording import Recording, sampling_precision, shapes_of


class GraphedSampler:
    """`sample` with fixed options. The first call of each batch size and text length records; on a CPU it is the plain loop.

    Weights are read where they lie: updating them in place is seen, moving the network to another place is not.
    """

    def __init__(
        self, net: MaskedTransformer, config: MaskedSampleConfig, critic: nn.Module | None = None,
        bf16: bool = False,
    ) -> None:  # fmt: skip
        self.drawer, self.bf16 = Drawer(net, config, critic), bf16
        self.recordings: dict[tuple[Any, ...], Recording[Setup, State]] = {}

    @torch.no_grad()
    def __call__(
        self, text: TextStates, seeds: Tensor, negative: TextStates | None = None, known: Tensor | None = None,
        low: Tensor | None = None, frames: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """ids b n; arguments as those of `sample`."""
        setup, state = self.drawer.prepare(text, seeds, negative, known, low, frames)
        if seeds.device.type == "cuda":
            shapes = shapes_of(setup, state)
            if shapes not in self.recordings:
                self.recordings[shapes] = Recording(self.step, setup, state)
            recording = self.recordings[shapes]
            recording.load(setup, state)
            for _ in range(self.drawer.config.steps):
                recording.play()
            return recording.state.ids.clone()
        for _ in range(self.drawer.config.steps):
            state = self.step(setup, state)
        return state.ids

    def step(self, setup: Setup, state: State) -> State:
        """One step at the chosen precision."""
        with sampling_precision(state.ids.device, self.bf16):
            return self.drawer.step_once(setup, state)
