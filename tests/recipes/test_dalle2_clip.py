"""A CLIP model from the disk in the place of the pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tessera import pipeline
from tessera.config import UserError
from tessera.data.embedding_files import FileEmbeddings
from tessera.data.opening import open_source
from tessera.data.sources import split_indices
from tessera.data.synth.shapes import write_shapes
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tessera.tokenizers.pair.clip import FrozenClip, load_clip
from tests.recipes.test_dalle2_drawing import RATES, SETS, check_views
from tests.text.test_frozen import clip_folder, transformers

__all__ = ["clip_folder"]


def test_a_clip_model_embeds_pictures_and_prompts(clip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shapes(tmp_path / "data", 20, 0, image_size=32)
    sets = [*SETS, *RATES, f"embeddings={{kind: clip, path: {clip_folder}}}"]
    config = pipeline.resolve("dalle2", preset="tiny", data=str(tmp_path / "data"), steps=2, sets=sets)
    run = pipeline.train(config, run=tmp_path / "run")
    session = load(run, device="cpu")
    assert list(session.nets) == ["prior", "base", "upsampler1"]
    assert session.config.embedding_width == load_clip(clip_folder, session.device).width == 8
    drawn = session.sample("a red circle")
    varied = session.sample("", image=Image.new("RGB", (32, 32), (255, 0, 0)))
    assert drawn[0].size == varied[0].size == (32, 32)
    assert not np.array_equal(np.asarray(drawn[0]), np.asarray(varied[0]))
    exported = load(export_run(run, tmp_path / "model"), device="cpu").sample("a red circle")
    assert np.array_equal(np.asarray(exported[0]), np.asarray(drawn[0])), "it finds the CLIP model, too"
    check_views(run, tmp_path / "data")
    check_cosines(run, clip_folder)
    with monkeypatch.context() as patch:
        sides, embed = list[int](), FrozenClip.pictures
        patch.setattr(FrozenClip, "pictures", lambda clip, images: sides.append(images.shape[-1]) or embed(clip, images))
        session.sample("", image=Image.new("RGB", (32, 32), (255, 0, 0)))
    assert sides == [32], "not what the decoder would see of it"
    shutil.rmtree(run / "cache")
    assert [path.name[:11] for path in pipeline.prepare(run)["prior"]] == ["embeddings-"], (
        "CLIP needs no other stage, but a cache"
    )
    assert (run / "cache").is_dir()


def check_cosines(run: Path, clip_folder: Path) -> None:
    """Validation of the prior knows how near pictures and captions are, as transformers itself has it."""
    config = load(run, device="cpu").config
    source = open_source(config.data.path, config.data)
    picked = split_indices(source, config.data.validation_fraction)[1].tolist()
    known = FileEmbeddings.listed(next((run / "cache").glob("embeddings-*")))
    model, tokenizer = (kind.from_pretrained(clip_folder) for kind in (transformers.CLIPModel, transformers.AutoTokenizer))
    with torch.no_grad():
        pieces = [tokenizer(source.caption(index), truncation=True, max_length=12, return_tensors="pt") for index in picked]
        words = torch.cat([model(**piece, pixel_values=torch.zeros(1, 3, 8, 8)).text_embeds for piece in pieces])
    real = torch.from_numpy(np.stack([known.read(source.key(index)) for index in picked]))
    validations = [json.loads(line) for line in (run / "prior" / "metrics.jsonl").read_text().splitlines() if "cosine" in line]
    assert [line["kind"] for line in validations] == ["valid", "valid_raw"]
    for line in validations:
        assert line["cosine_text_real"] == pytest.approx(float(F.cosine_similarity(words, real).mean()), abs=1e-5)
        assert -1 <= line["cosine_text"] <= 1


def test_a_folder_without_a_model_is_told_before_anything_trains(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", 20, 0, image_size=32)
    sets = [*SETS, f"embeddings={{kind: clip, path: {tmp_path}}}"]
    config = pipeline.resolve("dalle2", preset="tiny", data=str(tmp_path / "data"), steps=2, sets=sets)
    with pytest.raises(UserError, match=r"has no config.json; expected a folder that `save_pretrained` wrote"):
        pipeline.train(config, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
