"""What a run or an export can do with the stages that are trained in it, as one types it: enters its config, leaves a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.contracts import Recipe, Way
from tessera.sampling.places import has_weights, read_config
from tessera.sampling.session import Session

WORDS = {"prompt": '"PROMPT"', "image": '"" --image FILE', "embedding": '"" --image FILE.npy'}


def words_of(way: Way) -> str:
    """What follows `tessera sample MODEL`."""
    return WORDS[way.given] + ("" if way.start is None else f" --set sample.start={way.start}")


def can_be_judged(session: Session) -> bool:
    """By `tessera evaluate`: what a generator draws, or what a tokenizer keeps."""
    return session.draws or "tokenizer" in session.nets


def after_training(run: Path, last: str | None) -> str:
    """Of a run; `last` is the stage that was trained last, None where all come from elsewhere."""
    name, (recipe, config) = shlex.quote(str(run)), read_config(run)
    trained = [train.name for train in recipe.steps(config) if has_weights(run, train)]
    if (way := recipe.way(config, trained)) is None:
        goes_on = f"tessera resume {name}   to go on with the next stage"
        return f"tessera export {name} --out DIR" if last == "tokenizer" else goes_on
    said = f"tessera sample {name} {words_of(way)}"
    if way.given == "prompt":
        return f"{said}   or   tessera evaluate {name}"
    return said if way.lacks is None else f"{said}   or   tessera resume {name} --stage {way.lacks}   to draw from prompts"


def after_export(run: Path, out: Path) -> str:
    """Of an export, by the stages that lie in it."""
    recipe, config = read_config(run)
    return use_of_export(recipe, config, [train.name for train in recipe.steps(config) if (out / train.name).is_dir()], run, out)


def use_of_export(recipe: Recipe, config: Any, stages: Sequence[str], run: Path, out: Path) -> str:
    """Draw; where nothing that draws is in it, look at what its tokenizer keeps, or train on."""
    if way := recipe.way(config, stages):
        return f"tessera sample {shlex.quote(str(out))} {words_of(way)}"
    model = f"tessera.load({json.dumps(str(out))})"
    codes = {
        "picture": f'import tessera; {model}.reconstruct("PICTURE")[0].save("reconstruction.png")',
        "clip": "import tessera; from tessera.media.clip_files import encode_gif; "
        f'open("reconstruction.gif", "wb").write(encode_gif({model}.reconstruct("CLIP")[0]))',
    }
    if "tokenizer" in stages and recipe.medium in codes:
        return f"python -c {shlex.quote(codes[recipe.medium])}"
    return f"tessera resume {shlex.quote(str(run))}"
