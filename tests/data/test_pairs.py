"""Batches of pictures, embeddings and captions that belong together; and the cache that an encoder fills."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tessera.config import ImageDataConfig, UserError
from tessera.data import prepare
from tessera.data.embedding_cache import write_embeddings
from tessera.data.embedding_files import FileEmbeddings
from tessera.data.embeddings import Embeddings, Missing
from tessera.data.loader import Feed
from tessera.data.order import Cut
from tessera.data.pairs import PairLoader
from tessera.data.sources import ImageFolder, split_indices
from tessera.text.encoders import ByteReader

NUM = 20
TEXT = ByteReader(16)
WHOLE = Cut(6, 3, 0, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of one colour each, which is a function of the name; so is the caption."""
    path = tmp_path / "pictures"
    path.mkdir()
    for number in range(NUM):
        Image.new("RGB", (20, 20), (10 * number, 255 - 10 * number, 40)).save(path / f"{number:02d}.png")
        (path / f"{number:02d}.txt").write_text(f"colour {number}")
    return path


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SHARD_SAMPLES", 8)


def feed_of(data: Path, caches: Path, said: list[str] | None = None, cut: Cut = WHOLE, **values: Any) -> Feed:
    heard = [] if said is None else said
    config = ImageDataConfig(**{"resolution": 16, "workers": 0, "validation_fraction": 0.2, **values})
    return Feed(
        source=ImageFolder.open(data), config=config, cut=cut, seed=3, device=torch.device("cpu"), validation_samples=8,
        preview_samples=4, caches=caches, say=heard.append, show=lambda line: None,
    )  # fmt: skip


def encode(pictures: Tensor) -> Tensor:
    """A stand-in for an encoder: the mean colour, and one more channel."""
    return torch.cat([pictures.mean((2, 3)), torch.full((len(pictures), 1), 0.5)], dim=1)


def colour(key: str) -> np.ndarray:
    """What `encode` must give for a picture, from its name."""
    red = 10 * int(key)
    return np.array([red / 127.5 - 1, (255 - red) / 127.5 - 1, 40 / 127.5 - 1, 0.5], np.float32)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_cache_has_the_embedding_of_every_picture(folder: Path, tmp_path: Path) -> None:
    feed = feed_of(folder, tmp_path)
    cache = write_embeddings(feed, encode, "colours", 16)
    embeddings = FileEmbeddings.listed(cache)
    assert embeddings.width == 4
    for index in range(NUM):
        key = feed.source.key(index)
        assert embeddings.read(key) == pytest.approx(colour(key), abs=1e-6)
    assert write_embeddings(feed, lambda pictures: pytest.fail("it is there"), "colours", 16) == cache
    assert write_embeddings(feed, encode, "others", 16) != cache
    assert write_embeddings(feed, encode, "colours", 20) != cache


