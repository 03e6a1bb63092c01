"""The runs behind RESULTS.md: every one is a valid config; they wait for each other, are resumed where a command has taken its
time, and stop no other when they fail. A stand-in for the program says what it was asked."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tessera import pipeline

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
NAMES = tuple(importlib.import_module("headline").HEADLINES)
sys.path.remove(str(BENCH))

PROGRAM = """
import signal, sys, time
from dataclasses import replace
from pathlib import Path
words = sys.argv[1:]
home = Path(sys.argv[0]).parent
with (home / "said.txt").open("a") as said:
    stage = words[words.index("--stage") :][:2] if "--stage" in words else []
    said.write(" ".join([*words[:2], *stage]) + "\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if words[0] == "data":
    Path(words[words.index("--out") + 1]).mkdir(parents=True)
if words[0] == "train":
    run = Path(words[words.index("--run") + 1])
    if (home / f"fail-{run.parent.name}").exists():
        sys.exit("what broke")
elif words[0] == "resume":
    run = Path(words[1])
if words[0] in ("train", "resume"):
    part = run / (stage[1] if stage else "base")
    part.mkdir(parents=True, exist_ok=True)
    time.sleep(0.3)
    (part / "metrics.jsonl").write_text("{}")
    time.sleep(60 if words[0] == "train" and (home / "slow").exists() else 0)
"""


@pytest.fixture
def headline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("headline")
    monkeypatch.setattr(module, "draw", lambda run: None)
    for name, run in module.HEADLINES.items():  # what scripts of this folder do with a run has tests of its own
        then = tuple(line for line in run.then if not line.startswith("bench/"))
        monkeypatch.setitem(module.HEADLINES, name, replace(run, then=then))
    return module


def told(headline: ModuleType, home: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, list[str]]:
    """Exit code, and what the program was asked, in order."""
    (home / "program.py").write_text(PROGRAM)
    program = f"{sys.executable} {home / 'program.py'}"
    monkeypatch.setattr(sys, "argv", ["headline.py", *words, "--out", str(home / "out"), "--tessera", program])
    with pytest.raises(SystemExit) as end:
        headline.main()
    return int(end.value.code or 0), (home / "said.txt").read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [False, True])
def test_every_run_is_a_config(name: str, quick: bool, headline: ModuleType) -> None:
    run = headline.HEADLINES[name]
    sets = headline.sets_of(run, Path("out"), quick)
    config = pipeline.resolve(run.recipe, preset="tiny" if quick else "small", data="data", sets=sets)
    assert config.recipe == run.recipe
    assert run.after.partition("/")[0] in ("", *NAMES)
    if run.stage != "tokenizer":
        assert (config.base.steps == 2) == quick


def test_a_run_waits_for_the_one_that_it_needs(headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = told(headline, tmp_path, monkeypatch, "masked-conv", "nuwa", "--lanes", "2")
    nuwa = tmp_path / "out" / "nuwa" / "run"
    assert code == 0
    assert said[:2] == ["data synth", "train nuwa --stage tokenizer"]
    assert sorted(said[2:]) == sorted([f"resume {nuwa} --stage base", "train phenaki", f"evaluate {nuwa}"])


def test_one_that_fails_stops_only_those_that_need_it(
    headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fail-nuwa").touch()
    code, said = told(headline, tmp_path, monkeypatch, "nuwa", "masked-conv", "graph")
    assert code == 1
    assert "train phenaki" not in said
    assert said[-1].startswith("evaluate")
    *_, nuwa, masked, graph = capsys.readouterr().out.splitlines()
    assert nuwa.startswith("nuwa: Failed: code 1 of ")
    assert masked == "masked-conv: nuwa failed, and it needs that one"
    assert graph == "graph: done"


def test_what_takes_longer_is_resumed(headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow").touch()
    monkeypatch.setattr(headline, "MOST_SECONDS", 1.0)
    code, said = told(headline, tmp_path, monkeypatch, "phenaki")
    assert code == 0
    run = tmp_path / "out" / "phenaki" / "run"
    stages = ["--stage tokenizer", "--stage base"]  # each by a command of its own, and resumed alone
    assert said[:4] == ["data synth", f"train phenaki {stages[0]}", f"resume {run} {stages[0]}", f"resume {run} {stages[1]}"]
    assert said[4:] == [f"evaluate {run}", f"sample {run}"]


def test_a_stage_alone_is_resumed_alone(headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow").touch()
    monkeypatch.setattr(headline, "MOST_SECONDS", 1.0)
    monkeypatch.setitem(headline.HEADLINES, "cvivit", replace(headline.HEADLINES["cvivit"], then=()))
    _, said = told(headline, tmp_path, monkeypatch, "cvivit")
    run = tmp_path / "out" / "cvivit" / "run"
    assert said[1:] == ["train phenaki --stage tokenizer", f"resume {run} --stage tokenizer"]


@pytest.mark.parametrize("words", [("ar-conv",), ("nuwa", "ar-conv", "--seed", "2")])
def test_what_nobody_makes_is_not_waited_for(
    words: tuple[str, ...], headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, _ = told(headline, tmp_path, monkeypatch, *words)
    assert code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("ar-conv: needs nuwa/base in ")


def test_real_data_that_are_not_there_are_asked_for(
    headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["headline.py", "sprites", "--out", str(tmp_path), "--real", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="--real"):
        headline.main()


def test_what_is_timed_runs_beside(
    headline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timed.py").write_text("import sys\nprint('timed', *sys.argv[1:])\n")
    good, bad = f"{tmp_path / 'timed.py'} 'one word'", f"{tmp_path / 'missing.py'}"
    code, said = told(headline, tmp_path, monkeypatch, "cvivit", "--timed", bad, "unclosed 'word", good)
    assert code == 1, "one of them failed"
    assert "train phenaki --stage tokenizer" in said
    assert (tmp_path / "out" / "timed-3.log").read_text() == "timed one word\n"
    out = capsys.readouterr().out
    assert "missing.py" in out
    assert "timed: unclosed 'word: No closing quotation" in out
