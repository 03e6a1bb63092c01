"""The token cache: a function of tokenizer, resolution, views and files; made once, by any number of ranks, and read by draws."""

from __future__ import annotations

import errno
import itertools
import json
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera import files
from tessera.config import ImageDataConfig, UserError
from tessera.data import prepare
from tessera.data.loader import Feed, frame
from tessera.data.order import Cut
from tessera.data.prepare import TokenPlan, cache_folder, write_tokens
from tessera.data.sources import ImageFolder, as_source, captions_of
from tessera.data.synth.shapes import write_shapes
from tessera.data.token_cache import TokenCache
from tessera.data.tokens import TokenLoader
from tessera.randomness import mix, mix_text
from tessera.text.encoders import NoTextReader

WHOLE = Cut(4, None, 0, 1)
FACTS = {"num_samples": 2, "views": 1, "grid": [1], "tokenizer": "", "vocab_size": 2, "resolution": 16, "faults": {}}
VARIED = {"crop": "random", "zoom": 1.5, "flip": "always"}


def encode(pictures: Tensor) -> Tensor:
    """A stand-in for a tokenizer: the brightness of each 4 x 4 patch as an id below 256."""
    return (torch.nn.functional.avg_pool2d(pictures.mean(1, keepdim=True), 4)[:, 0] * 127.5 + 127.5).long()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepare") / "shapes"
    write_shapes(path, 20, 0, image_size=40)
    return path / "train"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them."""
    monkeypatch.setattr(prepare, "SHARD_SAMPLES", 8)


def feed_of(data: Path, caches: Path, said: list[str] | None = None, cut: Cut = WHOLE, **values: Any) -> Feed:
    heard = [] if said is None else said
    return Feed(
        source=ImageFolder.open(data), config=ImageDataConfig(resolution=16, workers=0, validation_fraction=0.2, **values),
        cut=cut, seed=3, device=torch.device("cpu"), validation_samples=8, preview_samples=4, caches=caches, say=heard.append,
        show=lambda line: None,
    )  # fmt: skip


def plan_of(feed: Feed, **values: Any) -> TokenPlan:
    return replace(TokenPlan.of(feed.config, "weights", 256, feed.config.resolution), **values)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- what is in it


def test_every_view_is_the_picture_that_its_draw_cuts(shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path, views=3, **VARIED)
    cache = TokenCache(write_tokens(feed, plan_of(feed), encode))
    assert (cache.num_samples, cache.views, cache.grid, cache.faults) == (20, 3, (4, 4), {})
    for index, view in itertools.product((0, 7, 8, 19), range(3)):
        draw = None if view == 0 else mix(feed.seed, mix_text("view"), view, mix_text(feed.source.key(index)))
        picture = frame(feed.source.read(index), feed.config, (), draw)
        wanted = encode(torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1)[0]
        assert np.array_equal(cache.ids(index, view), wanted.numpy()), (index, view)


def test_one_view_where_nothing_varies() -> None:
    assert TokenPlan.of(ImageDataConfig(views=8), "x", 9, 16).views == 1
    assert TokenPlan.of(ImageDataConfig(views=8, flip=True), "x", 9, 16).views == 8
    assert TokenPlan.of(ImageDataConfig(views=8, crop="random"), "x", 9, 16).views == 8


@pytest.mark.parametrize(
    ("vocab_size", "kind"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**32 + 1, "uint64")]
)
def test_the_smallest_type_that_holds_the_vocabulary(vocab_size: int, kind: str) -> None:
    assert np.dtype(TokenPlan("x", vocab_size, 16, 1).dtype).name == kind


def test_ids_are_stored_in_that_type(shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    for vocab_size, kind in ((256, "uint8"), (1000, "uint16")):
        folder = write_tokens(feed, plan_of(feed, vocab_size=vocab_size), encode)
        assert np.load(folder / "00000.npy").dtype == kind


# ---- keys and captions


def test_it_knows_keys_and_captions_without_its_source(shapes: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(shapes, tmp_path / "data"))
    feed = feed_of(data, tmp_path / "caches")
    folder = write_tokens(feed, plan_of(feed), encode)
    wanted = [(feed.source.key(index), (feed.source.caption(index),)) for index in range(20)]
    shutil.rmtree(data)
    cache = pickle.loads(pickle.dumps(TokenCache(str(folder))))
    assert [(cache.key(index), cache.captions(index)) for index in range(20)] == wanted
    assert all(text for _, (text,) in wanted)
    assert (cache.tokenizer, cache.vocab_size, cache.resolution) == ("weights", 256, 16)
    assert len(pickle.dumps(cache)) < 1000, "they are not sent to workers"


def test_captions_that_change_are_written_alone(shapes: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(shapes, tmp_path / "data"))
    folder = write_tokens(feed_of(data, tmp_path), plan_of(feed_of(data, tmp_path)), encode)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    table = data / "metadata.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    rows[3]["text"] = ["猫", "another"]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    feed = feed_of(data, tmp_path)
    assert write_tokens(feed, plan_of(feed), lambda pictures: pytest.fail("encoded again")) == folder
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert [name for name in after if after[name] != before[name]] == ["samples.jsonl"]
    cache = TokenCache(folder)
    texts = [cache.captions(index) for index in range(20)]
    assert texts == [captions_of(feed.source, index) for index in range(20)]
    assert texts[3] == ("猫", "another")


@pytest.mark.parametrize("content", [None, "", "{", "[]\n" * 20, '{"key": "a"}\n' * 20, '{"key": "a", "captions": []}\n' * 19])
def test_lost_or_damaged_captions_are_told_and_written_anew(content: str | None, shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    folder = write_tokens(feed, plan_of(feed), encode)
    path = folder / "samples.jsonl"
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_text(content)
    cache = TokenCache(folder)
    assert cache.ids(3).shape == (4, 4), "ids need no captions"
    with pytest.raises(UserError, match=r"samples.jsonl cannot be read \(.*; `tessera data prepare RUN` writes it anew"):
        cache.key(0)
    write_tokens(feed, plan_of(feed), encode)
    assert path.read_bytes() == whole


# ---- its key


def test_it_is_made_once(shapes: Path, tmp_path: Path) -> None:
    said: list[str] = []
    feed = feed_of(shapes, tmp_path, said)
    folder = write_tokens(feed, plan_of(feed), encode)
    assert len(said) == 1
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert write_tokens(feed, plan_of(feed), lambda pictures: pytest.fail("encoded again")) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert len(said) == 1


@pytest.mark.parametrize(
    ("plan", "data"),
    [
        ({"tokenizer": "other weights"}, {}),
        ({"resolution": 32}, {}),
        ({"vocab_size": 300}, {}),
        ({"views": 4}, {}),
        ({}, {"zoom": 1.2}),
        ({}, {"flip": False}),
        ({}, {"crop": "center", "zoom": 1.0}),
        ({}, {"channels": 1}),
        ({}, {"background": (0, 0, 0)}),
    ],
    ids=str,
)
def test_whatever_decides_its_content_decides_its_name(
    plan: dict[str, Any], data: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    feed, other = (feed_of(shapes, tmp_path, **{**VARIED, **changes}) for changes in ({}, data))
    assert cache_folder(feed, plan_of(feed, views=2)) != cache_folder(other, plan_of(other, **{"views": 2, **plan}))


def test_changed_files_make_it_anew(shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for picture in sorted(shapes.glob("*.png"))[:3]:
        shutil.copy(picture, data)
        (data / picture.name).with_suffix(".txt").write_text("a shape")

    def name() -> str:
        feed = feed_of(data, tmp_path, flip=True)
        return cache_folder(feed, plan_of(feed)).name

    first = name()
    assert name() == first
    picture, caption = sorted(data.glob("*.png"))[0], sorted(data.glob("*.txt"))[0]
    caption.write_text("something else")
    assert name() == first, "a caption is no part of a picture"
    caption.write_text("a circle on the left")
    second = name()
    assert second != first, "but left and right decide whether it is mirrored"
    picture.write_bytes(sorted(data.glob("*.png"))[1].read_bytes())
    third = name()
    assert third != second
    picture.unlink()
    assert name() != third


# ---- unfinished work


@pytest.mark.parametrize(
    "lost",
    [
        ["manifest.json"], ["manifest.json", "00001.npy"], ["00001.npy"], ["00000.npy", "00002.npy"],
        ["00001.json"], ["manifest.json", "00000.json"],
    ],
)  # fmt: skip
def test_what_is_missing_is_made_again_and_no_more(lost: list[str], shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    folder = write_tokens(feed, plan_of(feed), encode)
    whole, asked = bytes_of(folder), []
    for name in lost:
        (folder / name).unlink()

    def count(pictures: Tensor) -> Tensor:
        asked.append(len(pictures))
        return encode(pictures)

    assert write_tokens(feed, plan_of(feed), count) == folder
    assert bytes_of(folder) == whole
    assert sum(asked) == sum({"00000": 8, "00001": 8, "00002": 4}.get(name.split(".")[0], 0) for name in lost)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000])
@pytest.mark.parametrize("finished", [True, False])
def test_a_damaged_list_of_faults_is_made_again(finished: bool, content: str, shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    folder = write_tokens(feed, plan_of(feed), encode)
    whole, asked = bytes_of(folder), list[int]()
    (folder / "00001.json").write_text(content)
    if not finished:
        (folder / "manifest.json").unlink()
    write_tokens(feed, plan_of(feed), lambda pictures: (asked.append(len(pictures)), encode(pictures))[1])
    assert bytes_of(folder) == whole
    assert asked == [8]


def test_a_death_inside_leaves_whole_shards(shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    wanted = bytes_of(write_tokens(feed_of(shapes, tmp_path / "other"), plan_of(feed), encode))
    calls = itertools.count()

    def die(pictures: Tensor) -> Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return encode(pictures)

    with pytest.raises(KeyboardInterrupt):
        write_tokens(feed, plan_of(feed), die)
    folder = cache_folder(feed, plan_of(feed))
    with pytest.raises(UserError, match=r"is no finished token cache .*; delete it, and it is made anew"):
        TokenCache(folder)
    (folder / "00001.tmp-7").write_bytes(b"half")
    assert bytes_of(write_tokens(feed, plan_of(feed), encode)) == wanted


def of_ranks(feeds: Sequence[Feed]) -> list[list[str]]:
    """Makes one cache together; what each did, in turn: met the others, or encoded a batch."""
    barrier = threading.Barrier(len(feeds), timeout=20)
    done: list[list[str]] = [[] for _ in feeds]

    def work(rank: int) -> None:
        def meet() -> None:
            done[rank].append("met")
            barrier.wait()

        def noted(pictures: Tensor) -> Tensor:
            done[rank].append("encoded")
            return encode(pictures)

        feed = replace(feeds[rank], cut=Cut(4, None, rank, len(feeds)), wait=meet)
        write_tokens(feed, plan_of(feed), noted)

    with ThreadPoolExecutor(len(feeds)) as pool:
        list(pool.map(work, range(len(feeds))))
    return done


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_two_ranks_write_what_one_does(num_ranks: int, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever each has to do, they meet after every batch: that another has much left is no reason to give up waiting."""
    monkeypatch.setattr(prepare, "CHUNK_PICTURES", 4)
    alone = feed_of(shapes, tmp_path / "one", views=2, **VARIED)
    one = write_tokens(alone, plan_of(alone), encode)
    done = of_ranks([feed_of(shapes, tmp_path / "many", views=2, **VARIED)] * num_ranks)
    assert bytes_of(tmp_path / "many" / one.name) == bytes_of(one)
    assert sum(each.count("encoded") for each in done) == 10
    assert max(each.count("encoded") for each in done) > min(each.count("encoded") for each in done)
    for each in done:
        assert ("encoded", "encoded") not in itertools.pairwise(each)


