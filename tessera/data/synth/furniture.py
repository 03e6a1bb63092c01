"""Captioned furniture: a seed enters, a folder of meshes with exact captions leaves.

Chairs, tables, lamps, shelves and beds are made of closed parts (`furniture_meshes`). A caption names every attribute, in one
grammar, so that a program can check a generated mesh against the words that asked for it (`furniture_oracle`). Of each kind one
combination of attributes in eight never appears in `train/`; these make up all of `heldout/`. Lengths vary freely.

Sample i is a function of (seed, split, i) alone. Draws are splitmix64 and vertices need only + - * / and comparisons, so the same
seed gives the same bytes on every machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from tessera.data.synth.furniture_meshes import build_furniture
from tessera.data.synth.splits import SPLITS, Split, hold_out, write_set
from tessera.media.meshes import Mesh
from tessera.randomness import Draws

VERSION = 1  # of the parts and of the draws: equal version and seed mean equal meshes and captions
Words = dict[str, str]  # "kind", and each attribute of that kind

# kind -> attribute -> value -> how a caption says it. ADJECTIVES stand before the noun, the others after it.
ADJECTIVES = ("width", "height", "top", "size")
ATTRIBUTES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "chair": {
        "width": {"narrow": "narrow", "wide": "wide"},
        "legs": {"three": "three legs", "four": "four legs", "pedestal": "a pedestal"},
        "back": {"none": "no back", "low": "a low back", "high": "a high back"},
        "armrests": {"without": "no armrests", "with": "armrests"},
    },
    "table": {
        "height": {"low": "low", "high": "high"},
        "top": {"square": "square", "long": "long", "round": "round"},
        "legs": {"three": "three legs", "four": "four legs", "pedestal": "a pedestal"},
        "shelf": {"without": "no lower shelf", "with": "a lower shelf"},
    },
    "lamp": {
        "height": {"short": "short", "tall": "tall"},
        "base": {"square": "a square base", "round": "a round base", "cross": "a cross base"},
        "shades": {"one": "one {shade} shade", "two": "two {shade} shades"},
        "shade": {"cone": "", "box": "", "drum": ""},  # said by `shades`
    },
    "shelf": {
        "width": {"narrow": "narrow", "wide": "wide"},
        "boards": {"two": "two boards", "three": "three boards", "four": "four boards", "five": "five boards"},
        "panel": {"without": "no back panel", "with": "a back panel"},
        "feet": {"without": "no feet", "with": "feet"},
    },
    "bed": {
        "size": {"single": "single", "double": "double"},
        "legs": {"without": "no legs", "with": "legs"},
        "headboard": {"none": "no headboard", "low": "a low headboard", "high": "a high headboard"},
        "pillows": {"none": "no pillows", "one": "one pillow", "two": "two pillows"},
    },
}


def combinations_of(kind: str) -> list[Words]:
    """Every combination of a kind's attributes."""
    axes = ATTRIBUTES[kind]
    return [{"kind": kind, **dict(zip(axes, values, strict=True))} for values in product(*axes.values())]


def caption(words: Mapping[str, str]) -> str:
    """The words in order: "a narrow chair with three legs, a high back and armrests"."""
    said = {name: values[words[name]].format(**words) for name, values in ATTRIBUTES[words["kind"]].items()}
    noun = " ".join([*(said[name] for name in said if name in ADJECTIVES), words["kind"]])
    *rest, last = [phrase for name, phrase in said.items() if phrase and name not in ADJECTIVES]
    return f"a {noun} with " + " and ".join(filter(None, [", ".join(rest), last]))


@cache
def _all_captions() -> Mapping[str, Words]:
    return {caption(words): words for kind in ATTRIBUTES for words in combinations_of(kind)}


def parse_caption(text: str) -> Words | None:
    """The words that `caption` would say by exactly this text; None where there are none."""
    words = _all_captions().get(text)
    return None if words is None else dict(words)


@dataclass(frozen=True, slots=True)
class Plan:
    """What samples may say in each split."""

    seed: int
    choices: Mapping[str, Mapping[str, Sequence[Words]]]  # split -> kind -> combinations


def plan_furniture(seed: int) -> Plan:
    """Chooses the held-out combinations of each kind by seed, and lists what remains for training."""
    choices: dict[str, dict[str, list[Words]]] = {split: {} for split in SPLITS}
    for index, kind in enumerate(ATTRIBUTES):
        cells = {tuple(words.values()): words for words in combinations_of(kind)}
        held = hold_out([(cell[1:],) for cell in cells], len(cells), Draws(seed, 100, index))
        for cell, words in cells.items():
            choices["heldout" if cell[1:] in held else "train"].setdefault(kind, []).append(words)
    return Plan(seed, choices)


def sample_furniture(plan: Plan, split: Split, index: int) -> tuple[Words, Mesh]:
    """Sample `index` of a split: a function of (seed, split, index)."""
    draws = Draws(plan.seed, SPLITS.index(split), index)
    words = draws.choose(plan.choices[split][draws.choose(list(ATTRIBUTES))])
    return dict(words), build_furniture(words, draws)


def write_furniture(out: Path, n: int, seed: int) -> dict[str, object]:
    """Writes train/ (n meshes), heldout/ (an eighth as many) and synth.json, whose content it returns."""
    plan = plan_furniture(seed)
    heldout = {kind: [caption(words) for words in held] for kind, held in plan.choices["heldout"].items()}
    about = {"kind": "furniture", "version": VERSION, "seed": seed, "n": n, "heldout": heldout}

    def write_sample(path: Path, split: Split, index: int) -> str:
        words, mesh = sample_furniture(plan, split, index)
        path.write_bytes(_to_obj(mesh))
        return caption(words)

    write_set(out, n, about, ".obj", write_sample)
    return about


def _to_obj(mesh: Mesh) -> bytes:
    """An OBJ file, y up: x stays, up is y, the front looks along z."""
    lines = [f"v {x:.6f} {z:.6f} {0.0 - y:.6f}" for x, y, z in mesh.vertices.tolist()]
    lines += [f"f {a + 1} {b + 1} {c + 1}" for a, b, c in mesh.faces.tolist()]
    return ("\n".join(lines) + "\n").encode("ascii")
