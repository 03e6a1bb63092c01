"""A request: what to draw, from the command line, a file or Python; complete, so that it can lie beside what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import create_model

from tessera.config import Config, Layer, UserError, build, layer_of, nearest, read_yaml

MOST_SAMPLES = 100_000
LARGEST_SEED = 2**62 - 1
KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {  # of a request's file
    "prompt": ((str, list), "text, in quotes if need be"),
    "prompts": ((list, str), "a list of texts: [a, b]"),
    "n": ((int,), "a whole number"),
    "seed": ((int,), "a whole number"),
    "negative": ((str,), "text, in quotes if need be"),
    "image": ((str,), "the name of a file"),
    "mask": ((str,), "the name of a file"),
    "mesh": ((str,), "the name of a file"),
    "outpaint": ((dict,), "sides and shares: {left: 0.25}"),
    "sample": ((dict,), "keys and values: {steps: 12}"),
}
KEYS = (*KINDS, "made_by")
SIDES = ("left", "right", "top", "bottom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Sample k of a prompt has the seed `seed + k`, whatever else is asked: a picture is a function of its own seed."""

    prompts: tuple[str, ...]
    options: Any  # the recipe's sample section, with this call's values
    n: int = 1
    seed: int = 0
    negative: str | None = None
    image: Any = None  # a file, a PIL image or an array
    mask: Any = None  # the same: white is drawn anew
    mesh: Any = None  # a file or a `Mesh`: a part, of which a whole one is made
    outpaint: Mapping[str, float] = field(default_factory=dict)  # side -> share of the new picture that is drawn there

    def rows(self) -> list[tuple[str, int]]:
        """Prompt and seed of every sample, prompt by prompt."""
        return [(prompt, self.seed + k) for prompt in self.prompts for k in range(self.n)]


def make_request(
    options: Config, prompts: Sequence[str], *, n: int = 1, seed: int = 0, negative: str | None = None, image: Any = None,
    mask: Any = None, mesh: Any = None, outpaint: Mapping[str, float] | None = None, changes: Sequence[Layer] = (),
) -> Request:  # fmt: skip
    """Checks what was asked. `changes` are values for this call, all of them below `sample`; later ones win."""
    if not prompts:
        raise UserError('nothing to draw: give a prompt, --prompts FILE or --request FILE with one; an empty prompt is ""')
    if not isinstance(n, int) or not 1 <= n <= MOST_SAMPLES // len(prompts):
        raise UserError(f"n is {n!r}; expected 1 or more samples of each prompt, and at most {MOST_SAMPLES:,} in all")
    if not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"seed is {seed!r}; expected a whole number from 0 to {LARGEST_SEED} (2^62 - 1)")
    if wrong := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise UserError(f"a prompt is {wrong[0]!r}; expected text")
    if image is None and (mask is not None or outpaint):
        raise UserError(
            f"{'outpaint' if outpaint else 'mask'} is given without an image; give one, too: --image FILE, or image in a request"
        )
    if mask is not None and outpaint:
        raise UserError("mask and outpaint both say where something new is drawn; give one of them")
    decided = decide(options, changes)
    if negative is not None and decided.guidance == 1:
        raise UserError("guidance pushes away from a negative prompt, and guidance 1 is none; raise it, or leave the prompt out")
    return Request(
        prompts=tuple(prompts), options=decided, n=n, seed=seed, negative=negative, image=image, mask=mask, mesh=mesh,
        outpaint=checked_sides(outpaint or {}),
    )  # fmt: skip


def decide(options: Config, changes: Sequence[Layer]) -> Any:
    """The sample section of a call. It is built below a root, so that messages name keys as users write them: sample.steps."""
    root: Any = create_model("Call", __base__=Config, sample=(type(options), ...))
    section = Layer.of({"sample": layer_of(options, "").values}, "the run's config")
    call: Any = build(root, [section, *changes])
    return call.sample


def checked_sides(outpaint: Mapping[str, Any]) -> dict[str, float]:
    """Side -> share of the new picture; opposite sides together leave something of the old one."""
    for side, share in outpaint.items():
        if side not in SIDES or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise UserError(f"outpaint has {side}: {share!r}; expected left, right, top or bottom, each a share from 0 to 0.9")
    shares = {side: float(outpaint.get(side, 0)) for side in SIDES}
    if max(shares["left"] + shares["right"], shares["top"] + shares["bottom"]) > 0.9:
        raise UserError(f"outpaint {dict(outpaint)} leaves less than a tenth of the picture; lower its shares")
    return {side: share for side, share in shares.items() if share > 0}


def read_request(path: Path) -> dict[str, Any]:
    """A YAML or JSON file -> arguments of `make_request`. The JSON beside a picture is such a file; its paths are relative to
    where it lies."""
    layer = read_yaml(path)
    values = {key: value for key, value in layer.values.items() if value is not None}
    if unknown := [key for key in values if key not in KEYS]:
        hint = nearest(unknown[0], KEYS)
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise UserError(f"{path}: a request has no {unknown[0]!r}{meant}; it has {', '.join(KEYS[:-1])}")
    for key, (kinds, expected) in KINDS.items():
        if key in values and (not isinstance(values[key], kinds) or isinstance(values[key], bool)):
            raise UserError(f"{layer.origins[key]}: {key} is {values[key]!r}; expected {expected}")
    if "prompt" in values and "prompts" in values:
        raise UserError(f"{path} has both prompt and prompts; keep one of them")
    name = "prompt" if "prompt" in values else "prompts"
    asked = values.get(name, [])
    prompts = [asked] if isinstance(asked, str) else asked
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise UserError(f"{layer.origins[f'{name}.{index}']}: {name} has {prompt!r}; expected text, in quotes if need be")
    changes = [Layer({"sample": values["sample"]}, layer.origins)] if "sample" in values else []
    found: dict[str, Any] = {key: values[key] for key in ("n", "seed", "negative", "outpaint") if key in values}
    found |= {key: str(path.parent / values[key]) for key in ("image", "mask", "mesh") if key in values}
    return {"prompts": prompts, "changes": changes, **found}


def read_prompts(path: Path) -> list[str]:
    """One a line, as they are; an empty line in the middle is an empty prompt."""
    expected = "expected a text file with one prompt a line, in UTF-8"
    if not path.is_file():
        raise UserError(f"--prompts {path} {'is a folder' if path.is_dir() else 'does not exist'}; {expected}")
    try:
        text = path.read_text(encoding="utf8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {path} is no text in UTF-8 (byte {error.start + 1:,}); {expected}") from None
    except OSError as error:
        raise UserError(f"--prompts {path} cannot be read ({error.strerror}); {expected}") from None
    lines = [line.rstrip("\r") for line in text.split("\n")]
    return lines[:-1] if lines and not lines[-1] else lines
