"""Cascades that learn from embeddings in tars, or in an array for each tar: trained, killed, resumed and used; and whatever is
wrong with a file, a sample has its own embedding or is left out, by name. Each embedding is a function of its key."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera
from tessera.config import UserError
from tessera.engine import loop
from tests.cascade import KEYS, PER_SHARD, WIDTH, arguments, coloured, saved, vector, write_rows, write_tars
from tests.data.array_makers import DAMAGED
from tests.processes import differences

Command = Callable[..., int]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of all samples that a step of a stage with embeddings has seen, each with its own."""
    real, seen = loop.train_step, set[str]()

    def looked_at(state: Any, stage: Any, batches: Any, *rest: Any) -> Any:
        for batch in batches:
            assert batch.valid.all()
            for row, key in enumerate(batch.keys if batch.embeddings is not None else ()):
                assert np.array_equal(batch.embeddings[row].numpy(), vector(key)), key
                assert batch.captions[row] == f"colour {KEYS.index(key)}"
                if batch.images is not None:
                    assert abs(batch.images[row, 0].float().mean() * 127.5 + 127.5 - 8 * KEYS.index(key)) < 2
                seen.add(key)
        return real(state, stage, batches, *rest)

    monkeypatch.setattr(loop, "train_step", looked_at)
    return seen


def whole(kind: str, folder: Path) -> tuple[Path, str]:
    """Data without a fault, and where its embeddings lie."""
    if kind == "tars":
        return write_tars(folder / "tars", lambda key: saved(vector(key))), "{kind: tars}"
    rows = write_rows(folder / "rows")
    return write_tars(folder / "tars"), f"{{kind: shards, path: {rows}, digits: 4}}"


class Killed(BaseException):
    """Nothing in the program catches this."""


