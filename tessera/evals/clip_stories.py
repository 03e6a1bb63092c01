"""Identity over scenes: stories of three scenes of one subject, and whether it stays the same in all of them.

Each story keeps the caption of a held-out clip up to the last slot of the captions; from there on its second and third scene go
on as other captions do (walks left; walks away; walks towards us). Where captions have no slots all three scenes have one
caption. Slots that the captions keep are read by the classifier of attributes, features are compared by the extractor. Stories of
moving digits turn back twice, and the oracle reads digit and colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tessera.contracts import Scene
from tessera.data.synth import digits
from tessera.evals.clip_attributes import Classifier, read_all
from tessera.evals.clip_material import ClipSide
from tessera.evals.clip_oracle import ClipOracle
from tessera.evals.distances import Features
from tessera.evals.oracle import wilson
from tessera.evals.slots import Slot, tail_of
from tessera.media.clips import Frames
from tessera.randomness import Draws, mix

NUM_SCENES = 3
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


@dataclass(frozen=True, slots=True)
class Story:
    """Scenes of one subject, and the clip that was told of them."""

    scenes: tuple[Scene, ...]
    frames: Frames | None = None

    @property
    def parts(self) -> list[Frames]:
        """The frames that each scene added."""
        assert self.frames is not None
        ends = np.cumsum([scene.frames for scene in self.scenes])
        return [self.frames[end - scene.frames : end] for scene, end in zip(self.scenes, ends, strict=True)]


def first_of(side: ClipSide, least: int) -> dict[str, int]:
    """Caption -> the first clip that has it and so many frames, in their order. A picture is no scene."""
    found: dict[str, int] = {}
    for index, (clip, caption) in enumerate(zip(side.clips, side.captions, strict=True)):
        if len(clip) >= least:
            found.setdefault(caption or "", index)
    return found


def write_stories(side: ClipSide, num: int, slots: Sequence[Slot], seed: int, least: int = 1) -> list[Story]:
    """Of the first captions that differ, as many as there are of them; scenes are as long as the clip of the caption, which has
    `least` frames or more."""
    captions = [caption or "" for caption in side.captions]
    stories = []
    for caption, index in list(first_of(side, least).items())[:num]:
        ends = [caption, *other_ends(caption, captions, slots, mix(seed, index))]
        stories.append(Story(tuple(Scene(ends[scene % len(ends)], len(side.clips[index])) for scene in range(NUM_SCENES))))
    return stories


def other_ends(caption: str, captions: Sequence[str], slots: Sequence[Slot], seed: int) -> list[str]:
    """The caption with the ends of others, one for each other value of the last slot, in an order that the seed decides."""
    if not slots or not (tail := tail_of(caption, slots[-1])):
        return []
    last, start = slots[-1], caption[: -len(tail)]
    (own,), values = last.read([caption]), last.read(captions)
    found: dict[int, str] = {}
    for other in Draws(seed).shuffled(range(len(captions))):
        if values[other] not in (-1, own):
            found.setdefault(int(values[other]), start + tail_of(captions[other], last))
    return list(found.values())


def write_digit_stories(side: ClipSide, num: int, least: int = 1) -> list[Story]:
    """As `write_stories`; in the second scene all digits move the other way, in the third as in the first."""
    stories: list[Story] = []
    for caption, index in first_of(side, least).items():
        if len(stories) < num and (scene := digits.parse_caption(caption)) is not None:
            movers = tuple(replace(mover, direction=turned_back(mover.direction)) for mover in scene.movers)
            captions = [caption, digits.caption(digits.Scene(movers)), caption]
            stories.append(Story(tuple(Scene(each, len(side.clips[index])) for each in captions)))
    return stories


def turned_back(direction: str) -> str:
    """up left -> down right"""
    return " ".join(OPPOSITE[word] for word in direction.split())


def identity_by_oracle(stories: Sequence[Story], oracle: ClipOracle) -> dict[str, object]:
    """Share of stories in which digit and colour are right in all three scenes (`kept`), beside `apart`: scenes by the captions
    of the next story."""
    table = {}
    for name, shift in (("kept", 0), ("apart", 1)):
        told = [stories[(index + shift) % len(stories)].scenes for index in range(len(stories))]
        verdicts = [
            [oracle.judge(part, scene.caption) for part, scene in zip(story.parts, scenes, strict=True)]
            for story, scenes in zip(stories, told, strict=True)
        ]
        right = {key: np.array([all(scene[key] for scene in each) for each in verdicts]) for key in ("digit", "colour")}
        table[name] = {"joint": float((right["digit"] & right["colour"]).mean())}
        table[name] |= {key: float(found.mean()) for key, found in right.items()}
    whole = round(table["kept"]["joint"] * len(stories))
    return {"kept": table["kept"]["joint"], "interval": list(wilson(whole, len(stories))), "rows": table}


def identity_by_slots(stories: Sequence[Story], classifier: Classifier) -> dict[str, object]:
    """Of the slots whose value the captions of a story keep: share of stories in which all three scenes show one value (`kept`),
    and in which it is the right one (`right`); jointly over the slots, and beside `apart`, one scene each of three stories."""
    asked = np.stack([read_all(classifier.slots, [scene.caption for scene in story.scenes]) for story in stories])  # n 3 s
    shown = np.stack([classifier.guess(story.parts) for story in stories])
    same = ((asked == asked[:, :1]) & (asked >= 0)).all(1)  # n s: kept by the captions
    kept, right = (shown == shown[:, :1]).all(1), (shown == asked).all(1)
    apart = np.stack([np.roll(shown[:, scene], scene, 0) for scene in range(NUM_SCENES)], 1)
    verdicts = {"kept": kept, "right": right, "apart": (apart == apart[:, :1]).all(1)}
    table = {name: _shares(classifier.slots, verdict, same) for name, verdict in verdicts.items()}
    whole = int((kept | ~same).all(1).sum())
    return {"kept": whole / len(stories), "interval": list(wilson(whole, len(stories))), "rows": table}


def _shares(slots: Sequence[Slot], verdict: npt.NDArray[np.bool_], asked: npt.NDArray[np.bool_]) -> dict[str, float]:
    shares = {s.name: float(verdict[asked[:, c], c].mean()) for c, s in enumerate(slots) if asked[:, c].any()}
    return {"joint": float((verdict | ~asked).all(1).mean()), **shares}


def identity_by_features(parts: Sequence[Features]) -> Mapping[str, float]:
    """Three times n d: mean cosine of two scenes of one story, and of two stories; 1 is the same."""
    scenes = [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12) for rows in parts]
    pairs = [(a, b) for a in range(len(scenes)) for b in range(a)]
    within = float(np.mean([(scenes[a] * scenes[b]).sum(1).mean() for a, b in pairs]))
    across = float(np.mean([(scenes[a] * np.roll(scenes[b], 1, 0)).sum(1).mean() for a, b in pairs]))
    return {"within": within, "across": across}
