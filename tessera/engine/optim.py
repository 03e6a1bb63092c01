"""Optimizers and learning rates. The rate is a pure function of the step, so there is no scheduler to save."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tessera.config import OptimConfig
from tessera.engine.shard import like


def build_optimizer(net: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the net's parameters in name order, in two groups: with and without decay.

    Fused, because that kernel takes a divisor and a "leave it out" flag that live on the device (`step.update`).
    """
    named = sorted(net.named_parameters())
    groups = [
        {"params": [p for _, p in named if decays(p)], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if not decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def decays(parameter: nn.Parameter) -> bool:
    """Matrices and kernels decay; norms, biases and other parameters of fewer than two axes do not."""
    return parameter.ndim >= 2


def learning_rate(config: OptimConfig, step: int, first_step: int, steps: int) -> float:
    """The rate of the update that takes `step` to `step + 1`; the warm-up counts from the turn's first step."""
    done = step - first_step
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, steps - first_step - config.warmup_steps)
    progress = min(1.0, (done - config.warmup_steps) / span)
    fall = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * fall)


def named_state(
    parameters: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Optimizer tensors as `parameter/moment`; parameters that were never updated have none."""
    for name, parameter in sorted(parameters):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{name}/{key}", value


def restore_state(
    parameters: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """The inverse of `named_state`: every tensor finds its parameter by name, never by order."""
    by_name = dict(parameters)
    optimizer.state.clear()
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        parameter = by_name[name]
        if value.shape == parameter.shape and key != "step":
            optimizer.state[parameter][key] = torch.empty_like(parameter).copy_(like(value, parameter))
        else:
            optimizer.state[parameter][key] = torch.empty_like(value).to(parameter.device).copy_(value)