# ---- what another run has made


@pytest.mark.parametrize(("views", "told"), [(1, "20 samples to tokens, 1 view each"), (2, "20 samples to tokens, 2 views each")])
def test_what_is_made_is_told(views: int, told: str, shapes: Path, tmp_path: Path) -> None:
    said = list[str]()
    feed = feed_of(shapes, tmp_path, said, views=views, **VARIED)
    folder = write_tokens(feed, plan_of(feed), encode)
    assert said[0] == f"cache: {told}, in {folder}"


def test_the_same_cache_of_another_run_is_taken(shapes: Path, tmp_path: Path) -> None:
    other = feed_of(shapes, tmp_path / "other", views=2, **VARIED)
    made, said = write_tokens(other, plan_of(other), encode), list[str]()
    before = bytes_of(made)
    feed = replace(feed_of(shapes, tmp_path / "own", said, views=2, **VARIED), lenders=(tmp_path / "none", other.caches))
    folder = write_tokens(feed, plan_of(feed), lambda pictures: pytest.fail("encoded again"))
    assert folder == tmp_path / "own" / made.name
    assert bytes_of(folder) == before == bytes_of(made)
    assert said == [f"cache: 3 of 3 shards are taken from {made}"]
    shutil.rmtree(made)
    assert bytes_of(folder) == before


