"""A transformer layer that a condition shifts, scales and gates: of the masked generators and of denoisers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.attention import Attention, FeedForward


class AdaptiveBlock(nn.Module):
    """Self-attention, cross-attention to a context where there is one, feed-forward; shifted, scaled and gated by the condition
    (adaLN, Peebles and Xie 2023; one projection for all layers and a table for each, Chen et al. 2023). Gates start at 0."""

    def __init__(self, width: int, heads: int, context_width: int | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(width, elementwise_affine=False) for _ in range(3))
        self.attention = Attention(width, heads)
        self.cross = None if context_width is None else Attention(width, heads, context_width)
        self.feed_forward = FeedForward(width)
        self.table = nn.Parameter(torch.zeros(num_shifts(context_width), width))
        self.dropout = dropout

    def forward(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, condition: Tensor, turns: Tensor,
        present: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x b n d, context b m c, mask b m, condition b s d with s of `num_shifts`, turns 2 n k; present b n, True where a token
        may be seen, None: all"""
        table = self.table.to(condition.dtype)
        shifts = list((condition + table)[:, :, None].unbind(1))
        shift, scale, gate = shifts[:3]
        x = x + gate * self._drop(self.attention(self.norm1(x) * (1 + scale) + shift, mask=present, turns=turns))
        if self.cross is not None:
            shift, scale, gate = shifts[3:6]
            x = x + gate * self._drop(self.cross(self.norm2(x) * (1 + scale) + shift, context, mask))
        shift, scale, gate = shifts[-3:]
        return x + gate * self._drop(self.feed_forward(self.norm3(x) * (1 + scale) + shift))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def num_shifts(context_width: int | None) -> int:
    """Vectors that a layer is conditioned by: shift, scale and gate of each of its parts."""
    return 6 if context_width is None else 9
