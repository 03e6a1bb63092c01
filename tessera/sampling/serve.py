"""A call of the command line from a run's folder to written files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.config import Layer, UserError, parse_sets
from tessera.files import free_folder
from tessera.media.images import inspect_image
from tessera.sampling.clips import asked_frames, counted
from tessera.sampling.export import SUFFIXES, Written, refuse_existing, sample_names, write_samples
from tessera.sampling.request import Request, make_request, read_prompts, read_request
from tessera.sampling.session import Session, load
from tessera.sampling.stored import our_version, place_for_results
from tessera.sampling.uses import can_be_judged
from tessera.sampling.vectors import is_vector
from tessera.text.bytes import ByteTextConfig, num_bytes


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a call left."""

    samples: list[Written]
    folder: Path
    by: str  # which stages drew, in words
    judged: bool  # whether `tessera evaluate` has something to judge


def draw_to_files(
    run: Path, prompts: Sequence[str], *, prompts_file: Path | None = None, request_file: Path | None = None,
    named: Mapping[str, Any], flags: Mapping[str, Any], sets: Sequence[str] = (), out: Path | None = None,
    checkpoint: str | None = None,
) -> Drawn:  # fmt: skip
    """`named` are n, seed, negative and files (image, mask, ...); `flags` are values of the sample section. Later ones win:
    the run's sample section, the request's file, flags, --set sample.KEY=VALUE."""
    session = load(run, checkpoint=checkpoint)
    options = list(type(session.config.sample).model_fields)
    if foreign := [name for name in flags if name not in options]:
        raise UserError(f"--{foreign[0]} does not apply to this model ({session.recipe.name}); it draws by {', '.join(options)}")
    request = read_call(session, prompts, prompts_file, request_file, named, [flag_values(flags), sample_values(sets)])
    folder = out or free_folder(place_for_results(run) / "drawn")
    suffixes = (*SUFFIXES[session.recipe.medium], ".json")
    refuse_existing(folder, [f"{name}{suffix}" for name in sample_names(request) for suffix in suffixes])
    written = write_samples(folder, request, session.serve(request), made_by(session, request))
    by = f"{drawn_by(session, request)}{empty_lines(request, prompts_file)}"
    return Drawn(written, folder, by, can_be_judged(session))


def read_call(
    session: Session, prompts: Sequence[str], prompts_file: Path | None, request_file: Path | None, named: Mapping[str, Any],
    changes: Sequence[Layer],
) -> Request:  # fmt: skip
    """One request from all places that may hold a part of it."""
    asked: dict[str, Any] = {"prompts": [], "changes": ()} if request_file is None else read_request(request_file)
    places = [list(prompts), asked["prompts"], [] if prompts_file is None else read_prompts(prompts_file)]
    if sum(map(bool, places)) > 1:
        raise UserError("prompts come from the command line, from --prompts and from --request; give one of them")
    if asked.get("scenes") and any(places):
        raise UserError(f"{request_file} has scenes, each with its prompt, and more prompts are given; leave these out")
    found: dict[str, Any] = {"prompts": next(filter(None, places), []), "changes": [*asked["changes"], *changes]}
    return make_request(session.config.sample, **{**asked, **named, **found})


def flag_values(flags: Mapping[str, Any]) -> Layer:
    """`--steps 9` -> sample.steps, from `--steps`."""
    return Layer({"sample": dict(flags)} if flags else {}, {f"sample.{name}": f"--{name}" for name in flags})


def sample_values(sets: Sequence[str]) -> Layer:
    """`--set sample.order=critic`; other keys are refused."""
    layer = parse_sets(sets)
    if other := [key for key in layer.values if key != "sample"]:
        raise UserError(f"--set {other[0]}: only values of the sample section can be changed here: sample.KEY")
    return layer


