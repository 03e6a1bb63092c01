"""Puts the measures of clips together: a model as callables and the material enter, one report and one sheet of frames leave.

As for pictures (`evaluate`): the first n of the held-out side are what the model is asked for, each at the length of the real
clip, and distances are measured to others, from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.config import VideoEvaluateConfig
from tessera.contracts import Scene
from tessera.engine.dist import World
from tessera.evals import clip_oracle, clip_stories
from tessera.evals.clip_attributes import Classifier, fit_classifier
from tessera.evals.clip_features import fit_clip_extractor
from tessera.evals.clip_material import ClipMaterial, ClipSide, refuse_odd
from tessera.evals.clip_nets import spread
from tessera.evals.clip_quality import clip_vectors, kept_of, steadiness, still
from tessera.evals.copies import Copies
from tessera.evals.distances import MIN_SAMPLES
from tessera.evals.evaluate import (
    Evaluation,
    Report,
    Say,
    copies_report,
    dealt_parts,
    distance_reports,
    loss_report,
    retrieval_report,
)
from tessera.evals.features import Extractor, load_extractor
from tessera.evals.health import Health, judge_accuracy, judge_distance
from tessera.evals.nets import Fitting, Pictures
from tessera.evals.oracle import told_at_once
from tessera.evals.slots import find_slots
from tessera.media.clips import Frames
from tessera.media.sheets import sheet
from tessera.nn.quantizers.codes import code_use
from tessera.randomness import Draws, mix

BATCH = 32  # clips of a step of a judging net
SHEET_CLIPS, SHEET_COLUMNS = 8, 2
SHEET_FRAMES = 8
Clips = Sequence[Frames]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSubject:
    """A model under test. What it cannot do is None, and the rows that need it are left out."""

    sample: Callable[[Sequence[str], Sequence[int], int], Clips] | None = None  # captions, frames of each, seed; "": anything
    reconstruct: Callable[[Clips], Clips] | None = None
    count_codes: Callable[[Clips], Tensor] | None = None  # how often each code occurs in their tokens: v, or several times v
    tell: Callable[[Sequence[Sequence[Scene]], int], Clips] | None = None  # stories, seed -> all scenes of each as one clip
    least_scene: int = 1  # frames of the shortest scene that can be told
    held_out_loss: Callable[[], Mapping[str, float]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # goes into the report: stages, steps, sampling options


@dataclass(frozen=True, slots=True)
class ClipRows:
    """Clips for the same captions: real ones, and what the model makes."""

    asked: ClipSide
    made: Mapping[str, Clips]  # reconstruction, samples: what there is of them

    @property
    def by_name(self) -> dict[str, Clips]:
        """Real clips under `real`, and what was made."""
        return {"real": self.asked.clips, **self.made}


def evaluate_clips(
    subject: ClipSubject, material: ClipMaterial, config: VideoEvaluateConfig, *, world: World | None = None,
    say: Say = lambda line: None,
) -> Evaluation:  # fmt: skip
    """Measures everything that the material allows, and says what it is at. Ranks share the sampling; each then computes the same
    report."""
    world = world or World(0, 1, torch.device("cpu"))
    asked = material.held_out[: config.n]
    rows = ClipRows(asked, make_rows(subject, asked, config.seed, world, say))
    report: Report = {"n": len(asked), "seed": config.seed, "held_out": material.origin, "subject": dict(subject.about)}
    report["oracle"] = oracle_report(material, rows, config.seed)
    say(told_at_once(report["oracle"]))
    report["reconstruction"] = reconstruction_report(rows, world.device)
    report["flicker"] = flicker_report(rows)
    report["codes"] = codes_report(subject, asked, world)
    few = f"{len(asked)} held-out and {len(material.train)} training clips: too few; {MIN_SAMPLES} or more are needed"
    copies: Copies | None = None
    extractor: Extractor | None = None
    if len(asked) < MIN_SAMPLES or len(material.train) < MIN_SAMPLES:
        report |= {name: {"skipped": few} for name in ("attributes", "fd", "kd", "identity", "copies", "retrieval")}
    else:
        fitting = Fitting(steps=config.fit_steps, batch_size=BATCH, seed=config.seed, device=world.device)
        report["attributes"], classifier = attributes_report(material, rows, fitting, say)
        say(f"features to compare by: {'given' if config.extractor else f'fitting a net, {fitting.steps:,} steps'}")
        extractor = pick_extractor(material, config, fitting)
        say(f"distances, and copies among {len(material.train):,} training clips")
        features = {name: extractor.extract(clips) for name, clips in rows.by_name.items()}
        report |= distance_reports(material.held_out.clips, features, extractor, config)
        train = material.train.clips
        report["copies"], copies = copies_report(rows.by_name, train, features, extractor, clip_vectors, "clips")
        report["identity"] = identity_report(subject, material, config, extractor, classifier, world, say)
        report["retrieval"] = clip_retrieval(material, rows, fitting, say)
    say("held-out loss, and the report")
    report["loss"] = loss_report(subject.held_out_loss, len(asked))
    report["health"] = health_of(report).as_dict()
    report["notes"] = notes_on(material, config, rows)
    return Evaluation(report, make_sheet(material, rows, copies), extractor)


def make_rows(subject: ClipSubject, asked: ClipSide, seed: int, world: World, say: Say) -> dict[str, Clips]:
    """What the model makes of the asked captions and clips, in chunks dealt out to the ranks."""
    made: dict[str, list[Clips]] = {}
    if not len(asked):
        return {}
    if subject.reconstruct is not None:
        say(f"reconstructing {len(asked):,} held-out clips")
        reconstruct = subject.reconstruct
        made["reconstruction"] = dealt_parts(len(asked), world, lambda part, _: reconstruct(asked.clips[part]))
    if subject.sample is not None:
        say(f"drawing {len(asked):,} clips from their captions")
        sample, captions = subject.sample, [caption or "" for caption in asked.captions]
        made["samples"] = dealt_parts(
            len(asked), world, lambda part, index: sample(captions[part], asked.lengths[part], mix(seed, index) >> 33)
        )
    found = {name: [clip for part in parts for clip in part] for name, parts in made.items()}
    for name, clips in found.items():
        refuse_odd(name, clips)
        if [clip.shape for clip in clips] != [clip.shape for clip in asked.clips]:
            raise ValueError(f"{name}: {len(clips)} clips, not as many, as long and as large as the {len(asked)} real ones")
    return dict(found)


def notes_on(material: ClipMaterial, config: VideoEvaluateConfig, rows: ClipRows) -> list[str]:
    """What a reader of every number must know."""
    notes = []
    if len(rows.asked) < config.n:
        notes.append(f"asked for n={config.n}, held out are {len(material.held_out)}; n={len(rows.asked)} is used")
    if len(material.train) < material.num_train:
        notes.append(f"{len(material.train):,} of {material.num_train:,} training clips are used (evaluate.train_samples)")
    missing = {"samples": "no generator is trained", "reconstruction": "there is no tokenizer"}
    return notes + [f"no {name}: {reason}" for name, reason in missing.items() if name not in rows.made]


def pick_extractor(material: ClipMaterial, config: VideoEvaluateConfig, fitting: Fitting) -> Extractor:
    """The saved one that the config names, or a new one fitted to the training side."""
    if config.extractor is not None:
        return load_extractor(Path(config.extractor), fitting.device, "clip")
    return fit_clip_extractor(material.train.clips, material.train.captions, fitting)


def oracle_report(material: ClipMaterial, rows: ClipRows, seed: int) -> Report:
    """Accuracy of the samples at the top, every reference row below."""
    if material.oracle is None:
        return {"skipped": "these data have no oracle; `tessera data synth digits` makes some that have"}
    reason = clip_oracle.readable_clips(rows.asked.clips, rows.asked.captions) if len(rows.asked) else "nothing is held out"
    if reason is not None:
        return {"skipped": reason}
    captions = [caption or "" for caption in rows.asked.captions]
    tallies = clip_oracle.reference_rows(rows.asked.clips, captions, material.oracle, seed)
    tallies |= {name: clip_oracle.tally(clips, captions, material.oracle) for name, clips in rows.made.items()}
    table = {name: row.as_dict() for name, row in tallies.items()}
    return {**table.get("samples", {}), "rows": table}


def reconstruction_report(rows: ClipRows, device: torch.device) -> Report:
    """What the tokenizer keeps at the top; `still`, what the first frame alone would, below it."""
    if "reconstruction" not in rows.made:
        return {"skipped": "no reconstructions"}
    real = rows.asked.clips
    made = {"still": still(real), "reconstruction": rows.made["reconstruction"]}
    table = {name: kept_of(real, clips, device) for name, clips in made.items()}
    return {**table["reconstruction"], "rows": table}


def flicker_report(rows: ClipRows) -> Report:
    """Of the samples at the top, every row below."""
    if not len(rows.asked):
        return {"skipped": "nothing is held out"}
    table = {name: steadiness(clips) for name, clips in rows.by_name.items()}
    if table["real"]["flicker"] is None:
        return {"skipped": "no clip has three frames"}
    return {**table.get("samples", {}), "rows": table}


def codes_report(subject: ClipSubject, asked: ClipSide, world: World) -> Report:
    """Use of the codebook by the tokens of real clips."""
    if subject.count_codes is None or not len(asked):
        return {"skipped": "no tokenizer counts codes"}
    count = subject.count_codes
    counts = torch.stack(dealt_parts(len(asked), world, lambda part, _: count(asked.clips[part]).cpu())).sum(0)
    return {**code_use(counts), "vocab_size": counts.shape[-1], "tokens": int(counts.sum())}


def attributes_report(material: ClipMaterial, rows: ClipRows, fitting: Fitting, say: Say) -> tuple[Report, Classifier | None]:
    """Accuracy of the samples at the top; `chance`: what is judged, by others' captions."""
    if material.oracle is not None:
        return {"skipped": "an oracle judges these data"}, None
    slots = find_slots(material.train.captions) if material.captioned else []
    if not slots:
        return {"skipped": "the captions have no slots: words that exclude each other, one in nearly every caption"}, None
    say(f"attributes: fitting a classifier of {len(slots)} slots, {fitting.steps:,} steps")
    classifier = fit_classifier(material.train.clips, material.train.captions, slots, fitting)
    captions = list(rows.asked.captions)
    others = [captions[other] for other in clip_oracle.others_than_own(len(captions), Draws(fitting.seed, 11))]
    table = {name: classifier.tally(clips, captions).as_dict() for name, clips in rows.by_name.items()}
    table["chance"] = classifier.tally(rows.by_name.get("samples", rows.asked.clips), others).as_dict()
    table = {name: {**row, "mean": mean_of(row)} for name, row in table.items()}
    facts = {"slots": {slot.name: list(slot.values) for slot in slots}, "model_sha256": classifier.sha256}
    return {**table.get("samples", {}), **facts, "rows": table}, classifier