def test_a_cache_that_was_interrupted_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    feed = feed_of(folder, tmp_path)
    wanted = files(write_embeddings(feed, encode, "colours", 16))
    calls = 0

    def dying(pictures: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return encode(pictures)

    other = replace(feed, caches=tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        write_embeddings(other, dying, "colours", 16)
    again: list[int] = []
    cache = write_embeddings(other, lambda pictures: again.append(len(pictures)) or encode(pictures), "colours", 16)
    assert sum(again) == NUM - 16, "two shards were there"
    assert files(cache) == wanted


@pytest.mark.parametrize("harm", [cut, Path.unlink, lambda path: path.with_suffix(".json").unlink()])
def test_a_shard_that_was_lost_is_made_again(harm: Callable[[Path], None], folder: Path, tmp_path: Path) -> None:
    feed = feed_of(folder, tmp_path)
    cache = write_embeddings(feed, encode, "colours", 16)
    wanted, again = files(cache), list[int]()
    harm(cache / "00001.npy")
    write_embeddings(feed, lambda pictures: again.append(len(pictures)) or encode(pictures), "colours", 16)
    assert files(cache) == wanted
    assert sum(again) == 8, "that one alone"


def test_two_ranks_write_what_one_does(folder: Path, tmp_path: Path) -> None:
    wanted = files(write_embeddings(feed_of(folder, tmp_path), encode, "colours", 16))
    barrier = threading.Barrier(2)
    made: dict[int, Path] = {}

    def write(rank: int) -> None:
        feed = replace(feed_of(folder, tmp_path / "two", cut=Cut(6, 3, rank, 2)), wait=barrier.wait)
        made[rank] = write_embeddings(feed, encode, "colours", 16)

    ranks = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert made[0] == made[1]
    assert files(made[0]) == wanted


def test_a_picture_that_cannot_be_read_has_no_embedding(folder: Path, tmp_path: Path) -> None:
    (folder / "07.png").write_bytes(b"no picture")
    said: list[str] = []
    embeddings = FileEmbeddings.listed(write_embeddings(feed_of(folder, tmp_path, said), encode, "colours", 16))
    assert set(Missing.among(embeddings, [f"{number:02d}" for number in range(NUM)]).reasons) == {"07"}
    assert any("07 has no embedding: " in line for line in said)
    assert embeddings.of("08") == pytest.approx(colour("08"), abs=1e-6)


def test_what_could_not_be_read_is_tried_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is a shard whose list of that, or of its keys, is lost or damaged."""
    feed, read, again = feed_of(folder, tmp_path), ImageFolder.read, list[int]()
    wanted = files(write_embeddings(replace(feed, caches=tmp_path / "whole"), encode, "colours", 16))

    def counted(pictures: Tensor) -> Tensor:
        again.append(len(pictures))
        return encode(pictures)

    def broken(source: ImageFolder, index: int) -> Any:
        if index == 9:
            raise OSError(5, "Input/output error")
        return read(source, index)

    with monkeypatch.context() as patch:
        patch.setattr(ImageFolder, "read", broken)
        cache = write_embeddings(feed, encode, "colours", 16)
        write_embeddings(feed, counted, "colours", 16)
    assert files(cache) != wanted
    write_embeddings(feed, counted, "colours", 16)
    assert files(cache) == wanted
    (cache / "00000.faults.json").write_text("{")
    (cache / "00002.faults.json").unlink()
    write_embeddings(feed, counted, "colours", 16)
    assert files(cache) == wanted
    assert again == [8, 8, 4]
    (cache / "00000.json").write_text("[")
    (cache / "00001.json").write_text(json.dumps(json.loads((cache / "00001.json").read_text())[::-1]))
    (cache / "00002.json").unlink()
    write_embeddings(feed, counted, "colours", 16)
    assert files(cache) == wanted
    assert again[3:] == [8, 8, 4]


def test_an_encoder_that_breaks_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not finite, of 00 first"):
        write_embeddings(feed_of(folder, tmp_path), lambda pictures: encode(pictures) * torch.nan, "nan", 16)


@pytest.fixture
def embeddings(folder: Path, tmp_path: Path) -> Embeddings:
    return FileEmbeddings.listed(write_embeddings(feed_of(folder, tmp_path), encode, "colours", 16))


def check_batch(batch: Any) -> None:
    """Picture, embedding, caption and key are of one sample."""
    moved = batch.to(torch.device("cpu"))
    for row, key in enumerate(batch.keys):
        assert batch.captions[row] == f"colour {int(key)}"
        assert batch.embeddings[row].numpy() == pytest.approx(colour(key), abs=1e-6)
        if batch.images is not None:
            assert moved.images[row].mean((1, 2)).numpy() == pytest.approx(colour(key)[:3], abs=1e-6)
    assert torch.equal(batch.text.ids, TEXT(batch.captions, batch.keys).ids)


@pytest.mark.parametrize("pictures", [True, False])
def test_what_is_in_a_batch_belongs_together(pictures: bool, folder: Path, tmp_path: Path, embeddings: Embeddings) -> None:
    loader = PairLoader(feed_of(folder, tmp_path, workers=2), TEXT, embeddings, pictures=pictures, resolution=8)
    stream = loader.batches(0)
    keys: list[str] = []
    for _ in range(4):
        for batch in next(stream):
            check_batch(batch)
            assert batch.images is None or batch.images.shape == (3, 3, 8, 8)
            assert (batch.images is None) == (not pictures)
            keys += batch.keys
    stream.close()
    num_train = len(loader.train)
    assert len(set(keys[:num_train])) == num_train, "each once an epoch"
    for batch in [*loader.validation(), loader.preview()]:
        check_batch(batch)


def test_captions_of_validation_are_embedded_once_and_come_with_their_batches(
    folder: Path, tmp_path: Path, embeddings: Embeddings
) -> None:
    asked = list[str | None]()

    def embed(captions: Sequence[str | None]) -> Tensor:
        asked.extend(captions)
        return torch.tensor([[float((caption or "none -1").split()[1]), 1.0] for caption in captions])

    first, second, third = (
        f"{index:02d}" for index in PairLoader(feed_of(folder, tmp_path, validation_fraction=0.4), TEXT, embeddings).held_out[:3]
    )
    (folder / f"{first}.txt").unlink()
    (folder / f"{second}.txt").write_text(f"colour {int(third)}\nanother caption")
    loader = PairLoader(
        feed_of(folder, tmp_path, validation_fraction=0.4), TEXT, embeddings, pictures=False, embed_captions=embed
    )
    assert len(asked) == len(set(asked)) == len(loader.held_out) - 1, "equal ones once, and none of training"
    batches = loader.validation()
    assert sum(len(batch.keys) for batch in batches) > len(loader.held_out), "the last one is filled up"
    for batch in batches:
        wanted = batch.to(torch.device("cpu")).wanted
        assert wanted is not None
        numbers = {first: -1, second: int(third)}
        assert wanted.tolist() == [[numbers.get(key, int(key)), 1] for key in batch.keys]
    assert len(asked) == len(loader.held_out) - 1, "not again"
    stream = loader.batches(0)
    assert [batch.wanted for batch in next(stream)] == [None, None]
    stream.close()
    assert PairLoader(feed_of(folder, tmp_path, validation_fraction=0.4), TEXT, embeddings).validation()[0].wanted is None


def test_samples_without_an_embedding_are_told_and_left_out(folder: Path, tmp_path: Path) -> None:
    cache = write_embeddings(feed_of(folder, tmp_path), encode, "colours", 16)
    array = np.load(cache / "00001.npy")
    array[3] = 0  # sample 11
    np.save(cache / "00001.npy", array)
    embeddings, said = FileEmbeddings.listed(cache), list[str]()
    with pytest.raises(UserError, match=r"1 of 20 samples have no embedding\. all zeros, which stands for none: 1 \(11\)"):
        PairLoader(feed_of(folder, tmp_path, corrupt_budget=0.04), TEXT, embeddings)
    loader = PairLoader(feed_of(folder, tmp_path, said, corrupt_budget=0.05), TEXT, embeddings)
    assert said == ["embeddings: 1 of 20 samples have no embedding. all zeros, which stands for none: 1 (11); left out"]
    assert sorted(loader.source.key(int(index)) for index in [*loader.train, *loader.held_out]) == [
        f"{number:02d}" for number in range(NUM) if number != 11
    ]


def test_every_sample_without_an_embedding_is_in_the_log(folder: Path, tmp_path: Path) -> None:
    """The terminal names five of a reason; past the budget, too."""
    cache = write_embeddings(feed_of(folder, tmp_path), encode, "colours", 16)
    array = np.load(cache / "00001.npy")
    array[:7] = 0  # samples 8 to 14
    np.save(cache / "00001.npy", array)
    wanted = "embeddings: without one, all zeros, which stands for none: 08, 09, 10, 11, 12, 13, 14"
    embeddings, said, noted = FileEmbeddings.listed(cache), list[str](), list[str]()
    PairLoader(replace(feed_of(folder, tmp_path, said, corrupt_budget=0.5), note=noted.append), TEXT, embeddings)
    assert said[0].endswith("7 (08, 09, 10, 11, 12, ...); left out")
    assert noted == [wanted]
    with pytest.raises(UserError, match="more than"):
        PairLoader(replace(feed_of(folder, tmp_path, corrupt_budget=0.1), note=noted.append), TEXT, embeddings)
    assert noted == [wanted, wanted]


def test_embeddings_of_validation_samples_alone(folder: Path, tmp_path: Path) -> None:
    """What is missing is told, and not the split."""
    feed = feed_of(folder, tmp_path, corrupt_budget=1)
    held_out = [feed.source.key(int(index)) for index in split_indices(feed.source, 0.2)[1]]
    np.save(tmp_path / "a.npy", np.stack([colour(key) for key in held_out]))
    (tmp_path / "a.txt").write_text("\n".join(held_out))
    told = f"{NUM - len(held_out)} of 20 samples have no embedding. not among the keys .* None is left to train on"
    with pytest.raises(UserError, match=told):
        PairLoader(feed, TEXT, FileEmbeddings.listed(tmp_path / "a.npy"))


def harm_one(path: Path) -> None:
    array = np.load(path)
    array[0] = np.nan
    np.save(path, array)


@pytest.mark.parametrize("harm", [harm_one, cut, Path.unlink])
def test_what_breaks_in_training_is_replaced_whole(harm: Callable[[Path], None], folder: Path, tmp_path: Path) -> None:
    """The sample in its place brings its own picture, caption and embedding; the fault names who belonged there."""
    cache = write_embeddings(feed_of(folder, tmp_path), encode, "colours", 16)
    loader = PairLoader(feed_of(folder, tmp_path), TEXT, FileEmbeddings.listed(cache))
    harm(cache / "00000.npy")
    stream, faults = loader.batches(0), list[str]()
    for _ in range(6):
        for batch in next(stream):
            assert batch.valid.all()
            check_batch(batch)
            faults += batch.faults
    stream.close()
    assert faults
    assert all("its embedding is missing: " in fault and int(fault[:2]) < 8 for fault in faults)
