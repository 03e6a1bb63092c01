"""Slots of captions: found where captions follow a template, in a known template and in real captions."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from tessera.evals.slots import find_slots, join_repeated, tail_of, tokens_of

REAL = os.environ.get("TESSERA_REAL_DATA")
CAPTIONS = [
    f"a {colour} {thing} above a {other} box {doing} {where}"
    for colour, thing, other, (doing, where) in product(
        ("red", "green", "blue"),
        ("ball", "ring"),
        ("red", "green", "blue"),
        product(("rolls", "glides along"), ("left", "right")),
    )
]


def values_of(captions: list[str]) -> list[set[str]]:
    return [set(slot.values) for slot in find_slots(captions)]


def test_words_that_exclude_each_other_are_slots_in_the_order_of_the_template() -> None:
    """`glides` and `along` always come together and are one; colours that come twice are told apart by the `a` before them, which
    comes twice itself and is told apart by the words before it."""
    captions = [caption.replace(" above a ", " above one ") for caption in CAPTIONS]
    assert values_of(captions) == [
        {"a red", "a green", "a blue"}, {"ball", "ring"}, {"one red", "one green", "one blue"}, {"rolls", "glides"},
        {"left", "right"},
    ]  # fmt: skip


def test_what_repeated_words_are_read_with() -> None:
    texts = ["a man with black hair and black shoes", "a man with long hair in long sleeves", "a man and a man with red hair"]
    joined = join_repeated(texts)
    assert joined == {"a": 1, "black": -1, "long": -1, "man": -1}
    assert tokens_of(texts[0], {"black": -1}) == ["a", "man", "with", "with black", "hair", "and", "and black", "shoes"]
    assert tokens_of("long, long hair", {"long": 1}) == ["long long", "long hair", "hair"]
    assert tokens_of(None, {}) == []


def test_values_are_read_and_none_or_two_are_not() -> None:
    slots = find_slots([f"it {doing} {where}" for doing in ("runs", "walks", "jumps") for where in ("left", "right")] * 6)
    doing = slots[0]
    assert doing.values == ("jumps", "runs", "walks")
    assert doing.read(["it runs left", "IT JUMPS", "it sleeps", "it runs and walks", None, ""]).tolist() == [1, 0, -1, -1, -1, -1]
    assert doing.name == "jumps/runs/walks"
    assert tail_of("It Runs left.", doing) == "Runs left."
    assert tail_of("it sleeps", doing) == ""


def test_a_long_slot_has_a_short_name() -> None:
    (slot,) = find_slots([f"word{letter}" for letter in "abcdef"] * 10)
    assert slot.name == "worda/wordb/wordc/wordd/+2"


def test_some_captions_may_break_the_rule() -> None:
    captions = [f"a {colour} ball" for colour in ("red", "green", "blue")] * 100
    assert values_of([*captions, "a red green ball", "nothing", "a red red ball"]) == [{"red", "green", "blue"}]


def test_free_captions_have_no_slots() -> None:
    words = ["sun", "moon", "sea", "wind", "tree", "stone", "river", "cloud", "bird", "fish"]
    free = [" ".join(word for bit, word in enumerate(words) if number >> bit & 1) for number in range(1, 1024)]
    assert find_slots(free) == []
    assert find_slots([]) == []
    assert find_slots([None, "", "one caption"]) == []


@pytest.mark.skipif(REAL is None, reason="TESSERA_REAL_DATA names no folder")
@pytest.mark.parametrize("num", [400, 1500])
def test_slots_of_real_captions(num: int) -> None:
    files = sorted((Path(REAL or "") / "sprites").glob("*.txt"))[:num]
    found = values_of([file.read_text() for file in files])
    colours = ("black", "blue", "green", "purple", "red", "white", "yellow")
    for slot in (
        {"man", "woman"},
        {"with black", "blond", "brown", "grey", "with red"},
        {*(f"a {colour}" for colour in colours), "leather", "plate"},
        {"long sleeved", "short", "armour"},
        {f"and {colour}" for colour in colours},
        {"leggings", "shorts", "skirt", "trousers"},
        {"casts", "draws", "jumps", "runs", "swings", "thrusts", "walks"},
        {"away", "left", "right", "towards"},
    ):
        assert slot in found
    assert len(found) == 9, "hair styles are the ninth"
