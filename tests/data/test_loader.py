"""The loader: every sample once an epoch, the same pixels from any number of workers and ranks, and no process left behind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.batches import ImageBatch
from tessera.config import ImageDataConfig, UserError
from tessera.data.loader import ImageLoader, Prepared, SampleLoader
from tessera.data.order import Cut
from tessera.data.sources import ImageFolder, Source, split_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures of several shapes, each of another noise, with captions."""
    path, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(40):
        height, width = 16 + number % 3 * 8, 16 + number % 5 * 6
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path / f"{number:02d}.png")
        (path / f"{number:02d}.txt").write_text(f"picture {number}")
    return path


def loader(
    source: Source | Path, *, batch_size: int = 8, micro: int | None = None, rank: int = 0, world_size: int = 1, seed: int = 0,
    validation_samples: int = 512, preview_samples: int = 4, **data: Any,
) -> ImageLoader:  # fmt: skip
    config = ImageDataConfig(**{"resolution": 16, "workers": 0, "validation_fraction": 0.25, **data})
    opened = ImageFolder.open(source) if isinstance(source, Path) else source
    cut = Cut(batch_size, micro, rank, world_size)
    return ImageLoader(
        opened, config, cut, seed=seed, device=CPU, validation_samples=validation_samples, preview_samples=preview_samples
    )


def take(made: ImageLoader, steps: int, first_step: int = 0) -> list[Sequence[ImageBatch]]:
    stream = made.batches(first_step)
    try:
        return list(itertools.islice(stream, steps))
    finally:
        stream.close()


def rows(batches: Sequence[ImageBatch]) -> list[tuple[str, int, bytes]]:
    """Key, position and pixels of every sample, in order."""
    return [
        (key, int(position), image.numpy().tobytes())
        for batch in batches
        for key, position, image in zip(batch.keys, batch.positions, batch.images, strict=True)
    ]


def flat(steps: Sequence[Sequence[ImageBatch]]) -> list[tuple[str, int, bytes]]:
    return [row for step in steps for row in rows(step)]


# ---- the stream


@pytest.mark.parametrize(("batch_size", "micro", "world_size"), [(3, None, 1), (7, 2, 2), (50, 9, 3), (8, 3, 1)])
def test_every_training_sample_once_an_epoch(folder: Path, batch_size: int, micro: int | None, world_size: int) -> None:
    ranks = [loader(folder, batch_size=batch_size, micro=micro, rank=rank, world_size=world_size) for rank in range(world_size)]
    size = len(ranks[0].train)
    steps = -(-2 * size // batch_size)
    seen = [row for taken in [take(made, steps) for made in ranks] for row in flat(taken)]
    keys = [key for key, _, _ in sorted(seen, key=lambda row: row[1])]
    assert sorted(position for _, position, _ in seen) == list(range(steps * batch_size))
    for epoch in (keys[:size], keys[size : 2 * size]):
        assert sorted(epoch) == sorted(ranks[0].source.key(int(index)) for index in ranks[0].train)
    assert not {ranks[0].source.key(int(index)) for index in ranks[0].held_out} & set(keys)


AUGMENTED: dict[str, Any] = {"crop": "random", "zoom": 1.5, "flip": True}


def test_ranks_and_workers_change_no_pixel(folder: Path) -> None:
    alone = sorted(flat(take(loader(folder, **AUGMENTED), 9)), key=lambda row: row[1])
    with_workers = flat(take(loader(folder, workers=2, micro=3, **AUGMENTED), 9))
    assert with_workers == alone
    ranks = [take(loader(folder, micro=2, rank=rank, world_size=3, **AUGMENTED), 9) for rank in range(3)]
    assert sorted([row for rank in ranks for row in flat(rank)], key=lambda row: row[1]) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_at_a_step_is_the_tail_of_the_stream(folder: Path, workers: int) -> None:
    whole = take(loader(folder, micro=3, **AUGMENTED), 9)
    assert flat(take(loader(folder, micro=3, workers=workers, **AUGMENTED), 4, first_step=5)) == flat(whole[5:])


def test_captions_and_keys_belong_to_their_pictures(folder: Path) -> None:
    for batch in take(loader(folder), 1)[0]:
        for key, caption, image in zip(batch.keys, batch.captions, batch.images, strict=True):
            assert caption == f"picture {int(key)}"
            with Image.open(folder / f"{key}.png") as picture:
                if picture.size == (16, 16):
                    assert np.array_equal(np.asarray(picture), image.permute(1, 2, 0).numpy())


def test_augmentation_depends_on_seed_epoch_and_key_only(folder: Path) -> None:
    source, config = ImageFolder.open(folder), ImageDataConfig(resolution=16, **AUGMENTED)
    every, some = np.arange(40), np.arange(40)[::-3].copy()

    def drawn(indices: Any, seed: int, epoch: int) -> dict[str, bytes]:
        prepared = Prepared(source, config, indices, seed)
        items = [prepared[position] for position in range(epoch * len(indices), (epoch + 1) * len(indices))]
        return {item.key: item.image.tobytes() for item in items if item.image is not None}

    first = drawn(every, 0, 0)
    assert drawn(some, 0, 0) == {key: first[key] for key in drawn(some, 0, 0)}  # not on what else is there
    for other in (drawn(every, 0, 1), drawn(every, 1, 0)):
        assert sum(other[key] == first[key] for key in first) <= 4
    assert drawn(every, 0, 1) == drawn(every, 0, 1)


def test_flips_are_half_of_the_draws_and_crops_are_spread(folder: Path) -> None:
    source = ImageFolder.open(folder)
    plain = Prepared(source, ImageDataConfig(resolution=16), np.arange(40), 0)
    flipped = Prepared(source, ImageDataConfig(resolution=16, flip=True), np.arange(40), 0)
    same = mirrored = 0
    for position in range(400):
        a, b = plain[position].image, flipped[position].image
        assert a is not None
        assert b is not None
        same, mirrored = same + np.array_equal(a, b), mirrored + np.array_equal(a[:, ::-1], b)
    assert same + mirrored == 400
    assert 150 < mirrored < 250


@pytest.fixture
def captioned(tmp_path: Path) -> Path:
    """Twelve pictures of noise: four with three captions, four whose caption names a side, four with one."""
    rng = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"{number:02d}.png")
        text = "one\ntwo\nthree" if number < 4 else "the left one" if number < 8 else "plain"
        (tmp_path / f"{number:02d}.txt").write_text(text)
    return tmp_path


