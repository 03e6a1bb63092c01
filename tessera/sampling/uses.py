"""What a run or an export can do with the stages that are trained in it, as one types it: enters its config, leaves a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.contracts import Recipe
from tessera.recipes.dalle2.config import Dalle2Config
from tessera.sampling.places import has_weights, read_config
from tessera.sampling.session import Session

WORDS = {"prompt": '"PROMPT"', "image": '"" --image FILE', "embedding": '"" --image FILE.npy'}


@dataclass(frozen=True, slots=True)
class Way:
    """How something is drawn."""

    given: Literal["prompt", "image", "embedding"]
    start: str | None = None  # an upsampler, which is named

    @property
    def words(self) -> str:
        """What follows `tessera sample MODEL`."""
        return WORDS[self.given] + ("" if self.start is None else f" --set sample.start={self.start}")


def way_to_draw(config: Any, trained: Collection[str]) -> Way | None:
    """With these stages; None: none of them draws. A decoder without a prior has no way from text to an embedding."""
    if not isinstance(config, Dalle2Config):
        return Way("prompt") if "base" in trained else None
    names, start = list(config.upsamplers), config.sample.start
    upsamplers = [name for name in names if name in trained]
    if "base" not in trained or start != "prior" or upsamplers != names[: len(upsamplers)]:
        return Way("image", start if start in upsamplers else upsamplers[-1]) if upsamplers else None
    if "prior" in trained:
        return Way("prompt")
    return Way("image" if config.embeddings.kind in ("pair", "clip") else "embedding")  # others come from files alone


def can_be_judged(session: Session) -> bool:
    """By `tessera evaluate`: what a generator draws, or what a tokenizer keeps."""
    return session.draws or "tokenizer" in session.nets


def after_training(run: Path, last: str | None) -> str:
    """Of a run; `last` is the stage that was trained last, None where all come from elsewhere."""
    name, (recipe, config) = shlex.quote(str(run)), read_config(run)
    trained = [train.name for train in recipe.steps(config) if has_weights(run, train)]
    if (way := way_to_draw(config, trained)) is None:
        goes_on = f"tessera resume {name}   to go on with the next stage"
        return f"tessera export {name} --out DIR" if last == "tokenizer" else goes_on
    said = f"tessera sample {name} {way.words}"
    if way.given == "prompt":
        return f"{said}   or   tessera evaluate {name}"
    return said if way.start else f"{said}   or   tessera resume {name} --stage prior   to draw from prompts"


def after_export(run: Path, out: Path) -> str:
    """Of an export, by the stages that lie in it."""
    recipe, config = read_config(run)
    return use_of_export(recipe, config, [train.name for train in recipe.steps(config) if (out / train.name).is_dir()], run, out)


def use_of_export(recipe: Recipe, config: Any, stages: Sequence[str], run: Path, out: Path) -> str:
    """Draw; where nothing that draws is in it, look at what its tokenizer keeps, or train on."""
    if way := way_to_draw(config, stages):
        return f"tessera sample {shlex.quote(str(out))} {way.words}"
    model = f"tessera.load({json.dumps(str(out))})"
    codes = {
        "picture": f'import tessera; {model}.reconstruct("PICTURE")[0].save("reconstruction.png")',
        "clip": "import tessera; from tessera.media.clip_files import encode_gif; "
        f'open("reconstruction.gif", "wb").write(encode_gif({model}.reconstruct("CLIP")[0]))',
    }
    if "tokenizer" in stages and recipe.medium in codes:
        return f"python -c {shlex.quote(codes[recipe.medium])}"
    return f"tessera resume {shlex.quote(str(run))}"
