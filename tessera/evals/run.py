"""A run or an export under evaluation: its session as a `Subject`, its data as the material."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera.config import EngineConfig, EvaluateConfig, Layer, UserError, build, layer_of, parse_sets
from tessera.engine.dist import World, join, leave
from tessera.evals.clip_run import judge_clips
from tessera.evals.distances import Features
from tessera.evals.evaluate import Evaluation, Say, Subject, dealt, evaluate, write_evaluation
from tessera.evals.features import Extractor, inception_extractor
from tessera.evals.health import EMBEDDINGS
from tessera.evals.material import Material, load_material
from tessera.evals.mesh_run import judge_meshes
from tessera.evals.nets import Pictures
from tessera.files import digest, free_folder
from tessera.nn.lpips import load_lpips
from tessera.recipes.dalle2.config import Dalle2SampleConfig
from tessera.recipes.dalle2.drawing import Painter
from tessera.sampling.request import make_request
from tessera.sampling.session import Session, load
from tessera.sampling.stored import place_for_results
from tessera.sampling.uses import can_be_judged


def evaluate_run(
    run: Path | str, *, n: int | None = None, sets: Sequence[str] = (), checkpoint: str | None = None, data: Any = None,
    device: str = "auto", say: Say = lambda line: None,
) -> tuple[Evaluation, Path]:  # fmt: skip
    """Judges a trained model by its held-out data; also the folder that was written: evaluation-NNN in the run, for an export
    in the current folder. Under torchrun the ranks share the sampling."""
    ranks = join(EngineConfig()) if "WORLD_SIZE" in os.environ else None
    session = load(run, checkpoint=checkpoint, device=device if ranks is None else ranks.device)
    changes = dict(parse_sets(sets).values)
    if unknown := set(changes) - {"evaluate", "sample", "data"}:
        raise UserError(f"--set {min(unknown)}: here only values of evaluate, sample and data can be set")
    root = build(type(session.config), [layer_of(session.config, "the run"), Layer.of(changes, "--set")])
    config = root.evaluate if n is None else root.evaluate.model_copy(update={"n": n})
    world = ranks or World(0, 1, session.device)
    things, judge = {
        "picture": ("pictures", judge_pictures), "clip": ("clips", judge_clips), "mesh": ("meshes", judge_meshes)
    }[session.recipe.medium]  # fmt: skip
    say(f"reading up to {config.train_samples:,} training and {2 * config.n:,} held-out {things}")
    evaluation = judge(session, root.model_copy(update={"evaluate": config}), data, world, say)
    folder = free_folder(place_for_results(Path(run)), "evaluation-")
    if world.main:
        write_evaluation(evaluation, folder)
    leave()
    return evaluation, folder


def judge_pictures(session: Session, root: Any, data: Any, world: World, say: Say) -> Evaluation:
    """By pictures at the size that the model draws; `root` is the run's config with what the user set."""
    if not can_be_judged(session):
        raise UserError(f"nothing that can be judged is trained yet (trained: {', '.join(session.nets)}); tessera resume goes on")
    given = given_extractor(root.evaluate, session.device)
    judge = None if given is None else shared(given, world)
    lpips = None if root.evaluate.lpips is None else load_lpips(root.evaluate.lpips).to(session.device)
    material = material_of(session, root.data, root.evaluate, data)
    subject = subject_of(session, from_captions(root.sample, session.config.sample), material)
    return evaluate(subject, material, root.evaluate, world=world, extractor=judge, lpips=lpips, say=say)


def material_of(session: Session, data: Any, config: EvaluateConfig, source: Any) -> Material:
    """Held-out and training pictures at the size that the model draws."""
    sized = data.at(session.resolution)
    return load_material(sized, most_train=config.train_samples, most_held_out=2 * config.n, seed=config.seed, source=source)


def from_captions(options: Any, usual: Any) -> Any:
    """A cascade is judged from its first stage on, wherever calls of the run start."""
    if not isinstance(options, Dalle2SampleConfig):
        return options
    if options.start not in ("prior", usual.start):
        raise UserError(f"sample.start={options.start}: what is judged is drawn from captions; leave it out")
    return options.model_copy(update={"start": "prior"})


def subject_of(session: Session, options: Any, material: Material) -> Subject:
    """What of a session can be judged: a tokenizer alone, or all of it."""
    about = {"model": session.path.name, "stages": dict(session.steps), "sample": options.model_dump(mode="json")}
    if not session.draws:
        return Subject(reconstruct=lambda pictures, captions, seed: session.through_tokens(pictures), about=about)

    def sample(captions: Sequence[str], seed: int) -> Pictures:
        request = make_request(options, captions, seed=seed)
        rows = [(caption, seed + index) for index, caption in enumerate(captions)]  # noise of its own for each
        return np.stack([np.asarray(made).reshape(*made.size[::-1], -1) for made in session.draw_rows(rows, request)])

    def held_out_loss() -> Mapping[str, float]:
        return session.draw.loss(material.held_out.pictures, material.held_out.captions)

    if isinstance(session.draw, Painter):  # its pictures are drawn of their own embeddings, which leaves the prior out
        draw = session.draw
        redrawn = partial(draw.redrawn, options=options) if draw.sphere.known else None
        asked = sample if "prior" in session.nets else None
        return Subject(sample=asked, reconstruct=redrawn, parts=EMBEDDINGS, held_out_loss=held_out_loss, about=about)
    return Subject(
        sample=sample, reconstruct=lambda pictures, captions, seed: session.through_tokens(pictures),
        held_out_loss=held_out_loss, about=about,
    )  # fmt: skip


def shared(extractor: Extractor, world: World) -> Extractor:
    """Ranks look at some pictures each, and all know what was seen. Fitted nets are not shared so: on GPUs ranks may have fitted
    them to other last bits."""

    def dealt_out(look: Callable[[Any], Features]) -> Callable[[Any], Features]:
        return lambda pictures: dealt(len(pictures), world, lambda part, _: look(pictures[part]))

    classify = None if extractor.classify is None else dealt_out(extractor.classify)
    return replace(extractor, extract=dealt_out(extractor.extract), classify=classify)


def given_extractor(config: EvaluateConfig, device: torch.device) -> Extractor | None:
    """Inception, where the user names its file. TorchScript is a program: it is run because, and only if, it is named."""
    if config.inception is None:
        return None
    path = Path(config.inception)
    if not path.is_file():
        raise UserError(f"evaluate.inception: {path} is no file; expected the TorchScript file of Inception, or null")
    try:
        module = torch.jit.load(str(path), map_location=device)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"evaluate.inception: {path} cannot be read as TorchScript: {str(error).splitlines()[0]}") from None
    return inception_extractor(module, digest(path))
