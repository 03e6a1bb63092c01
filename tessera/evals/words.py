"""Captions as words: what the extractor predicts, what the retrieval model reads, and which caption is nearest to another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WORD = re.compile(r"\w+")
_ROWS = 1024  # captions compared at once


def words_of(caption: str | None) -> list[str]:
    """Lower-case runs of letters and digits; none of an absent caption."""
    return WORD.findall((caption or "").lower())


def phrases_of(caption: str | None, longest: int = 3) -> list[str]:
    """Words, pairs and triples of neighbouring words: enough to tell "red circle left of blue" from "blue circle left of red"."""
    words = words_of(caption)
    return [" ".join(words[i : i + size]) for size in range(1, longest + 1) for i in range(len(words) - size + 1)]


def telling_words(captions: Sequence[str | None], most: int = 128) -> list[str]:
    """The most frequent words that two or more captions have, and at least one in twenty lacks; by frequency, then alphabet."""
    counts = Counter(word for caption in captions for word in set(words_of(caption)))
    limit = 0.95 * len(captions)
    found = [(-count, word) for word, count in counts.items() if 2 <= count <= limit]
    return [word for _, word in sorted(found)[:most]]


def which_words(captions: Sequence[str | None], words: Sequence[str]) -> npt.NDArray[np.float32]:
    """n v: 1 where a caption has the word."""
    place = {word: column for column, word in enumerate(words)}
    table = np.zeros((len(captions), len(words)), np.float32)
    for row, caption in enumerate(captions):
        for word in words_of(caption):
            if word in place:
                table[row, place[word]] = 1
    return table


def nearest_captions(asked: Sequence[str | None], known: Sequence[str | None]) -> npt.NDArray[np.int64]:
    """For each asked caption the index of the known one that shares most phrases with it (Dice), the first of equals."""
    asked_sets, known_sets = ([set(phrases_of(caption)) for caption in captions] for captions in (asked, known))
    place = {phrase: column for column, phrase in enumerate(sorted(set().union(*asked_sets)))}
    left, best = _table(asked_sets, place), np.zeros(len(asked), np.int64)
    record = np.full(len(asked), -1.0, np.float32)
    for start in range(0, len(known), _ROWS):
        part = known_sets[start : start + _ROWS]
        sizes = np.array([len(phrases) for phrases in part], np.float32)
        total = np.array([len(phrases) for phrases in asked_sets], np.float32)[:, None] + sizes
        dice = 2 * (left @ _table(part, place).T) / np.maximum(total, 1)
        winner = dice.argmax(1)
        value = dice[np.arange(len(asked)), winner]
        best, record = np.where(value > record, start + winner, best), np.maximum(value, record)
    return best


def _table(sets: Sequence[set[str]], place: dict[str, int]) -> npt.NDArray[np.float32]:
    table = np.zeros((len(sets), len(place)), np.float32)
    for row, phrases in enumerate(sets):
        table[row, [place[phrase] for phrase in phrases if phrase in place]] = 1
    return table
