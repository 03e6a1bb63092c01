"""Oracle scores of data that `tessera data synth shapes` made: a program reads each picture and compares it with the words.

Never without its reference rows. `chance`: random training pictures. `nearest`: the training picture whose caption is nearest:
that is how far copying gets. `real`: the true pictures: what the oracle itself misses. `reconstruction`: those through the
tokenizer, the ceiling of every generator on its tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.data.synth.shapes import parse_caption
from tessera.data.synth.shapes_oracle import score
from tessera.evals.nets import Pictures
from tessera.evals.words import nearest_captions
from tessera.randomness import Draws


@dataclass(frozen=True, slots=True)
class Tally:
    """How often each attribute was right, of how often it was asked for."""

    right: Mapping[str, int]
    asked: Mapping[str, int]

    @property
    def num(self) -> int:
        """Pictures judged."""
        return self.asked.get("joint", 0)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON: the share right of each attribute, n, and the interval of joint."""
        shares: dict[str, object] = {name: self.right.get(name, 0) / count for name, count in self.asked.items()}
        return {**shares, "n": self.num, "interval": list(wilson(self.right.get("joint", 0), self.num))}


def tally(pictures: Pictures, captions: Sequence[str]) -> Tally:
    """Judges picture i by caption i."""
    right, asked = Counter[str](), Counter[str]()
    for picture, caption in zip(pictures, captions, strict=True):
        for name, verdict in score(picture, caption).items():
            asked[name] += 1
            right[name] += verdict
    return Tally(dict(right), dict(asked))


def wilson(right: int, num: int, z: float = 1.959963985) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): stays within [0, 1] and says something at 0 and at n of n."""
    if num == 0:
        return 0.0, 1.0
    share = right / num
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    reach = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def readable(pictures: Pictures, captions: Sequence[str | None]) -> str | None:
    """Why the oracle cannot judge these; None if it can."""
    if pictures.shape[3] != 3 or pictures.shape[1] != pictures.shape[2]:
        return f"the oracle reads square RGB pictures; these are {' x '.join(map(str, pictures.shape[1:]))}"
    unknown = next((caption for caption in captions if caption is None or parse_caption(caption) is None), "")
    return None if unknown == "" else f"{unknown!r} is no caption of shapes"


def reference_rows(
    asked: Sequence[str], real: Pictures, train: Pictures, train_captions: Sequence[str | None], seed: int
) -> dict[str, Tally]:
    """The rows that need no model: chance, nearest and real."""
    draws = Draws(seed, 7)
    drawn = np.array([draws.below(len(train)) for _ in asked])
    return {
        "chance": tally(train[drawn], asked),
        "nearest": tally(train[nearest_captions(asked, train_captions)], asked),
        "real": tally(real, asked),
    }
