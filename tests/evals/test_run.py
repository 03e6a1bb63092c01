"""`tessera evaluate`: a run, an export, a tokenizer alone; its report, its files, what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera import pipeline
from tessera.config import UserError
from tessera.data.sources import split_indices
from tessera.data.synth.shapes import write_shapes
from tessera.engine import dist
from tessera.engine.dist import World
from tessera.evals.distances import Features
from tessera.evals.features import inception_extractor
from tessera.evals.nets import Pictures
from tessera.evals.run import evaluate_run, shared
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tests.nn.public_nets import write_lpips
from tests.small import SUPERRES, generated, pictures, small_config, workshop

__all__ = ["generated", "pictures", "workshop"]

QUICK = ("evaluate.fit_steps=2", "evaluate.resamples=2")


@pytest.fixture
def run(generated: Path, tmp_path: Path) -> Path:
    """A copy to write into."""
    return Path(shutil.copytree(generated, tmp_path / "run"))


def test_a_run_is_judged_and_nothing_is_overwritten(run: Path) -> None:
    first, folder = evaluate_run(run, n=3, sets=QUICK, device="cpu")
    assert folder.name == "evaluation-001"
    report = json.loads((folder / "evaluation.json").read_text())
    assert report["n"] == 3
    assert report["subject"]["stages"] == {"tokenizer": 3, "base": 3}
    assert set(report["oracle"]["rows"]) == {"chance", "nearest", "real", "reconstruction", "samples"}
    assert report["loss"]["loss"] > 0
    assert (folder / "evaluation.png").is_file()
    second, other = evaluate_run(run, n=3, sets=QUICK, device="cpu")
    assert other.name == "evaluation-002"
    assert first.report == second.report, "the same weights and seed give the same numbers"


def test_every_phase_is_told(run: Path, tmp_path: Path) -> None:
    write_shapes(tmp_path / "more", 128, 0, image_size=32)
    said: list[str] = []
    sets = (*QUICK, "evaluate.train_samples=50", f"data.path={tmp_path / 'more'}")
    evaluate_run(run, n=8, sets=sets, device="cpu", say=said.append)
    assert said == [
        "reading up to 50 training and 16 held-out pictures",
        "reconstructing 8 held-out pictures",
        "drawing 8 pictures from their captions",
        "the oracle finds 0.0% of 8 samples right in everything",
        "features to compare by: fitting a net, 2 steps",
        "distances, and copies among 50 training pictures",
        "retrieval: fitting a net, 2 steps",
        "held-out loss, and the report",
    ]


def test_the_held_out_loss_is_that_of_training(run: Path, pictures: Path) -> None:
    session = load(run, device="cpu")
    source = pipeline.open_source(session.config)
    _, held_out = split_indices(source, session.config.data.validation_fraction)
    pixels = np.stack([session.prepare(source.read(int(index))) for index in held_out])
    found = session.draw.loss(pixels, [source.caption(int(index)) for index in held_out])
    lines = [json.loads(line) for line in (run / "base" / "metrics.jsonl").read_text().splitlines()]
    valid = [line for line in lines if line["kind"] == "valid"][-1]
    assert found["loss"] == pytest.approx(valid["loss"], rel=0.1), "other masks, the same order of size"


def test_a_tokenizer_alone_is_judged_by_what_it_keeps(pictures: Path, tmp_path: Path) -> None:
    run = pipeline.train(small_config(pictures), run=tmp_path / "run", stage="tokenizer")
    report = evaluate_run(run, n=3, sets=QUICK, device="cpu")[0].report
    assert "samples" not in report["oracle"].get("rows", {})
    assert any("nothing that draws from captions is trained" in note for note in report["notes"])


def test_with_superres_pictures_are_judged_at_its_size(pictures: Path, tmp_path: Path) -> None:
    run = pipeline.train(small_config(pictures, superres=SUPERRES), run=tmp_path / "run")
    evaluation, _ = evaluate_run(run, n=3, sets=QUICK, device="cpu")
    assert load(run, device="cpu").resolution == 32
    assert evaluation.report["oracle"]["rows"]["real"]["joint"] == 1.0


def test_an_export_is_told_where_its_data_lie(run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = export_run(run, tmp_path / "out")
    with pytest.raises(UserError, match=r"--set data\.path=PATH"):
        evaluate_run(out, n=3, sets=QUICK, device="cpu")
    report = evaluate_run(out, n=3, sets=(*QUICK, f"data.path={pictures}"), device="cpu")[0].report
    assert report["oracle"]["n"] == 3


def test_only_what_concerns_the_judging_can_be_set(run: Path) -> None:
    with pytest.raises(UserError, match="only values of evaluate, sample and data"):
        evaluate_run(run, n=3, sets=("base.steps=9",), device="cpu")


class Fake(torch.nn.Module):
    """As the Inception file is called: uint8 in, features or chances out."""

    def forward(self, x: torch.Tensor, return_features: bool = False, no_output_bias: bool = False) -> torch.Tensor:
        found = x.float().mean((2, 3)) + torch.arange(x.shape[1])
        return found if return_features else found.div(64).softmax(1)


def test_a_named_inception_file_gives_fid(run: Path, tmp_path: Path) -> None:
    torch.jit.script(Fake()).save(str(tmp_path / "inception.pt"))
    sets = (*QUICK, f"evaluate.inception={tmp_path / 'inception.pt'}")
    with pytest.raises(UserError, match="is no file"):
        evaluate_run(run, n=3, sets=("evaluate.inception=/nowhere.pt",), device="cpu")
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read as TorchScript"):
        evaluate_run(run, n=3, sets=(f"evaluate.inception={tmp_path / 'bad.pt'}",), device="cpu")
    write_shapes(tmp_path / "more", 128, 0, image_size=32)  # 16 held out: 8 to judge, and 8 to judge by
    report = evaluate_run(run, n=8, sets=(*sets, f"data.path={tmp_path / 'more'}"), device="cpu")[0].report
    assert {key: (report[key]["name"], report[key]["n"], report[key]["d"]) for key in ("fd", "kd")} == {
        "fd": ("FID", 8, 3),
        "kd": ("KID", 8, 3),
    }
    assert (report["is"]["name"], report["is"]["n"], report["is"]["classes"]) == ("IS", 8, 3)
    assert 1 < report["is"]["value"] < 3


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_what_a_given_net_looks_at(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at its chunks, and what all have seen lies in the order of the pictures."""
    pictures = np.random.default_rng(0).integers(0, 256, (200, 4, 4, 3), dtype=np.uint8)
    whole = inception_extractor(Fake(), "0" * 64)
    assert whole.classify is not None
    looked: list[int] = []

    def look(some: Pictures) -> Features:
        looked.append(len(some))
        return whole.extract(some)

    shares: list[dict[int, Features]] = []

    def all_gather(items: list[Any], item: dict[int, Features]) -> None:
        shares.append(item)
        items[:] = shares if len(shares) >= size else [dict.fromkeys(range(4), whole.extract(pictures))] * size

    monkeypatch.setattr(dist.torch_dist, "all_gather_object", all_gather)
    dealt_out = [shared(replace(whole, extract=look), World(rank, size, torch.device("cpu"))) for rank in range(size)]
    found = [extractor.extract(pictures) for extractor in dealt_out][-1]  # the last finds all shares
    np.testing.assert_array_equal(found, whole.extract(pictures))
    assert sorted(looked) == [8, 64, 64, 64]
    alone = shared(whole, World(0, 1, torch.device("cpu")))
    assert alone.classify is not None
    np.testing.assert_array_equal(alone.classify(pictures), whole.classify(pictures))


def test_files_that_are_named_are_read_before_anything_is_drawn(run: Path, tmp_path: Path) -> None:
    _, _, files = write_lpips(tmp_path, "vgg")
    write_shapes(tmp_path / "more", 64, 0, image_size=32)
    sets = [*QUICK, f"data.path={tmp_path / 'more'}", f"evaluate.lpips.path={files.path}", "evaluate.lpips.net=vgg"]
    said: list[str] = []
    with pytest.raises(UserError, match=r"evaluate\.lpips\.heads: there is no file"):
        evaluate_run(run, n=8, sets=[*sets, "evaluate.lpips.heads=gone"], device="cpu", say=said.append)
    assert len(said) == 1
    report = evaluate_run(run, n=8, sets=[*sets, f"evaluate.lpips.heads={files.heads}"], device="cpu")[0].report["lpips"]
    assert report["name"] == "LPIPS-vgg"
    assert 0 < report["value"] == report["rows"]["reconstruction"]["value"]
