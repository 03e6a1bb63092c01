"""What a tokenizer that also serves a finer grid learns from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tessera.config import ImageDataConfig
from tessera.data.loader import Feed
from tessera.data.opening import open_source
from tessera.data.order import Cut
from tessera.recipes.muse.config import MuseConfig, SuperresConfig, tiny
from tessera.recipes.muse.stages import tokenizer_data, tokenizer_step
from tessera.recipes.needs import NeedsConfig


def with_superres(**changes: object) -> MuseConfig:
    return tiny().model_copy(update={"superres": SuperresConfig(resolution=64, **changes)})  # type: ignore[arg-type]


def test_a_shared_tokenizer_sees_parts_as_large_as_the_finer_grid_has_them() -> None:
    found = tokenizer_data(with_superres())
    assert (found.crop, found.zoom, found.resolution) == ("random", 2.0, 32)


def test_without_a_shared_finer_grid_data_stay_as_they_are() -> None:
    assert tokenizer_data(tiny()) == tiny().data
    for alone in (with_superres(needs=NeedsConfig(tokenizer="elsewhere")), with_superres(enlarged=False)):
        assert tokenizer_data(alone) == alone.data


def test_its_batches_are_of_the_coarse_size_and_enlarged(tmp_path: Path) -> None:
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:, :32] = 255  # one edge: a part that is twice as large has at most half of the picture's edges
    for index in range(64):
        Image.fromarray(np.roll(picture, index, axis=1)).save(tmp_path / f"{index:02}.png")
    config = with_superres()
    source = open_source(tmp_path, ImageDataConfig(path=str(tmp_path), workers=0))
    data = config.data.model_copy(update={"path": str(tmp_path), "validation_fraction": 0.0, "workers": 0})
    config = config.model_copy(update={"data": data})
    feed = Feed(
        source=source, config=data, cut=Cut(64, None, 0, 1), seed=0, device=torch.device("cpu"), validation_samples=0,
        preview_samples=0, caches=tmp_path / "caches",
    )  # fmt: skip
    loader = tokenizer_step(config).feed({}, feed)
    (batch,) = next(iter(loader.batches(0)))
    assert batch.images.shape == (64, 3, 32, 32)
    bright = (batch.images[:, 0, 0] > 0).float().mean(1)  # whole pictures are half bright, whatever they were rolled by
    assert (bright - 0.5).abs().max() > 0.2
