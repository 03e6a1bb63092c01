"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tessera.recipes.precision import full_precision


@pytest.fixture
def exact_products() -> Iterator[None]:
    """No TF32, whatever other tests have set."""
    setting = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with full_precision(torch.device("cuda")):
        yield
    torch.set_float32_matmul_precision(setting)
