"""Exact numbers where training allows rounded ones, by the same fast kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tessera.recipes.precision import full_precision


def flags() -> tuple[bool, bool, bool, str]:
    cudnn = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision()


def test_the_newer_names_of_torch_are_followed() -> None:
    """In a process of its own: once used, the older ones are refused."""
    script = """
import torch
from tessera.recipes.precision import full_precision
matmul = torch.backends.cuda.matmul
matmul.fp32_precision = "tf32"
with full_precision(torch.device("cuda")):
    assert matmul.fp32_precision == "ieee"
    assert torch.backends.cudnn.enabled
assert matmul.fp32_precision == "tf32"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_computes_exactly_with_cudnn_and_goes_back_to_what_training_set(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(KeyError) if fails else full_precision(torch.device("cpu")), full_precision(torch.device("cuda")):
            assert flags() == (True, False, False, "highest")
            if fails:
                raise KeyError
        assert flags() == (True, True, True, "high")
        with full_precision(torch.device("cpu")):
            assert flags() == (True, True, True, "high")
    finally:
        torch.set_float32_matmul_precision(before)
