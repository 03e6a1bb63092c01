"""A tokenizer of pictures, trained by muse, that phenaki uses frame by frame: the same ids, from a run and from an export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import pipeline, rehearsal
from tessera.config import UserError
from tessera.data.synth.digits import write_digits
from tessera.data.token_cache import TokenCache
from tessera.sampling.package import export_run
from tessera.sampling.session import load
from tests.small import generated, pictures, workshop

__all__ = ["generated", "pictures", "workshop"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frames") / "digits"
    write_digits(path, 16, 0, image_size=32, frames=6)
    return path


def config_of(clips: Path, tokenizer: Path | str, *sets: str) -> Any:
    own = [
        f"base.needs.tokenizer={tokenizer}", "engine.device=cpu", "data.resolution=16", "data.frames=4", "base.batch_size=4",
        "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}", "base.model={width: 16, depth: 1, heads: 2}",
        "sample={steps: 2, chunk: 2}", "data.validation_fraction=0.2",
    ]  # fmt: skip
    return pipeline.resolve("phenaki", preset="tiny", data=str(clips), steps=2, sets=[*own, *sets])


@pytest.mark.parametrize("exported", [False, True])
def test_a_tokenizer_of_pictures_gives_clips_the_ids_of_their_frames(
    exported: bool, generated: Path, clips: Path, tmp_path: Path
) -> None:
    place = export_run(generated, tmp_path / "model") if exported else generated
    config = config_of(clips, place / "tokenizer")
    (estimate,) = rehearsal.dry_run(config)
    assert estimate.stage == "base"
    run = pipeline.train(config, run=tmp_path / "run")
    muse, session = load(generated, device="cpu"), load(run, device="cpu")
    assert session.config.tokenizer.model.kind == "frames"
    assert session.config.tokenizer.model.widths == muse.config.tokenizer.model.widths == (8, 8)
    assert session.steps == {"tokenizer": 3, "base": 2}
    (folder,) = (run / "cache").glob("tokens-*")
    cache, source = TokenCache(folder), pipeline.open_source(session.config)
    assert (cache.grid, cache.time_stride) == ((4, 8, 8), 1)
    for index in (0, 5):
        frames = source.read(index).read(lambda facts: range(4)).frames
        wanted = muse.encode(*frames).numpy()
        assert len(np.unique(wanted)) > 4
        assert np.array_equal(session.encode(frames).numpy()[0], wanted)
        assert np.array_equal(cache.ids(index, 0), wanted)
        decoded = session.decode(session.encode(frames))[0].frames
        for made, picture in zip(decoded, muse.decode(muse.encode(*frames)), strict=True):
            assert np.abs(made.astype(int) - np.asarray(picture).astype(int)).max() <= 1
    drawn = session.sample("a", seed=1, frames=7)[0].frames
    assert drawn.shape == (7, 16, 16, 3)
    pipeline.resume(run, sets=["base.steps=3"])
    model = export_run(run, tmp_path / "phenaki")
    drawn = load(run, device="cpu").sample("a", seed=1)[0].frames
    if exported:
        shutil.rmtree(place)
    assert np.array_equal(load(model, device="cpu").sample("a", seed=1)[0].frames, drawn), "an export stands alone"


def test_sizes_that_do_not_fit_it_are_told(generated: Path, clips: Path, tmp_path: Path) -> None:
    for sets, said in (
        ("data.resolution=17", "data.resolution 17 cannot be divided by the tokenizer's stride 2; use 16 or 18"),
        ("data.channels=1", "was trained on pictures of 3 channels, data.channels is 1"),
    ):
        own = [f"base.needs.tokenizer={generated / 'tokenizer'}", "engine.device=cpu", sets]
        config = pipeline.resolve("phenaki", preset="tiny", data=str(clips), sets=own)
        with pytest.raises(UserError, match=said):
            pipeline.train(config, run=tmp_path / "run")
