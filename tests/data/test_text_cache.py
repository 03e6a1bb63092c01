"""Caption states on the disk: equal to what the encoder gives, made once, whole or not there at all."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tessera.batches import TextStates
from tessera.config import UserError
from tessera.data import text_cache
from tessera.data.text_cache import CachedText, is_whole, write_text_states
from tessera.randomness import mix_text

LENGTH, WIDTH = 6, 8


class Encoder:
    """A stand-in: a state for each word, a function of the word alone; counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, captions: Sequence[str | None]) -> TextStates:
        self.asked += [caption for caption in captions if caption]
        states, mask = torch.zeros(len(captions), LENGTH, WIDTH), torch.zeros(len(captions), LENGTH, dtype=torch.bool)
        for row, caption in enumerate(captions):
            for place, word in enumerate((caption or "").split()[:LENGTH]):
                noise = torch.Generator().manual_seed(mix_text(word) % 2**31)
                states[row, place], mask[row, place] = torch.randn(WIDTH, generator=noise), True
        return TextStates(states, mask, states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


CAPTIONS = ["a red cat", "a blue dog", "a red cat", "猫", "x", " ", "one two three four five six seven eight", "half \ud83d pair"]


def write(folder: Path, captions: Sequence[str | None] = CAPTIONS, fingerprint: str = "one") -> tuple[Path, Encoder]:
    encoder = Encoder()
    return write_text_states(folder, captions, encoder, fingerprint), encoder


def test_what_is_read_is_what_the_encoder_gave(tmp_path: Path) -> None:
    path, _ = write(tmp_path)
    read, asked = CachedText(path), [*CAPTIONS[::-1], None, ""]
    found, wanted = read(asked, [""] * len(asked)), Encoder()(asked)
    assert found.states.dtype == found.pooled.dtype == torch.float16
    assert found.states.equal(wanted.states.half())
    assert found.mask.equal(wanted.mask)
    assert found.pooled.equal(wanted.pooled.half())
    assert not found.mask[-2:].any()
    assert read.width == WIDTH
    moved = found.to(torch.device("cpu"))
    torch.testing.assert_close(moved.states, wanted.states, rtol=1e-3, atol=1e-6)


def test_each_distinct_caption_is_encoded_once_and_stored_without_padding(tmp_path: Path) -> None:
    path, encoder = write(tmp_path)
    assert sorted(encoder.asked) == sorted(set(CAPTIONS))
    assert path.parent == tmp_path
    assert path.name.startswith("text-")
    assert len(path.name) == len("text-") + 16
    states = np.load(path / "00000.states.npy")
    assert states.shape == (3 + 3 + 1 + 1 + 6 + 3, WIDTH)
    hashes = np.load(path / "captions.npy")
    assert hashes.dtype == np.uint64
    assert (np.diff(hashes.astype(object)) > 0).all()
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["length"] == LENGTH
    assert manifest["captions"] == len(set(CAPTIONS))


def test_more_captions_than_are_encoded_at_a_time(tmp_path: Path) -> None:
    captions = [f"caption {index} " + "word " * (index % 7) for index in range(1000)]
    path, _ = write(tmp_path, captions)
    found = CachedText(path)(captions, captions)
    assert found.states.equal(Encoder()(captions).states.half())


def test_a_cache_is_taken_again_whatever_the_order(tmp_path: Path) -> None:
    path, _ = write(tmp_path)
    written = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    again, encoder = write(tmp_path, [*CAPTIONS[::-1], None, "", "x"])
    assert again == path
    assert encoder.asked == []
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == written


def test_another_encoder_or_other_captions_make_another(tmp_path: Path) -> None:
    paths = {
        write(tmp_path)[0],
        write(tmp_path, fingerprint="two")[0],
        write(tmp_path, [*CAPTIONS, "one more"])[0],
        write(tmp_path, CAPTIONS[:-1])[0],
    }
    assert len(paths) == 4
    assert sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.parametrize("captions", [[], [None, ""]])
def test_no_captions_at_all(tmp_path: Path, captions: list[str | None]) -> None:
    path, _ = write(tmp_path, captions)
    found = CachedText(path)([None, ""], ["a", "b"])
    assert found.states.shape == (2, LENGTH, WIDTH)
    assert not found.mask.any()


def test_a_caption_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    path, _ = write(tmp_path)
    with pytest.raises(UserError, match=r"'a green cat' is not among the 7 .*run `tessera data prepare RUN`"):
        CachedText(path)(["a green cat"], ["a"])
    with pytest.raises(UserError, match="not a whole text cache"):
        CachedText(tmp_path / "text-0")(["x"], ["a"])


def test_a_pickle_holds_the_path_alone(tmp_path: Path) -> None:
    path, _ = write(tmp_path, [f"caption number {index}" for index in range(2000)])
    read = CachedText(path)
    wanted = read(["caption number 7"], ["a"])
    pickled = pickle.dumps(read)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)(["caption number 7"], ["a"]).states.equal(wanted.states)


