"""A call of the command line from a run's folder to written files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.config import UserError, parse_sets
from tessera.files import free_folder
from tessera.sampling.export import SUFFIXES, Written, refuse_existing, sample_names, write_samples
from tessera.sampling.request import Request, make_request, read_prompts, read_request
from tessera.sampling.session import Session, load
from tessera.sampling.stored import our_version, place_for_results


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a call left."""

    samples: list[Written]
    folder: Path
    by: str  # which stages drew, in words


def draw_to_files(
    run: Path, prompts: Sequence[str], *, prompts_file: Path | None = None, request_file: Path | None = None,
    named: Mapping[str, Any], flags: Mapping[str, Any], sets: Sequence[str] = (), out: Path | None = None,
    checkpoint: str | None = None,
) -> Drawn:  # fmt: skip
    """`named` are n, seed, negative, image and mask; `flags` are values of the sample section. Later ones win: the run's sample
    section, the request's file, flags, --set sample.KEY=VALUE."""
    session = load(run, checkpoint=checkpoint)
    request = read_call(session, prompts, prompts_file, request_file, named, {**flags, **sample_values(sets)})
    folder = out or free_folder(place_for_results(run) / "drawn")
    suffixes = (*SUFFIXES[session.recipe.medium], ".json")
    refuse_existing(folder, [f"{name}{suffix}" for name in sample_names(request) for suffix in suffixes])
    return Drawn(write_samples(folder, request, session.serve(request), made_by(session)), folder, drawn_by(session))


def read_call(
    session: Session, prompts: Sequence[str], prompts_file: Path | None, request_file: Path | None, named: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> Request:  # fmt: skip
    """One request from all places that may hold a part of it."""
    asked: dict[str, Any] = {"prompts": [], "changes": ()} if request_file is None else read_request(request_file)
    places = [list(prompts), asked["prompts"], [] if prompts_file is None else read_prompts(prompts_file)]
    if sum(map(bool, places)) > 1:
        raise UserError("prompts come from the command line, from --prompts and from --request; give one of them")
    found: dict[str, Any] = {"prompts": next(filter(None, places), []), "changes": (*asked["changes"], changes)}
    return make_request(session.config.sample, **{**asked, **named, **found})


def sample_values(sets: Sequence[str]) -> dict[str, Any]:
    """`--set sample.order=critic` -> {"order": "critic"}."""
    values = dict(parse_sets(sets).values)
    found = values.pop("sample", {})
    if values or not isinstance(found, dict):
        raise UserError(
            f"--set {next(iter(values), 'sample')}: only values of the sample section can be changed here: sample.KEY"
        )
    return found


def drawn_by(session: Session) -> str:
    """One line for whoever wonders why pictures are small, or still poor."""
    trained = ", ".join(f"{name} step {step:,}" for name, step in session.steps.items())
    missing = "".join(f", {name} not trained" for name in untrained(session))
    size = f": pictures are {session.resolution} px" if session.recipe.medium == "picture" else ""
    return f"drawn by {trained}{missing}{size}"


def untrained(session: Session) -> list[str]:
    """Stages of the config that have no weights yet."""
    return [train.name for train in session.recipe.steps(session.config) if train.name not in session.steps]


def made_by(session: Session) -> dict[str, Any]:
    """Which weights drew: for whoever asks later why a picture came out otherwise."""
    return {
        "tessera": our_version(),
        "recipe": session.recipe.name,
        "model": session.path.name,
        "device": session.device.type,
        "stages": {name: {"step": session.steps[name], "weights": session.hashes[name]} for name in session.steps},
        "untrained": untrained(session),
        **({"resolution": session.resolution} if session.recipe.medium == "picture" else {}),
    }
