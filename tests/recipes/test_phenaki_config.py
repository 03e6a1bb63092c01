"""What fits together is decided by the config: sizes, windows, and the vocabulary of a tokenizer that comes from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera.config import UserError
from tessera.nn.quantizers import FSQConfig, ResidualConfig, VQConfig
from tessera.pipeline import resolve
from tessera.recipes.phenaki.stages import adopt, steps


def config_of(*sets: str) -> Any:
    return resolve("phenaki", preset="small", sets=sets)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("data.frames=16", "data.frames 16 is not 1 more than a multiple of the tokenizer's time stride 4; use 13 or 17"),
        ("data.resolution=36", "data.resolution 36 cannot be divided by the tokenizer's stride 8; use 32 or 40"),
        ("sample.overlap=13", "sample.overlap 13 leaves no room for new frames in a window of 17; use at most 12"),
    ],
)
def test_sizes_that_do_not_fit_are_told_with_those_that_do(value: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        config_of(value)


@pytest.mark.parametrize(
    ("quantizer", "codes"),
    [
        ("{kind: fsq, levels: [8, 8, 8]}", FSQConfig(levels=(8, 8, 8))),
        ("{kind: vq, codes: 64}", VQConfig(codes=64)),
        ("{kind: residual, num_quantizers: 2, quantizer: {kind: vq, codes: 32}}", ResidualConfig(quantizer=VQConfig(codes=32))),
    ],
)
def test_the_generator_has_the_vocabulary_and_the_grid_of_the_tokenizer(quantizer: str, codes: Any) -> None:
    """Nobody writes the number of codes a second time."""
    config = config_of(f"tokenizer.model.quantizer={quantizer}", "data.frames=9")
    with torch.device("meta"):
        tokenizer, base = (train.serves() for train in steps(config))
    assert base["generator"].embed.vocab_size == tokenizer["tokenizer"].vocab_size == codes.vocab_size
    assert base["generator"].grid == (3, 8, 8) + ((2,) if isinstance(codes, ResidualConfig) else ())


def test_a_tokenizer_from_elsewhere_brings_its_architecture() -> None:
    other = config_of("tokenizer.model={kind: cvivit, patch: 4, time_patch: 2, quantizer: {kind: vq, codes: 64}}")
    made = adopt(config_of("base.needs.tokenizer=there/tokenizer"), lambda origin: other)
    assert made.tokenizer.model == other.tokenizer.model
    assert made.grid == (9, 16, 16)
    with torch.device("meta"):
        assert steps(made)[1].serves()["generator"].embed.vocab_size == 64
    for wrong, said in (
        (resolve("muse", preset="tiny"), "is of recipe muse and holds no tokenizer of clips"),
        (config_of("data.channels=1"), "was trained on clips of 1 channels, data.channels is 3; set data.channels=1"),
    ):
        with pytest.raises(UserError, match=said):
            adopt(config_of("base.needs.tokenizer=there/tokenizer"), lambda origin, wrong=wrong: wrong)
