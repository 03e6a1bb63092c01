"""How long a call takes, alone and in a row."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tessera.bench import timing


def test_calls_in_a_row_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(timing, "settle", lambda: said.append("wait"))

    def call() -> None:
        said.append("call")
        time.sleep(0.002)

    row = timing.time_call(call, 8, warm=1, repeats=2, count=False, together=3)
    assert said == ["call", "wait", *["call"] * 3, "wait", *["call"] * 3, "wait"]
    assert 2 <= row["ms"] < 20
    assert row["items_per_s"] == pytest.approx(8 / row["ms"] * 1e3, rel=0.01)


@pytest.mark.parametrize(("gpu", "together"), [(True, (4, 5)), (False, (20, 1))])
def test_updates_follow_each_other_on_a_gpu(gpu: bool, together: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(timing, "time_call", lambda call, items, **how: asked.update(how))
    timing.time_steps(lambda: None, 1, repeats=20, warm=3)
    assert (asked["repeats"], asked["together"], asked["warm"]) == (*together, 3)