def mean_of(row: Mapping[str, Any]) -> float:
    """Over slots."""
    return float(np.mean([row[key] for key in row if key not in ("joint", "n", "interval")]))


def identity_report(
    subject: ClipSubject, material: ClipMaterial, config: VideoEvaluateConfig, extractor: Extractor,
    classifier: Classifier | None, world: World, say: Say,
) -> Report:  # fmt: skip
    """By the oracle, or by attributes where captions have slots; and by features."""
    if subject.tell is None or not config.stories:
        return {"skipped": "no stories are told" if subject.tell is None else "evaluate.stories is 0"}
    side, least = material.held_out, subject.least_scene
    stories = (
        clip_stories.write_digit_stories(side, config.stories, least)
        if material.oracle
        else clip_stories.write_stories(side, config.stories, classifier.slots if classifier else (), config.seed, least)
    )
    if len(stories) < 2:
        return {"skipped": f"needs two different captions, or more, of clips of {least} frames or more"}
    say(f"telling {len(stories)} stories of three scenes")
    stories = told(stories, subject.tell, config.seed, world)
    parts = [extractor.extract([story.parts[scene] for story in stories]) for scene in range(clip_stories.NUM_SCENES)]
    report: Report = {"n": len(stories), "features": dict(clip_stories.identity_by_features(parts))}
    if material.oracle is not None:
        report |= clip_stories.identity_by_oracle(stories, material.oracle)
    elif classifier is not None:
        report |= clip_stories.identity_by_slots(stories, classifier)
    return report