class Rows(torch.utils.data.Dataset[TextStates]):
    def __init__(self, read: CachedText) -> None:
        self.read = read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> TextStates:
        return self.read([CAPTIONS[index]], [""])


def test_workers_read_the_same(tmp_path: Path) -> None:
    read = CachedText(write(tmp_path)[0])
    read(["x"], [""])  # open before the workers start, as a preview does
    loader = DataLoader(Rows(read), batch_size=None, num_workers=1, multiprocessing_context="fork")
    for index, found in enumerate(loader):
        assert found.states.equal(read([CAPTIONS[index]], [""]).states)


# ---- shards

MANY = [f"caption {index} " + "word " * (index % 7) for index in range(20)]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them, the last one shorter."""
    monkeypatch.setattr(text_cache, "SHARD_CAPTIONS", 6)
    monkeypatch.setattr(text_cache, "CHUNK", 4)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("small_shards")
def test_shards_are_read_as_one(tmp_path: Path) -> None:
    path, _ = write(tmp_path, MANY)
    assert len(list(path.glob("*.states.npy"))) == 4
    found, wanted = CachedText(path)(MANY, MANY), Encoder()(MANY)
    assert found.states.equal(wanted.states.half())
    assert found.pooled.equal(wanted.pooled.half())


@pytest.mark.usefixtures("small_shards")
def test_after_an_error_what_is_missing_is_made_and_no_more(tmp_path: Path) -> None:
    whole, encoder = bytes_of(write(tmp_path / "whole", MANY)[0]), Encoder()

    def fail(captions: Sequence[str | None]) -> TextStates:
        if len(encoder.asked) >= 8:  # in the second shard
            raise RuntimeError("out of memory")
        return encoder(captions)

    with pytest.raises(RuntimeError, match="out of memory"):
        write_text_states(tmp_path / "broken", MANY, fail, "one")
    (left,) = (tmp_path / "broken").iterdir()
    assert not is_whole(left)
    (left / "00001.states.tmp-7").write_bytes(b"half")
    path, again = write(tmp_path / "broken", MANY)
    assert path == left
    assert len(again.asked) == 14, "all but the first shard"
    assert bytes_of(path) == whole


@pytest.mark.usefixtures("small_shards")
def test_ranks_share_the_shards(tmp_path: Path) -> None:
    whole, barrier = write(tmp_path / "one", MANY)[0], threading.Barrier(3, timeout=20)
    encoders, met = [Encoder() for _ in range(3)], [[0], [0], [0]]

    def work(rank: int) -> None:
        def meet() -> None:
            met[rank].append(len(encoders[rank].asked))
            barrier.wait()

        write_text_states(tmp_path / "three", MANY, encoders[rank], "one", rank=rank, world_size=3, wait=meet)

    ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert [len(encoder.asked) for encoder in encoders] == [8, 6, 6], "the first has the short one, too"
    assert max(after - before for each in met for before, after in pairwise(each)) == 6, "they meet after each shard"
    assert bytes_of(tmp_path / "three" / whole.name) == bytes_of(whole)


def test_a_kill_in_the_middle_leaves_no_half_cache(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:

        def stall(captions: Sequence[str | None]) -> TextStates:
            if any(captions):
                (tmp_path / "stalled").touch()
                time.sleep(60)
            return Encoder()(captions)

        write_text_states(tmp_path / "caches", CAPTIONS, stall, "one")
        os._exit(0)
    while not (tmp_path / "stalled").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = (tmp_path / "caches").iterdir()
    assert not is_whole(left)
    with pytest.raises(UserError, match="not a whole text cache"):
        CachedText(left)(["x"], [""])
    path, encoder = write(tmp_path / "caches")
    assert path == left
    assert is_whole(path)
    assert encoder.asked


@pytest.mark.parametrize("damage", ["gone", "cut", "manifest"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, damage: str) -> None:
    path, _ = write(tmp_path)
    if damage == "gone":
        (path / "00000.pooled.npy").unlink()
    elif damage == "cut":
        os.truncate(path / "00000.states.npy", 200)
    else:
        (path / "manifest.json").write_text("{")
    assert not is_whole(path)
    again, encoder = write(tmp_path)
    assert again == path
    assert encoder.asked
    assert is_whole(path)


def test_equal_captions_give_equal_bytes(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one")[0], write(tmp_path / "two", CAPTIONS[::-1])[0]
    assert one.name == two.name
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_numbers_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    def large(captions: Sequence[str | None]) -> TextStates:
        found = Encoder()(captions)
        return TextStates(found.states * 1e6, found.mask, found.pooled)

    with pytest.raises(UserError, match="float16 cannot hold"):
        write_text_states(tmp_path, CAPTIONS, large, "one")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
