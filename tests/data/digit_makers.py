"""Moving digits for tests: options, scenes of a split, and what reads them."""

from __future__ import annotations

from tessera.data.synth.digits import DigitsOptions, Scene, oracle_reader, plan_digits, sample_scene
from tessera.data.synth.digits_oracle import DigitsOracle
from tessera.data.synth.splits import Split

FULL = DigitsOptions()
EIGHT = DigitsOptions(num_directions=8)
TINY = DigitsOptions(image_size=32, frames=9, max_digits=1, num_kinds=3, num_colours=3)


def scenes_of(split: Split, n: int, options: DigitsOptions = FULL, seed: int = 1) -> list[Scene]:
    plan = plan_digits(seed, options)
    return [sample_scene(plan, split, index) for index in range(n)]


def oracle_of(options: DigitsOptions = FULL) -> DigitsOracle:
    return DigitsOracle(oracle_reader(), options.frames)