@pytest.mark.parametrize("linked", [True, False], ids=["one disk", "two disks"])
@pytest.mark.parametrize("lost", ["00001.npy", "00001.json"])
def test_what_the_other_run_lacks_is_made_here_and_not_there(
    linked: bool, lost: str, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("cross-device link")

    if not linked:
        monkeypatch.setattr(files.os, "link", refuse)
    other = feed_of(shapes, tmp_path / "other")
    made, said = write_tokens(other, plan_of(other), encode), list[str]()
    whole = bytes_of(made)
    for name in (lost, "manifest.json"):
        (made / name).unlink()
    theirs, seen = bytes_of(made), list[int]()

    def counted(pictures: Tensor) -> Tensor:
        seen.append(len(pictures))
        return encode(pictures)

    feed = replace(feed_of(shapes, tmp_path / "own", said), lenders=(other.caches,))
    assert bytes_of(write_tokens(feed, plan_of(feed), counted)) == whole
    assert bytes_of(made) == theirs
    assert sum(seen) == 8
    assert said[0].startswith("cache: 2 of 3 shards")


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", None], ids=["empty", "cut", "unread sample"])
def test_a_damaged_shard_is_not_taken(damage: bytes | None, shapes: Path, tmp_path: Path) -> None:
    other, said = feed_of(shapes, tmp_path / "other"), list[str]()
    made = write_tokens(other, plan_of(other), encode)
    whole = bytes_of(made)
    if damage is None:
        (made / "00001.json").write_text('{"8.png": "a disk that was away"}')
    else:
        (made / "00001.npy").write_bytes(damage)
    feed = replace(feed_of(shapes, tmp_path / "own", said), lenders=(other.caches,))
    assert bytes_of(write_tokens(feed, plan_of(feed), encode)) == whole
    assert said[0].startswith("cache: 2 of 3 shards")


def test_a_dataset_in_python_takes_nothing(shapes: Path, tmp_path: Path) -> None:
    """Its cache is named by its keys, which another dataset may have, too."""
    folder = ImageFolder.open(shapes)
    pictures = [np.asarray(folder.read(index)) for index in range(len(folder))]
    bright, dark = (
        as_source([{"key": str(n), "image": image // divisor} for n, image in enumerate(pictures)]) for divisor in (1, 2)
    )
    other = replace(feed_of(shapes, tmp_path / "other"), source=bright)
    write_tokens(other, plan_of(other), encode)
    feed = replace(other, source=dark, caches=tmp_path / "own", lenders=(other.caches,))
    alone = replace(feed, caches=tmp_path / "alone", lenders=())
    found, wanted = (write_tokens(each, plan_of(each), encode) for each in (feed, alone))
    assert bytes_of(found) == bytes_of(wanted) != bytes_of(tmp_path / "other" / found.name)


def test_a_cache_of_something_else_is_not_taken(shapes: Path, tmp_path: Path) -> None:
    other, said = feed_of(shapes, tmp_path / "other"), list[str]()
    write_tokens(other, plan_of(other), encode)
    feed = replace(feed_of(shapes, tmp_path / "own", said), lenders=(other.caches,))
    write_tokens(feed, plan_of(feed, tokenizer="other weights"), encode)
    assert len(said) == 1
    assert "to tokens" in said[0]


# ---- what cannot be read


def test_what_cannot_be_read_is_named_and_left_out(shapes: Path, tmp_path: Path) -> None:
    data, said = Path(shutil.copytree(shapes, tmp_path / "data")), []
    bad = sorted(data.glob("*.png"))[4::9]
    for picture in bad:
        picture.write_bytes(b"no picture")
    feed = feed_of(data, tmp_path / "cache", said, corrupt_budget=0.5)
    cache = TokenCache(write_tokens(feed, plan_of(feed), encode))
    assert list(cache.faults) == [picture.stem for picture in bad]
    strict = replace(feed, config=feed.config.model_copy(update={"corrupt_budget": 0.05}))
    with pytest.raises(UserError, match=r"2 of 20 samples cannot be read, more than data\.corrupt_budget=0\.05 allows"):
        TokenLoader(strict, cache, NoTextReader())
    for picture in bad:
        assert sum(f"{picture.stem} is left out: " in line and "not an image" in line for line in said) == 1
    loader = TokenLoader(feed, cache, NoTextReader())
    used = {feed.source.key(int(index)) for index in (*loader.train, *loader.held_out)}
    assert used == {feed.source.key(index) for index in range(20)} - set(cache.faults)
    steps = list(itertools.islice(loader.batches(0), 8))
    assert not {key for step in steps for batch in step for key in batch.keys} & set(cache.faults)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Keys of pictures that the disk does not give, until they are taken out of it."""
    keys, read = set[str](), ImageFolder.read

    def read_or_fail(source: ImageFolder, index: int) -> Any:
        if source.key(index) in keys:
            raise OSError(errno.EIO, "Input/output error")
        return read(source, index)

    monkeypatch.setattr(ImageFolder, "read", read_or_fail)
    return keys


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_could_not_be_read_once_is_tried_again(num_ranks: int, away: set[str], shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    whole = bytes_of(write_tokens(feed_of(shapes, tmp_path / "whole"), plan_of(feed), encode))
    away |= {feed.source.key(index) for index in (1, 5, 17)}
    folder = write_tokens(feed, plan_of(feed), encode)
    left_out = bytes_of(folder)
    with pytest.raises(UserError, match=r"3 of 20 samples cannot be read.*; each start tries them again"):
        TokenLoader(feed, TokenCache(folder), NoTextReader())
    assert write_tokens(feed, plan_of(feed), lambda pictures: pytest.fail("none of them can be read yet")) == folder
    assert bytes_of(folder) == left_out
    away.remove(feed.source.key(5))
    done = of_ranks([feed] * num_ranks)
    assert sum(each.count("encoded") for each in done) == 1, "the shard of that one"
    assert set(TokenCache(folder).faults) == away
    away.clear()
    of_ranks([feed] * num_ranks)
    assert bytes_of(folder) == whole


def test_a_kill_while_a_shard_is_made_again_forgets_no_sample(away: set[str], shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    whole = bytes_of(write_tokens(feed_of(shapes, tmp_path / "whole"), plan_of(feed), encode))
    away |= {feed.source.key(index) for index in (1, 9)}
    write_tokens(feed, plan_of(feed), encode)
    away.clear()
    calls = itertools.count()

    def die(pictures: Tensor) -> Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return encode(pictures)

    with pytest.raises(KeyboardInterrupt):
        write_tokens(feed, plan_of(feed), die)
    assert bytes_of(write_tokens(feed, plan_of(feed), encode)) == whole


def test_what_another_run_could_read_is_taken_from_there(away: set[str], shapes: Path, tmp_path: Path) -> None:
    other = feed_of(shapes, tmp_path / "other")
    whole = bytes_of(write_tokens(other, plan_of(other), encode))
    feed = feed_of(shapes, tmp_path / "own")
    away.add(feed.source.key(1))
    write_tokens(feed, plan_of(feed), encode)
    away.clear()
    feed = replace(feed, lenders=(other.caches,))
    assert bytes_of(write_tokens(feed, plan_of(feed), lambda pictures: pytest.fail("encoded again"))) == whole


def test_samples_that_are_left_out_are_told_at_every_start(away: set[str], shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path, said := [], corrupt_budget=0.5)
    away |= {feed.source.key(index) for index in (1, 17)}
    for _ in range(2):
        said.clear()
        TokenLoader(feed, TokenCache(write_tokens(feed, plan_of(feed), encode)), NoTextReader())
        assert said[-1] == "cache: 2 of 20 samples are left out, and tried again at the next start"


def test_work_on_a_cache_may_be_stopped_and_goes_on(shapes: Path, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def leave() -> None:
        raise Enough

    feed = feed_of(shapes, tmp_path / "cache", [])
    with pytest.raises(Enough):
        write_tokens(replace(feed, check=leave), plan_of(feed), encode)
    assert not list((tmp_path / "cache").rglob("manifest.json"))
    assert TokenCache(write_tokens(feed, plan_of(feed), encode)).num_samples == len(feed.source)


# ---- batches


def both_grids(shapes: Path, tmp_path: Path) -> TokenLoader:
    """Of 16 and of 32 pixels."""
    feed = feed_of(shapes, tmp_path, views=4, **VARIED)
    low, fine = (TokenCache(write_tokens(feed, plan_of(feed, resolution=size), encode)) for size in (16, 32))
    return TokenLoader(feed, fine, NoTextReader(), low)


def test_views_are_drawn_by_seed_epoch_and_key(shapes: Path, tmp_path: Path) -> None:
    loader, seen = both_grids(shapes, tmp_path), Counter[int]()
    size = len(loader.train)
    for position in range(6 * size):
        item = loader.samples[position]
        index = next(index for index in range(20) if loader.source.key(index) == item.key)
        view = mix(mix(3, position // size, mix_text(item.key)), 6) % 4
        assert np.array_equal(item.ids, loader.samples.cache.ids(index, view))
        assert item.low is not None
        assert np.array_equal(item.low, loader.samples.low.ids(index, view)), "both grids are of the same view"
        seen[view] += 1
    assert len(seen) == 4
    assert [loader.samples[5].key, loader.samples[5].ids.tolist()] == [loader.samples[5].key, loader.samples[5].ids.tolist()]


def test_validation_and_preview_show_the_centre(shapes: Path, tmp_path: Path) -> None:
    loader = both_grids(shapes, tmp_path)
    batch = loader.preview()
    for row, key in enumerate(batch.keys):
        index = next(index for index in range(20) if loader.source.key(index) == key)
        assert np.array_equal(batch.ids[row].numpy(), loader.samples.cache.ids(index, 0))
    assert all(batch.ids.dtype == torch.int32 for batch in loader.validation())


def test_it_is_small_to_send_to_workers(shapes: Path, tmp_path: Path) -> None:
    cache = both_grids(shapes, tmp_path).samples.cache
    cache.ids(0, 0)
    sent = pickle.dumps(cache)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).ids(19, 3), cache.ids(19, 3))


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"views": 1}), json.dumps({**FACTS, "shard_samples": 0})])
def test_a_damaged_manifest_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="is no finished token cache"):
        TokenCache(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\x80\x04.", None], ids=["empty", "no array", "cut"])
def test_a_damaged_shard_is_told_before_training(damage: bytes | None, shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(shapes, tmp_path)
    folder = write_tokens(feed, plan_of(feed), encode)
    shard = folder / "00001.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] if damage is None else damage)
    with pytest.raises(UserError, match=r"00001.npy cannot be read .*; delete it, and it is made anew"):
        TokenCache(folder)
    shard.write_bytes((folder / "00002.npy").read_bytes())
    with pytest.raises(UserError, match=r"holds \(4, 1, 4, 4\), expected \(8, 1, 4, 4\)"):
        TokenCache(folder)
    shard.unlink()
    TokenCache(write_tokens(feed, plan_of(feed), encode))
    assert shard.read_bytes() == whole
