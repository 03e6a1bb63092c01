"""The script that says where the time of a case goes."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from tessera.bench import timing


def test_kernels_of_a_case_are_added_up_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    monkeypatch.setattr(timing, "hush", timing.hush)
    timing.limit.cache_clear()  # another test may have measured it
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--most", "3", "tessera", "bench", "image.maskgit.sample", "--json"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("kernels").main()
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    first, *others = [number for number, line in enumerate(lines) if line.startswith("busy ")]
    assert others, "of the limit, and of the case itself"
    for head in (first, *others):
        busy, passed = map(float, re.findall(r"([\d.]+) (?:of|ms)", lines[head])[:2])
        assert 0 < busy <= 2.2 * passed  # two threads may be busy at once
        rows = [re.match(r" *([\d.]+) ms +([\d.]+)% +(\d+) x (.+)", line) for line in lines[head + 1 : head + 4]]
        times = [float(row[1]) for row in rows if row]
        assert len(times) == 3
        assert times == sorted(times, reverse=True)
        assert sum(times) <= busy + 0.1
    assert "aten::mm" in "".join(lines[first : first + 4])
