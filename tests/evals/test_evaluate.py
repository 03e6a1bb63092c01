"""The whole evaluation with models that are known: one that knows the answers, one that copies, one that is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.config import EvaluateConfig, ImageDataConfig, UserError
from tessera.data.synth.shapes import write_shapes
from tessera.engine import dist
from tessera.engine.dist import World
from tessera.evals import Evaluation, Material, Side, Subject, evaluate, lines, load_material, write_evaluation
from tessera.evals.evaluate import Rows, dealt, lpips_report
from tessera.evals.nets import Pictures
from tessera.nn.lpips import load_lpips
from tests.nn.public_nets import by_hand, write_lpips

QUICK = EvaluateConfig(n=40, fit_steps=8, resamples=10)
SECTIONS = ("oracle", "fd", "kd", "is", "copies", "retrieval", "loss", "health")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data") / "shapes"
    write_shapes(made, 640, 0, image_size=32)
    return made


@pytest.fixture(scope="module")
def material(folder: Path) -> Material:
    return load_material(ImageDataConfig(path=str(folder), resolution=32), most_train=300, most_held_out=80, seed=0)


def darkened(pictures: Pictures, captions: object = None, seed: int = 0) -> Pictures:
    return (pictures // 4 * 4).astype(np.uint8)


def knowing(material: Material) -> Subject:
    """Answers with the true picture; where two have the same caption, with one after the other."""

    def sample(captions: Sequence[str], seed: int) -> Pictures:
        answers: dict[str | None, list[Pictures]] = {}
        for caption, picture in zip(material.held_out.captions, material.held_out.pictures, strict=True):
            answers.setdefault(caption, []).append(picture)
        return np.stack([answers[caption].pop(0) for caption in captions])

    return Subject(sample=sample, reconstruct=darkened, held_out_loss=lambda: {"base": 1.5}, about={"base": "step 3"})


def copying(material: Material) -> Subject:
    """Answers with training pictures, drawn by the seed."""

    def sample(captions: Sequence[str], seed: int) -> Pictures:
        return material.train.pictures[np.random.default_rng(seed).integers(len(material.train), size=len(captions))]

    return Subject(sample=sample, reconstruct=darkened)


@pytest.fixture(scope="module")
def known(material: Material) -> Evaluation:
    return evaluate(knowing(material), material, QUICK)


def test_the_sides_of_synthetic_data(material: Material, folder: Path) -> None:
    assert material.oracle == "shapes"
    assert (len(material.train), len(material.held_out)) == (300, 80)
    assert material.num_train > 300
    assert material.captioned
    held_out = {json.loads(line)["text"] for line in (folder / "heldout" / "metadata.jsonl").read_text().splitlines()}
    assert set(material.held_out.captions) <= held_out
    inside = load_material(ImageDataConfig(path=str(folder / "train"), resolution=32), most_train=4, most_held_out=4, seed=0)
    assert inside.oracle == "shapes"


def test_a_perfect_model_scores_as_real_pictures_do(known: Evaluation) -> None:
    report = known.report
    assert [name for name in SECTIONS if "skipped" in report[name]] == []
    assert report["oracle"]["joint"] == 1.0
    assert list(report["oracle"]["rows"]) == ["chance", "nearest", "real", "reconstruction", "samples"]
    assert report["oracle"]["interval"][0] > 0.9
    rows = report["fd"]["rows"]
    assert rows["samples"]["value"] == pytest.approx(rows["floor"]["value"])  # the true pictures, against the others
    assert (report["fd"]["n"], report["fd"]["d"]) == (40, 64)
    assert "n=40 < d=64" in report["fd"]["note"]
    assert report["fd"]["name"].startswith("FD-words-")
    assert report["fd"]["name"].endswith(report["fd"]["extractor_sha256"][:8])
    assert report["copies"]["pixels"]["median"] == report["copies"]["pixels"]["held_out_median"]
    assert report["retrieval"]["rows"]["samples"] == report["retrieval"]["rows"]["real"]
    assert report["retrieval"]["candidates"] == 32
    assert report["loss"] == {"base": 1.5}
    assert report["health"]["limit"] == "neither"
    assert report["subject"] == {"base": "step 3"}


def test_scores_and_likeness_stand_beside_real_pictures(material: Material, tmp_path: Path) -> None:
    chain, heads, files = write_lpips(tmp_path, "alex")
    lpips = load_lpips(files)
    report = evaluate(knowing(material), material, QUICK, lpips=lpips).report
    rows = report["is"]["rows"]
    assert rows["samples"]["value"] == rows["real"]["value"] == report["is"]["value"], "the true pictures"
    assert report["is"]["name"] == report["fd"]["name"].replace("FD", "IS")
    asked = material.held_out.pictures[:40]
    real, made, others = (
        torch.from_numpy(each).permute(0, 3, 1, 2) / 127.5 - 1 for each in (asked, darkened(asked), np.roll(asked, -1, axis=0))
    )
    found = report["lpips"]["rows"]
    with torch.no_grad():
        for name, pictures in (("reconstruction", made), ("shuffled", others)):
            assert found[name]["value"] == pytest.approx(by_hand(chain, heads, "alex", pictures, real).mean().item(), rel=1e-3)
    assert (report["lpips"]["name"], report["lpips"]["n"], report["lpips"]["value"]) == (
        "LPIPS-alex", 40, found["reconstruction"]["value"],
    )  # fmt: skip
    assert 0 < found["reconstruction"]["value"] < found["shuffled"]["value"]
    text = "\n".join(lines(report))
    assert "LPIPS-alex" in text
    assert report["is"]["name"] in text
    bare = lpips_report(Rows(material.held_out[:9], {}), lpips, QUICK, World(0, 1, torch.device("cpu")))
    assert bare["skipped"] == "no reconstructions"


def test_the_score_is_that_of_the_samples(material: Material) -> None:
    """One grey picture for all captions: it says nothing of any class."""

    def sample(captions: Sequence[str], seed: int) -> Pictures:
        return np.full((len(captions), 32, 32, 3), 127, np.uint8)

    found = evaluate(Subject(sample=sample), material, QUICK).report["is"]
    assert found["rows"]["samples"]["value"] == found["value"] == pytest.approx(1, abs=1e-6)
    assert found["rows"]["real"]["value"] > 1.0001


def test_pictures_that_are_too_small_for_lpips(material: Material, tmp_path: Path) -> None:
    small = replace(
        material, held_out=Side(material.held_out.pictures[:4, ::2, ::2], material.held_out.captions[:4]), oracle=None
    )
    report = evaluate(Subject(reconstruct=darkened), small, QUICK, lpips=load_lpips(write_lpips(tmp_path, "alex")[2])).report
    assert report["lpips"]["skipped"] == "pictures of 16 px are too small for alex, which needs 31"


def test_a_copying_model_is_caught(material: Material) -> None:
    report = evaluate(copying(material), material, QUICK).report
    assert report["oracle"]["joint"] < 0.1
    assert report["copies"]["share"] == 1.0
    assert report["copies"]["features"]["share"] == 1.0
    assert report["copies"]["pixels"]["held_out_share"] < 0.1
    assert report["health"]["limit"] == "generator"


def test_a_report_repeats(material: Material, known: Evaluation) -> None:
    again = evaluate(knowing(material), material, QUICK)
    assert json.dumps(again.report) == json.dumps(known.report)


def test_what_is_written(known: Evaluation, material: Material, tmp_path: Path) -> None:
    written = write_evaluation(known, tmp_path / "evaluation")
    assert [path.name for path in written] == ["evaluation.json", "evaluation.png", "extractor.safetensors"]
    assert json.loads(written[0].read_text()) == known.report
    with Image.open(written[1]) as picture:
        assert picture.size[1] > 4 * 96
    reused = evaluate(knowing(material), material, QUICK.model_copy(update={"extractor": str(written[2])}))
    assert reused.report["fd"] == known.report["fd"]


def test_lines_name_every_row(known: Evaluation) -> None:
    text = "\n".join(lines(known.report))
    for word in ("chance", "nearest", "floor", "real", "reconstruction", "samples", "joint 100.0 %", "R@1", "health: ", "loss: "):
        assert word in text
    assert "FID" not in text


def test_a_tokenizer_alone_is_judged(material: Material) -> None:
    report = evaluate(Subject(reconstruct=darkened), material, QUICK).report
    assert "joint" not in report["oracle"]
    assert report["fd"]["value"] is None
    assert report["copies"] == {"skipped": "no samples"}
    assert report["health"]["generator_loss"] is None
    assert any("no samples" in note for note in report["notes"])
    assert lines(report)


def test_a_generator_without_a_tokenizer(material: Material) -> None:
    report = evaluate(replace(knowing(material), reconstruct=None), material, QUICK).report
    assert report["health"]["limit"] == "unknown"
    assert report["oracle"]["joint"] == 1.0


def test_without_captions_and_without_an_oracle(material: Material) -> None:
    bare = Material(
        Side(material.train.pictures, (None,) * 300), Side(material.held_out.pictures, (None,) * 80), 300, "the validation split"
    )
    asked: list[str] = []

    def sample(captions: Sequence[str], seed: int) -> Pictures:
        asked.extend(captions)
        return bare.train.pictures[: len(captions)]

    report = evaluate(Subject(sample=sample, reconstruct=darkened), bare, QUICK).report
    assert set(asked) == {""}
    assert "skipped" in report["oracle"]
    assert "needs captions" in report["retrieval"]["skipped"]
    assert report["fd"]["name"].startswith("FD-turns-")
    assert "knows no classes" in report["is"]["skipped"]
    assert report["health"]["measure"] == report["fd"]["name"]
    assert lines(report)


def test_tiny_data_give_notes_instead_of_numbers(material: Material) -> None:
    tiny = replace(material, held_out=material.held_out[:5])
    done = evaluate(knowing(material), tiny, QUICK)
    for name in ("fd", "kd", "is", "copies", "retrieval"):
        assert "too few" in done.report[name]["skipped"]
    assert done.report["oracle"]["n"] == 5
    assert done.report["notes"][0].startswith("asked for n=40, held out are 5")
    assert lines(done.report)
    halves = evaluate(knowing(material), replace(material, held_out=material.held_out[:12]), QUICK).report
    assert "too few for a distance" in halves["fd"]["skipped"]  # two halves of six
    assert halves["copies"]["note"].startswith("12 held-out")


def unasked() -> dict[str, float]:
    raise AssertionError("of nothing there is no loss")


def test_nothing_held_out(material: Material) -> None:
    done = evaluate(replace(knowing(material), held_out_loss=unasked), replace(material, held_out=material.held_out[:0]), QUICK)
    assert done.sheet is None
    assert done.report["oracle"] == done.report["loss"] == {"skipped": "nothing is held out"}
    assert lines(done.report)


def test_a_model_of_another_size_is_refused(material: Material) -> None:
    with pytest.raises(ValueError, match=r"reconstruction are uint8 shaped .* expected uint8"):
        evaluate(Subject(reconstruct=lambda pictures, captions, seed: pictures[:, ::2, ::2]), material, QUICK)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_deal_out_the_same_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(part: slice, index: int) -> Pictures:
        return np.full((part.stop - part.start, 1, 1, 1), index, np.uint8)

    alone = dealt(200, World(0, 1, torch.device("cpu")), work)
    assert alone.ravel().tolist() == [0] * 64 + [1] * 64 + [2] * 64 + [3] * 8
    shares: list[dict[int, Pictures]] = []

    def all_gather(items: list[Any], item: dict[int, Pictures]) -> None:
        shares.append(item)
        items[:] = shares if len(shares) >= size else [dict.fromkeys(range(4), alone)] * size

    monkeypatch.setattr(dist.torch_dist, "all_gather_object", all_gather)
    made = [dealt(200, World(rank, size, torch.device("cpu")), work) for rank in range(size)][-1]  # the last finds all shares
    np.testing.assert_array_equal(made, alone)
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3]


def test_other_data_use_the_validation_split(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "train", tmp_path / "photos")
    config = ImageDataConfig(path=str(tmp_path / "photos"), resolution=32, validation_fraction=0.1)
    found = load_material(config, most_train=50, most_held_out=20, seed=0)
    assert (found.oracle, found.origin) == (None, "the validation split")
    assert not {p.tobytes() for p in found.train.pictures} & {p.tobytes() for p in found.held_out.pictures}
    again = load_material(config, most_train=50, most_held_out=20, seed=0)
    np.testing.assert_array_equal(found.held_out.pictures, again.held_out.pictures)


def test_wrong_material_is_the_users_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--set data\.path=PATH"):
        load_material(ImageDataConfig(), most_train=1, most_held_out=1, seed=0)
    shutil.copytree(folder / "heldout", tmp_path / "photos")
    with pytest.raises(UserError, match="validation split is empty"):
        load_material(
            ImageDataConfig(path=str(tmp_path / "photos"), validation_fraction=0.0), most_train=1, most_held_out=1, seed=0
        )
    (tmp_path / "photos" / "heldout").mkdir()
    shutil.copy(next(folder.glob("heldout/*.png")), tmp_path / "photos" / "heldout" / "a.png")
    (tmp_path / "photos" / "synth.json").write_text("{")
    with pytest.raises(UserError, match=r"synth.json cannot be read"):
        load_material(ImageDataConfig(path=str(tmp_path / "photos")), most_train=1, most_held_out=1, seed=0)
    with pytest.raises(ValueError, match="expected one each"):
        Side(np.zeros((2, 4, 4, 3), np.uint8), ("a",))


@pytest.mark.slow
def test_quality_is_ranked_by_every_measure(material: Material) -> None:
    """With the default fit: the more samples are wrong, the worse each number."""
    right, wrong = knowing(material).sample, copying(material).sample
    assert right is not None
    assert wrong is not None
    found = []
    for share in (0.0, 0.5, 1.0):

        def sample(captions: Sequence[str], seed: int, share: float = share) -> Pictures:
            pick = np.random.default_rng(seed).random(len(captions)) < share
            noisy = np.clip(wrong(captions, seed).astype(int) - 60, 0, 255).astype(np.uint8)
            return np.where(pick[:, None, None, None], noisy, right(captions, seed))

        report = evaluate(Subject(sample=sample), material, EvaluateConfig(n=40, resamples=0)).report
        found.append([-report["oracle"]["joint"], report["fd"]["value"], report["kd"]["value"], -report["retrieval"]["r@1"]])
    for values in zip(*found, strict=True):
        assert list(values) == sorted(values)
        assert values[0] < values[2]
