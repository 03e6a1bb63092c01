"""Puts the measures of meshes together: a model as callables and the material enter, one report and one sheet of pictures leave.

As for pictures (`evaluate`): the first n of the held-out side are what the model is asked for, and sets are compared with others,
from its end. Sets and copies are compared in the bins of the tokenizer and in one box: what bins lose, and where in its box a
model that learned from moved meshes draws, is not the generator's fault. A reconstruction is compared with its original as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tessera.config import MeshEvaluateConfig
from tessera.data.canonical import CleanedMesh, normalise, quantise, to_mesh
from tessera.data.synth import furniture_oracle
from tessera.engine.dist import World
from tessera.evals import oracle
from tessera.evals.copies import few_note
from tessera.evals.distances import MIN_SAMPLES
from tessera.evals.evaluate import SHEET_COLUMNS, Evaluation, Report, Say, dealt_parts, loss_report
from tessera.evals.health import ADVICE, Health, judge_accuracy, judge_apart
from tessera.evals.mesh_copies import COARSE_POINTS, Corners, find_equals, find_shape_copies
from tessera.evals.mesh_health import check_health, summarise_health
from tessera.evals.mesh_material import MeshMaterial, MeshSide
from tessera.evals.mesh_points import NUM_POINTS, Clouds, CloudSet, compare, has_surface, sample_points, sample_set
from tessera.evals.mesh_sets import draw, set_rows, size_note
from tessera.evals.nets import Pictures
from tessera.media.meshes import Mesh
from tessera.media.rendering import render
from tessera.media.sheets import sheet
from tessera.randomness import mix

LEAST_POINTS = 256  # of a shape, where the number is ours to choose
CPU_POINTS = 2**14  # shapes of a side times points of each: 14 seconds for the sets on one core; 4 minutes at n=256, 5 h by 2,048
CPU_PAIRS = 2**16  # above so many pairs the first search for copies compares FEW_POINTS without a GPU
FEW_POINTS = 64
PICTURE = 128  # pixels of a side, on the sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSubject:
    """A model under test. What it cannot do is None, and the rows that need it are left out."""

    sample: Callable[[Sequence[str], int], Sequence[Mesh]] | None = None  # captions, seed; "" asks for anything
    reconstruct: Callable[[Sequence[Mesh]], Sequence[Mesh]] | None = None  # standard meshes -> meshes in the same box
    held_out_loss: Callable[[], Mapping[str, float]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # goes into the report: stages, steps, sampling options
    tokenizer_advice: str = ADVICE["tokenizer"]  # what to do where reconstructions lose most


@dataclass(frozen=True, slots=True)
class MeshRows:
    """Meshes for the same captions: real ones, and what the model makes."""

    asked: MeshSide
    made: Mapping[str, Sequence[Mesh]]  # reconstruction, samples: what there is of them

    @property
    def by_name(self) -> dict[str, Sequence[Mesh]]:
        """Real meshes under `real`, and what was made."""
        return {"real": self.asked.meshes, **self.made}


@dataclass(frozen=True, slots=True)
class BinnedSet(CloudSet):
    """Meshes as sets and copies compare them: faces in bins, and clouds of these."""

    corners: Sequence[Corners]  # of all meshes


@dataclass(frozen=True, slots=True)
class Measuring:
    """How shapes become points, and where these are compared."""

    points: int
    bins: int
    seed: int
    device: torch.device

    def clouds(self, meshes: Sequence[Mesh]) -> BinnedSet:
        """In bins, so that a copy is at distance 0, then in one box; shapes without a surface are left out."""
        corners = [quantise(mesh, self.bins) for mesh in meshes]
        coarse = (to_mesh(own, self.bins) for own in corners)
        found = sample_set([normalise(mesh) if len(mesh.faces) else mesh for mesh in coarse], self.points, self.seed)
        return BinnedSet(found.points, found.kept, found.num_empty, corners)


def evaluate_meshes(
    subject: MeshSubject, material: MeshMaterial, config: MeshEvaluateConfig, *, world: World | None = None,
    say: Say = lambda line: None,
) -> Evaluation:  # fmt: skip
    """Measures everything that the material allows, and says what it is at. Ranks share the sampling; each then computes the same
    report."""
    world = world or World(0, 1, torch.device("cpu"))
    asked = material.held_out[: config.n]
    rows = MeshRows(asked, make_rows(subject, asked, config.seed, world, say))
    measuring = Measuring(pick_points(config, len(asked), world.device), material.bins, config.seed, world.device)
    clouds = {name: measuring.clouds(meshes) for name, meshes in rows.by_name.items()}
    report: Report = {"n": len(asked), "seed": config.seed, "held_out": material.origin, "subject": dict(subject.about)}
    report |= {"points": measuring.points, "bins": material.bins}
    report["oracle"] = oracle_report(material, rows, config.seed)
    say(oracle.told_at_once(report["oracle"]))
    report["reconstruction"] = reconstruction_report(rows, clouds, measuring)
    report["shapes"] = shapes_report(rows)
    nearest: dict[int, int] = {}
    few = f"{len(asked)} held-out and {len(material.train)} training shapes: too few; {MIN_SAMPLES} or more are needed"
    if len(asked) < MIN_SAMPLES or len(material.train) < MIN_SAMPLES:
        report |= {name: {"skipped": few} for name in ("sets", "copies")}
    else:
        say(f"sets, and copies among {len(material.train):,} training meshes, by {measuring.points:,} points each")
        train = measuring.clouds(material.train.meshes)
        report["sets"] = sets_report(material, clouds, train, measuring)
        report["copies"], nearest = copies_report(material, rows, clouds, train, measuring)
    say("held-out loss, and the report")
    report["loss"] = loss_report(subject.held_out_loss, len(asked))
    report["health"] = health_of(report, {**ADVICE, "tokenizer": subject.tokenizer_advice}).as_dict()
    report["notes"] = notes_on(material, config, rows, measuring)
    return Evaluation(report, make_sheet(material, rows, nearest), None)


def pick_points(config: MeshEvaluateConfig, num: int, device: torch.device) -> int:
    """What the config says; else as many as others take, and fewer where comparing so many shapes would take minutes."""
    if config.points is not None:
        return config.points
    return NUM_POINTS if device.type != "cpu" else min(NUM_POINTS, max(LEAST_POINTS, CPU_POINTS // max(num, 1)))


def make_rows(subject: MeshSubject, asked: MeshSide, seed: int, world: World, say: Say) -> dict[str, Sequence[Mesh]]:
    """What the model makes of the asked captions and meshes, in chunks dealt out to the ranks."""
    made: dict[str, list[Sequence[Mesh]]] = {}
    if not len(asked):
        return {}
    if subject.reconstruct is not None:
        say(f"reconstructing {len(asked):,} held-out meshes")
        reconstruct = subject.reconstruct
        made["reconstruction"] = dealt_parts(len(asked), world, lambda part, _: reconstruct(asked.meshes[part]))
    if subject.sample is not None:
        say(f"drawing {len(asked):,} meshes from their captions")
        sample, captions = subject.sample, [caption or "" for caption in asked.captions]
        made["samples"] = dealt_parts(len(asked), world, lambda part, index: sample(captions[part], mix(seed, index) >> 33))
    found = {name: [mesh for part in parts for mesh in part] for name, parts in made.items()}
    for name, meshes in found.items():
        if len(meshes) != len(asked):
            raise ValueError(f"{name} are {len(meshes)} meshes for {len(asked)}; expected one each")
    return dict(found)


def notes_on(material: MeshMaterial, config: MeshEvaluateConfig, rows: MeshRows, measuring: Measuring) -> list[str]:
    """What a reader of every number must know."""
    notes = []
    if len(rows.asked) < config.n:
        notes.append(f"asked for n={config.n}, held out are {len(material.held_out)}; n={len(rows.asked)} is used")
    if len(material.train) + material.train.num_refused < material.num_train:
        notes.append(f"{len(material.train):,} of {material.num_train:,} training meshes are used (evaluate.train_samples)")
    for name, side in (("training", material.train), ("held-out", material.held_out)):
        if side.num_refused:
            notes.append(
                f"{side.num_refused:,} {name} meshes are left out, because training rejects them: see `tessera data check`, with "
                "the data options of the run (--set data.max_faces=...)"
            )
    if measuring.points < NUM_POINTS:
        notes.append(
            f"shapes are compared by {measuring.points:,} points each; figures of others take {NUM_POINTS:,} (evaluate.points)"
        )
    missing = {"samples": "no generator is trained", "reconstruction": "there is no tokenizer"}
    return notes + [f"no {name}: {reason}" for name, reason in missing.items() if name not in rows.made]


def oracle_report(material: MeshMaterial, rows: MeshRows, seed: int) -> Report:
    """Accuracy of the samples at the top, every reference row below."""
    if material.oracle != "furniture":
        return {"skipped": "these data have no oracle; `tessera data synth furniture` makes some that have"}
    reason = oracle.readable_furniture(rows.asked.captions) if len(rows.asked) else "nothing is held out"
    if reason is not None:
        return {"skipped": reason}
    if not len(material.train):
        return {"skipped": "there are no training meshes to compare with"}
    captions, train, score = [caption or "" for caption in rows.asked.captions], material.train, furniture_oracle.score
    tallies = oracle.reference_rows(captions, rows.asked.meshes, train.meshes, train.captions, seed, score)
    tallies |= {name: oracle.tally(meshes, captions, score) for name, meshes in rows.made.items()}
    table = {name: row.as_dict() for name, row in tallies.items()}
    return {**table.get("samples", {}), "rows": table}


def reconstruction_report(rows: MeshRows, clouds: Mapping[str, BinnedSet], measuring: Measuring) -> Report:
    """What the tokenizer keeps at the top; `quantised`, what bins alone would keep, below it."""
    if "reconstruction" not in rows.made:
        return {"skipped": "no reconstructions"}
    real, corners = rows.asked.meshes, clouds["real"].corners
    sides = {"quantised": [to_mesh(own, measuring.bins) for own in corners], "reconstruction": rows.made["reconstruction"]}
    table = {name: kept_of(real, corners, made, measuring) for name, made in sides.items()}
    return {**table["reconstruction"], "rows": table}


def kept_of(
    real: Sequence[Mesh], corners: Sequence[Corners], made: Sequence[Mesh], measuring: Measuring
) -> dict[str, float | None]:
    """Shares of shapes and of faces that are right in every bin, and how near surfaces lie, over those that have one."""
    found = [quantise(mesh, measuring.bins) for mesh in made]
    right = [np.array_equal(a, b) for a, b in zip(corners, found, strict=True)]
    common = [len(_faces(a) & _faces(b)) for a, b in zip(corners, found, strict=True)]
    close = [
        compare(*(sample_points(mesh, measuring.points, measuring.seed) for mesh in pair), device=measuring.device)
        for pair in zip(real, made, strict=True) if all(map(has_surface, pair))
    ]  # fmt: skip
    return {
        "exact": float(np.mean(right)),
        "triangle_accuracy": sum(common) / max(1, sum(map(len, corners))),
        "chamfer": float(np.mean([each.chamfer for each in close])) if close else None,
        "normal_consistency": float(np.mean([each.normal_consistency for each in close])) if close else None,
        "empty": 1 - len(close) / len(right),
    }


def _faces(corners: Corners) -> set[bytes]:
    return {face.tobytes() for face in np.ascontiguousarray(corners)}


def shapes_report(rows: MeshRows) -> Report:
    """Integrity, and the mean number of faces, of the samples at the top, every row below."""
    if not len(rows.asked):
        return {"skipped": "nothing is held out"}
    table: dict[str, dict[str, float]] = {}
    for name, meshes in rows.by_name.items():
        faces = float(np.mean([len(mesh.faces) for mesh in meshes]))
        table[name] = {"faces": faces, **summarise_health([check_health(mesh) for mesh in meshes]), **removed_of(meshes)}
    return {**table.get("samples", {}), "rows": table}


def removed_of(meshes: Sequence[Mesh]) -> dict[str, float]:
    """Shares of the faces that tokens said, which are no longer in the meshes; means over shapes. Nothing of other meshes."""
    done = [mesh.cleaning for mesh in meshes if isinstance(mesh, CleanedMesh)]
    if len(done) < len(meshes):
        return {}
    return {
        f"removed_{kind}": float(np.mean([getattr(each, f"num_{kind}") / max(1, each.num_faces_before) for each in done]))
        for kind in ("degenerate", "duplicate")
    }


def sets_report(material: MeshMaterial, clouds: Mapping[str, CloudSet], train: CloudSet, measuring: Measuring) -> Report:
    """Each row against other held-out shapes, as many on both sides; `train`: training shapes in the place of samples."""
    num = min(len(material.held_out) // 2, *(len(side.kept) + side.num_empty for side in clouds.values()))
    if num < MIN_SAMPLES:
        return {"skipped": f"{len(material.held_out)} held-out shapes are two sides of {num}; {MIN_SAMPLES} or more are needed"}
    reference = measuring.clouds(material.held_out[len(material.held_out) - num :].meshes).points
    sides: dict[str, Clouds] = {"train": train.points[draw(len(train.points), num, measuring.seed)]}
    sides |= {name: side.points[side.kept < num] for name, side in clouds.items()}
    if not len(reference):
        return {"skipped": "no held-out shape has a surface"}
    scores = set_rows({name: side for name, side in sides.items() if len(side)}, reference, device=measuring.device)
    empty = {name: num - row.num_samples for name, row in scores.items()} | {"train": 0}  # of the latter any are taken
    table = {name: {**row.as_dict(), "num_empty": empty[name]} for name, row in scores.items()}
    notes = [f"{name}: {note}" for name, row in scores.items() if (note := size_note(row))]
    notes += [f"{name}: no shape has a surface" for name, side in sides.items() if not len(side)]
    return {**table.get("samples", {}), "n": num, "points": measuring.points, "rows": table, "notes": notes}


def copies_report(
    material: MeshMaterial, rows: MeshRows, clouds: Mapping[str, BinnedSet], train: BinnedSet, measuring: Measuring
) -> tuple[Report, dict[int, int]]:
    """By Chamfer and face by face; also the nearest training shape of each sample that has a surface."""
    if "samples" not in rows.made:
        return {"skipped": "no samples"}, {}
    samples, real = clouds["samples"], clouds["real"]
    equals = find_equals(samples.corners, real.corners, train.corners).as_dict()
    report: Report = {"n": len(rows.asked), "searched": len(material.train), "equal": equals}
    if not len(samples.kept) or not len(real.kept) or not len(train.kept):
        return {**report, "note": "no sample, or no real shape, has a surface: none is near another"}, {}
    pairs = (len(samples.kept) + len(real.kept)) * len(train.kept)
    coarse = FEW_POINTS if measuring.device.type == "cpu" and pairs > CPU_PAIRS else COARSE_POINTS
    found = find_shape_copies(samples.points, real.points, train.points, coarse=coarse, device=measuring.device)
    nearest = {int(samples.kept[row]): int(train.kept[index]) for row, index in enumerate(found.indices)}
    first = [int(samples.kept[row]) for row in found.ranked]
    told = [[index, nearest[index], float(found.distances[row])] for index, row in zip(first, found.ranked, strict=True)]
    chamfer = {**found.as_dict(), "nearest": told[:8], "num_empty": samples.num_empty, "coarse_points": coarse}
    note = few_note(len(real.kept), "shapes")
    report = {"share": chamfer["share"], **report, "chamfer": chamfer, **({"note": note} if note else {})}
    return report, {index: nearest[index] for index in first}


def health_of(report: Report, advice: Mapping[str, str]) -> Health:
    """By the oracle where there is one, else by 1-NNA."""
    if rows := report["oracle"].get("rows"):
        joint = {name: row["joint"] for name, row in rows.items()}
        return judge_accuracy(joint["real"], joint.get("reconstruction"), joint.get("samples"), things="shapes", advice=advice)
    if "real" in (rows := report["sets"].get("rows", {})):
        apart = {name: row["nna"] for name, row in rows.items()}
        return judge_apart(apart["real"], apart.get("reconstruction"), apart.get("samples"), advice=advice)
    return Health("none", "unknown", None, None, f"nothing to tell by: {report['sets'].get('skipped')}")


def make_sheet(material: MeshMaterial, rows: MeshRows, nearest: Mapping[int, int]) -> Pictures | None:
    """Real, reconstruction, sample and nearest training shape; the first of `nearest`, which lie nearest, come first."""
    if not len(rows.asked):
        return None
    first = list(nearest)[: SHEET_COLUMNS // 2]
    columns = [*first, *(index for index in range(len(rows.asked)) if index not in first)][:SHEET_COLUMNS]
    shown = {name: [meshes[index] for index in columns] for name, meshes in rows.by_name.items()}
    if nearest:
        nothing = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))  # a sample without a surface is near nothing
        known = (nearest.get(index) for index in columns)
        shown["nearest training"] = [nothing if index is None else material.train.meshes[index] for index in known]
    return sheet(
        [[render(mesh, PICTURE) for mesh in meshes] for meshes in shown.values()],
        row_names=list(shown),
        captions=[rows.asked.captions[index] or "" for index in columns],
    )