def told(
    stories: Sequence[clip_stories.Story], tell: Callable[[Sequence[Sequence[Scene]], int], Clips], seed: int, world: World
) -> list[clip_stories.Story]:
    """Each with its clip, in chunks dealt out to the ranks."""

    def work(part: slice, index: int) -> Clips:
        return tell([story.scenes for story in stories[part]], mix(seed, index, 3) >> 33)

    clips = [clip for made in dealt_parts(len(stories), world, work) for clip in made]
    refuse_odd("stories", clips)
    wanted = [sum(scene.frames for scene in story.scenes) for story in stories]
    if [len(clip) for clip in clips] != wanted:
        raise ValueError(f"stories of {wanted} frames came back with {[len(clip) for clip in clips]}")
    return [clip_stories.Story(story.scenes, clip) for story, clip in zip(stories, clips, strict=True)]


def clip_retrieval(material: ClipMaterial, rows: ClipRows, fitting: Fitting, say: Say) -> Report:
    """Whether a clip finds its caption among others."""
    if not material.captioned:
        return {"skipped": "needs captions of every held-out and of most training clips"}
    say(f"retrieval: fitting a net, {fitting.steps:,} steps")
    return retrieval_report(material.train.clips, material.train.captions, rows.by_name, rows.asked.captions, fitting)


