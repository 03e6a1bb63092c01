"""A CLIP model from a folder: its vectors are those that transformers gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tessera.config import UserError
from tessera.tokenizers.pair.clip import FrozenClip, clip_width, load_clip
from tests.text.test_frozen import clip_folder, t5_folder

transformers = pytest.importorskip("transformers")
__all__ = ["clip_folder", "t5_folder"]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clip(clip_folder: Path) -> FrozenClip:
    return load_clip(clip_folder, CPU)


def test_pictures_and_captions_are_what_transformers_gives(clip: FrozenClip, clip_folder: Path) -> None:
    assert (clip.width, clip.resolution) == (8, 8)
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip_folder)
    images = torch.rand(3, 3, 8, 8) * 2 - 1
    usual = (
        transformers.CLIPImageProcessorPil if hasattr(transformers, "CLIPImageProcessorPil") else transformers.CLIPImageProcessor
    )
    made = usual(do_resize=False, do_center_crop=False, do_rescale=False, do_convert_rgb=False)
    pixels = made((images / 2 + 0.5).numpy(), return_tensors="pt", input_data_format="channels_first")["pixel_values"]
    words = ["a red cat", "the dog"]
    with torch.no_grad():
        whole = model(**tokenizer(words, padding=True, return_tensors="pt"), pixel_values=pixels)
    assert torch.allclose(clip.pictures(images), whole.image_embeds, atol=1e-6)
    assert torch.allclose(clip.captions(words), whole.text_embeds, atol=1e-6)
    assert torch.allclose(clip.captions([*words, None, " "])[:2], whole.text_embeds, atol=1e-6)
    assert clip.captions(["the dog", None, " "]).norm(dim=1).tolist() == pytest.approx([1, 0, 0])


def test_pictures_are_scaled_to_what_the_model_sees(clip: FrozenClip) -> None:
    images = torch.rand(2, 3, 20, 20) * 2 - 1
    small = F.interpolate(images, size=(8, 8), mode="bicubic", antialias=True).clamp(-1, 1)
    assert torch.equal(clip.pictures(images), clip.pictures(small))
    assert torch.equal(clip.pictures(F.pad(images, (4, 5), value=0.5)), clip.pictures(images))  # the middle square
    grey = torch.rand(2, 1, 8, 8) * 2 - 1
    assert torch.equal(clip.pictures(grey), clip.pictures(grey.expand(-1, 3, -1, -1)))


def test_the_fingerprint_names_weights_and_pixels(clip: FrozenClip, clip_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(clip_folder, tmp_path / "clip"))
    assert load_clip(folder, CPU).fingerprint == clip.fingerprint
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}))
    other = load_clip(folder, CPU)
    assert other.fingerprint != clip.fingerprint
    assert other.mean.tolist() == [[[0.0]], [[0.0]], [[0.0]]]


def test_weights_that_are_missing_are_never_made_up(clip_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(clip_folder, tmp_path / "clip"))
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"clip lacks 1 weights of the model \(visual_projection\.weight\); expected a whole one"):
        load_clip(folder, CPU)


def test_what_is_no_clip_model(t5_folder: Path, clip_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json; expected a folder that `save_pretrained` wrote"):
        load_clip(tmp_path, CPU)
    with pytest.raises(UserError, match="is a 't5' model, expected one with both towers of CLIP"):
        load_clip(t5_folder, CPU)
    folder = Path(shutil.copytree(clip_folder, tmp_path / "clip"))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        load_clip(folder, CPU)


def test_a_vocabulary_that_is_missing_is_never_made_up(clip_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(clip_folder, tmp_path / "clip"))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=r"clip has no word pieces .* expected tokenizer\.json, or vocab\.json and merges\.txt"):
        load_clip(folder, CPU)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", r"it holds \[\]"),
        ("null", "it holds None"),
        ("{", "Expecting property name"),
        ('{"image_mean": 0.5}', "image_mean is 0.5"),
        ('{"image_mean": null}', "image_mean is None"),
        ('{"image_mean": "123"}', "image_mean is '123'"),
        ('{"image_std": [1, 1]}', r"image_std is \[1, 1\]"),
        ('{"image_std": [1, NaN, 1]}', r"image_std is \[1, nan, 1\]"),
        pytest.param(f'{{"image_mean": [1, {10**400}, 1]}}', "int too large to convert to float", id="a number without end"),
        ('{"image_std": [1, 0, 1]}', r"image_std \[1.0, 0.0, 1.0\], which is not above 0"),
    ],
)
def test_pixel_facts_that_are_wrong_are_told(content: str, told: str, clip_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(clip_folder, tmp_path / "clip"))
    (folder / "preprocessor_config.json").write_text(content)
    with pytest.raises(
        UserError, match=rf"preprocessor_config\.json cannot be used: {told}.*; expected an object with image_mean"
    ):
        load_clip(folder, CPU)


@pytest.mark.parametrize(
    "change",
    [
        {"vision_config": []},
        {"vision_config": "large"},
        *(
            {"vision_config": {name: value}}
            for name, value in (("patch_size", 0), ("num_attention_heads", 0), ("image_size", "big"), ("image_size", -8))
        ),
        {"projection_dim": None},
    ],
    ids=str,
)
def test_a_config_that_is_wrong_is_told(change: dict[str, Any], clip_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(clip_folder, tmp_path / "clip"))
    facts = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        facts[name] = {**facts[name], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(
        UserError, match=r"the CLIP model at .* cannot be read: \w+: .*; expected a folder that `save_pretrained`"
    ):
        load_clip(folder, CPU)


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"projection_dim": null}', '{"projection_dim": 0}', '{"projection_dim": Infinity}']
)
def test_a_width_that_is_not_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json does not say projection_dim"):
        clip_width(tmp_path)
