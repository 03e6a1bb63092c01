"""Every stage of every recipe, its nets recorded on a GPU: numbers of launched ones, with dropout, micro-batches and critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.engine.dist import World
from tessera.engine.replay import Replayed, replay
from tessera.engine.step import Setting, train_step
from tests.contract.test_recorded import CASES
from tests.contract.test_stages import data, named, small
from tests.prepared import prepared

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

__all__ = ["data"]  # a fixture
STEPS = 8


def numbers(config: Any, name: str, folder: Path, recorded: bool) -> tuple[list[dict[str, float]], Any]:
    world = World(0, 1, torch.device("cuda"))
    stage, state, loader = prepared(config, named(config, name), world, folder)
    modules = [m for net in stage.all_nets.values() for m in net.modules() if isinstance(m, stage.recorded)]
    for module in modules if recorded else ():
        replay(module)
    stream, lines = loader.batches(0), []
    for _ in range(STEPS):
        moved = [batch.to(world.device) for batch in next(stream)]
        turns = train_step(state, stage, moved, Setting(world, STEPS)).turns
        lines.append({name: value for turn in turns for name, value in turn.numbers().items()})
    stream.close()
    return lines, [module._compiled_call_impl for module in modules]


@pytest.mark.parametrize(("recipe", "name", "sets"), CASES)
def test_recorded_stages_train_as_launched_ones(
    recipe: str, name: str, sets: tuple[str, ...], data: dict[str, Path], tmp_path: Path
) -> None:
    config = small(recipe, data, *sets)
    wanted, modules = numbers(config, name, tmp_path, recorded=False)
    if not modules:
        pytest.skip("nothing of it is recorded")
    found, calls = numbers(config, name, tmp_path, recorded=True)
    assert any(isinstance(call, Replayed) and call.recordings for call in calls)
    for step, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert other == pytest.approx(one, rel=5e-3, abs=1e-4), step