def health_of(report: Report) -> Health:
    """By the oracle where there is one, else by attributes, else by the Fréchet distance."""
    for section, key in (("oracle", "joint"), ("attributes", "mean")):
        if rows := report[section].get("rows"):
            shares = {name: row[key] for name, row in rows.items()}
            judge = partial(judge_accuracy, things="clips", measure=section)
            return judge(shares["real"], shares.get("reconstruction"), shares.get("samples"))
    if rows := report["fd"].get("rows"):
        values = {name: row["value"] for name, row in rows.items()}
        judged = (values["floor"], values.get("reconstruction"), values.get("samples"))
        return judge_distance(report["fd"]["name"], *judged, things="clips")
    return Health("none", "unknown", None, None, f"nothing to tell by: {report['fd'].get('skipped')}")


def make_sheet(material: ClipMaterial, rows: ClipRows, copies: Copies | None) -> Pictures | None:
    """Strips of frames with the caption below: real, reconstruction, sample and nearest training clip; samples that lie nearest
    to training come first."""
    if not len(rows.asked):
        return None
    order = [int(index) for index in copies.ranked[: SHEET_CLIPS // 2]] if copies else []
    order = [*order, *(index for index in range(len(rows.asked)) if index not in order)][:SHEET_CLIPS]
    shown = {name: [clips[index] for index in order] for name, clips in rows.by_name.items()}
    if copies is not None:
        shown["nearest training"] = [material.train.clips[copies.indices[index]] for index in order]
    bands = [order[start : start + SHEET_COLUMNS] for start in range(0, len(order), SHEET_COLUMNS)]
    return np.concatenate([band_of(rows, shown, order, band) for band in bands])


def band_of(rows: ClipRows, shown: Mapping[str, Clips], order: Sequence[int], band: Sequence[int]) -> Pictures:
    """Some clips side by side; a band that is not full is filled up with its first clip's paper."""
    blank = np.full_like(strip_of(shown["real"][0]), 255)
    missing = SHEET_COLUMNS - len(band)
    columns = [order.index(index) for index in band]
    return sheet(
        [[*(strip_of(clips[column]) for column in columns), *[blank] * missing] for clips in shown.values()],
        row_names=list(shown),
        captions=[*((rows.asked.captions[index] or "") for index in band), *[""] * missing],
    )


def strip_of(clip: Frames) -> Pictures:
    """t h w c -> h (8 w) c: frames side by side, each enlarged to 64 pixels or more."""
    scale = max(1, 64 // clip.shape[1])
    return np.concatenate(list(spread(clip, SHEET_FRAMES).repeat(scale, 1).repeat(scale, 2)), axis=1)
