"""Oracle scores of data that `tessera data synth` made: a program reads each picture, or mesh, and compares it with the words.

Never without its reference rows. `chance`: random training samples. `nearest`: the training sample whose caption is nearest:
that is how far copying gets. `real`: the true samples: what the oracle itself misses. `reconstruction`: those through the
tokenizer, the ceiling of every generator on its tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tessera.data.synth import furniture, shapes, shapes_oracle
from tessera.evals.nets import Pictures
from tessera.evals.words import nearest_captions
from tessera.randomness import Draws

Score: TypeAlias = Callable[[Any, str], Mapping[str, bool]]  # a picture or a mesh, a caption -> right or wrong, `joint` among it


@dataclass(frozen=True, slots=True)
class Tally:
    """How often each attribute was right, of how often it was asked for."""

    right: Mapping[str, int]
    asked: Mapping[str, int]

    @property
    def num(self) -> int:
        """Samples judged."""
        return self.asked.get("joint", 0)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON: the share right of each attribute, n, and the interval of joint."""
        shares: dict[str, object] = {name: self.right.get(name, 0) / count for name, count in self.asked.items()}
        return {**shares, "n": self.num, "interval": list(wilson(self.right.get("joint", 0), self.num))}


def tally(samples: Iterable[Any], captions: Sequence[str], score: Score = shapes_oracle.score) -> Tally:
    """Judges sample i by caption i."""
    right, asked = Counter[str](), Counter[str]()
    for sample, caption in zip(samples, captions, strict=True):
        for name, verdict in score(sample, caption).items():
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
    """Why the oracle of shapes cannot judge these; None if it can."""
    if pictures.shape[3] != 3 or pictures.shape[1] != pictures.shape[2]:
        return f"the oracle reads square RGB pictures; these are {' x '.join(map(str, pictures.shape[1:]))}"
    return _unknown(captions, shapes.parse_caption, "shapes")


def readable_furniture(captions: Sequence[str | None]) -> str | None:
    """Why the oracle of furniture cannot judge by these; None if it can."""
    return _unknown(captions, furniture.parse_caption, "furniture")


def _unknown(captions: Sequence[str | None], parse: Callable[[str], object], kind: str) -> str | None:
    odd = [caption for caption in captions if caption is None or parse(caption) is None]
    return f"{odd[0]!r} is no caption of {kind}" if odd else None


def reference_rows(
    asked: Sequence[str], real: Sequence[Any] | Pictures, train: Sequence[Any] | Pictures,
    train_captions: Sequence[str | None], seed: int, score: Score = shapes_oracle.score,
) -> dict[str, Tally]:  # fmt: skip
    """The rows that need no model: chance, nearest and real."""
    draws = Draws(seed, 7)
    drawn = [draws.below(len(train)) for _ in asked]
    nearest = nearest_captions(asked, train_captions).tolist()
    return {
        "chance": tally([train[index] for index in drawn], asked, score),
        "nearest": tally([train[index] for index in nearest], asked, score),
        "real": tally(real, asked, score),
    }


def told_at_once(section: Mapping[str, Any]) -> str:
    """The first answer of an evaluation, long before its report."""
    if "joint" not in section:
        return f"oracle: {section['skipped']}" if "skipped" in section else "the oracle has judged what needs no samples"
    return f"the oracle finds {section['joint']:.1%} of {section['n']:,} samples right in everything"
