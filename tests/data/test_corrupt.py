"""Files that cannot be read: another sample takes the place of one in training, one in validation loses its weight."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.batches import ImageBatch
from tessera.config import ImageDataConfig
from tessera.data.loader import ImageLoader
from tessera.data.order import Cut
from tessera.data.sources import ImageFolder, Source, as_source, split_indices

NUM = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of one colour each, which their captions name."""
    for number in range(NUM):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{number:02d}.png")
        (tmp_path / f"{number:02d}.txt").write_text(f"colour {number}")
    return tmp_path


def loader(source: Source | Path, *, batch_size: int = 6, rank: int = 0, world_size: int = 1, **data: Any) -> ImageLoader:
    config = ImageDataConfig(**{"resolution": 16, "workers": 0, "validation_fraction": 0.0, **data})
    opened = ImageFolder.open(source) if isinstance(source, Path) else source
    cut = Cut(batch_size, None, rank, world_size)
    return ImageLoader(opened, config, cut, seed=0, device=torch.device("cpu"), validation_samples=99, preview_samples=4)


def take(made: ImageLoader, steps: int, first_step: int = 0) -> list[Sequence[ImageBatch]]:
    stream = made.batches(first_step)
    try:
        return list(itertools.islice(stream, steps))
    finally:
        stream.close()


def rows(steps: Sequence[Sequence[ImageBatch]]) -> list[tuple[int, str, str | None, int]]:
    """Position, key, caption and colour of every sample, in order of the stream."""
    found = [
        (int(position), key, caption, int(image[0, 0, 0]))
        for step in steps
        for batch in step
        for position, key, caption, image in zip(batch.positions, batch.keys, batch.captions, batch.images, strict=True)
    ]
    return sorted(found)


def faults(steps: Sequence[Sequence[ImageBatch]]) -> list[str]:
    return [fault for step in steps for batch in step for fault in batch.faults]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "content", [None, b"", b"no picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 40], ids=["gone", "empty", "text", "png"]
)
def test_another_sample_takes_the_place(folder: Path, content: bytes | None, workers: int) -> None:
    intact = rows(take(loader(folder), 4))
    made = loader(folder, workers=workers)
    bad = folder / "07.png"
    bad.unlink() if content is None else bad.write_bytes(content)
    epoch = take(made, 4)
    found = rows(epoch)
    assert [len(batch.keys) for (batch,) in epoch] == [6, 6, 6, 6]
    assert all(bool(batch.valid.all()) for (batch,) in epoch)
    (changed,) = [place for place, (old, new) in enumerate(zip(intact, found, strict=True)) if old != new]
    assert intact[changed][1] == "07"
    position, key, caption, colour = found[changed]
    assert (position, caption, colour) == (intact[changed][0], f"colour {int(key)}", int(key)), "key, caption and picture agree"
    (fault,) = faults(epoch)
    assert fault.startswith(f"{bad}: ")
    assert "\n" not in fault


def test_the_replacement_is_a_function_of_seed_and_position(folder: Path) -> None:
    for number in range(0, NUM, 2):  # half of all
        (folder / f"{number:02d}.png").write_bytes(b"no picture")
    whole = take(loader(folder), 8)
    keys = [row[1] for row in rows(whole)]
    assert all(int(key) % 2 for key in keys), "replacements that are bad too are replaced again"
    assert len(faults(whole)) == NUM, "one a place, however many were tried: twelve files in two epochs"
    shares = [take(loader(folder, rank=rank, world_size=2), 8) for rank in (0, 1)]
    assert sorted(row for share in shares for row in rows(share)) == rows(whole)
    assert rows(take(loader(folder), 3, first_step=5)) == rows(whole[5:])
    drawn = Counter(key for key, first in zip(keys[:NUM], keys[NUM:], strict=True) if key != first)
    assert len(drawn) > NUM // 4, "not always the same one"


def test_replacements_are_training_samples(folder: Path) -> None:
    made = loader(folder, validation_fraction=0.4)
    held_out = {made.source.key(int(index)) for index in made.held_out}
    for index in made.train[::2]:
        (folder / f"{made.source.key(int(index))}.png").write_bytes(b"no picture")
    keys = {row[1] for row in rows(take(made, 8))}
    assert held_out
    assert not keys & held_out


def test_when_nothing_can_be_read_samples_lose_their_weight(folder: Path) -> None:
    made = loader(folder)
    for picture in folder.glob("*.png"):
        picture.unlink()
    ((batch,),) = take(made, 1)
    assert batch.images.shape == (6, 3, 16, 16)
    assert not batch.valid.any()
    assert len(batch.faults) == 6


def test_validation_and_preview_leave_out_what_cannot_be_read(folder: Path) -> None:
    _, held_out = split_indices(ImageFolder.open(folder), 0.4)
    assert len(held_out) > 4
    made = loader(folder, validation_fraction=0.4, batch_size=4)
    before, shown = made.validation(), made.preview()
    bad = shown.keys[1]
    (folder / f"{bad}.png").write_bytes(b"")
    after, blank = made.validation(), made.preview()
    assert [batch.keys for batch in after] == [batch.keys for batch in before]
    for old, new in zip(before, after, strict=True):
        for place, key in enumerate(new.keys):
            assert bool(new.valid[place]) == (bool(old.valid[place]) and key != bad)
            assert key == bad or torch.equal(new.images[place], old.images[place])
    assert {fault.split(":")[0] for batch in after for fault in batch.faults} == {str(folder / f"{bad}.png")}
    assert blank.valid.tolist() == [True, False, True, True]
    assert not blank.images[1].any()


class Fickle:
    """A dataset whose second item is no picture once it is read again."""

    def __init__(self) -> None:
        self.reads = Counter[int]()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        broken = index == 1 and self.reads[index] > 1
        return {"key": str(index), "image": None if broken else np.zeros((16, 16, 3), np.uint8), "caption": ""}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_item_of_the_users_dataset_is_named_in_one_line(workers: int) -> None:
    ((batch,),) = take(loader(as_source(Fickle()), batch_size=3, workers=workers), 1)
    assert len(batch.keys) == 3
    assert "1" not in batch.keys
    (fault,) = batch.faults
    assert "sample 1 of the dataset has an image that is a NoneType" in fault
    assert "Traceback" not in fault
