"""`tessera.load`: a run or an export in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tessera
from tessera import pipeline
from tessera.config import UserError
from tessera.contracts import Stage, Tokenizer
from tessera.data.loader import prepare
from tessera.data.sources import ImageFolder
from tessera.files import digest
from tessera.sampling.session import Session, load
from tests.sampling.conftest import SETS


@pytest.fixture(scope="module")
def session(exported: Path) -> Session:
    return load(exported, device="cpu")


@pytest.fixture(scope="module")
def picture(photos: Path) -> Path:
    return sorted((photos / "train").glob("*.png"))[0]


# ---- use


def test_it_opens_runs_and_exports_alike(trained: Path, exported: Path, picture: Path, session: Session) -> None:
    assert tessera.load is load
    from_run = load(trained, device="cpu")
    assert from_run.encode(picture).equal(session.encode(picture))
    assert repr(from_run) == f"Session({str(trained)!r}: muse, tokenizer of step 5, on cpu)"
    assert isinstance(session.tokenizer, Tokenizer)
    net = session.nets["tokenizer"]["tokenizer"]
    assert not net.training
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert load(trained, checkpoint="step-2", device="cpu").steps == {"tokenizer": 2}
    with pytest.raises(UserError, match="is an export, which holds one set of weights"):
        load(exported, checkpoint="best")


def test_there_and_back(session: Session, photos: Path) -> None:
    files = sorted((photos / "train").glob("*.png"))[:3]
    ids = session.encode(*files)
    assert (ids.shape, ids.dtype, ids.device.type) == ((3, 8, 8), torch.int64, "cpu")
    pictures = session.decode(ids)
    assert [(picture.mode, picture.size) for picture in pictures] == [("RGB", (16, 16))] * 3
    again = session.reconstruct(*files)
    assert all(np.array_equal(a, b) for a, b in zip(pictures, again, strict=True))
    assert np.array_equal(session.decode(ids.numpy()[:1].astype(np.int16))[0], pictures[0])
    single = [session.encode(file)[0] for file in files]
    assert torch.equal(torch.stack(single), ids)


def test_ids_may_be_trained_on(session: Session, picture: Path) -> None:
    table = nn.Embedding(1000, 4)
    table(session.encode(picture)).sum().backward()
    assert table.weight.grad is not None


def test_many_pictures_go_in_chunks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [np.full((16, 16, 3), 20 * index, np.uint8) for index in range(5)]
    whole = session.encode(*pictures)
    monkeypatch.setattr("tessera.sampling.session.CHUNK", 2)
    assert torch.equal(session.encode(*pictures), whole)
    assert len(session.decode(whole)) == 5


def test_pictures_are_prepared_as_in_validation(session: Session, photos: Path, trained: Path) -> None:
    recipe_config = pipeline.resolve(str(trained / "config.yaml"))
    source = ImageFolder.open(photos)
    for index in range(4):
        wanted = prepare(source, recipe_config.data, index, 0).image
        assert wanted is not None
        assert np.array_equal(session.prepare(source.path(index)), wanted)
        assert np.array_equal(session.prepare(str(source.path(index))), wanted)
        assert np.array_equal(session.prepare(Image.open(source.path(index))), wanted)
        assert np.array_equal(session.prepare(source.read(index)), wanted)


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (16, 16), (301, 40)])
def test_any_size_and_any_mode(session: Session, size: tuple[int, int], tmp_path: Path) -> None:
    for mode in ("RGB", "RGBA", "L", "P", "1", "CMYK"):
        assert session.encode(Image.new(mode, size)).shape == (1, 8, 8)
    Image.new("RGB", size, (9, 99, 200)).save(tmp_path / "x.jpg")
    assert session.encode(tmp_path / "x.jpg").shape == (1, 8, 8)
    for shape in (size, (*size, 1), (*size, 3), (*size, 4)):
        assert session.encode(np.zeros(shape, np.uint8)).shape == (1, 8, 8)


def test_transparency_lies_on_the_background(session: Session) -> None:
    clear = np.zeros((16, 16, 4), np.uint8)
    assert session.prepare(clear).min() == 255


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (4, "RGBA")])
def test_other_channels(photos: Path, tmp_path: Path, channels: int, mode: str) -> None:
    sets = [*SETS, f"data.channels={channels}"]
    run = tessera.train("muse", preset="tiny", data=photos, steps=1, sets=sets, run=tmp_path / "run")
    made = load(run, device="cpu").reconstruct(np.zeros((20, 20, 3), np.uint8))
    assert made[0].mode == mode


def test_it_leaves_the_random_numbers_alone(exported: Path) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    load(exported)
    assert torch.equal(torch.rand(2), wanted)


def test_a_hub_may_link_the_files(model: Path, tmp_path: Path, picture: Path, session: Session) -> None:
    """Download caches hold the content elsewhere and link to it."""
    weights = model / "tokenizer" / "model.safetensors"
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    (model / "README.md").write_text("Licence: MIT")  # the card is the user's
    assert load(model, device="cpu").encode(picture).equal(session.encode(picture))


# ---- wrong input


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros((4, 4), np.float32), "float32 shaped .*; expected a file, a PIL image or uint8"),
        (np.zeros((4, 4, 2), np.uint8), "expected 1, 3 or 4 channels"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"shaped \(2, 4, 4, 3\)"),
        (np.zeros((0, 4, 3), np.uint8), "shaped"),
        ([1, 2], "a picture is a list"),
        (None, "a picture is a NoneType"),
        ("nowhere.png", "nowhere.png: no such file"),
        (Path(__file__), "not an image that is read here"),
    ],
)
def test_what_is_no_picture(session: Session, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        session.encode(given)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(8, 8, dtype=torch.long), r"torch.int64 shaped \[8, 8\]; expected whole numbers"),
        (torch.zeros(1, 8, 8), "torch.float32"),
        (torch.zeros(0, 8, 8, dtype=torch.long), "shaped"),
        (torch.full((1, 2, 2), 1000), "ids reach from 1000 to 1000; this tokenizer's are 0 to 999"),
        (torch.full((1, 2, 2), -1), "ids reach from -1"),
    ],
)
def test_what_are_no_ids(session: Session, ids: torch.Tensor, said: str) -> None:
    with pytest.raises(UserError, match=said):
        session.decode(ids)


def test_no_picture_at_all(session: Session) -> None:
    with pytest.raises(UserError, match="no picture given"):
        session.encode()


@pytest.mark.parametrize("device", ["cuda:99", "abacus", "mps:x"])
def test_a_device_that_is_not_there(exported: Path, device: str) -> None:
    with pytest.raises(UserError, match=r"is not there|no device is called"):
        load(exported, device=device)


# ---- wrong folders


def test_a_wrong_folder_is_told_apart(exported: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"exportd does not exist; did you mean {exported}\?"):
        load(exported.with_name("exportd"))
    with pytest.raises(UserError, match="is neither a run nor an export; expected a run folder"):
        load(tmp_path)
    with pytest.raises(UserError, match=f"is a part of {trained}: open that one"):
        load(trained / "tokenizer" / "checkpoints" / "step-000004")
    with pytest.raises(UserError, match=f"is a part of {exported}"):
        load(exported / "tokenizer")
    with pytest.raises(UserError, match="neither a run nor an export"):
        load(Path(__file__))


def change(model: Path, **values: Any) -> None:
    """Rewrites config.json and its hash, as a program would that knows what it does."""
    facts = json.loads((model / "config.json").read_text()) | values
    (model / "config.json").write_text(json.dumps(facts))
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["files"]["config.json"] = {
        "bytes": (model / "config.json").stat().st_size,
        "sha256": digest(model / "config.json"),
    }
    (model / "manifest.json").write_text(json.dumps(manifest))


def test_a_newer_format(model: Path) -> None:
    change(model, format=2, tessera="9.0")
    with pytest.raises(UserError, match=r"format 2 \(written by tessera 9.0\); this is tessera .* reads format 1"):
        load(model)


def test_a_model_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="is not that of an export: it names no format"):
        load(tmp_path)


def test_a_config_of_a_newer_version(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())["config"]
    config["tokenizer"]["model"]["attention"] = True
    change(model, config=config, tessera="9.0")
    with pytest.raises(UserError, match=r"tokenizer.model.attention .*config.json\): unknown key(.|\n)*written by tessera 9.0"):
        load(model)


def test_a_run_of_a_newer_version(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text() + "video: 3\n")
    with pytest.raises(UserError, match=r"video \(.*config.yaml, line \d+\): unknown key"):
        load(run)


@pytest.mark.parametrize(
    "values",
    [
        {"recipe": "mouse"},
        {"recipe": ["muse"]},
        {"stages": {"../../run/tokenizer": {"step": 1, "nets": [], "averaged": []}}},
        {"stages": {"tokenizer": {"step": "5", "nets": [], "averaged": []}}},
        {"stages": {"tokenizer": 5}},
        {"stages": ["tokenizer"]},
        {"config": None},
        {"config": {"tokenizer": {"model": {"widths": [16, 16], "blocks": [1, 1]}}, "data": {"resolution": 16}}},
        {"stages": {"base": {"step": 1, "nets": [], "averaged": []}}},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(model: Path, values: dict[str, Any]) -> None:
    change(model, **values)
    with pytest.raises(UserError):
        load(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer/model.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_export_is_refused_by_name(model: Path, name: str, damage: str) -> None:
    content = bytearray((model / name).read_bytes())
    content[-3] ^= 1
    if damage == "gone":
        (model / name).unlink()
    else:
        (model / name).write_bytes(content if damage == "flip" else content[:-3])
    with pytest.raises(UserError, match="neither a run nor an export" if damage == "gone" and name == "config.json" else name):
        load(model)


def test_damage_is_told_in_words(model: Path) -> None:
    weights = model / "tokenizer" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-3])
    with pytest.raises(UserError, match=rf"is damaged: it has {len(content) - 3} bytes, expected {len(content)}; copy"):
        load(model)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"is damaged: .*sha256 differs"):
        load(model)


def test_a_manifest_of_a_newer_format(model: Path) -> None:
    manifest = json.loads((model / "manifest.json").read_text())
    for change, said in (({"format": 2}, "manifest.json has format 2; this is tessera"), ({"format": None}, "names no format")):
        (model / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(UserError, match=said):
            load(model)
    (model / "manifest.json").write_text(json.dumps(manifest | {"files": dict.fromkeys(manifest["files"], 3)}))
    with pytest.raises(UserError, match=r"manifest.json does not say how many bytes config.json has"):
        load(model)


def test_a_manifest_is_needed_and_names_no_other_files(model: Path, tmp_path: Path) -> None:
    manifest = json.loads((model / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    (model / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"names \['../../secret', 'config.json'"):
        load(model)
    (model / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"has no manifest.json with its files"):
        load(model)


# ---- nets by themselves


def test_trained_nets_are_those_that_use_needs(trained: Path, exported: Path) -> None:
    for path in (trained, exported):
        nets = load(path, device="cpu").nets["tokenizer"]
        assert set(nets) == {"tokenizer"}


def test_a_stage_of_the_users_own_cannot_be_opened_as_ours(photos: Path, tmp_path: Path) -> None:
    config = pipeline.resolve("muse", preset="tiny", data=str(photos), steps=1, sets=SETS)
    (ours,) = pipeline.pick(pipeline.find_recipe("muse").steps(config), "tokenizer")

    def mine() -> Stage:
        stage = ours.build()
        net = stage.nets["tokenizer"]
        assert isinstance(net, nn.Module)
        net.register_buffer("extra", torch.zeros(1))
        return stage

    run = pipeline.train(config, run=tmp_path / "run", stage="tokenizer", stages={"tokenizer": mine})
    with pytest.raises(UserError, match=r"does not fit net 'tokenizer' of its config: 1 tensors differ \(extra\)"):
        load(run)
