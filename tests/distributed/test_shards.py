"""Webdataset shards over ranks and workers: no sample lost, none repeated, whoever reads and whatever ends a run."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tessera.config import ImageDataConfig, UserError
from tessera.data.loader import ImageLoader
from tessera.data.opening import open_source
from tessera.data.order import Cut
from tessera.data.sources import split_indices
from tests import cascade
from tests.cascade import write_tars
from tests.data.shard_makers import encoded, pack
from tests.processes import check, checkpoints, made_once, read_metrics, run, start, train_arguments

SCRIPT = Path(__file__).parent / "keys.py"
SIZES = (11, 7, 3)  # samples of each tar: they share neither ranks nor batches evenly
BATCH = 8


def write_shards(folder: Path, sizes: tuple[int, ...] = SIZES) -> Path:
    for shard, size in enumerate(sizes):
        members = {}
        for number in range(size):
            members[f"{number:04d}.png"] = encoded(100 * shard + number)
            members[f"{number:04d}.txt"] = f"number {number} of {shard}".encode()
        pack(folder / f"{shard:05d}.tar", members)
    return folder


@pytest.fixture(scope="session")
def shards(workshop: Path) -> Path:
    path = workshop / "shards"
    return made_once(path, lambda: write_shards(path))


def config(workers: int = 2, fraction: float = 0.15) -> ImageDataConfig:
    return ImageDataConfig(resolution=16, workers=workers, validation_fraction=fraction)


def loader_of(folder: Path, rank: int, ranks: int, workers: int = 2, micro: int | None = None) -> ImageLoader:
    return ImageLoader(
        open_source(folder, config(workers)), config(workers), Cut(BATCH, micro, rank, ranks), seed=4,
        device=torch.device("cpu"), validation_samples=8, preview_samples=2,
    )  # fmt: skip


def train_keys(folder: Path) -> list[str]:
    source = open_source(folder, config())
    return sorted(source.key(int(index)) for index in split_indices(source, 0.15)[0])


Steps = dict[int, list[list[str]]]  # step -> keys of each rank


def read_steps(folder: Path, ranks: int, first: int, last: int, **how: int | None) -> Steps:
    """What the loaders of all ranks give from one step to another."""
    found: Steps = {step: [] for step in range(first, last)}
    for rank in range(ranks):
        stream = loader_of(folder, rank, ranks, **how).batches(first)
        for step in found:
            found[step].append([key for batch in next(stream) for key in batch.keys])
        stream.close()
    return found


def stream_of(steps: Steps) -> list[str]:
    """The samples in their order, all ranks together."""
    return [key for step in sorted(steps) for rank in steps[step] for key in rank]


def epochs(stream: list[str], size: int) -> Iterator[list[str]]:
    """Whole ones."""
    return (sorted(stream[start : start + size]) for start in range(0, len(stream) - size + 1, size))


def assert_once_an_epoch(stream: list[str], keys: list[str], at_least: int) -> None:
    found = list(epochs(stream, len(keys)))
    assert len(found) >= at_least
    assert all(epoch == keys for epoch in found)


def test_two_ranks_three_shards_two_workers(shards: Path) -> None:
    steps, keys = read_steps(shards, 2, 0, 8), train_keys(shards)
    assert {key.split("/")[0] for key in keys} == {"00000", "00001", "00002"}
    assert len(keys) % BATCH, "or epochs would end with batches"
    assert all(len(rank) == BATCH // 2 for step in steps.values() for rank in step), "equal steps"
    assert_once_an_epoch(stream_of(steps), keys, 3)


@pytest.mark.parametrize(("ranks", "workers", "micro"), [(1, 0, None), (3, 2, 1)])
def test_any_number_of_ranks_goes_on_where_two_stopped(shards: Path, ranks: int, workers: int, micro: int | None) -> None:
    before, after = read_steps(shards, 2, 0, 3), read_steps(shards, ranks, 3, 7, workers=workers, micro=micro)
    assert stream_of(before) + stream_of(after) == stream_of(read_steps(shards, 1, 0, 7, workers=0))


def test_one_shard_serves_three_ranks(tmp_path: Path) -> None:
    """With two workers each: fewer shards than any of these, and fewer samples than a batch."""
    folder = write_shards(tmp_path, (5,))
    steps, keys = read_steps(folder, 3, 0, 4), train_keys(folder)
    assert all(len(rank) >= BATCH // 3 for step in steps.values() for rank in step)
    assert_once_an_epoch(stream_of(steps), keys, 5)


def test_shards_that_are_all_held_out_are_an_error(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_shards(tmp_path / name, (2,))
    (tmp_path / "train" / "00000.tar").write_bytes(b"")
    with pytest.raises(UserError, match="all of them fall into the validation split"):
        loader_of(tmp_path, 0, 2)


def test_a_shard_that_is_cut_in_the_middle(tmp_path: Path) -> None:
    """What comes before the cut is read, once an epoch, by all ranks; the shard is named."""
    folder = write_shards(tmp_path)
    path = folder / "00000.tar"
    path.write_bytes(path.read_bytes()[:9000])
    keys = train_keys(folder)
    of_it = [key for key in keys if key.startswith("00000/")]
    assert 0 < len(of_it) < SIZES[0]
    assert any(reject.path.startswith("00000.tar") for reject in open_source(folder, config()).rejects)
    assert_once_an_epoch(stream_of(read_steps(folder, 2, 0, 6)), keys, 2)


def test_a_shard_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    """Its samples are replaced, whole, and named; ranks stay in step."""
    folder = write_shards(tmp_path)
    loaders = [loader_of(folder, rank, 2) for rank in range(2)]
    path = folder / "00000.tar"
    path.write_bytes(path.read_bytes()[:600])
    faults = list[str]()
    for loader in loaders:
        stream = loader.batches(0)
        for (batch,) in itertools.islice(stream, 5):
            assert len(batch.keys) == BATCH // 2
            assert batch.valid.all()
            assert not [key for key in batch.keys if key.startswith("00000/")]
            faults += batch.faults
        stream.close()
    assert faults
    assert all("00000.tar/" in fault for fault in faults)


# ---- the program


def arguments(shards: Path, path: Path, workers: int) -> list[str]:
    """Saved every step, so that a kill is never far from a checkpoint."""
    sets = {"tokenizer__critic": "null", "tokenizer__model__dropout": 0, "tokenizer__optim__schedule": "constant"}
    more = {"engine__save_every_steps": 1, "engine__preview_every_steps": 50, "engine__validate_every_steps": 50}
    return train_arguments(shards, path, tokenizer__batch_size=BATCH, tokenizer__steps=400, data__workers=workers, **sets, **more)


def recorded(folder: Path) -> Steps:
    """Steps that all ranks began."""
    ranks = [dict(map(json.loads, file.read_text().splitlines())) for file in sorted(folder.iterdir())]
    return {step: [rank[step] for rank in ranks] for step in ranks[0] if all(step in rank for rank in ranks)}


def killed(path: Path, arguments: list[str], stage: str) -> Path:
    """A run of two ranks that was killed after the sixth step of a stage, and what it had seen."""

    def make() -> None:
        path.mkdir()
        with start([str(path / "seen"), *arguments], path, ranks=2, script=SCRIPT) as running:
            running.until(lambda: checkpoints(path / "run", stage) and int(checkpoints(path / "run", stage)[-1][5:]) >= 6)
            running.kill()
            assert running.process.returncode == -signal.SIGKILL

    return made_once(path, make)


def assert_whole_epochs(before: Path, stage: str, ranks: int, keys: list[str], folder: Path) -> None:
    """Resumed on so many ranks for four more steps: every sample once an epoch over both parts, as if one rank had read all."""
    shutil.copytree(before / "run", folder / "run")
    saved = int(checkpoints(folder / "run", stage)[-1].removeprefix("step-"))
    last = saved + 4
    command = [str(folder / "seen"), "resume", str(folder / "run"), "--stage", stage, "--set", f"{stage}.steps={last}"]
    check(run(command, folder, ranks=ranks, script=SCRIPT))
    steps = {step: keys for step, keys in recorded(before / "seen").items() if step <= saved}
    after = recorded(folder / "seen")
    assert sorted(steps) == list(range(1, saved + 1))
    assert sorted(after) == list(range(saved + 1, last + 1))
    assert all(len(keys) == ranks for keys in after.values())
    assert_once_an_epoch(stream_of({**steps, **after}), keys, 2)
    metrics = [line["step"] for line in read_metrics(folder / "run", stage) if line["kind"] == "train"]
    assert metrics == list(range(1, last + 1)), "continuous, none twice"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.slow
def test_killed_on_two_ranks_and_resumed_on_others(
    ranks: int, workers: int, workshop: Path, shards: Path, tmp_path: Path
) -> None:
    path = workshop / f"killed on shards {workers}"
    before = killed(path, arguments(shards, path / "run", workers), "tokenizer")
    assert_whole_epochs(before, "tokenizer", ranks, train_keys(shards), tmp_path)


@pytest.mark.parametrize("kind", ["tars", "shards"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.slow
def test_a_decoder_killed_on_two_ranks_and_resumed_on_others(ranks: int, kind: str, workshop: Path, tmp_path: Path) -> None:
    """Its embeddings lie in the tars, or in an array for each."""
    path, data, rows = (workshop / f"killed decoder {kind}{part}" for part in ("", " data", " rows"))
    made_once(data, lambda: write_tars(data, None if kind == "shards" else lambda key: cascade.saved(cascade.vector(key))))
    made_once(rows, lambda: cascade.write_rows(rows))
    changes: dict[str, str | int] = {
        "embeddings": f"{{kind: shards, path: {rows}, digits: 4}}" if kind == "shards" else "{kind: tars}",
        "data.workers": 2, "base.steps": 400, "engine.save_every_steps": 1, "engine.preview_every_steps": 50,
        "engine.validate_every_steps": 50,
    }  # fmt: skip
    before = killed(path, [*cascade.arguments(data, path / "run", changes), "--stage", "base"], "base")
    kept = split_indices(open_source(data, config()), 0.2)[0]
    assert_whole_epochs(before, "base", ranks, sorted(cascade.KEYS[index] for index in kept), tmp_path)
