"""The script that asks how fast and how often right a cascade draws: on a tiny run, against drawing as the session does."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.config import UserError
from tessera.contracts import Chunk, Context
from tessera.data.loader import reading_at
from tessera.data.opening import open_source
from tessera.data.pairs import PairSamples, collate_pairs
from tessera.evals.material import load_material
from tessera.evals.oracle import Tally, tally
from tessera.generators.diffusion.degrade import degrade
from tessera.recipes.dalle2 import nets
from tessera.recipes.dalle2.drawing import Painter
from tessera.recipes.pictures import pictures
from tessera.sampling.session import Session, load
from tessera.text.encoders import NoTextConfig, reader
from tests.recipes.test_dalle2_drawing import run, workshop

__all__ = ["run", "workshop"]

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def cascade(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("cascade")


@pytest.fixture(scope="module")
def session(run: Path) -> Session:
    return load(run, device="cpu")


def test_a_line_for_every_sampler_and_number_of_steps(
    cascade: ModuleType, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cascade.py", str(run), "--n", "3", "--samplers", "heun", "dpm", "--steps", "1", "2"])
    cascade.main()
    first, names, *rows, last = capsys.readouterr().out.splitlines()
    assert first.startswith("3 held-out captions in chunks of 3; real pictures ")
    assert "at 16 px" in first
    assert "at 32 px" in first
    columns = ("upsampler of small", "base of real", "upsampler of real", "base of prior", "upsampler of prior")
    assert names.split()[6:] == " ".join(columns).split()
    assert [tuple(row.split()[:2]) for row in rows] == [("heun", "1"), ("heun", "2"), ("dpm", "1"), ("dpm", "2")]
    for row in rows:
        prior, base, upsampler, whole = map(float, row.split()[2:6])
        assert whole == pytest.approx(prior + base + upsampler, abs=3e-5)
        assert base > 0
        assert len(row.split()) == 11
    assert last.startswith("best: ")


def test_each_attribute_of_what_training_has_shown(
    cascade: ModuleType, run: Path, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, unseen = (cascade.side_of(session, 3, 16, side).captions for side in ("train", "heldout"))
    assert len(shown) == len(unseen) == 3
    assert not set(shown) & set(unseen)
    words = ["--n", "3", "--samplers", "euler", "--steps", "1", "--side", "train", "--each"]
    monkeypatch.setattr(sys, "argv", ["cascade.py", str(run), *words])
    judged: list[list[str]] = []
    monkeypatch.setattr(cascade, "tally", lambda made, captions: judged.append(list(captions)) or tally(made, captions))
    cascade.main()
    assert judged
    assert all(captions == list(shown) for captions in judged)
    first, _, row, *each, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("3 training captions in chunks of 3; ")
    columns = ["upsampler of small", "base of real", "upsampler of real", "base of prior", "upsampler of prior"]
    assert [line.split(":")[0].strip() for line in each] == columns
    for line, joint in zip(each, row.split()[-5:], strict=True):
        assert f"joint {joint} of 3" in line
        assert "colour " in line


def test_what_is_judged_is_what_the_session_draws(cascade: ModuleType, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    painter, real = cascade.painter_of(session), cascade.side_of(session, 3, 32)
    options, judged = session.config.sample.model_copy(update={"chunk": 2}), []  # so the last chunk is padded
    monkeypatch.setattr(cascade, "tally", lambda made, captions: judged.append(np.stack(made)) or tally(made, captions))
    cascade.drawn(painter, cascade.given_by(session, painter, real, 3), real.captions, options, cascade.Row("dpm", 3))
    by_column = dict(zip(cascade.columns_of(painter), judged, strict=True))
    captions = [caption or "" for caption in real.captions]
    wanted = [np.asarray(session.sample(caption, seed=row, options={"chunk": 2})[0]) for row, caption in enumerate(captions)]
    np.testing.assert_array_equal(by_column["prior", "upsampler"], np.stack(wanted))
    redrawn = painter.redrawn(real.pictures[:2], captions[:2], 0, options)
    np.testing.assert_array_equal(by_column["real", "upsampler"][:2], redrawn)
    assert by_column["prior", "base"].shape == (3, 16, 16, 3)
    told = Chunk(captions, torch.arange(3), options)
    enlarged = painter.enlarged(told, cascade.shrunk(session, painter, 3), ["upsampler1"], options)
    np.testing.assert_array_equal(by_column["small", "upsampler"], np.stack(pictures(enlarged)))


def test_the_upsampler_alone_is_given_what_it_learns_from(
    cascade: ModuleType, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter, data = cascade.painter_of(session), session.config.data.at(32)
    source, seen = open_source(Path(data.path) / "heldout", data), list[Tensor]()
    samples = PairSamples(reading_at(source, data), data, np.arange(len(source)), 0, None, pictures=True)
    items = [samples.item(index, index, None) for index in range(len(source))]
    batch = collate_pairs(items, reader(NoTextConfig())).to(torch.device("cpu"))
    monkeypatch.setattr(nets, "degrade", lambda low, small, *where: seen.append(small) or degrade(low, small, *where))
    nets.read_upsampler(painter.config.upsampler1, (16, 16), {}, batch, Context(0, 0, batch.positions))
    learned = dict(zip(batch.captions, seen[0], strict=True))  # of which no two are equal
    real = cascade.side_of(session, 3, 64)  # as where another upsampler comes after it
    given = cascade.given_by(session, painter, real, 3)
    assert given["prior"].shape == given["real"].shape == (3, 3, 64, 64)
    for caption, small in zip(real.captions, given["small"], strict=True):
        assert torch.equal(small, learned[caption])


def test_without_an_upsampler_there_is_none_to_judge(
    cascade: ModuleType, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter = cascade.painter_of(session)
    monkeypatch.setattr(painter, "stages", {name: painter.stages[name] for name in ("embedder", "prior", "base")})
    assert cascade.columns_of(painter) == [("real", "base"), ("prior", "base")]
    real = cascade.side_of(session, 2, 16)
    given = cascade.given_by(session, painter, real, 2)
    row = cascade.drawn(painter, given, real.captions, session.config.sample, cascade.Row("dpm", 3))
    assert list(row.right) == [("real", "base"), ("prior", "base")]


def test_only_the_stages_named_are_varied(cascade: ModuleType, session: Session) -> None:
    options = session.config.sample
    changed = cascade.varied(options, "ddim", 5, ["base"])
    assert (changed.sampler, changed.steps, changed.eta) == ("ddim", 5, 1.0)
    assert (changed.prior, changed.upsampler) == (options.prior, options.upsampler)
    changed = cascade.varied(options, "heun", 5, ["prior", "upsampler"])
    assert (changed.sampler, changed.steps) == (options.sampler, options.steps)
    assert (changed.prior.sampler, changed.prior.steps, changed.upsampler.steps, changed.upsampler.eta) == ("heun", 5, 5, 0.0)
    assert changed.prior.candidates == options.prior.candidates


def test_the_fastest_that_is_as_good_as_the_best(cascade: ModuleType) -> None:
    def row(steps: int, seconds: float, right: int) -> object:
        counts = Tally({"joint": right}, {"joint": 100})
        return cascade.Row("dpm", steps, {"base": seconds}, {("real", "base"): Tally({}, {}), ("prior", "base"): counts})

    found = cascade.verdict([row(4, 0.1, 80), row(8, 0.2, 94), row(16, 0.4, 96), row(32, 0.8, 95)])
    assert found.startswith("best: dpm 16, 96.0% in 0.40000 s a picture; fastest within its interval (from 90.2%): dpm 8, 94.0%")


def test_data_without_an_oracle(cascade: ModuleType, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    material = replace(load_material(session.config.data, most_train=1, most_held_out=3, seed=0), oracle=None)
    monkeypatch.setattr(cascade, "load_material", lambda *_, **__: material)
    with pytest.raises(UserError, match="has no oracle"):
        cascade.side_of(session, 3, 32)


def test_a_run_without_a_decoder(cascade: ModuleType, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = session.draw
    assert isinstance(painter, Painter)
    monkeypatch.setattr(painter, "stages", {"upsampler1": painter.stages["upsampler1"]})
    with pytest.raises(UserError, match="no trained decoder"):
        cascade.painter_of(session)
