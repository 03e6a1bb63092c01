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
    # `flags` turns cuDNN off unless told otherwise
    with exact_products(), torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of matrices, by the name for it that the program around us uses: torch refuses to read the older one where the
    newer was set."""
    matmul = torch.backends.cuda.matmul
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        newer = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
