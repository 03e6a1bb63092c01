"""Puts the measures together: a model as callables and the material enter, one report and one sheet of pictures leave.

The first n of the held-out side are what the model is asked for: their captions give samples, their pictures reconstructions.
Distances are measured to others, from its end. Real, reconstructed and sampled pictures are thus compared, in equal numbers, with
real pictures that none of them was made from, so that the three distances can be subtracted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tessera.config import EvaluateConfig, VideoEvaluateConfig
from tessera.engine.dist import World
from tessera.evals import oracle, retrieval
from tessera.evals.copies import Copies, few_note, find_copies, pixel_vectors
from tessera.evals.distances import MIN_SAMPLES, Features, estimate_frechet, estimate_kernel, size_note
from tessera.evals.features import Extractor, fit_extractor, load_extractor, save_extractor
from tessera.evals.health import TOKENS, Health, Parts, judge_accuracy, judge_distance
from tessera.evals.likeness import estimate_mean, perceptual_distances
from tessera.evals.material import Material, Side
from tessera.evals.nets import Fitting, Pictures, weights_hash
from tessera.evals.scores import estimate_score
from tessera.media.images import write_png
from tessera.media.sheets import sheet
from tessera.nn.lpips import Lpips
from tessera.randomness import mix

CHUNK = 64  # captions per call of `sample`; fixed, so that what is sampled does not hang on the number of ranks
SHEET_COLUMNS = 8
Report = dict[str, Any]
Say = Callable[[str], None]  # one line of progress
T = TypeVar("T")
A = TypeVar("A", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under test. What it cannot do is None, and the rows that need it are left out."""

    sample: Callable[[Sequence[str], int], Pictures] | None = None  # captions, seed -> n h w c; "" asks for anything
    reconstruct: Callable[[Pictures, Sequence[str | None], int], Pictures] | None = None  # pictures, their captions, a seed
    parts: Parts = TOKENS  # what reconstructions, and samples, are made with
    held_out_loss: Callable[[], Mapping[str, float]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # goes into the report: stages, steps, sampling options


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation leaves."""

    report: Report
    sheet: Pictures | None  # h w 3
    extractor: Extractor | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Pictures for the same captions: real ones, and what the model makes."""

    asked: Side
    made: Mapping[str, Pictures]  # reconstruction, samples: what there is of them


def evaluate(
    subject: Subject,
    material: Material,
    config: EvaluateConfig,
    *,
    world: World | None = None,
    extractor: Extractor | None = None,
    lpips: Lpips | None = None,
    say: Say = lambda line: None,
) -> Evaluation:
    """Measures everything that the material allows, and says what it is at. Ranks share the sampling; each then computes the same
    report."""
    world = world or World(0, 1, torch.device("cpu"))
    asked = material.held_out[: config.n]
    rows = Rows(asked, make_rows(subject, asked, config.seed, world, say))
    notes = list(notes_on(material, config, rows))
    report: Report = {"n": len(asked), "seed": config.seed, "held_out": material.origin, "subject": dict(subject.about)}
    copies: Copies | None = None
    report["oracle"] = oracle_report(material, rows, config.seed)
    say(oracle.told_at_once(report["oracle"]))
    if len(asked) < MIN_SAMPLES or len(material.train) < MIN_SAMPLES:
        few = f"{len(asked)} held-out and {len(material.train)} training pictures: too few; {MIN_SAMPLES} or more are needed"
        report |= {name: {"skipped": few} for name in ("fd", "kd", "is", "copies", "retrieval")}
    else:
        fitting = Fitting(steps=config.fit_steps, seed=config.seed, device=world.device)
        say(f"features to compare by: {'given' if extractor or config.extractor else f'fitting a net, {fitting.steps:,} steps'}")
        extractor = extractor or pick_extractor(material, config, fitting)
        say(f"distances, and copies among {len(material.train):,} training pictures")
        features = {name: extractor.extract(pictures) for name, pictures in rows_by_name(rows).items()}
        report |= distance_reports(material.held_out.pictures, features, extractor, config)
        report["is"] = score_report(rows_by_name(rows), extractor, config)
        report["copies"], copies = copies_report(rows_by_name(rows), material.train.pictures, features, extractor)
        say(f"retrieval: {f'fitting a net, {fitting.steps:,} steps' if material.captioned else 'left out, captions are missing'}")
        skipped = "needs captions of every held-out and of most training pictures"
        report["retrieval"] = (
            retrieval_report(material.train.pictures, material.train.captions, rows_by_name(rows), rows.asked.captions, fitting)
            if material.captioned
            else {"skipped": skipped}
        )
    if lpips is not None:
        say(f"LPIPS of {len(asked):,} reconstructions")
        report["lpips"] = lpips_report(rows, lpips, config, world)
    say("held-out loss, and the report")
    report["loss"] = loss_report(subject.held_out_loss, len(asked))
    report["health"] = health_of(report, subject.parts).as_dict()
    report["notes"] = notes
    return Evaluation(report, make_sheet(material, rows, copies), extractor)


def loss_report(measure: Callable[[], Mapping[str, float]] | None, num: int) -> Report:
    """Of so many samples that are held out."""
    if not num:
        return {"skipped": "nothing is held out"}
    return (dict(measure()) if measure else {}) or {"skipped": "no stage measures a loss of what is held out"}


def make_rows(subject: Subject, asked: Side, seed: int, world: World, say: Say) -> dict[str, Pictures]:
    """What the model makes of the asked captions and pictures, in chunks dealt out to the ranks."""
    made: dict[str, Pictures] = {}
    if not len(asked):
        return made
    if subject.reconstruct is not None:
        reconstruct = subject.reconstruct
        say(f"reconstructing {len(asked):,} held-out pictures")
        made["reconstruction"] = dealt(
            len(asked),
            world,
            lambda part, index: reconstruct(asked.pictures[part], asked.captions[part], mix(seed, index) >> 33),
        )
    if subject.sample is not None:
        sample, captions = subject.sample, [caption or "" for caption in asked.captions]
        say(f"drawing {len(asked):,} pictures from their captions")
        made["samples"] = dealt(len(asked), world, lambda part, index: sample(captions[part], mix(seed, index) >> 33))
    for name, pictures in made.items():
        if pictures.shape != asked.pictures.shape or pictures.dtype != np.uint8:
            raise ValueError(f"{name} are {pictures.dtype} shaped {pictures.shape}; expected uint8 {asked.pictures.shape}")
    return made


def dealt(num: int, world: World, work: Callable[[slice, int], npt.NDArray[A]]) -> npt.NDArray[A]:
    """What `dealt_parts` makes, as one array."""
    return np.concatenate(dealt_parts(num, world, work))


def dealt_parts(num: int, world: World, work: Callable[[slice, int], T]) -> list[T]:
    """Chunk i is made by rank i % size, whatever the number of ranks, and all ranks get all chunks in order."""
    parts = [slice(start, min(start + CHUNK, num)) for start in range(0, num, CHUNK)]
    own = {index: work(part, index) for index, part in enumerate(parts) if index % world.size == world.rank}
    found = {index: made for gathered in world.gather(own) for index, made in gathered.items()}
    return [found[index] for index in range(len(parts))]


def rows_by_name(rows: Rows) -> dict[str, Pictures]:
    """Real pictures under `real`, and what was made."""
    return {"real": rows.asked.pictures, **rows.made}


def notes_on(material: Material, config: EvaluateConfig, rows: Rows) -> list[str]:
    """What a reader of every number must know."""
    notes = []
    if len(rows.asked) < config.n:
        notes.append(f"asked for n={config.n}, held out are {len(material.held_out)}; n={len(rows.asked)} is used")
    if len(material.train) < material.num_train:
        notes.append(f"{len(material.train):,} of {material.num_train:,} training pictures are used (evaluate.train_samples)")
    missing = {
        "samples": "nothing that draws from captions is trained",
        "reconstruction": "nothing here turns pictures into what is drawn from",
    }
    return notes + [f"no {name}: {reason}" for name, reason in missing.items() if name not in rows.made]


def pick_extractor(material: Material, config: EvaluateConfig, fitting: Fitting) -> Extractor:
    """The saved one that the config names, or a new one fitted to the training side."""
    if config.extractor is not None:
        return load_extractor(Path(config.extractor), fitting.device)
    return fit_extractor(material.train.pictures, material.train.captions, fitting)


def oracle_report(material: Material, rows: Rows, seed: int) -> Report:
    """Accuracy of the samples at the top, every reference row below."""
    if material.oracle != "shapes":
        return {"skipped": "these data have no oracle; `tessera data synth shapes` makes some that have"}
    reason = oracle.readable(rows.asked.pictures, rows.asked.captions) if len(rows.asked) else "nothing is held out"
    if reason is not None:
        return {"skipped": reason}
    captions = [caption or "" for caption in rows.asked.captions]
    tallies = oracle.reference_rows(captions, rows.asked.pictures, material.train.pictures, material.train.captions, seed)
    tallies |= {name: oracle.tally(pictures, captions) for name, pictures in rows.made.items()}
    table = {name: row.as_dict() for name, row in tallies.items()}
    return {**table.get("samples", {}), "rows": table}


def distance_reports(
    held_out: Any, features: Mapping[str, Features], extractor: Extractor, config: EvaluateConfig | VideoEvaluateConfig
) -> dict[str, Report]:
    """`fd` and `kd`: each row against held-out media from the end of the list, `floor` being that of the real ones."""
    num = min(len(features["real"]), len(held_out) // 2)
    note = size_note(num, features["real"].shape[1])
    reports: dict[str, Report] = {}
    for key, measure in (("fd", estimate_frechet), ("kd", estimate_kernel)):
        report: Report = {"name": extractor.measure_name(key.upper()), "extractor_sha256": extractor.sha256, "n": num}
        if num < MIN_SAMPLES:
            reports[key] = {**report, "skipped": note}
            continue
        reference = extractor.extract(held_out[len(held_out) - num :])
        table = {
            "floor" if name == "real" else name: measure(
                made[:num], reference, resamples=config.resamples, seed=config.seed
            ).as_dict()
            for name, made in features.items()
        }
        report |= {"value": table.get("samples", {}).get("value"), "d": reference.shape[1], "rows": table}
        reports[key] = {**report, **({"note": note} if note else {})}
    return reports


def score_report(rows: Mapping[str, Pictures], extractor: Extractor, config: EvaluateConfig) -> Report:
    """`is` of every row, in equal numbers."""
    if extractor.classify is None:
        return {"skipped": f"{extractor.name} knows no classes; the words of captions are some"}
    chances = {name: extractor.classify(pictures) for name, pictures in rows.items()}
    table = {name: estimate_score(each, resamples=config.resamples, seed=config.seed).as_dict() for name, each in chances.items()}
    report: Report = {"name": extractor.measure_name("IS"), "extractor_sha256": extractor.sha256, "n": len(rows["real"])}
    classes = chances["real"].shape[1]
    return {**report, "value": table.get("samples", {}).get("value"), "classes": classes, "rows": table}


def lpips_report(rows: Rows, net: Lpips, config: EvaluateConfig, world: World) -> Report:
    """Of reconstructions and what they were made of; `shuffled`: of real pictures and the next ones. Ranks share the looking."""
    report: Report = {"name": f"LPIPS-{net.kind}", "sha256": weights_hash(net), "n": len(rows.asked)}
    real, side = rows.asked.pictures, min(rows.asked.pictures.shape[1:3])
    if "reconstruction" not in rows.made or side < net.least:
        small = f"pictures of {side} px are too small for {net.kind}, which needs {net.least}"
        return {**report, "skipped": small if side < net.least else "no reconstructions"}

    def estimate(made: Pictures) -> dict[str, object]:
        values = dealt(len(real), world, lambda part, _: perceptual_distances(net, made[part], real[part]))
        return estimate_mean(values, resamples=config.resamples, seed=config.seed).as_dict()

    table = {"shuffled": estimate(np.roll(real, -1, axis=0))} if len(real) > 1 else {}
    table["reconstruction"] = estimate(rows.made["reconstruction"])
    return {**report, "value": table["reconstruction"]["value"], "rows": table}


def copies_report(
    rows: Mapping[str, Any], train: Any, features: Mapping[str, Features], extractor: Extractor,
    vectors: Callable[[Any], Features] = pixel_vectors, things: str = "pictures",
) -> tuple[Report, Copies | None]:  # fmt: skip
    """In pixels and in features; the pairs of the pixels go to the sheet."""
    if "samples" not in rows:
        return {"skipped": "no samples"}, None
    pixels = find_copies(vectors(rows["samples"]), vectors(rows["real"]), vectors(train))
    found = find_copies(features["samples"], features["real"], extractor.extract(train))
    report: Report = {"share": pixels.as_dict()["share"], "n": len(rows["real"]), "searched": len(train)}
    report |= {"pixels": pixels.as_dict(), "features": found.as_dict()}
    note = few_note(len(rows["real"]), things)
    return {**report, **({"note": note} if note else {})}, pixels


def retrieval_report(
    train: Any, train_captions: Sequence[str | None], rows: Mapping[str, Any], asked: Sequence[str | None], fitting: Fitting
) -> Report:
    """R@1 and R@5 of the samples at the top, every reference row below."""
    candidates = retrieval.candidates_for(asked, retrieval.CANDIDATES, fitting.seed)
    if candidates.shape[1] < 2:
        return {"skipped": "all held-out captions are the same"}
    model = retrieval.fit_retriever(train, train_captions, fitting)
    captions = model.captions(asked)
    table = {name: retrieval.recall(model.pictures(media), captions, candidates) for name, media in rows.items()}
    table["chance"] = retrieval.chance(candidates.shape[1])
    facts = {"n": len(asked), "candidates": candidates.shape[1], "model_sha256": model.sha256}
    return {**table.get("samples", {}), **facts, "rows": table}


def health_of(report: Report, parts: Parts = TOKENS) -> Health:
    """By the oracle where there is one, else by the Fréchet distance."""
    if rows := report["oracle"].get("rows"):
        joint = {name: row["joint"] for name, row in rows.items()}
        return judge_accuracy(joint["real"], joint.get("reconstruction"), joint.get("samples"), parts=parts)
    if rows := report["fd"].get("rows"):
        values = {name: row["value"] for name, row in rows.items()}
        return judge_distance(
            report["fd"]["name"], values["floor"], values.get("reconstruction"), values.get("samples"), parts=parts
        )
    return Health("none", "unknown", None, None, f"nothing to tell by: {report['fd'].get('skipped')}")


def make_sheet(material: Material, rows: Rows, copies: Copies | None) -> Pictures | None:
    """Real, reconstruction, sample and nearest training picture; the samples nearest to training come first."""
    if not len(rows.asked):
        return None
    order = copies.ranked[: SHEET_COLUMNS // 2] if copies else np.arange(0)
    rest = [index for index in range(len(rows.asked)) if index not in order]
    columns = [*map(int, order), *rest][:SHEET_COLUMNS]
    shown = {name: pictures[columns] for name, pictures in rows_by_name(rows).items()}
    if copies is not None:
        shown["nearest training"] = material.train.pictures[copies.indices[columns]]
    return sheet(
        [list(pictures) for pictures in shown.values()],
        row_names=list(shown),
        captions=[rows.asked.captions[index] or "" for index in columns],
        scale=max(1, 96 // max(rows.asked.pictures.shape[1:3])),
    )


def write_evaluation(evaluation: Evaluation, folder: Path) -> list[Path]:
    """evaluation.json, evaluation.png and, where one was fitted, extractor.safetensors; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "evaluation.json"]
    written[0].write_text(json.dumps(evaluation.report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if evaluation.sheet is not None:
        written.append(folder / "evaluation.png")
        write_png(written[-1], evaluation.sheet)
    if evaluation.extractor is not None and evaluation.extractor.net is not None:
        written.append(folder / "extractor.safetensors")
        save_extractor(evaluation.extractor, written[-1])
    return written
