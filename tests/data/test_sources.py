"""The index of a folder, splits by hash, and the user's own datasets as sources."""

from __future__ import annotations

import hashlib
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tessera.config import UserError
from tessera.data.sources import ImageFolder, Source, StringTable, as_source, split_indices, split_of


def put(path: Path, colour: tuple[int, int, int] = (10, 20, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), colour).save(path)
    return path


def captions(source: Source) -> dict[str, str | None]:
    return {source.key(index): source.caption(index) for index in range(len(source))}


# ---- strings without objects


@given(st.lists(st.text(st.characters(codec=None))))
@settings(max_examples=60, deadline=None)
def test_string_table_holds_any_strings(strings: list[str]) -> None:
    table = pickle.loads(pickle.dumps(StringTable(strings)))
    assert len(table) == len(strings)
    assert [table[index] for index in range(len(table))] == list(table) == strings
    assert [table[index - len(strings)] for index in range(len(strings))] == strings
    for outside in (len(strings), -len(strings) - 1):
        with pytest.raises(IndexError):
            table[outside]


def test_string_table_takes_numpy_indices_and_no_floats() -> None:
    table = StringTable(["a", "bc"])
    assert table[np.int64(1)] == "bc"  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        table[1.0]  # type: ignore[index]


def test_the_index_is_a_few_objects_however_many_files(tmp_path: Path) -> None:
    for number in range(40):
        put(tmp_path / f"{number}.png").with_suffix(".txt").write_text(f"picture {number}")
    small = len(pickle.dumps(ImageFolder.open(tmp_path)))
    for number in range(40, 80):
        put(tmp_path / f"{number}.png").with_suffix(".txt").write_text(f"picture {number}")
    large = len(pickle.dumps(ImageFolder.open(tmp_path)))
    assert large - small < 40 * 64  # names, captions and offsets, no object per sample


# ---- splits


FIRST_SIX = ["train", "validation", "train", "train", "train", "train"]  # a change here moves users' held-out samples


@dataclass(frozen=True)
class Numbered:
    """A source of the user's own; no inheritance."""

    groups: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.groups)

    def key(self, index: int) -> str:
        return f"{index}"

    def group(self, index: int) -> str:
        return self.groups[index]

    def caption(self, index: int) -> str | None:
        return None

    def read(self, index: int) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)


def test_the_split_of_a_group_is_fixed_for_ever() -> None:
    """By the definition: 8 bytes of BLAKE2b keyed with the seed, little end first, as a fraction of 2^64."""
    for group, seed in [("cats/one", 0), ("cats/one", 1), ("", 0), ("猫", 12)]:
        digest = hashlib.blake2b(group.encode(), digest_size=8, key=str(seed).encode()).digest()
        place = sum(byte * 256**power for power, byte in enumerate(digest)) / 2**64
        assert split_of(group, min(place + 1e-9, 0.999), seed) == "validation"
        assert split_of(group, max(place - 1e-9, 0.0), seed) == "train"
    assert [split_of(f"sample {number}", 0.3) for number in range(6)] == FIRST_SIX


@given(st.lists(st.text(), max_size=30), st.floats(0, 0.99), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_indices_agree_with_groups(groups: list[str], fraction: float, seed: int) -> None:
    train, validation = split_indices(Numbered(tuple(groups)), fraction, seed)
    sides = {**dict.fromkeys(train.tolist(), "train"), **dict.fromkeys(validation.tolist(), "validation")}
    assert len(train) + len(validation) == len(groups)
    assert [sides[index] for index in range(len(groups))] == [split_of(group, fraction, seed) for group in groups]
    assert train.dtype == validation.dtype == np.int64


def test_a_split_depends_on_nothing_but_the_group() -> None:
    groups = [f"g{number % 500}" for number in range(2000)]
    shuffled = random.Random(0).sample(groups, len(groups))
    held = {groups[index] for index in split_indices(Numbered(tuple(groups)), 0.1)[1]}
    assert held == {shuffled[index] for index in split_indices(Numbered(tuple(shuffled)), 0.1)[1]}
    assert held == {groups[index] for index in split_indices(Numbered(tuple(groups[:500])), 0.1)[1]}  # fewer files
    assert held < {groups[index] for index in split_indices(Numbered(tuple(groups)), 0.2)[1]}  # a larger share only adds
    assert 30 <= len(held) <= 70


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fractions_outside_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="validation_fraction"):
        split_of("a", fraction)


def test_nothing_is_held_back_at_zero() -> None:
    assert len(split_indices(Numbered(tuple(map(str, range(1000)))), 0.0)[1]) == 0


# ---- the user's own datasets


@dataclass
class Item:
    key: str
    image: Any
    caption: str | None = None


def test_a_source_is_taken_as_it_is() -> None:
    source = Numbered(("a",))
    assert as_source(source) is source


@pytest.mark.parametrize("as_mapping", [False, True])
def test_datasets_of_arrays_and_pil_images(as_mapping: bool) -> None:
    array = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    items = [
        Item("one", array, "an array"),
        Item("two", Image.fromarray(array), ""),
        Item("three", Image.new("RGBA", (3, 2), (0, 0, 0, 0))),
        Item("four", array[..., :1]),
        Item("five", np.dstack([array, np.full((2, 3), 255, np.uint8)])),
    ]
    source = as_source([vars(item) for item in items] if as_mapping else items, background=(5, 6, 7))
    assert captions(source) == {"one": "an array", "two": None, "three": None, "four": None, "five": None}
    assert source.group(0) == "one"
    assert np.array_equal(source.read(0), array)
    assert np.array_equal(source.read(1), array)
    assert source.read(2)[0, 0].tolist() == [5, 6, 7]
    assert np.array_equal(source.read(3), array[..., :1].repeat(3, -1))
    assert np.array_equal(source.read(4), array)


def test_a_dataset_may_name_groups() -> None:
    picture = np.zeros((2, 2, 3), np.uint8)
    source = as_source([{"key": str(number), "image": picture, "caption": "x", "group": "all"} for number in range(3)])
    assert [source.group(index) for index in range(3)] == ["all"] * 3
    assert [sample.key for sample in source] == ["0", "1", "2"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            Item("a", np.zeros((3, 4, 4), np.float32)),
            r"sample 0 .* ndarray of float32 shaped \(3, 4, 4\); expected a uint8 array",
        ),
        (Item("a", None), "NoneType"),
        ({"image": np.zeros((2, 2, 3), np.uint8)}, "has key None; expected a string"),
        (Item(3, np.zeros((2, 2, 3), np.uint8)), "has key 3"),  # type: ignore[arg-type]
        (Item("a", np.zeros((2, 2, 3), np.uint8), ["x"]), "has caption"),  # type: ignore[arg-type]
    ],
)
def test_wrong_samples_stop_at_the_door(item: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        as_source([item])


def test_keys_of_a_dataset_must_differ() -> None:
    with pytest.raises(UserError, match="several samples with the key 'a'"):
        as_source([Item("a", np.zeros((2, 2, 3), np.uint8))] * 2)