def drawn_by(session: Session, request: Request) -> str:
    """One line for whoever wonders why samples are small, or still poor."""
    trained = ", ".join(f"{name} step {session.steps[name]:,}" for name in drawing(session, request))
    missing = "".join(f", {name} not trained" for name in untrained(session))
    sizes = {
        "picture": lambda: f": pictures are {in_pixels(session)}",
        "clip": lambda: f": clips are {counted(asked_frames(request, session.config.data))} of {in_pixels(session)}",
        "mesh": lambda: "",
    }
    told = f"{fitted_first(session, request)}{cut_short(session, request)}"
    return f"drawn by {trained}{missing}{sizes[session.recipe.medium]()}{told}"


def fitted_first(session: Session, request: Request) -> str:
    """A picture that is to be enlarged, and had another size than what is."""
    if session.recipe.medium != "picture" or request.image is None or is_vector(request.image):
        return ""
    draw: Any = session.draw
    size, facts = draw.start_size(request.options), inspect_image(Path(request.image))[0]
    if size == drawn_size(session):
        return ""
    was = (facts.height, facts.width)
    scale = min(was[0] / size[0], was[1] / size[1])  # of the largest part that has these proportions
    done = ["cropped"] * any(side - scale * kept >= 1 for side, kept in zip(was, size, strict=True))
    done += ["made smaller"] * (scale > 1) + ["made larger"] * (scale < 1)
    told = f"; {request.image} is {sized(was)}, and was {' and '.join(done)} first: what is enlarged is {sized(size)}"
    return told if done else ""


def cut_short(session: Session, request: Request) -> str:
    """Prompts of which only the beginning is read."""
    text = getattr(session.config, "text", None)
    if not isinstance(text, ByteTextConfig):
        return ""
    prompts = [*request.prompts, *(scene.caption for scene in request.scenes), request.negative or ""]
    longer = [prompt for prompt in prompts if num_bytes(prompt) > text.length]
    return f"; only the first {text.length} bytes are read of {longer[0]!r}" if longer else ""


def empty_lines(request: Request, prompts_file: Path | None) -> str:
    """Lines of a file of prompts that say nothing, for they may be there by mistake."""
    empty = [number for number, prompt in enumerate(request.prompts, 1) if not prompt]
    if prompts_file is None or not empty:
        return ""
    told = "is empty, line" if len(empty) == 1 else "are empty, the first one line"
    as_what = "an empty prompt" if len(empty) == 1 else "empty prompts"
    return f"; {prompts_file}: {len(empty):,} of its {len(request.prompts):,} lines {told} {empty[0]:,}: drawn as {as_what}"


def drawn_size(session: Session) -> tuple[int, int]:
    """Height and width of what is drawn."""
    size: tuple[int, int] = session.config.data.at(getattr(session.draw, "resolution", session.resolution)).size
    return size


def in_pixels(session: Session) -> str:
    """The same in words."""
    return sized(drawn_size(session))


def sized(size: tuple[int, int]) -> str:
    """Height and width in words that nobody takes for the other."""
    height, width = size
    return f"{height} px" if height == width else f"{width} px wide and {height} high"


def drawing(session: Session, request: Request) -> Sequence[str]:
    """Names of the stages that take part."""
    enters = session.recipe.enters
    return list(session.steps) if enters is None else enters(session.draw, request.options)


def untrained(session: Session) -> list[str]:
    """Stages of the config that have no weights yet."""
    return [train.name for train in session.recipe.steps(session.config) if train.name not in session.steps]


def made_by(session: Session, request: Request) -> dict[str, Any]:
    """Which weights drew: for whoever asks later why a picture came out otherwise."""
    height, width = (0, 0) if session.recipe.medium == "mesh" else drawn_size(session)
    return {
        "tessera": our_version(),
        "recipe": session.recipe.name,
        "model": session.path.name,
        "device": session.device.type,
        "stages": {name: {"step": session.steps[name], "weights": session.hashes[name]} for name in drawing(session, request)},
        "untrained": untrained(session),
        **({"resolution": height} if height else {}),
        **({"width": width} if width != height else {}),
    }
