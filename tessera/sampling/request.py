"""A request: what to draw, from the command line, a file or Python; complete, so that it can lie beside what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import create_model

from tessera.config import Config, Layer, UserError, build, layer_of, nearest, read_yaml
from tessera.contracts import Scene
from tessera.files import read_lines

MOST_SAMPLES = 100_000
LARGEST_SEED = 2**62 - 1
Kinds: TypeAlias = Mapping[str, tuple[tuple[type, ...], str]]  # key -> what it may be, and that in words

KINDS: Kinds = {  # of a request's file
    "prompt": ((str, list), "text, in quotes if need be"),
    "prompts": ((list, str), "a list of texts: [a, b]"),
    "n": ((int,), "a whole number"),
    "seed": ((int,), "a whole number"),
    "negative": ((str,), "text, in quotes if need be"),
    "image": ((str,), "the name of a file"),
    "mask": ((str,), "the name of a file"),
    "towards": ((str,), "the name of a file"),
    "at": ((int, float), "a number from 0 to 1"),
    "mesh": ((str,), "the name of a file"),
    "outpaint": ((dict,), "sides and shares: {left: 0.25}"),
    "scenes": ((list,), "a list of scenes: [{prompt: a, frames: 20}, {prompt: b, frames: 20, overlap: 5}]"),
    "keyframes": ((list,), "a list of given frames: [{frame: 0, image: a.png}, {frame: -1, image: b.png}]"),
    "sketch": ((str, list), "the name of a file, or a list of frames: [{frame: 0, image: a.png}]"),
    "sample": ((dict,), "keys and values: {steps: 12}"),
}
KEYS = (*KINDS, "made_by")
SCENE_KINDS: Kinds = {
    "prompt": ((str,), "text, in quotes if need be"),
    "frames": ((int,), "a whole number"),
    "overlap": ((int, type(None)), "a whole number; 0 is a hard cut"),
}
KEYFRAME_KINDS: Kinds = {"frame": ((int,), "a whole number; -1 is the last frame"), "image": ((str,), "the name of a file")}
SIDES = ("left", "right", "top", "bottom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Sample k of a prompt has the seed `seed + k`, whatever else is asked: a picture is a function of its own seed. On the way
    between two pictures all have one seed, and sample k its place."""

    prompts: tuple[str, ...]
    options: Any  # the recipe's sample section, with this call's values
    n: int = 1
    seed: int = 0
    negative: str | None = None
    image: Any = None  # a file, a PIL image or an array; of a clip the first frame, or a clip whose frames are the first ones;
    # an .npy file or a vector is the embedding of a picture
    mask: Any = None  # the same: white is drawn anew
    towards: Any = None  # another image: the samples of a prompt lie on the way to it, at equal distances, both ends included
    at: float | None = None  # with `towards`: all samples lie here, from 0 (image) to 1 (towards)
    mesh: Any = None  # a file or a `Mesh`: a part, of which a whole one is made
    outpaint: Mapping[str, float] = field(default_factory=dict)  # side -> share of the new picture that is drawn there
    scenes: tuple[Scene, ...] = ()  # of a clip of several captions; then there are no prompts
    keyframes: tuple[tuple[int, Any], ...] = ()  # place in the clip, counted from the end if negative, and the picture there
    sketch: Any = None  # a file, a `Clip` or an array: sketches of the clip's first frames; a picture is one of the first alone;
    # or, as `keyframes`, places and pictures: sketches of some of its frames

    def rows(self) -> list[tuple[str, int]]:
        """Prompt and seed of every sample, prompt by prompt. A story's prompt are those of its scenes."""
        prompts = (" / ".join(scene.caption for scene in self.scenes),) if self.scenes else self.prompts
        stays = self.towards is not None and self.at is None
        return [(prompt, self.seed + (0 if stays else k)) for prompt in prompts for k in range(self.n)]

    def places(self) -> list[float | None]:
        """Of every sample how far it is on the way to another picture; None without one, and of one sample, which is no way."""
        if self.towards is None or (self.at is None and self.n == 1):
            return [None] * len(self.rows())
        return [k / (self.n - 1) if self.at is None else self.at for _ in self.prompts for k in range(self.n)]


