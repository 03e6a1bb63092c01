"""What was drawn, as files: pictures, clips or meshes, and beside each a JSON that draws it again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tessera.config import UserError
from tessera.contracts import Scene
from tessera.files import in_the_way
from tessera.media.clip_files import encode_gif, encode_mp4, frame_sheet
from tessera.media.clips import AvMissing, Clip
from tessera.media.images import encode_png, to_array
from tessera.media.mesh_files import encode_glb, encode_obj, encode_ply
from tessera.media.meshes import Mesh
from tessera.media.rendering import mesh_views, turntable
from tessera.media.sheets import sheet
from tessera.sampling.request import Request

SHOWN = 17  # frames of a clip on its sheet


@dataclass(frozen=True, slots=True)
class Written:
    """One sample on the disk."""

    path: Path
    prompt: str
    seed: int
    at: float | None = None  # its place on the way to another picture


def write_samples(
    out: Path, request: Request, drawn: Sequence[Any], made_by: Mapping[str, Any]
) -> list[Written]:  # fmt: skip
    """The files of each, and a json."""
    names, written = sample_names(request), []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, (prompt, seed), at, made in zip(names, request.rows(), request.places(), drawn, strict=True):
            files = files_of(made, prompt)
            for suffix, content in files.items():
                (out / f"{name}{suffix}").write_bytes(content)
            path = out / f"{name}{next(iter(files))}"
            facts = recipe_of(request, prompt, seed, out, at) | {"made_by": dict(made_by)}
            path.with_suffix(".json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
            written.append(Written(path, prompt, seed, at))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    return written


SUFFIXES = {"picture": (".png",), "clip": (".gif", ".mp4", ".png"), "mesh": (".glb", ".obj", ".ply", ".png", ".gif")}
"""Of the files that `files_of` makes of one sample, the main one first."""


def files_of(made: Image.Image | Clip | Mesh, prompt: str) -> dict[str, bytes]:
    """A sample as files: a picture as png; a clip as gif, as mp4 where PyAV is there, and its frames as one png; a mesh as glb,
    obj and ply, with pictures of it from four sides and all around."""
    if isinstance(made, Image.Image):
        return {".png": encode_png(to_array(made, channels=len(made.getbands())))}  # type: ignore[arg-type]
    if isinstance(made, Clip):
        return clip_files(made, prompt)
    views = encode_png(sheet([mesh_views(made)], captions=[prompt, "", "", ""]))
    return {".glb": encode_glb(made), ".obj": encode_obj(made), ".ply": encode_ply(made), ".png": views, ".gif": turntable(made)}


def clip_files(clip: Clip, prompt: str) -> dict[str, bytes]:
    """The png has all frames of a short clip, and `SHOWN` of a longer one; one frame is a picture, so it is the png itself."""
    files = {".gif": encode_gif(clip)}
    with contextlib.suppress(AvMissing):
        files[".mp4"] = encode_mp4(clip)
    still = clip.frames[0] if len(clip.frames) == 1 else frame_sheet([clip], [prompt], most=SHOWN)
    return files | {".png": encode_png(still)}


def sample_names(request: Request) -> list[str]:
    """`<i>` for prompt i from 0 on, or `<i>-<k>` where each has several samples; a story is one prompt."""
    num = 1 if request.scenes else len(request.prompts)
    return [str(i) if request.n == 1 else f"{i}-{k}" for i in range(num) for k in range(request.n)]


def recipe_of(request: Request, prompt: str, seed: int, out: Path, at: float | None = None) -> dict[str, Any]:
    """A request for one sample alone, as `tessera sample RUN --request` reads it."""
    facts: dict[str, Any] = {"prompt": prompt, "seed": seed, "n": 1}
    if request.scenes:
        facts = {"scenes": [scene_facts(scene) for scene in request.scenes], "seed": seed, "n": 1}
    if request.negative is not None:
        facts["negative"] = request.negative
    for name in ("image", "mask", "towards", "mesh", "sketch"):
        if isinstance(given := getattr(request, name), (str, Path)):
            facts[name] = os.path.relpath(given, out)
    if at is not None:
        facts["at"] = at
    for name in ("keyframes", "sketch"):
        if isinstance(pairs := getattr(request, name), tuple) and pairs:
            files = [(place, given) for place, given in pairs if isinstance(given, (str, Path))]
            facts[name] = [{"frame": place, "image": os.path.relpath(given, out)} for place, given in files]
    if request.outpaint:
        facts["outpaint"] = dict(request.outpaint)
    return facts | {"sample": request.options.model_dump(mode="json")}


def scene_facts(scene: Scene) -> dict[str, Any]:
    """A scene as a request's file has it."""
    overlap = {} if scene.overlap is None else {"overlap": scene.overlap}
    return {"prompt": scene.caption, "frames": scene.frames, **overlap}


def refuse_existing(out: Path, names: Sequence[str]) -> None:
    """A picture of an earlier call is never replaced; nor is a file that has the folder's name."""
    if blocked := in_the_way(out):
        raise UserError(f"{blocked}; name another --out, a folder that is there or a new one")
    there = [name for name in names if (out / name).exists()]
    if there:
        raise UserError(
            f"{out} already holds {there[0]}{f' and {len(there) - 1} more' if len(there) > 1 else ''}; name another --out"
        )
