"""What a tokenizer that also serves a finer grid learns from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tessera.batches import ImageBatch
from tessera.contracts import Context
from tessera.data.loader import Feed
from tessera.data.opening import open_source
from tessera.data.order import Cut
from tessera.recipes.muse.config import MuseConfig, SuperresConfig, tiny
from tessera.recipes.muse.stages import coarse_size, tokenizer_height, tokenizer_step
from tessera.recipes.needs import NeedsConfig
from tessera.tokenizers.image.critic import CriticConfig
from tessera.tokenizers.image.losses import ImageLosses
from tessera.tokenizers.image.stage import build_stage


def with_superres(**changes: object) -> MuseConfig:
    return tiny().model_copy(update={"superres": SuperresConfig(resolution=64, **changes)})  # type: ignore[arg-type]


def test_a_shared_tokenizer_sees_pictures_of_both_sizes() -> None:
    assert (tokenizer_height(with_superres()), coarse_size(with_superres())) == (64, (32, 32))


def test_without_a_shared_finer_grid_pictures_are_of_one_size() -> None:
    for alone in (tiny(), with_superres(needs=NeedsConfig(tokenizer="elsewhere")), with_superres(enlarged=False)):
        assert (tokenizer_height(alone), coarse_size(alone)) == (32, None)


def test_its_batches_are_of_the_finer_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    whole = {}
    for index in range(4):
        whole[f"{index:02}"] = picture = rng.integers(0, 256, (128, 128, 3), np.uint8)
        Image.fromarray(picture).save(tmp_path / f"{index:02}.jpg", quality=100, subsampling=0)
    config = with_superres()
    data = config.data.model_copy(update={"path": str(tmp_path), "validation_fraction": 0.0, "workers": 0})
    source = open_source(tmp_path, data)  # opened for 32 px: a JPEG of 128 px would be read at 32
    feed = Feed(
        source=source, config=data, cut=Cut(4, None, 0, 1), seed=0, device=torch.device("cpu"), validation_samples=0,
        preview_samples=0, caches=tmp_path / "caches",
    )  # fmt: skip
    loader = tokenizer_step(config.model_copy(update={"data": data})).feed({}, feed)
    (batch,) = next(iter(loader.batches(0)))
    assert batch.images.shape == (4, 3, 64, 64)
    for image, key in zip(batch.images, batch.keys, strict=True):
        halved = whole[key].reshape(64, 2, 64, 2, 3).mean((1, 3)) / 127.5 - 1
        seen = image.permute(1, 2, 0).float().numpy()
        assert np.corrcoef(seen.ravel(), halved.ravel())[0, 1] > 0.9, "at 64 px, not 32 enlarged"


def test_its_loss_is_the_mean_of_both_sizes_and_its_sums_are_over_both_grids() -> None:
    config = with_superres().tokenizer.model_copy(update={"critic": None})
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    batch = ImageBatch.stack(list(images), ["a", "b", "c"], [None] * 3, [0, 1, 2]).to(torch.device("cpu"))
    torch.manual_seed(0)
    stage = build_stage(config, 3, small=(32, 32))
    context = Context(0, 0, torch.arange(3))
    plain = ImageLosses(config.loss, None)
    shrunk = replace(batch, images=F.interpolate(batch.images, scale_factor=0.5, mode="bilinear", antialias=True))
    for turn, own in ((stage.turns[0].loss, plain.tokenizer_turn), (stage.measure, plain.measure)):
        assert turn is not None
        large, small, both = own(stage.nets, batch, context), own(stage.nets, shrunk, context), turn(stage.nets, batch, context)
        torch.testing.assert_close(both.total, (large.total + small.total) / 2)
        torch.testing.assert_close(both.parts["psnr"], (large.parts["psnr"] + small.parts["psnr"]) / 2)
        assert both.weight == 3
        assert both.stats["codes"].sum() == 3 * (16 * 16 + 8 * 8)


def test_its_critic_meets_large_pictures_alone() -> None:
    """Who judges no small ones cannot be pleaded with for them, either."""
    tokenizer = with_superres().tokenizer
    critic = CriticConfig(widths=(8, 8), start_step=0, warmup_steps=0)
    torch.manual_seed(0)
    stage = build_stage(tokenizer.model_copy(update={"critic": critic}), 3, small=32)
    sides: list[int] = []
    stage.nets["critic"].register_forward_hook(lambda net, inputs, made: sides.append(inputs[0].shape[-1]))
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    batch = ImageBatch.stack(list(images), ["a", "b"], [None] * 2, [0, 1]).to(torch.device("cpu"))
    made = stage.turns[0].loss(stage.nets, batch, Context(0, 0, torch.arange(2)))
    stage.turns[1].loss(stage.nets, batch, Context(0, 0, torch.arange(2), {"tokenizer": made.hand}))
    assert {"plea", "plea_weight"} <= made.parts.keys()
    assert made.hand.shape[-1] == 64
    assert set(sides) == {64}
