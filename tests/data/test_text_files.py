"""Text states of the user's own: a file for each sample key."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.config import UserError
from tessera.data.text_files import PrecomputedText
from tessera.text.precomputed import PrecomputedTextConfig, settle_precomputed
from tests.data.array_makers import DAMAGED

KEYS = ["a", "dogs/rex.v2", "vector", "none"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "dogs").mkdir()
    np.save(tmp_path / "a.npy", rng.normal(size=(3, 8)).astype(np.float16))
    np.save(tmp_path / "dogs" / "rex.v2.npy", rng.normal(size=(9, 8)))
    np.save(tmp_path / "vector.npy", rng.normal(size=8).astype(np.float32))
    np.save(tmp_path / "none.npy", np.zeros((0, 8), np.float32))
    return tmp_path


def test_states_come_by_key_whatever_the_caption(folder: Path) -> None:
    read = PrecomputedText.open(folder, 5, 8, KEYS)
    found = pickle.loads(pickle.dumps(read))([None, "x", "y", "", "z"], [*KEYS, ""])
    assert found.states.shape == (5, 5, 8)
    assert found.mask.sum(1).tolist() == [3, 5, 1, 0, 0]
    long, vector = np.load(folder / "dogs" / "rex.v2.npy")[:5], np.load(folder / "vector.npy")
    np.testing.assert_allclose(found.states[1].numpy(), long, rtol=1e-6)
    np.testing.assert_allclose(found.pooled[1].numpy(), long.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.pooled[2].numpy(), vector)
    assert found.pooled[3:].eq(0).all()
    assert found.states[~found.mask].eq(0).all()
    assert found.states.dtype == torch.float32


def test_samples_without_a_file_are_counted_and_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"7 samples have no text states in .*: b0\.npy, b1\.npy, .* and 2 more missing"):
        PrecomputedText.open(folder, 5, 8, [*KEYS, *(f"b{index}" for index in range(7))])
    with pytest.raises(UserError, match=r"c\.npy cannot be read"):
        PrecomputedText.open(folder, 5, 8, KEYS)([None], ["c"])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 9)), r"float64 of shape \(2, 9\); expected floats, states x 8"),
        (np.zeros((2, 8), np.int32), "int32"),
        (np.zeros((1, 2, 8)), r"shape \(1, 2, 8\)"),
        (np.array(["text"], dtype=object), "cannot be read"),
    ],
)
def test_a_file_of_another_form_is_refused_at_the_door(folder: Path, array: np.ndarray, message: str) -> None:
    np.save(folder / "a.npy", array)
    with pytest.raises(UserError, match=message):
        PrecomputedText.open(folder, 5, 8, KEYS)


@pytest.mark.parametrize("raised", DAMAGED)
def test_a_damaged_file_is_refused_at_the_door(raised: str, folder: Path) -> None:
    (folder / "a.npy").write_bytes(DAMAGED[raised])
    with pytest.raises(UserError, match=r"a\.npy cannot be read as a NumPy array \(.*; expected the text states of sample 'a'"):
        PrecomputedText.open(folder, 5, 8, KEYS)
    with pytest.raises(UserError, match=r"a\.npy cannot be read as a NumPy array: "):
        settle_precomputed(PrecomputedTextConfig(path=folder))


def test_numbers_that_are_not_finite(folder: Path) -> None:
    np.save(folder / "a.npy", np.full((2, 8), np.nan))
    with pytest.raises(UserError, match="not finite"):
        PrecomputedText.open(folder, 5, 8, KEYS)([None], ["a"])
