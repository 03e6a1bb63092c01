"""Oracle scores of clips that `tessera data synth digits` made, or that were asked for by such captions.

Never without its reference rows, which show that the oracle looks at time. `real`: the true clips: what the oracle itself misses.
`shuffled`: each by another one's caption. `still`: the first frame, repeated: it may be right in all but direction and speed.
`reversed`: backwards in time: direction alone is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tessera.data.synth import digits
from tessera.evals.clip_quality import still
from tessera.evals.oracle import Tally
from tessera.evals.oracle import tally as tally_all
from tessera.media.clips import Frames
from tessera.randomness import Draws


class ClipOracle(Protocol):
    """Reads a clip and compares it with a caption."""

    def judge(self, clip: Frames, asked: str) -> Mapping[str, bool]:
        """Right or wrong for each attribute, `direction` and `joint` among them."""
        ...


@dataclass(frozen=True, slots=True)
class ClipTally:
    """How often each attribute was right, over all clips and over those whose caption asks for a direction."""

    all: Tally
    directions: Mapping[str, Tally]

    def as_dict(self) -> dict[str, object]:
        """Plain JSON: the share right of each attribute, n, the interval of joint; for each direction its own share and n."""
        each = {
            name: {"direction": part.right["direction"] / part.num, "joint": part.right["joint"] / part.num, "n": part.num}
            for name, part in self.directions.items()
        }
        return {**self.all.as_dict(), "directions": each}


def tally(clips: Iterable[Frames], captions: Sequence[str], oracle: ClipOracle) -> ClipTally:
    """Judges clip i (uint8, t h w 3) by caption i. A caption of two digits counts for the direction of each."""
    verdicts = [oracle.judge(clip, caption) for clip, caption in zip(clips, captions, strict=True)]
    asked = [_directions(caption) for caption in captions]
    parts = {name: [v for v, names in zip(verdicts, asked, strict=True) if name in names] for name in digits.DIRECTIONS}
    return ClipTally(_sum(verdicts), {name: _sum(part) for name, part in parts.items() if part})


def _sum(verdicts: Sequence[Mapping[str, bool]]) -> Tally:
    return tally_all(verdicts, [""] * len(verdicts), lambda verdict, _: verdict)


def _directions(caption: str) -> set[str]:
    scene = digits.parse_caption(caption)
    return set() if scene is None else {mover.direction for mover in scene.movers}


def readable_clips(clips: Sequence[Frames], captions: Sequence[str | None]) -> str | None:
    """Why the oracle of moving digits cannot judge these; None if it can."""
    for clip in clips:
        if clip.ndim != 4 or clip.shape[3] != 3 or clip.shape[1] != clip.shape[2]:
            return f"the oracle reads square RGB clips; one is {' x '.join(map(str, clip.shape))}"
    odd = [caption for caption in captions if caption is None or digits.parse_caption(caption) is None]
    return f"{odd[0]!r} is no caption of moving digits" if odd else None


def reference_rows(clips: Sequence[Frames], captions: Sequence[str], oracle: ClipOracle, seed: int) -> dict[str, ClipTally]:
    """The rows that need no model, of true clips and their captions."""
    others = others_than_own(len(clips), Draws(seed, 8))
    return {
        "real": tally(clips, captions, oracle),
        "shuffled": tally(clips, [captions[other] for other in others], oracle),
        "still": tally(still(clips), captions, oracle),
        "reversed": tally([clip[::-1] for clip in clips], captions, oracle),
    }


def others_than_own(num: int, draws: Draws) -> list[int]:
    """For each of num another one, all of them once: a round in which nobody keeps its own."""
    order = draws.shuffled(range(num))
    other = dict(zip(order, order[1:] + order[:1], strict=True))
    return [other[index] for index in range(num)]
