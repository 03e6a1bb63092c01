"""How near a prediction of bins is to the bins that were there."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class BinScores(nn.Module):
    """Logits b f c 3 bins and bins b f c 3 -> b f each: `kl`, divergence from blurred bins; `bin_accuracy`, the share that is
    right; `triangle_accuracy`, whether all of a face's are. A module, so that it can be compiled: logits are then read once."""

    def forward(self, logits: Tensor, targets: Tensor, blur: float) -> dict[str, Tensor]:
        """blur: deviation in bins."""
        right = logits.detach().argmax(-1) == targets
        return {
            "kl": blurred_divergence(logits, targets, blur).mean((-2, -1)),
            "bin_accuracy": right.float().mean((-2, -1)),
            "triangle_accuracy": right.all(-1).all(-1).float(),
        }


def blurred_divergence(logits: Tensor, targets: Tensor, blur: float) -> Tensor:
    """... bins, targets ... -> ...: divergence (KL) of the prediction from a Gaussian about the target, cut at the first and the
    last bin and of sum 1. Cross-entropy less the target's own entropy, so that 0 is perfect. fp32.

    Weights of all bins, most of them 0: to take logits near the target alone would be to scatter their gradients."""
    logs = logits.float().log_softmax(-1)
    with torch.no_grad():
        away = torch.arange(logs.shape[-1], device=logs.device, dtype=torch.float32) - targets[..., None]
        weights = away.div(max(blur, 1e-12)).square_().mul_(-0.5).exp_()
        weights.masked_fill_(away.abs_() > math.ceil(6 * blur), 0)  # beyond, they are below 2e-8
        weights.div_(weights.sum(-1, keepdim=True))
        entropies = -torch.special.xlogy(weights, weights).sum(-1)
    return -(weights * logs).sum(-1) - entropies