def pulls(options: Config) -> bool:
    """Whether there is guidance, of one stage at least."""
    sections = [value for _, value in options if isinstance(value, Config)]
    return getattr(options, "guidance", 1) != 1 or any(map(pulls, sections))


def make_request(
    options: Config, prompts: Sequence[str], *, n: int = 1, seed: int = 0, negative: str | None = None, image: Any = None,
    mask: Any = None, towards: Any = None, at: float | None = None, mesh: Any = None,
    outpaint: Mapping[str, float] | None = None, scenes: Sequence[Scene | Mapping[str, Any]] = (),
    keyframes: Mapping[int, Any] | Sequence[tuple[int, Any]] = (), sketch: Any = None, changes: Sequence[Layer] = (),
) -> Request:  # fmt: skip
    """Checks what was asked. `changes` are values for this call, all of them below `sample`; later ones win."""
    if prompts and scenes:
        raise UserError("prompts and scenes both say what to draw; give one of them: each scene has a prompt of its own")
    if not prompts and not scenes:
        raise UserError('nothing to draw: give a prompt, --prompts FILE or --request FILE with one; an empty prompt is ""')
    if not isinstance(n, int) or not 1 <= n <= MOST_SAMPLES // max(1, len(prompts)):
        raise UserError(f"n is {n!r}; expected 1 or more samples of each prompt, and at most {MOST_SAMPLES:,} in all")
    if not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"seed is {seed!r}; expected a whole number from 0 to {LARGEST_SEED} (2^62 - 1)")
    if seed + n - 1 > LARGEST_SEED:
        raise UserError(
            f"seed is {seed} and n is {n:,}, so the last sample would have the seed {seed + n - 1}; expected {LARGEST_SEED} "
            f"(2^62 - 1) or less: lower the seed"
        )
    if wrong := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise UserError(f"a prompt is {wrong[0]!r}; expected text")
    parts = {"mask": mask, "outpaint": outpaint or None, "towards": towards}
    given = [name for name, value in parts.items() if value is not None]
    if image is None and given:
        raise UserError(f"{given[0]} is given without an image; give one, too: --image FILE, or image in a request")
    if mask is not None and outpaint:
        raise UserError("mask and outpaint both say where something new is drawn; give one of them")
    refuse_odd_way(given, at)
    if isinstance(sketch, (Mapping, tuple)):
        refuse_no_frames("sketch", sketch)
    story = checked_scenes(scenes)
    decided = decide(options, [*changes, *lengths_of(story, options, changes)])
    if negative is not None and not pulls(decided):
        raise UserError("guidance pushes away from a negative prompt, and guidance 1 is none; raise it, or leave the prompt out")
    return Request(
        prompts=tuple(prompts), options=decided, n=n, seed=seed, negative=negative, image=image, mask=mask,
        towards=towards, at=at, mesh=mesh, outpaint=checked_sides(outpaint or {}), scenes=story,
        keyframes=checked_places("keyframes", keyframes),
        sketch=checked_places("sketch", sketch) if isinstance(sketch, (Mapping, tuple)) else sketch,
    )  # fmt: skip


def refuse_odd_way(given: Sequence[str], at: Any) -> None:
    """Between two pictures lie whole ones, and each has a place there; `given` are names of what is given beside an image."""
    if "towards" not in given:
        if at is not None:
            raise UserError(f"at is {at!r}, a place between two pictures; give both: image and towards")
        return
    if len(given) > 1:
        raise UserError(f"towards asks for whole pictures between two, and {given[0]} for a part of one; give one of them")
    if at is not None and (not isinstance(at, (int, float)) or isinstance(at, bool) or not 0 <= at <= 1):
        raise UserError(f"at is {at!r}; expected a number from 0 (image) to 1 (towards)")


