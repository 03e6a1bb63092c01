"""Slots: what captions of a template say in turn. Words that never stand in one caption, and of which nearly every caption has
one, are the values of a slot: left, right, away, towards.

A word that some caption has twice (a black shirt and black trousers) says nothing by itself: it is taken with the word before or
behind it, on the side where fewer different words stand (and black, long hair). Words that always come together (draws, bow) are
one. Captions that follow no template have no slots.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.evals.words import WORD, words_of

LEAST = 5  # captions that have a value: fewer teach a classifier nothing
LEAST_SHARE = 0.005  # of all captions
COVERAGE = 0.95  # of the captions have a value of the slot
OVERLAP = 0.02  # of a value's captions may have another value of the slot; those count nowhere
NEAR = 2  # words apart, on average over captions: of tokens about as near the rarer is taken first
MISTAKES = 0.01  # of a word's captions have it twice without a meaning
SHOWN = 4  # values in a slot's name


@dataclass(frozen=True, slots=True)
class Slot:
    """Values that exclude each other, in alphabetical order."""

    values: tuple[str, ...]
    joined: Mapping[str, int]  # words that are read with a neighbour: -1 the one before, 1 the one behind

    @property
    def name(self) -> str:
        """away/left/right/towards, or the first of many and how many more there are."""
        more = len(self.values) - SHOWN
        return "/".join(self.values[:SHOWN]) + (f"/+{more}" if more > 0 else "")

    def read(self, captions: Sequence[str | None]) -> npt.NDArray[np.int64]:
        """n: which value each caption has; -1 where it has none, or two."""
        place = {value: index for index, value in enumerate(self.values)}
        found = ([place[token] for token in set(tokens_of(caption, self.joined)) if token in place] for caption in captions)
        return np.array([each[0] if len(each) == 1 else -1 for each in found], np.int64)


def tokens_of(caption: str | None, joined: Mapping[str, int]) -> list[str]:
    """Words, those in `joined` with their neighbour."""
    words = words_of(caption)
    padded = ["", *words, ""]
    sides = {-1: lambda i: f"{padded[i]} {words[i]}", 0: lambda i: words[i], 1: lambda i: f"{words[i]} {padded[i + 2]}"}
    return [sides[joined.get(word, 0)](index).strip() for index, word in enumerate(words)]


def join_repeated(texts: Sequence[str]) -> dict[str, int]:
    """Of the words that captions have twice, and not by mistake, on which side fewer different words stand."""
    twice = Counter(word for text in texts for word, count in Counter(words_of(text)).items() if count > 1)
    once = Counter(word for text in texts for word in set(words_of(text)))
    repeated = {word for word, count in twice.items() if count >= MISTAKES * once[word]}
    beside: dict[tuple[str, int], set[str]] = defaultdict(set)
    for text in texts:
        words = words_of(text)
        for index, word in enumerate(words):
            if word in repeated:
                beside[word, -1].add(words[index - 1] if index else "")
                beside[word, 1].add(words[index + 1] if index + 1 < len(words) else "")
    return {word: -1 if len(beside[word, -1]) <= len(beside[word, 1]) else 1 for word in sorted(repeated)}


def find_slots(captions: Sequence[str | None]) -> list[Slot]:
    """Each token is a value of one slot at most. A slot starts from the rarest token that is left and takes those that exclude
    all it has, the nearest in place and the rarest first, so that it is fine: walks, runs, jumps, not walks, runs, faces."""
    texts = [caption for caption in captions if caption is not None and words_of(caption)]
    joined = join_repeated(texts)
    has, tokens, places = _table(texts, joined)
    if not tokens:
        return []
    counts = has.sum(0)
    both = has.T @ has
    apart = both <= OVERLAP * np.minimum(counts[:, None], counts[None])
    left, slots = list(np.lexsort((places, counts))), []
    while left:
        chosen, free = [left.pop(0)], list(left)
        covered = has[:, chosen[0]] > 0
        while covered.mean() < 1 and (free := [t for t in free if apart[t, chosen].all()]):
            best = min(free, key=lambda t: (abs(places[t] - places[chosen[0]]) // NEAR, counts[t], tokens[t]))
            chosen.append(best)
            free.remove(best)
            covered |= has[:, best] > 0
        if len(chosen) > 1 and covered.mean() >= COVERAGE:
            slots.append((float(np.mean(places[chosen])), Slot(tuple(sorted(tokens[t] for t in chosen)), joined)))
            left = [t for t in left if t not in chosen]
    return [slot for _, slot in sorted(slots, key=lambda pair: (pair[0], pair[1].values))]


def _table(texts: Sequence[str], joined: Mapping[str, int]) -> tuple[npt.NDArray[np.float64], list[str], npt.NDArray[np.float64]]:
    """n v: which captions have which token, of tokens that tell captions apart, one of those that always come together; the
    tokens, and their mean places."""
    rows: dict[str, list[int]] = defaultdict(list)
    sums: Counter[str] = Counter()
    for row, text in enumerate(texts):
        for place, token in enumerate(tokens_of(text, joined)):
            if not rows[token] or rows[token][-1] != row:
                rows[token].append(row)
                sums[token] += place
    least = max(LEAST, LEAST_SHARE * len(texts))
    kept: dict[tuple[int, ...], str] = {}
    for token in sorted(rows, key=lambda token: (sums[token] / len(rows[token]), token)):
        if least <= len(rows[token]) <= COVERAGE * len(texts):
            kept.setdefault(tuple(rows[token]), token)
    has = np.zeros((len(texts), len(kept)))
    for column, found in enumerate(kept):
        has[list(found), column] = 1
    return has, list(kept.values()), np.array([sums[token] / len(rows[token]) for token in kept.values()])


def tail_of(caption: str, slot: Slot) -> str:
    """The caption from its value of the slot on; empty where it has none."""
    starts, tokens = [match.start() for match in WORD.finditer(caption)], tokens_of(caption, slot.joined)
    if len(starts) != len(tokens):  # a few letters become two in lower case
        return ""
    return next((caption[start:] for start, token in zip(starts, tokens, strict=True) if token in slot.values), "")
