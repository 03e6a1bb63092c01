"""Residual quantization: each link of a chain quantizes what the links before it left over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from tessera.config import Config
from tessera.nn.quantizers.codes import Quantizer
from tessera.nn.quantizers.fsq import FSQConfig
from tessera.nn.quantizers.lfq import LFQConfig
from tessera.nn.quantizers.vq import VQConfig


class ResidualConfig(Config):
    """Several quantizers of one kind, each for what the ones before it left over. Ids get a last axis, one id for each."""

    kind: Literal["residual"] = "residual"
    """The kind of quantizer."""
    quantizer: Annotated[FSQConfig | LFQConfig | VQConfig, Field(discriminator="kind")] = VQConfig()
    """Every link of the chain."""
    num_quantizers: int = Field(2, ge=1, le=64)
    """Links of the chain."""

    @model_validator(mode="after")
    def _resolvable(self) -> ResidualConfig:
        """Each link of FSQ divides what is left by its levels; beyond the 24 bits of fp32 nothing is left."""
        if isinstance(self.quantizer, FSQConfig):
            most = int(24 / math.log2(max(self.quantizer.levels)))
            if self.num_quantizers > max(1, most):
                raise ValueError(
                    f"num_quantizers {self.num_quantizers} with {max(self.quantizer.levels)} levels a channel is finer than fp32 "
                    f"can tell; at most {most} links"
                )
        return self

    @property
    def vocab_size(self) -> int:
        """Number of codes of one link; a token is num_quantizers such ids."""
        return self.quantizer.vocab_size

    @property
    def width(self) -> int:
        """Channels of the latent."""
        return self.quantizer.width

    def build(self) -> Residual:
        """The module."""
        return Residual(self)


class Residual(Quantizer):
    """Zeghidour et al. 2021 (SoundStream, algorithm 1). The code of a token is the sum over the chain.

    Vectors are normalised or bounded once, before the first link. FSQ subdivides (see `FSQ`), LFQ halves its codes from link to
    link, VQ learns a codebook for each link.
    """

    def __init__(self, config: ResidualConfig) -> None:
        super().__init__()
        self.vocab_size, self.width = config.vocab_size, config.width
        self.chain = [config.quantizer.build(depth) for depth in range(config.num_quantizers)]
        self.links = nn.ModuleList(self.chain)

    def prepare(self, z: Tensor) -> Tensor:
        """As the first link does."""
        return self.chain[0].prepare(z)

    def nearest(self, prepared: Tensor) -> Tensor:
        """... d -> ... q"""
        found = []
        for link in self.chain:
            found.append(link.nearest(prepared))
            prepared = prepared - link.decode(found[-1])
        return torch.stack(found, dim=-1)

    def decode(self, ids: Tensor) -> Tensor:
        """... q -> ... d; the ids of the first links alone decode to a coarser code."""
        parts = [link.decode(own) for link, own in zip(self.chain, ids.unbind(-1), strict=False)]
        return torch.stack(parts).sum(0)

    def terms(self, prepared: Tensor, ids: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Means over the links."""
        every = [link.terms(left, own, valid) for link, left, own in self.walk(prepared, ids)]
        return {name: torch.stack([terms[name] for terms in every]).mean(0) for name in every[0]}

    def sums(self, prepared: Tensor, ids: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Those of the links, with an axis q in front."""
        every = [link.sums(left.detach(), own, valid) for link, left, own in self.walk(prepared, ids)]
        return {name: torch.stack([sums[name] for sums in every]) for name in every[0]}

    def follow(self, sums: Mapping[str, Tensor], step: int) -> None:
        """Each link by its own."""
        for index, link in enumerate(self.chain):
            link.follow({name: value[index] for name, value in sums.items()}, step)

    def facts(self) -> dict[str, Tensor]:
        """Sums over the links."""
        every = [link.facts() for link in self.chain]
        return {name: torch.stack([facts[name] for facts in every]).sum(0) for name in every[0]}

    def counts(self, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """q vocab_size"""
        return torch.stack([link.counts(own, valid) for link, own in zip(self.chain, ids.unbind(-1), strict=True)])

    def walk(self, prepared: Tensor, ids: Tensor) -> Iterator[tuple[Quantizer, Tensor, Tensor]]:
        """Each link with what it saw and what it chose."""
        for link, own in zip(self.chain, ids.unbind(-1), strict=True):
            yield link, prepared, own
            prepared = prepared - link.decode(own).detach()