def decide(options: Config, changes: Sequence[Layer]) -> Any:
    """The sample section of a call. It is built below a root, so that messages name keys as users write them: sample.steps."""
    root: Any = create_model("Call", __base__=Config, sample=(type(options), ...))
    section = Layer.of({"sample": layer_of(options, "").values}, "the run's config")
    call: Any = build(root, [section, *changes])
    return call.sample


def lengths_of(story: Sequence[Scene], options: Config, changes: Sequence[Layer]) -> list[Layer]:
    """A story is as long as its scenes are together; a call that asks for another length contradicts itself."""
    if not story or "frames" not in type(options).model_fields:
        return []
    total = sum(scene.frames for scene in story)
    for layer in changes:
        section = layer.values.get("sample")
        asked = section.get("frames") if isinstance(section, Mapping) else None
        if asked is not None and asked != total:
            place = layer.origins.get("sample.frames", "sample.frames")
            raise UserError(f"the scenes have {total:,} frames together, and {asked!r} are asked ({place}); leave that out")
    return [Layer.of({"sample": {"frames": total}}, "the frames of all scenes")]


def checked_scenes(scenes: Sequence[Scene | Mapping[str, Any]]) -> tuple[Scene, ...]:
    """Scenes as `Scene`s, each with a caption, a length, and no more overlap than there are frames before it."""
    if isinstance(scenes, (str, Mapping, Scene)) or not isinstance(scenes, Iterable):
        raise UserError(f"scenes is {scenes!r}; expected {KINDS['scenes'][1]}")
    found, before, cut = [], 0, False
    for number, scene in enumerate(scenes, 1):
        made = scene if isinstance(scene, Scene) else _scene_of(scene, number)
        for name, value, least in (("frames", made.frames, 1), ("overlap", made.overlap or 0, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"scene {number} has {name} {value!r}; expected a whole number of {least} or more")
        if not isinstance(made.caption, str):
            raise UserError(f"scene {number} has the prompt {made.caption!r}; expected text")
        if (made.overlap or 0) > before:
            known = f"{before:,} frames come" if before else "nothing comes"
            raise UserError(
                f"scene {number} overlaps {made.overlap:,} frames, and {known} before it{' since a cut' * cut}; lower its overlap"
            )
        found.append(made)
        cut = cut or (number > 1 and made.overlap == 0)
        before = made.frames + (0 if made.overlap == 0 else before)
    return tuple(found)


def _scene_of(scene: Any, number: int) -> Scene:
    if not isinstance(scene, Mapping):
        raise UserError(f"scene {number} is {scene!r}; expected a prompt and its frames: {{prompt: a, frames: 20}}")
    if missing := [key for key in ("prompt", "frames") if scene.get(key) is None]:
        raise UserError(f"scene {number} has no {missing[0]}; expected a prompt and its frames: {{prompt: a, frames: 20}}")
    if unknown := [key for key in scene if key not in SCENE_KINDS]:
        raise UserError(f"scene {number} has {unknown[0]!r}; expected {', '.join(SCENE_KINDS)}")
    return Scene(scene["prompt"], scene["frames"], scene.get("overlap"))


def checked_places(key: str, given: Mapping[int, Any] | Sequence[tuple[int, Any]]) -> tuple[tuple[int, Any], ...]:
    """Places and pictures; whether a place is in the clip is known once its length is."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (list, tuple)) or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UserError(f"{key} is a {type(given).__name__}; expected pictures by their places: {{0: FIRST, -1: LAST}}")
    if wrong := [place for place, _ in pairs if not isinstance(place, int) or isinstance(place, bool)]:
        raise UserError(f"{key} has the place {wrong[0]!r}; expected whole numbers: {{0: FIRST, -1: LAST}}")
    return tuple(pairs)


def refuse_no_frames(key: str, given: Sized, where: str = "") -> None:
    """Who gives an empty list of frames does not expect a clip that is drawn without any."""
    if not len(given):
        raise UserError(f"{where}{key} has no frames; give one or more, each with its place, or leave {key} out")


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
        if unknown[0] in ("frames", "steps", "guidance"):
            meant = f"; write it below sample: {{{unknown[0]}: {values[unknown[0]]}}}"
        raise UserError(f"{path}: a request has no {unknown[0]!r}{meant}; it has {', '.join(KEYS[:-1])}")
    refuse_other_kinds(values, KINDS, layer.origins, "")
    if "prompt" in values and "prompts" in values:
        raise UserError(f"{path} has both prompt and prompts; keep one of them")
    name = "prompt" if "prompt" in values else "prompts"
    asked = values.get(name, [])
    prompts = [asked] if isinstance(asked, str) else asked
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise UserError(f"{layer.origins[f'{name}.{index}']}: {name} has {prompt!r}; expected text, in quotes if need be")
    lists = {key: values[key] for key in ("scenes", "keyframes", "sketch") if isinstance(values.get(key), list)}
    for key, items in lists.items():
        if key != "scenes":
            refuse_no_frames(key, items, f"{layer.origins[key]}: ")
        elif not items:
            raise UserError(f"{layer.origins[key]}: scenes is empty; expected {KINDS['scenes'][1]}; or leave scenes out")
        for index, item in enumerate(items):
            refuse_other_parts(item, SCENE_KINDS if key == "scenes" else KEYFRAME_KINDS, layer.origins, f"{key}.{index}")
    changes = [Layer({"sample": values["sample"]}, layer.origins)] if "sample" in values else []
    found: dict[str, Any] = {key: values[key] for key in ("n", "seed", "negative", "at", "outpaint", "scenes") if key in values}
    files = [key for key in ("image", "mask", "towards", "mesh", "sketch") if key in values and key not in lists]
    found |= {key: str(path.parent / values[key]) for key in files}
    for key in ("keyframes", "sketch"):
        if key in lists:
            found[key] = tuple((item["frame"], str(path.parent / item["image"])) for item in lists[key])
    return {"prompts": prompts, "changes": changes, **found}


def refuse_other_kinds(values: Mapping[str, Any], kinds: Kinds, origins: Mapping[str, str], above: str) -> None:
    """A value of another type is told with its file and line; YAML's true is no number."""
    for key, (types, expected) in kinds.items():
        if key in values and (not isinstance(values[key], types) or isinstance(values[key], bool)):
            raise UserError(f"{origins[f'{above}{key}']}: {above}{key} is {values[key]!r}; expected {expected}")


def refuse_other_parts(item: Any, kinds: Kinds, origins: Mapping[str, str], place: str) -> None:
    """One entry of a list of scenes or frames: keys and values, those that are known and all that must be there."""
    if not isinstance(item, dict):
        raise UserError(f"{origins[place]}: {place} is {item!r}; expected {', '.join(kinds)}: {{{next(iter(kinds))}: ...}}")
    if unknown := [key for key in item if key not in kinds]:
        hint = nearest(unknown[0], kinds)
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise UserError(f"{origins[place]}: {place} has no {unknown[0]!r}{meant}; it has {', '.join(kinds)}")
    if missing := [key for key, (types, _) in kinds.items() if key not in item and type(None) not in types]:
        raise UserError(f"{origins[place]}: {place} has no {missing[0]}; expected {kinds[missing[0]][1]}")
    refuse_other_kinds(item, kinds, origins, f"{place}.")


def read_prompts(path: Path) -> list[str]:
    """One a line, as they are; an empty line is an empty prompt, but for those at the end, which are none."""
    expected = "expected a text file with one prompt a line, in UTF-8"
    if not path.is_file():
        raise UserError(f"--prompts {path} {'is a folder' if path.is_dir() else 'does not exist'}; {expected}")
    try:
        prompts = [line if line.strip() else "" for line in read_lines(path)]
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {path} is no text in UTF-8 (byte {error.start + 1:,}); {expected}") from None
    except OSError as error:
        raise UserError(f"--prompts {path} cannot be read ({error.strerror}); {expected}") from None
    while prompts and not prompts[-1]:
        prompts.pop()
    if not prompts:
        raise UserError(f'--prompts {path} holds no prompt; {expected}; to draw without one, give "" in its place')
    return prompts
