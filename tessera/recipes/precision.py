"""How exactly tokenizers run outside training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Training lets a GPU round factors to 10 bits, which tips ids, and cuDNN choose kernels by how fast they were this time,
    which may tip them from run to run. The CPU does neither."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):  # of itself it turns cuDNN off
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
