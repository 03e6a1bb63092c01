"""What a stage measures of its training data before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.contracts import Nets, Survey
from tessera.engine.survey import take_survey
from tests.engine.toys import Points, Stream, fit, placed, points, setting, simple_turn, single


def sums(nets: Nets, batch: Points) -> Mapping[str, Tensor]:
    assert not nets["maker"].training
    return {"count": torch.tensor(float(len(batch.keys))), "sum": batch.x.double().sum(0)}


def keep(nets: Nets, sums: Mapping[str, Tensor]) -> None:
    maker: Any = nets["maker"]
    maker.seen.copy_(sums["sum"] / sums["count"])


@pytest.mark.parametrize(("samples", "taken"), [(20, 24), (1000, 64)])
def test_the_first_batches_are_summed_up_to_an_epoch(samples: int, taken: int) -> None:
    survey = Survey(sums, keep, samples)
    stage = single(simple_turn, averaged=("maker",), survey=survey)
    state, loader = placed(stage), Stream(batch_size=8)
    take_survey(stage, survey, state, loader, 8, setting())
    expected = points(0, taken).x.mean(0)
    for net in (state.nets["maker"], state.averages["maker"]):
        torch.testing.assert_close(net.seen, expected)
    assert state.nets["maker"].training
    assert loader.closed == 1


def test_it_is_taken_once_and_not_when_training_goes_on(tmp_path: Path) -> None:
    asked: list[int] = []

    def count(nets: Nets, sums: Mapping[str, Tensor]) -> None:
        asked.append(1)
        keep(nets, sums)

    stage = single(simple_turn, survey=Survey(sums, count, 8))
    state = placed(stage)
    fit(tmp_path, stage, state, steps=2).run()
    assert len(asked) == 2  # for the nets and for their averages
    fit(tmp_path, stage, state, steps=3).run()
    assert len(asked) == 2
