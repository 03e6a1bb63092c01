"""A run or an export of a recipe of meshes under evaluation: its session as a `MeshSubject`, its data as the material."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.data.canonical import quantise, standardise
from tessera.data.mesh_sources import as_mesh_source
from tessera.engine.dist import World
from tessera.evals.evaluate import Evaluation, Say
from tessera.evals.health import ADVICE
from tessera.evals.mesh_evaluate import MeshSubject, evaluate_meshes
from tessera.evals.mesh_material import MeshMaterial, load_meshes
from tessera.media.meshes import Mesh
from tessera.recipes.meshgpt.drawing import through_tokens
from tessera.sampling.request import make_request
from tessera.sampling.session import Session


def judge_meshes(session: Session, root: Any, data: Any, world: World, say: Say) -> Evaluation:
    """By meshes as training sees them; `root` is the run's config with what the user set."""
    config, source = root.evaluate, None if data is None else as_mesh_source(data)
    material = load_meshes(
        root.data, most_train=config.train_samples, most_held_out=2 * config.n, seed=config.seed, source=source,
        caches=session.path / "cache",
    )  # fmt: skip
    return evaluate_meshes(subject_of(session, root.sample, material), material, config, world=world, say=say)


def subject_of(session: Session, options: Any, material: MeshMaterial) -> MeshSubject:
    """What of a session can be judged: a tokenizer alone, or all of it."""
    about = {"model": session.path.name, "stages": dict(session.steps), "sample": options.model_dump(mode="json")}
    advice = ADVICE["tokenizer"] if "tokenizer" in session.nets else "raise data.bins"  # exact coordinates are not trained

    def reconstruct(meshes: Sequence[Mesh]) -> Sequence[Mesh]:
        return through_tokens(session.config, session.nets.get("tokenizer", {}), meshes, session.device)

    if not session.draws:
        return MeshSubject(reconstruct=reconstruct, about=about, tokenizer_advice=advice)

    def sample(captions: Sequence[str], seed: int) -> Sequence[Mesh]:
        request = make_request(options, captions, seed=seed)
        return session.draw_rows([(caption, seed + index) for index, caption in enumerate(captions)], request)

    def held_out_loss() -> Mapping[str, float]:
        meshes, config = material.held_out.meshes, session.config
        numbers = session.draw.loss(meshes, material.held_out.captions)
        if not config.quads:
            return in_faces(numbers)
        return in_quads(numbers, float(np.mean([len(quantise(standardise(mesh)[0], config.data.bins)) for mesh in meshes])))

    return MeshSubject(sample=sample, reconstruct=reconstruct, held_out_loss=held_out_loss, about=about, tokenizer_advice=advice)


def in_faces(numbers: Mapping[str, float]) -> dict[str, float]:
    """A generator of sequences counts groups and samples; here these are faces and meshes."""
    return _renamed(numbers, "face")


def in_quads(numbers: Mapping[str, float], triangles: float) -> dict[str, float]:
    """Of a generator whose groups are quads, which are one triangle or two: `bits_per_face` is by triangle all the same, from
    the mean number of triangles a mesh, so that tokenizers compare."""
    return _renamed(numbers, "quad") | {"bits_per_face": numbers["bits_per_sample"] / triangles}


def _renamed(numbers: Mapping[str, float], group: str) -> dict[str, float]:
    return {name.replace("group", group).replace("sample", "mesh"): value for name, value in numbers.items()}
