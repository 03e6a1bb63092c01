"""Evaluation: how good a trained model is, every number beside the reference rows that give it a meaning.

Enters: pictures as uint8 arrays b h w c, captions, and a model as a few callables (`Subject`). Leaves: a report of plain JSON,
lines for people and a sheet of pictures. Metrics see feature matrices n d only, extractors turn media into features: clips and
meshes need an extractor, not another metric.
"""

from tessera.evals.evaluate import Evaluation, Subject, evaluate, write_evaluation
from tessera.evals.lines import lines
from tessera.evals.material import Material, Side, load_material

__all__ = ["Evaluation", "Material", "Side", "Subject", "evaluate", "lines", "load_material", "write_evaluation"]
