"""Sizes that fit each other or are refused: those of this run's tokenizer, and those of one from elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tessera import pipeline
from tessera.config import UserError
from tessera.nn.quantizers import FSQConfig, ResidualConfig, VQConfig
from tessera.recipes.clips.config import MaskedClipsConfig
from tessera.recipes.clips.stages import adopt, steps
from tessera.staging import stage_elsewhere
from tests.small import generated, pictures, workshop

__all__ = ["generated", "pictures", "workshop"]


def resolved(*sets: str, preset: str = "small") -> Any:
    return pipeline.resolve("phenaki", preset=preset, sets=sets)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["data.frames=16"], "16 is not 1 more than a multiple of the tokenizer's time stride 4; use 13 or 17"),
        (["data.frames=2"], "use 1 or 5"),
        (["data.resolution=36"], "36 cannot be divided by the tokenizer's stride 8; use 32 or 40"),
        (["sample.overlap=13"], "13 leaves no room for new frames in a window of 17; use at most 12, or null"),
        (["data.frames=5", "sample.overlap=1"], "1 leaves no room for new frames in a window of 5; set it to null"),
        (["tokenizer.model.kind=cvivit", "data.frames=9"], "window 5 is more than the 3 latent frames of a training clip"),
        (["tokenizer.model.kind=frames", "sample.overlap=16"], "16 leaves no room for new frames .*; use at most 15, or null"),
        (["data.resolution=16", "tokenizer.critic={kind: clips, widths: [8, 8, 8, 8, 8, 8]}"], "a frame of 16 pixels 5 times"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolved(*sets)


@pytest.mark.parametrize("frames", [1, 5, 9, 13, 33])
def test_any_length_of_training_clips_needs_no_other_value(frames: int) -> None:
    assert resolved(f"data.frames={frames}").grid == (1 + (frames - 1) // 4, 8, 8)


@pytest.mark.parametrize(
    ("model", "sets", "grid"),
    [
        ("{widths: [8, 8, 8], blocks: [0, 0, 0], time_downsamples: 1}", ("data.frames=11", "data.resolution=20"), (6, 5, 5)),
        ("{kind: cvivit, width: 16, heads: 2, patch: 4, time_patch: 2}", ("data.frames=5", "data.resolution=20"), (3, 5, 5)),
        ("{kind: frames, widths: [8, 8, 8], blocks: [0, 0, 0]}", ("data.frames=6", "data.resolution=20"), (6, 5, 5)),
        ("{quantizer: {kind: residual, num_quantizers: 3}}", (), (5, 8, 8, 3)),
    ],
)
def test_a_tokenizer_from_elsewhere_decides_what_fits(model: str, sets: tuple[str, ...], grid: tuple[int, ...]) -> None:
    """Not the one that the preset would have trained, whose strides are 8 and 4."""
    other = resolved(f"tokenizer.model={model}")
    made = adopt(
        resolved("base.needs.tokenizer=/other/tokenizer", *sets), lambda origin: SimpleNamespace(config=other, home=origin)
    )
    assert isinstance(made, MaskedClipsConfig)
    assert (made.tokenizer.model, made.grid) == (other.tokenizer.model, grid)
    with pytest.raises(UserError, match=r"with the tokenizer of /other/tokenizer: sample.overlap 99 leaves no room"):
        adopt(
            resolved("base.needs.tokenizer=/other/tokenizer", *sets, "sample.overlap=99"),
            lambda origin: SimpleNamespace(config=other, home=origin),
        )


def test_only_a_tokenizer_is_taken_over(generated: Path) -> None:
    with pytest.raises(UserError, match=r"base is a stage of another kind; expected RUN/tokenizer"):
        stage_elsewhere(str(generated / "base"))


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
    config = resolved(f"tokenizer.model.quantizer={quantizer}", "data.frames=9", preset="small")
    with torch.device("meta"):
        tokenizer, base = (train.serves() for train in steps(config))
    assert base["generator"].embed.vocab_size == tokenizer["tokenizer"].vocab_size == codes.vocab_size
    assert base["generator"].grid == (3, 8, 8) + ((2,) if isinstance(codes, ResidualConfig) else ())


def test_a_tokenizer_from_elsewhere_brings_its_architecture() -> None:
    other = resolved("tokenizer.model={kind: cvivit, patch: 4, time_patch: 2, quantizer: {kind: vq, codes: 64}}")
    made = adopt(resolved("base.needs.tokenizer=there/tokenizer"), lambda origin: SimpleNamespace(config=other, home=origin))
    assert made.tokenizer.model == other.tokenizer.model
    assert made.grid == (9, 16, 16)
    with torch.device("meta"):
        assert steps(made)[1].serves()["generator"].embed.vocab_size == 64
    for wrong, said in (
        (
            pipeline.resolve("meshgpt", preset="tiny", sets=["tokenizer.kind=graph"]),
            "is of recipe meshgpt and holds no tokenizer of clips or pictures; name RUN/tokenizer of a phenaki, nuwa or muse run",
        ),
        (pipeline.resolve("muse", sets=["data.channels=1"]), "was trained on pictures of 1 channels, data.channels is 3"),
        (resolved("data.channels=1"), "was trained on clips of 1 channels, data.channels is 3; set data.channels=1"),
    ):
        with pytest.raises(UserError, match=said):
            adopt(
                resolved("base.needs.tokenizer=there/tokenizer"),
                lambda origin, wrong=wrong: SimpleNamespace(config=wrong, home=origin),
            )