@pytest.mark.parametrize(("kind", "workers"), [("tars", 2), ("shards", 0)])
def test_from_training_to_use(
    kind: str, workers: int, command: Command, tmp_path: Path, keys: set[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data, embeddings = whole(kind, tmp_path)
    changes: dict[str, str | int] = {"embeddings": embeddings, "data.workers": workers}
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    assert command(*arguments(data, unbroken, changes)) == 0
    assert len(keys) > 20, "nearly all of what is not held out"
    assert not (unbroken / "cache").exists(), "nothing is written twice"
    looked_at, steps = loop.train_step, list[int]()

    def kill(state: Any, *rest: Any) -> Any:
        steps.append(state.step)
        if len(steps) == 8:  # the last one of the decoder
            raise Killed
        return looked_at(state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", kill)
        with pytest.raises(Killed):
            command(*arguments(data, run, changes))
    assert command("resume", run) == 0
    assert differences(run, unbroken) == []

    drawn = tessera.load(run, device="cpu").sample("colour 3", n=2, seed=1)
    assert [picture.size for picture in drawn] == [(32, 32)] * 2
    assert command("export", run, "--out", tmp_path / "model") == 0
    again = tessera.load(tmp_path / "model", device="cpu").sample("colour 3", n=2, seed=1)
    assert [picture.tobytes() for picture in again] == [picture.tobytes() for picture in drawn]
    with pytest.raises(UserError, match=rf"came from files \(embeddings\.kind={kind}\)"):
        tessera.load(run, device="cpu").sample("", image=drawn[0])
    session = tessera.load(run, device="cpu")
    (of_vector,) = session.sample("", image=np.eye(session.config.embedding_width)[0])
    assert of_vector.size == (32, 32), "but an embedding of the user's is drawn"
    capsys.readouterr()
    quick = ["evaluate.fit_steps=2", "evaluate.resamples=2"]
    assert command("evaluate", run, "--n", 3, "--json", "--set", *quick) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["n"] == 3
    assert "skipped" in report["loss"], "nothing embeds what is held out"


# --- what is wrong with files

AT = 13  # a sample of the second tar


def one_array(content: bytes | None) -> Callable[[Path], tuple[Path, str]]:
    """Tars in which one sample has another array than its own, or none."""

    def write(folder: Path) -> tuple[Path, str]:
        return write_tars(folder / "tars", lambda key: content if key == KEYS[AT] else saved(vector(key))), "{kind: tars}"

    return write


def cut_tar(folder: Path) -> tuple[Path, str]:
    """The second tar ends within the array of one sample, whose picture and caption are whole."""
    data, embeddings = one_array(saved(vector(KEYS[AT])))(folder)
    path = data / "00001.tar"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(f"{KEYS[AT][6:]}.img_emb.npy".encode()) + 600])
    return data, embeddings


def one_file(harm: Callable[[Path], object]) -> Callable[[Path], tuple[Path, str]]:
    """An array for each tar, of which the second is not what it should be."""

    def write(folder: Path) -> tuple[Path, str]:
        data, embeddings = whole("shards", folder)
        harm(folder / "rows" / "img_emb_0001.npy")
        return data, embeddings

    return write


def not_a_number(path: Path) -> None:
    array = np.load(path)
    array[AT - PER_SHARD, 2] = np.nan
    np.save(path, array)


def too_long(path: Path) -> None:
    """The rows of the second tar from the third on, and two that are nobody's: each would find a vector, of another."""
    array = np.load(path)
    np.save(path, np.concatenate([array[2:], array[:4]]))


SECOND = KEYS[PER_SHARD : 2 * PER_SHARD]
FAULTS = {  # how it is written, whom it costs, what is told
    "a key without": (one_array(None), KEYS[AT : AT + 1], "no *.img_emb.npy of its own in its tar"),
    "nan in a tar": (one_array(saved(np.full(WIDTH, np.nan, np.float32))), KEYS[AT : AT + 1], "numbers that are not finite"),
    "integers in a tar": (one_array(saved(np.ones(WIDTH, np.int64))), KEYS[AT : AT + 1], "int64, expected floats"),
    "width in a tar": (one_array(saved(np.ones(WIDTH + 1, np.float32))), KEYS[AT : AT + 1], "shape (7,), expected (6,)"),
    "header in a tar": (one_array(DAMAGED["TokenError"]), KEYS[AT : AT + 1], "its array cannot be read (('EOF in multi-line"),
    "cut tar": (cut_tar, KEYS[AT : 2 * PER_SHARD], "no *.img_emb.npy of its own in its tar: 1 (00001/000010003)"),
    "missing": (one_file(Path.unlink), SECOND, "img_emb_0001.npy is missing: 10"),
    "length": (one_file(lambda path: np.save(path, np.load(path)[:8])), SECOND, "8 rows, and a sample of its tar asks for row 9"),
    "long": (one_file(too_long), SECOND, "12 rows, and no sample of its tar asks for rows 10 to 11"),
    "dtype": (one_file(lambda path: np.save(path, np.load(path).astype(np.int32))), SECOND, "expected floats by rows: 10"),
    "nan": (one_file(not_a_number), KEYS[AT : AT + 1], f"numbers that are not finite: 1 ({KEYS[AT]})"),
    "header": (one_file(lambda path: path.write_bytes(DAMAGED["TokenError"])), SECOND, "img_emb_0001.npy is no .npy file (('EOF"),
    "pickle": (one_file(lambda path: path.write_bytes(pickle.dumps([1.0]))), SECOND, "is no .npy file"),
}


COMMON = ("a key without", "header in a tar", "cut tar", "missing", "length", "long", "nan")


@pytest.mark.parametrize(
    "fault", [*COMMON, *(pytest.param(fault, marks=pytest.mark.slow) for fault in sorted(FAULTS.keys() - COMMON))]
)
def test_what_is_wrong_is_named_counted_and_left_out(
    fault: str, command: Command, tmp_path: Path, keys: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write, lost, told = FAULTS[fault]
    data, embeddings = write(tmp_path)
    allowed: dict[str, str | int] = {"embeddings": embeddings, "data.corrupt_budget": "0.5", "upsampler1": "null"}
    assert command(*arguments(data, tmp_path / "run", allowed)) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    gone = 6 if fault == "cut tar" else 0  # of these not even the picture is there
    counted = f"embeddings: {len(lost) - gone} of {30 - gone} samples have no embedding"
    assert sum(counted in line and told in line for line in log.splitlines()) == 2, "once a stage"
    assert all(key in log for key in lost[: len(lost) - gone])
    assert not keys & set(lost)
    assert {key[:5] for key in keys} >= {"00000", "00002"}
    capsys.readouterr()

    assert command(*arguments(data, tmp_path / "strict", allowed | {"data.corrupt_budget": "0.01"})) == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert told in last
    assert "more than data.corrupt_budget=0.01 allows" in last
    assert not list((tmp_path / "strict").rglob("step-*")), "nothing was trained"


# --- users who change their mind


def test_a_run_keeps_its_embeddings(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another kind are refused, whatever their width; a folder that has moved is found where the user says."""
    data, embeddings = whole("shards", tmp_path)
    run = tmp_path / "run"
    assert command(*arguments(data, run, {"embeddings": embeddings, "upsampler1": "null"})) == 0
    for change in ("embeddings={kind: pair}", "embeddings.rows=place"):
        assert command("resume", run, "--set", "prior.steps=5", change) == 2
        assert "and learns from those embeddings; start a new run to change them" in capsys.readouterr().err
    rows = (tmp_path / "rows").rename(tmp_path / "moved")
    assert command("resume", run, "--set", "prior.steps=5") == 2
    assert "rows is no folder; expected one with" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert command("resume", run, "--set", "prior.steps=5", "embeddings.path=moved") == 0
    assert f"path: {rows}\n" in (run / "config.yaml").read_text(), "so that it is found from anywhere"
    assert command("data", "prepare", run) == 2
    assert f"the stages of {run} read no caches, but the files themselves" in capsys.readouterr().err


def test_an_embedding_that_is_lost_later_is_told(command: Command, tmp_path: Path, keys: set[str]) -> None:
    data, embeddings = whole("tars", tmp_path)
    run = tmp_path / "run"
    changes: dict[str, str | int] = {"embeddings": embeddings, "upsampler1": "null", "data.corrupt_budget": "0.1"}
    assert command(*arguments(data, run, changes)) == 0
    lost = sorted(keys)[0]
    write_tars(data, lambda key: None if key == lost else saved(vector(key)))
    keys.clear()
    assert command("resume", run, "--set", "base.steps=12") == 0
    assert lost not in keys
    log = (run / "log.txt").read_text()
    assert re.search(r"base: (\d+) samples could be used when this run was saved, \d+ can be now: from here on their order", log)
    write_tars(data)
    assert command("resume", run, "--stage", "base", "--set", "base.steps=13") == 2
    net = "{kind: unet, widths: [8, 8], blocks: [1, 1], attention: [false, false], cross: [false, false], head_width: 8}"
    upsampler1 = f"upsampler1={{resolution: 32, batch_size: 4, steps: 1, model: {net}}}"
    assert command("resume", run, "--set", upsampler1, "--stage", "upsampler1") == 0, "it needs none"


@pytest.mark.parametrize("kind", ["tars", "shards"])
def test_a_rehearsal_finds_the_embeddings_of_its_few_samples(
    kind: str, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, embeddings = one_array(None)(tmp_path) if kind == "tars" else whole(kind, tmp_path)
    assert command(*arguments(data, tmp_path / "run", {"embeddings": embeddings}), "--dry-run") == 0
    assert "stage base: parameters" in capsys.readouterr().out


def test_nothing_but_samples_without(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tars(tmp_path / "tars", lambda key: saved(vector(key)))
    np.save(tmp_path / "e.npy", np.ones((1, WIDTH), np.float32))
    (tmp_path / "e.txt").write_text("somebody else\n")
    changes: dict[str, str | int] = {"embeddings": f"{{kind: list, path: {tmp_path / 'e.npy'}}}", "data.corrupt_budget": 1}
    assert command(*arguments(tmp_path / "tars", tmp_path / "run", changes)) == 2
    assert "30 of 30 samples have no embedding. not among the keys listed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_matrices_in_tars_are_told_at_the_door(
    more: tuple[str, ...], command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """States of text, say, in the place of vectors."""
    data = write_tars(tmp_path / "tars", lambda key: saved(np.ones((77, 8), np.float32)))
    assert command(*arguments(data, tmp_path / "run", {"embeddings": "{kind: tars}"}), *more) == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert f"30 of the first 30 *.img_emb.npy of {data} are arrays of shape (77, 8); expected a vector for every picture" in last


@pytest.mark.parametrize(("caption", "told"), [("a cat", "all captions are 'a cat'"), (None, "there is no caption")])
def test_a_pair_needs_captions_that_differ(
    caption: str | None, told: str, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number}.png").write_bytes(coloured(KEYS[number]))
        if caption is not None:
            (tmp_path / "data" / f"{number}.txt").write_text(caption)
    assert command(*arguments(tmp_path / "data", tmp_path / "run", {"data.uncaptioned_budget": 1})) == 2
    assert f"{told}, and the pair learns to tell captions apart" in capsys.readouterr().err


def test_a_pair_needs_micro_batches_of_two(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_tars(tmp_path / "tars")
    assert command(*arguments(data, tmp_path / "run", {"engine.micro_batch_size": 1})) == 2
    assert "the pair tells samples of a micro-batch apart; use 2 or more while it trains" in capsys.readouterr().err
