"""Evaluation: how good a trained model is, every number beside the reference rows that give it a meaning.

Enters: pictures as uint8 arrays b h w c, clips as lists of t h w c, or meshes, captions, and a model as a few callables
(`Subject`, `ClipSubject`, `MeshSubject`). Leaves: a report of plain JSON, lines for people and a sheet of pictures. Metrics of
pictures and clips see feature matrices n d only, those of sets of meshes matrices of distances.
"""

from tessera.evals.clip_evaluate import ClipSubject, evaluate_clips
from tessera.evals.clip_material import ClipMaterial, ClipSide, load_clips
from tessera.evals.evaluate import Evaluation, Subject, evaluate, write_evaluation
from tessera.evals.lines import lines
from tessera.evals.material import Material, Side, load_material
from tessera.evals.mesh_evaluate import MeshSubject, evaluate_meshes
from tessera.evals.mesh_material import MeshMaterial, MeshSide, load_meshes

__all__ = [
    "ClipMaterial", "ClipSide", "ClipSubject", "Evaluation", "Material", "MeshMaterial", "MeshSide", "MeshSubject", "Side",
    "Subject", "evaluate", "evaluate_clips", "evaluate_meshes", "lines", "load_clips", "load_material", "load_meshes",
    "write_evaluation",
]  # fmt: skip
