"""How exactly tokenizers run outside training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN rounds products to 10 bits by default, which tips ids; the CPU does not."""
    return torch.backends.cudnn.flags(allow_tf32=False) if device.type == "cuda" else nullcontext()