def test_a_caption_of_several_is_drawn_by_seed_epoch_and_key(captioned: Path) -> None:
    def drawn(seed: int, batch_size: int = 12, workers: int = 0) -> list[tuple[str, str | None]]:
        made = loader(captioned, validation_fraction=0.0, seed=seed, batch_size=batch_size, workers=workers)
        batches = [batch for step in take(made, 60 * 12 // batch_size) for batch in step]
        return [pair for batch in batches for pair in zip(batch.keys, batch.captions, strict=True)]

    first = drawn(0)
    assert first == drawn(0, batch_size=5) == drawn(0, batch_size=5, workers=2)
    assert first != drawn(1)
    counts = Counter(caption for key, caption in first if int(key) < 4)
    assert set(counts) == {"one", "two", "three"}
    assert min(counts.values()) > 240 / 3 * 0.7
    assert {caption for key, caption in first if int(key) >= 8} == {"plain"}


def test_validation_and_preview_take_the_first_caption(captioned: Path) -> None:
    made = loader(captioned, validation_fraction=0.49)
    for batch in [*made.validation(), made.preview()]:
        assert not {"two", "three"} & set(batch.captions)


@pytest.mark.parametrize(("flip", "sided"), [(True, False), ("always", True), (False, False)])
def test_pictures_whose_captions_name_a_side_are_not_mirrored(captioned: Path, flip: Any, sided: bool) -> None:
    source = ImageFolder.open(captioned)
    prepared = Prepared(source, ImageDataConfig(resolution=16, flip=flip), np.arange(12), 0)
    mirrored = Counter[bool]()
    for position in range(12 * 20):
        item = prepared[position]
        assert item.image is not None
        index = int(item.key)
        mirrored[4 <= index < 8] += not np.array_equal(item.image, source.read(index))
    assert (mirrored[True] > 20) == sided
    assert (mirrored[False] > 40) == bool(flip)


def test_split_folders_decide_what_is_trained(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / ("val" if number % 4 == 0 else "train")
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / f"{number}.png")
    made = loader(tmp_path, validation_fraction=0.5, batch_size=15)
    seen = {key for step in take(made, 3) for batch in step for key in batch.keys}
    assert {key.split("/")[0] for key in seen} == {"train"}
    assert len(seen) == 15
    assert {key.split("/")[0] for batch in made.validation() for key in batch.keys} == {"val"}


# ---- validation and preview


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("batch_size", "micro"), [(4, None), (3, None), (64, 64), (8, 2)])
def test_validation_is_the_held_out_set_once(folder: Path, batch_size: int, micro: int | None, world_size: int) -> None:
    ranks = [loader(folder, batch_size=batch_size, micro=micro, rank=rank, world_size=world_size) for rank in range(world_size)]
    shares = [made.validation() for made in ranks]
    assert len({len(share) for share in shares}) == 1
    assert len({len(batch.keys) for share in shares for batch in share}) == 1  # one shape
    valid = [key for share in shares for batch in share for key, use in zip(batch.keys, batch.valid.tolist(), strict=True) if use]
    assert sorted(valid) == sorted(ranks[0].source.key(int(index)) for index in ranks[0].held_out)
    assert len(valid) > 4


def test_validation_is_not_augmented_and_does_not_change(folder: Path) -> None:
    made = loader(folder, **AUGMENTED)
    assert [rows([batch]) for batch in made.validation()] == [rows([batch]) for batch in made.validation()]
    plain = {key: pixels for key, _, pixels in rows(loader(folder).validation())}
    assert {key: pixels for key, _, pixels in rows(made.validation())} == plain


def test_validation_takes_no_more_than_asked(folder: Path) -> None:
    few = loader(folder, validation_samples=3, batch_size=2)
    assert sum(int(batch.valid.sum()) for batch in few.validation()) == 3


def test_preview_is_fixed_and_held_out(folder: Path) -> None:
    ranks = [loader(folder, rank=rank, world_size=2) for rank in range(2)]
    assert rows([ranks[0].preview()]) == rows([ranks[0].preview()]) == rows([ranks[1].preview()])
    held_out = {ranks[0].source.key(int(index)) for index in ranks[0].held_out}
    assert set(ranks[0].preview().keys) <= held_out
    assert len(ranks[0].preview().keys) == 4


def test_without_a_held_out_set_there_is_no_validation_but_a_preview(folder: Path) -> None:
    made = loader(folder, validation_fraction=0.0, preview_samples=64)
    assert made.validation() == []
    assert len(made.preview().keys) == 40


def test_all_samples_held_out_is_the_users_error(tmp_path: Path) -> None:
    for number in range(20):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{number}.png")
    who = next(name for name in ("ann", "bob", "cem", "dan", "eve", "fay") if split_of(name, 0.5) == "validation")
    (tmp_path / "metadata.csv").write_text("file_name,text,who\n" + "".join(f"{n}.png,x,{who}\n" for n in range(20)))
    source = ImageFolder.open(tmp_path, group_by="who")
    with pytest.raises(UserError, match=r"20 samples, and all of them fall into the validation split; lower data.validation_fr"):
        loader(source, validation_fraction=0.5)


def test_where_what_is_lost_leaves_none_to_train_on_it_is_told(folder: Path) -> None:
    made = loader(folder)
    told = r"40 samples, of which 31 cannot be used and 9 fall into the validation split; repair the former, lower data\.val"
    with pytest.raises(UserError, match=told):
        SampleLoader(
            Prepared(made.source, ImageDataConfig(), np.zeros(0, np.int64), 0), made.collate, np.arange(9), ImageDataConfig(),
            Cut(8, None, 0, 1), device=CPU, validation_samples=8, preview_samples=4,
        )  # fmt: skip


# ---- processes


def children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def test_closing_ends_the_workers_at_once(folder: Path) -> None:
    before = children()
    stream = loader(folder, workers=2).batches(0)
    next(stream)
    started = children() - before
    assert len(started) == 2
    stream.close()
    assert not children() & started
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_program_ends_though_a_stream_is_open(folder: Path) -> None:
    code = f"""
import torch
from tessera.config import ImageDataConfig
from tessera.data.loader import ImageLoader
from tessera.data.order import Cut
from tessera.data.sources import ImageFolder
loader = ImageLoader(ImageFolder.open({str(folder)!r}), ImageDataConfig(resolution=16, workers=2), Cut(4, None, 0, 1), seed=0,
                     device=torch.device("cpu"), validation_samples=4, preview_samples=4)
stream = loader.batches(0)
next(stream)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 0


def test_workers_leave_signals_to_the_training_process(folder: Path) -> None:
    before = children()
    stream = loader(folder, workers=2).batches(0)
    first = [next(stream), next(stream)]  # one of each worker: both have begun
    for pid in children() - before:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    time.sleep(0.1)
    first += itertools.islice(stream, 10)  # past what was prefetched
    stream.close()
    assert flat(first) == flat(take(loader(folder), 12))


def test_a_large_index_is_small(folder: Path) -> None:
    """Splits and orders of many samples are ready at once, cost eight bytes each, and any step is as near as the first."""

    class Many:
        def __len__(self) -> int:
            return 50_000

        def key(self, index: int) -> str:
            return f"{index:06d}"

        group = key

        def caption(self, index: int) -> str | None:
            return None

        def read(self, index: int) -> Any:
            return np.zeros((16, 16, 3), np.uint8)

    made = loader(Many(), validation_samples=8)
    assert made.train.nbytes + made.held_out.nbytes == 8 * 50_000
    assert len(take(made, 1, first_step=10**9)[0][0].keys) == 8
