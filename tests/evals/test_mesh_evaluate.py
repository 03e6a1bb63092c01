"""The whole evaluation of meshes with known models: one that knows the answers, one that copies, one that draws noise."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.config import MeshDataConfig, MeshEvaluateConfig, UserError
from tessera.data.canonical import CleanedMesh, Cleaning, quantise, standardise, to_mesh
from tessera.data.loader import Feed
from tessera.data.mesh_cache import write_meshes
from tessera.data.mesh_sources import MeshFolder
from tessera.data.order import Cut
from tessera.data.synth.furniture import caption, plan_furniture, sample_furniture, write_furniture
from tessera.data.synth.furniture_oracle import oracle_accuracy
from tessera.data.synth.splits import Split
from tessera.engine import dist
from tessera.engine.dist import World
from tessera.evals import Evaluation, MeshMaterial, MeshSide, MeshSubject, evaluate_meshes, lines, load_meshes, write_evaluation
from tessera.evals.health import judge_apart
from tessera.evals.mesh_evaluate import pick_points
from tessera.media.meshes import Mesh
from tessera.randomness import mix

BINS = 128
QUICK = MeshEvaluateConfig(n=16, points=128)
SECTIONS = ("oracle", "reconstruction", "sets", "shapes", "copies", "loss")
PLAN = plan_furniture(0)


def furniture(split: Split, num: int) -> MeshSide:
    made = [sample_furniture(PLAN, split, index) for index in range(num)]
    return MeshSide(tuple(standardise(mesh)[0] for _, mesh in made), tuple(caption(words) for words, _ in made))


@pytest.fixture(scope="module")
def material() -> MeshMaterial:
    return MeshMaterial(furniture("train", 64), furniture("heldout", 32), 64, "heldout/", BINS, "furniture")


def in_bins(meshes: Sequence[Mesh]) -> list[Mesh]:
    return [to_mesh(quantise(mesh, BINS), BINS) for mesh in meshes]


def knowing(material: MeshMaterial) -> MeshSubject:
    """Answers with the true mesh; where two have the same caption, with one after the other."""

    def sample(captions: Sequence[str], seed: int) -> list[Mesh]:
        answers: dict[str | None, list[Mesh]] = {}
        for text, mesh in zip(material.held_out.captions, in_bins(material.held_out.meshes), strict=True):
            answers.setdefault(text, []).append(mesh)
        return [answers[text].pop(0) for text in captions]

    return MeshSubject(sample=sample, reconstruct=in_bins, held_out_loss=lambda: {"bits_per_face": 1.5}, about={"base": 3})


def copying(material: MeshMaterial) -> MeshSubject:
    """Answers with training meshes, drawn by the seed."""

    def sample(captions: Sequence[str], seed: int) -> list[Mesh]:
        chosen = np.random.default_rng(seed).integers(len(material.train), size=len(captions))
        return in_bins([material.train.meshes[index] for index in chosen])

    return MeshSubject(sample=sample, reconstruct=in_bins)


def soup(num: int, seed: int) -> list[Mesh]:
    """Triangles anywhere in the box."""
    rng = np.random.default_rng(seed)
    return [Mesh(rng.uniform(-0.9, 0.9, (90, 3)), np.arange(90).reshape(30, 3)) for _ in range(num)]


def raving() -> MeshSubject:
    return MeshSubject(sample=lambda captions, seed: soup(len(captions), seed), reconstruct=lambda meshes: soup(len(meshes), 5))


@pytest.fixture(scope="module")
def known(material: MeshMaterial) -> Evaluation:
    return evaluate_meshes(knowing(material), material, QUICK)


@pytest.fixture(scope="module")
def copied(material: MeshMaterial) -> Evaluation:
    return evaluate_meshes(copying(material), material, QUICK)


@pytest.fixture(scope="module")
def noisy(material: MeshMaterial) -> Evaluation:
    return evaluate_meshes(raving(), material, QUICK)


def test_a_perfect_model_scores_as_real_shapes_do(known: Evaluation, material: MeshMaterial) -> None:
    report = known.report
    assert [name for name in SECTIONS if "skipped" in report[name]] == []
    assert (report["n"], report["points"], report["sets"]["n"]) == (16, 128, 16)
    assert list(report["oracle"]["rows"]) == ["chance", "nearest", "real", "reconstruction", "samples"]
    assert report["oracle"]["joint"] == report["oracle"]["rows"]["real"]["joint"] == 1.0
    rows = report["sets"]["rows"]
    assert list(rows) == ["train", "real", "reconstruction", "samples"]
    assert rows["samples"] == rows["real"]  # the true shapes, against the others
    assert report["copies"]["chamfer"]["median"] == report["copies"]["chamfer"]["held_out_median"] > 0
    assert report["copies"]["equal"]["share"] == 0.0
    assert report["shapes"]["watertight"] == report["shapes"]["rows"]["real"]["watertight"] == 1.0
    assert report["loss"] == {"bits_per_face": 1.5}
    assert report["health"]["limit"] == "neither"
    assert report["subject"] == {"base": 3}


def test_the_oracle_row_is_the_oracles_accuracy(copied: Evaluation, material: MeshMaterial) -> None:
    captions = [text or "" for text in material.held_out.captions[:16]]
    sample = copying(material).sample
    assert sample is not None
    seed = mix(0, 0) >> 33
    assert oracle_accuracy(sample(captions, seed), captions).items() <= copied.report["oracle"].items()


def test_a_copying_model_is_caught(copied: Evaluation) -> None:
    report = copied.report
    assert report["oracle"]["joint"] < 0.1
    assert report["copies"]["equal"]["share"] == 1.0
    assert report["copies"]["share"] == 1.0
    assert report["copies"]["equal"]["held_out_share"] == 0.0
    assert report["copies"]["chamfer"]["held_out_share"] < 0.1
    assert report["health"]["limit"] == "generator"
    pairs = {sample: train for sample, train, _ in report["copies"]["chamfer"]["nearest"]}
    equals = dict(report["copies"]["equal"]["pairs"])
    assert all(pairs[sample] == equals[sample] for sample in set(pairs) & set(equals))


def test_noise_is_worst_by_every_measure(known: Evaluation, copied: Evaluation, noisy: Evaluation) -> None:
    best, middle, worst = (evaluation.report for evaluation in (known, copied, noisy))
    assert worst["oracle"]["joint"] == 0.0
    assert worst["sets"]["nna"] > 0.9 > best["sets"]["nna"]
    assert worst["sets"]["mmd"] > middle["sets"]["mmd"] > best["sets"]["mmd"]
    assert worst["sets"]["coverage"] < middle["sets"]["coverage"]
    assert (worst["shapes"]["watertight"], worst["shapes"]["boundary_edges"]) == (0.0, 1.0)
    assert worst["copies"]["chamfer"]["median"] > 2 * best["copies"]["chamfer"]["median"] > 0
    assert middle["copies"]["chamfer"]["median"] == 0
    assert (worst["reconstruction"]["exact"], worst["reconstruction"]["triangle_accuracy"]) == (0.0, 0.0)
    assert worst["reconstruction"]["chamfer"] > 20 * best["reconstruction"]["chamfer"]
    assert worst["health"]["limit"] == "tokenizer"  # nothing is left of the shapes before a generator begins


def test_reconstruction_beside_what_bins_keep(material: MeshMaterial, known: Evaluation) -> None:
    section = known.report["reconstruction"]
    assert (section["exact"], section["triangle_accuracy"], section["empty"]) == (1.0, 1.0, 0.0)
    assert section["rows"]["reconstruction"] == section["rows"]["quantised"]
    assert 0 < section["chamfer"] < 0.01  # other places on a surface that moved by less than a bin
    assert section["normal_consistency"] > 0.9

    def forgetful(meshes: Sequence[Mesh]) -> list[Mesh]:
        """One of four meshes loses its first face, the others nothing."""
        return [Mesh(m.vertices, m.faces[(index % 4 == 0) :]) for index, m in enumerate(in_bins(meshes))]

    found = evaluate_meshes(MeshSubject(reconstruct=forgetful), material, QUICK).report["reconstruction"]
    faces = [len(quantise(mesh, BINS)) for mesh in material.held_out.meshes[:16]]
    assert found["exact"] == 0.75
    assert found["triangle_accuracy"] == pytest.approx(1 - 4 / sum(faces))
    assert found["rows"]["quantised"]["exact"] == 1.0


def test_where_a_sample_lies_and_how_large_it_is_does_not_matter_to_sets(material: MeshMaterial, known: Evaluation) -> None:
    answer = knowing(material).sample
    assert answer is not None

    def sample(captions: Sequence[str], seed: int) -> list[Mesh]:
        return [Mesh(mesh.vertices * 0.5 + 0.25, mesh.faces) for mesh in answer(captions, seed)]

    found = evaluate_meshes(MeshSubject(sample=sample), material, QUICK).report["sets"]
    assert found["mmd"] == pytest.approx(known.report["sets"]["mmd"], rel=0.03)  # but for half as many bins


def test_a_report_repeats_and_is_json(material: MeshMaterial, known: Evaluation, tmp_path: Path) -> None:
    again = evaluate_meshes(knowing(material), material, QUICK)
    assert json.dumps(again.report, allow_nan=False) == json.dumps(known.report)
    written = write_evaluation(known, tmp_path / "evaluation")
    assert [path.name for path in written] == ["evaluation.json", "evaluation.png"]
    assert json.loads(written[0].read_text()) == known.report
    assert known.sheet is not None
    assert known.sheet.shape[0] > 4 * 128  # real, reconstruction, samples, nearest training
    assert known.sheet.shape[1] > 8 * 128


def test_two_ranks_make_the_report_of_one(material: MeshMaterial, copied: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tessera.evals.evaluate"], "CHUNK", 6)  # the package has a function of that name
    alone = evaluate_meshes(copying(material), material, QUICK)
    assert alone.report["oracle"] != copied.report["oracle"]  # other chunks, other noise
    shares: list[Any] = []
    both = threading.Barrier(2)

    def all_gather(items: list[Any], item: Any) -> None:
        shares.append(item)
        both.wait(30)
        items[:] = list(shares)
        both.wait(30)
        if item in shares:
            shares.remove(item)
        both.wait(30)

    monkeypatch.setattr(dist.torch_dist, "all_gather_object", all_gather)
    found: dict[int, Evaluation] = {}

    def work(rank: int) -> None:
        found[rank] = evaluate_meshes(copying(material), material, QUICK, world=World(rank, 2, torch.device("cpu")))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {rank: evaluation.report for rank, evaluation in found.items()} == {0: alone.report, 1: alone.report}


def test_lines_name_every_row(known: Evaluation, noisy: Evaluation) -> None:
    text = "\n".join(lines(known.report))
    for word in (
        "chance", "nearest", "train", "real", "quantised", "reconstruction", "samples", "joint 100.0 %", "1-NNA", "COV", "MMD",
        "watertight 100.0 %", "face for face", "training shapes", "health: ", "loss: bits_per_face 1.5", "by 128 points",
        "note: shapes are compared by 128 points",
    ):  # fmt: skip
        assert word in text
    assert "picture" not in text
    assert "joint   0.0 %" in "\n".join(lines(noisy.report))


def test_without_an_oracle_health_is_told_by_1_nna(material: MeshMaterial) -> None:
    bare = replace(material, oracle=None, held_out=replace(material.held_out, captions=(None,) * 32))
    asked: list[str] = []

    def sample(captions: Sequence[str], seed: int) -> list[Mesh]:
        asked.extend(captions)
        return soup(len(captions), seed)

    report = evaluate_meshes(MeshSubject(sample=sample, reconstruct=in_bins), bare, QUICK).report
    assert set(asked) == {""}
    assert "data synth furniture" in report["oracle"]["skipped"]
    assert (report["health"]["measure"], report["health"]["limit"]) == ("1-NNA", "generator")
    rows = report["sets"]["rows"]
    assert report["health"]["generator_loss"] == rows["samples"]["nna"] - rows["reconstruction"]["nna"]
    assert lines(report)


def test_the_sentence_by_1_nna() -> None:
    found = judge_apart(0.5, 0.52, 0.9)
    assert found.sentence == (
        "1-NNA is 50 % for real shapes, 52 % for reconstructions, 90 % for samples: "
        "the tokenizer adds 2 points, the generator 38: train the generator first"
    )
    assert judge_apart(0.5, 0.9, 0.95, advice={"tokenizer": "raise data.bins"}).sentence.endswith(": raise data.bins")
    assert judge_apart(0.5, 0.52, 0.55).limit == "neither"
    assert judge_apart(0.5, 0.7, None).limit == "tokenizer"
    assert judge_apart(0.5, None, 0.7).limit == "unknown"
    assert judge_apart(0.5, None, None).limit == "unknown"


def test_a_tokenizer_alone_is_judged(material: MeshMaterial) -> None:
    report = evaluate_meshes(MeshSubject(reconstruct=in_bins), material, QUICK).report
    assert "joint" not in report["oracle"]
    assert "nna" not in report["sets"]
    assert report["copies"] == {"skipped": "no samples"}
    assert report["health"]["generator_loss"] is None
    assert "no samples: no generator is trained" in report["notes"]
    assert lines(report)


def test_samples_without_a_surface_are_counted(material: MeshMaterial, known: Evaluation) -> None:
    nothing = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))
    answer = knowing(material).sample
    assert answer is not None
    some = MeshSubject(sample=lambda captions, seed: [nothing] * 4 + list(answer(captions, seed))[4:])
    report = evaluate_meshes(some, material, QUICK).report
    assert report["sets"]["rows"]["samples"]["num_empty"] == 4
    few = evaluate_meshes(some, replace(material, train=material.train[:9]), QUICK).report["sets"]["rows"]["train"]
    assert (few["num_samples"], few["num_empty"]) == (9, 0)
    assert report["sets"]["notes"][0].startswith("samples: 12 samples against 16")
    assert report["shapes"]["empty"] == pytest.approx(4 / 16)
    assert report["oracle"]["joint"] == pytest.approx(12 / 16)
    full = known.report["copies"]["chamfer"]["nearest"]
    assert report["copies"]["chamfer"]["nearest"][:3] == [row for row in full if row[0] >= 4][:3]  # numbers of all 16
    all_empty = evaluate_meshes(MeshSubject(sample=lambda captions, seed: [nothing] * len(captions)), material, QUICK)
    json.dumps(all_empty.report, allow_nan=False)
    assert lines(all_empty.report)
    assert all_empty.report["shapes"]["empty"] == 1.0


def test_faces_that_were_removed_are_told(material: MeshMaterial) -> None:
    def sample(captions: Sequence[str], seed: int) -> list[Mesh]:
        done = Cleaning(num_degenerate=4, num_duplicate=2, num_faces_before=40, num_faces_after=34)
        return [CleanedMesh(mesh.vertices, mesh.faces, cleaning=done) for mesh in soup(len(captions), seed)]

    report = evaluate_meshes(MeshSubject(sample=sample, reconstruct=in_bins), material, QUICK).report
    shapes = report["shapes"]
    assert (shapes["removed_degenerate"], shapes["removed_duplicate"]) == (pytest.approx(0.1), pytest.approx(0.05))
    assert "removed_degenerate" not in shapes["rows"]["reconstruction"]
    assert "removed: degenerate 10.00 %  duplicate 5.00 %" in "\n".join(lines(report))


def test_few_data_give_reasons_instead_of_numbers(material: MeshMaterial) -> None:
    report = evaluate_meshes(knowing(material), replace(material, held_out=material.held_out[:5]), QUICK).report
    assert "too few" in report["sets"]["skipped"]
    assert "too few" in report["copies"]["skipped"]
    assert report["oracle"]["n"] == 5
    assert report["notes"][0].startswith("asked for n=16, held out are 5")
    halves = evaluate_meshes(knowing(material), replace(material, held_out=material.held_out[:12]), QUICK).report
    assert "two sides of 6" in halves["sets"]["skipped"]
    assert halves["copies"]["note"].startswith("12 held-out shapes")
    asked = replace(knowing(material), held_out_loss=lambda: {"loss": 1 / 0})
    none = evaluate_meshes(asked, replace(material, held_out=material.held_out[:0]), QUICK)
    assert none.sheet is None
    assert none.report["oracle"] == none.report["loss"] == {"skipped": "nothing is held out"}
    assert lines(none.report)
    with pytest.raises(ValueError, match="samples are 1 meshes for 16; expected one each"):
        evaluate_meshes(MeshSubject(sample=lambda captions, seed: soup(1, 0)), material, QUICK)


def test_points_fall_with_the_number_of_shapes_on_a_cpu() -> None:
    cpu, gpu, auto = torch.device("cpu"), torch.device("cuda"), MeshEvaluateConfig()
    assert [pick_points(auto, num, cpu) for num in (0, 1, 8, 32, 64, 4096)] == [2048, 2048, 2048, 512, 256, 256]
    assert pick_points(auto, 4096, gpu) == 2048
    assert pick_points(QUICK, 1, cpu) == 128


@pytest.mark.parametrize("held_out", ["heldout/", "the validation split"])
def test_what_is_in_the_cache_is_not_read_again(held_out: str, tmp_path: Path) -> None:
    write_furniture(tmp_path / "made", 40, 0)
    home = tmp_path / "made" / "train" if held_out == "heldout/" else (tmp_path / "made" / "train").rename(tmp_path / "moved")
    config, caches = MeshDataConfig(path=str(home), validation_fraction=0.2, max_faces=100, workers=0), tmp_path / "cache"
    load, source = partial(load_meshes, config, most_train=30, most_held_out=20, seed=0), MeshFolder.open(home, config)
    feed = Feed(
        source=source, config=config, cut=Cut(4, None, 0, 1), seed=0, device=torch.device("cpu"), validation_samples=0,
        preview_samples=0, caches=caches, say=lambda line: None, show=lambda line: None,
    )  # fmt: skip
    folder, files = write_meshes(feed), load()
    cached = load(caches=caches)
    assert cached.origin.startswith(held_out)
    for a, b in ((files.train, cached.train), (files.held_out, cached.held_out)):
        assert (a.captions, a.num_refused) == (b.captions, b.num_refused)
        for one, other in zip(a.meshes, b.meshes, strict=True):
            np.testing.assert_array_equal(one.vertices, other.vertices)
            np.testing.assert_array_equal(one.faces, other.faces)
    assert len(cached.train) > 0 < cached.train.num_refused

    for path in source.files():  # nothing to read, and no way to see it
        facts = path.stat()
        path.write_bytes(b"#" * facts.st_size)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert load(caches=caches).train.captions == cached.train.captions
    assert load(caches=caches, source=source).train.captions == (), "a dataset of the user is read itself"
    (folder / "manifest.json").unlink()
    assert load(caches=caches).train.captions == (), "what is not finished is not used"


def test_both_sides_are_read_from_the_files(tmp_path: Path) -> None:
    write_furniture(tmp_path / "data", 40, 0)
    config = MeshDataConfig(path=str(tmp_path / "data"), validation_fraction=0.2, max_faces=400)
    found = load_meshes(config, most_train=12, most_held_out=4, seed=0)
    assert (found.oracle, len(found.train), len(found.held_out)) == ("furniture", 12, 4)
    held_out = {json.loads(line)["text"] for line in (tmp_path / "data" / "heldout" / "metadata.jsonl").read_text().splitlines()}
    assert set(found.held_out.captions) <= held_out
    np.testing.assert_allclose([np.abs(mesh.vertices).max() for mesh in found.train.meshes], 0.95, atol=1e-6)
    tight = load_meshes(config.model_copy(update={"max_faces": 40}), most_train=40, most_held_out=4, seed=0)
    assert tight.train.num_refused > 0
    some = load_meshes(config.model_copy(update={"max_faces": 40}), most_train=len(tight.train), most_held_out=4, seed=0)
    assert some.train.captions == tight.train.captions, "others take the place of those that are refused"
    note = evaluate_meshes(MeshSubject(), tight, QUICK).report["notes"]
    assert any("training meshes are left out" in line for line in note)

    shutil.copytree(tmp_path / "data" / "train", tmp_path / "other")
    other = load_meshes(config.model_copy(update={"path": str(tmp_path / "other")}), most_train=40, most_held_out=40, seed=0)
    assert (other.oracle, other.origin) == (None, "the validation split")
    assert len(other.train) + len(other.held_out) == 40
    with pytest.raises(UserError, match=r"--set data\.path=PATH"):
        load_meshes(MeshDataConfig(), most_train=1, most_held_out=1, seed=0)
    with pytest.raises(UserError, match="validation split is empty"):
        load_meshes(MeshDataConfig(path=str(tmp_path / "other"), validation_fraction=0.0), most_train=1, most_held_out=1, seed=0)
    with pytest.raises(ValueError, match="expected one each"):
        MeshSide((), ("a",))
