"""The loader of clips: the same frames from any number of ranks, workers and micro-batches; a stated share of pictures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.batches import VideoBatch
from tessera.config import UserError, VideoDataConfig
from tessera.data.clip_sources import as_clip_source
from tessera.data.clips import ClipLoader, PreparedClips
from tessera.data.loader import Feed
from tessera.data.opening import open_source
from tessera.data.order import Cut
from tessera.data.picking import frame_rate
from tessera.data.sources import Source
from tessera.media.clips import Clip
from tests.data.clip_makers import noise, save_apng, save_frames

CPU = torch.device("cpu")
AUGMENTED: dict[str, Any] = {"crop": "random", "zoom": 1.5, "flip": "always", "stride": 2}
LENGTHS = [1, 2, 5, 8, 13, 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 clips of noise, of 2 to 20 frames, and 8 single pictures; some in folders of frames."""
    path = tmp_path_factory.mktemp("clips")
    for number in range(32):
        frames = noise(number, 1 if number % 4 == 0 else LENGTHS[1 + number % 5], 16, 16 + number % 3 * 6)
        if number % 8 == 1:
            save_frames(path / f"{number:02d}", frames)
        else:
            save_apng(path / f"{number:02d}.png", frames)
        (path / f"{number:02d}.txt").write_text(f"clip {number}\nnumber {number}")
    return path


def loader(
    source: Source | Path, *, batch_size: int = 8, micro: int | None = None, rank: int = 0, world_size: int = 1, seed: int = 0,
    **data: Any,
) -> ClipLoader:  # fmt: skip
    config = VideoDataConfig(**{"resolution": 16, "frames": 5, "workers": 0, "validation_fraction": 0.2, **data})
    opened = open_source(source, config) if isinstance(source, Path) else source
    cut = Cut(batch_size, micro, rank, world_size)
    return ClipLoader(opened, config, cut, seed=seed, device=CPU, validation_samples=512, preview_samples=4)


def take(made: ClipLoader, steps: int, first_step: int = 0) -> list[Sequence[VideoBatch]]:
    stream = made.batches(first_step)
    try:
        return list(itertools.islice(stream, steps))
    finally:
        stream.close()


def flat(steps: Sequence[Sequence[VideoBatch]]) -> list[tuple[str, str | None, int, int, bytes]]:
    """Key, caption, position, length and pixels of every sample, in order."""
    return [
        (key, caption, int(position), int(length), frames.numpy().tobytes())
        for step in steps
        for batch in step
        for key, caption, position, length, frames in zip(
            batch.keys, batch.captions, batch.positions, batch.lengths, batch.frames, strict=True
        )
    ]


@pytest.mark.parametrize("share", [None, 0.3])
def test_ranks_workers_and_micro_batches_change_no_pixel(folder: Path, share: float | None) -> None:
    options: dict[str, Any] = {**AUGMENTED, "image_share": share}
    alone = flat(take(loader(folder, **options), 9))
    assert flat(take(loader(folder, workers=2, micro=3, **options), 9)) == alone
    ranks = [take(loader(folder, micro=2, rank=rank, world_size=3, **options), 9) for rank in range(3)]
    assert sorted([row for rank in ranks for row in flat(rank)], key=lambda row: row[2]) == alone
    assert flat(take(loader(folder, micro=4, **options), 4, first_step=5)) == alone[40:]
    assert [row[2] for row in alone] == list(range(72))


def test_every_sample_once_an_epoch_and_every_epoch_another_window(folder: Path) -> None:
    made = loader(folder, batch_size=7)
    size = len(made.train)
    seen = flat(take(made, -(-2 * size // 7)))[: 2 * size]
    for epoch in (seen[:size], seen[size:]):
        assert sorted(row[0] for row in epoch) == sorted(made.source.key(int(index)) for index in made.train)
    first, second = ({row[0]: row[4] for row in epoch} for epoch in (seen[:size], seen[size:]))
    long = [key for key in first if LENGTHS[1 + int(key) % 5] > 8 and int(key) % 4]
    assert sum(first[key] != second[key] for key in long) > len(long) // 2


def test_lengths_and_masks_are_those_of_the_clips(folder: Path) -> None:
    for batch in itertools.chain.from_iterable(take(loader(folder), 4)):
        for key, length, mask, frames in zip(batch.keys, batch.lengths, batch.mask, batch.frames, strict=True):
            stored = 1 if int(key) % 4 == 0 else LENGTHS[1 + int(key) % 5]
            assert int(length) == int(mask.sum()) == min(5, stored)
            for place in range(int(length), 5):
                assert torch.equal(frames[:, place], frames[:, int(length) - 1])
        moved = batch.to(CPU)
        assert moved.frames.dtype == torch.float32
        assert -1 <= moved.frames.min() < -0.9 < 0.9 < moved.frames.max() <= 1


# ---- pictures among clips


def test_pictures_come_at_their_positions_and_all_equally_often(folder: Path) -> None:
    made = loader(folder, image_share=0.3, batch_size=10)
    samples = made.samples
    assert isinstance(samples, PreparedClips)
    stills = {made.source.key(int(index)) for index in made.train if int(made.source.key(int(index))) % 4 == 0}
    clips = {made.source.key(int(index)) for index in made.train} - stills
    assert {made.source.key(int(index)) for index in samples.stills} == stills
    rounds = 10 * len(stills) * len(clips) // 10  # whole epochs of both
    keys = [samples[position].key for position in range(rounds)]
    for position, key in enumerate(keys):
        is_picture = (position + 1) * 3 // 10 > position * 3 // 10
        assert (key in stills) == is_picture
    for pool, share in ((stills, 3), (clips, 7)):
        counts = Counter(key for key in keys if key in pool)
        assert set(counts) == pool
        assert max(counts.values()) - min(counts.values()) <= 1
        assert abs(sum(counts.values()) - rounds * share // 10) <= 1


def test_without_picture_files_pictures_are_frames_of_clips(tmp_path: Path) -> None:
    for number in range(6):
        save_apng(tmp_path / f"{number}.png", noise(number, 7))
    made = loader(tmp_path, image_share=0.5, validation_fraction=0.0)
    places = Counter[int]()
    for position in range(120):
        item = made.samples[position]
        if position % 2:
            matches = [place for place in range(7) if np.array_equal(item.frames, noise(int(item.key), 7)[place : place + 1])]
            assert len(matches) == 1
            places[matches[0]] += 1
        else:
            assert len(item.frames) == 5
    assert len(places) == 7
    assert Counter(made.samples[position].key for position in range(60)) == Counter({str(number): 10 for number in range(6)})


@pytest.mark.parametrize("share", [None, 0.0])
def test_no_share_and_a_share_of_nothing(folder: Path, share: float | None) -> None:
    made = loader(folder, image_share=share)
    keys = {made.samples[position].key for position in range(60)}
    assert any(int(key) % 4 == 0 for key in keys) == (share is None)


def test_a_share_of_pictures_needs_clips(tmp_path: Path) -> None:
    for number in range(6):
        save_apng(tmp_path / f"{number}.png", noise(number, 1))
    assert len(loader(tmp_path, validation_fraction=0.0).train) == 6
    with pytest.raises(UserError, match=r"data.image_share=0.5 mixes pictures with clips, and all 6 training samples are single"):
        loader(tmp_path, image_share=0.5, validation_fraction=0.0)


def test_validation_shows_all_that_is_held_out_as_it_is(folder: Path) -> None:
    made, plain = loader(folder, image_share=0.3, **AUGMENTED), loader(folder, stride=2)
    assert flat([made.validation()]) == flat([plain.validation()]) == flat([plain.validation()])
    assert {row[0] for row in flat([made.validation()])} == {made.source.key(int(index)) for index in made.held_out}
    assert flat([[made.preview()]]) == flat([[plain.preview()]])


# ---- what cannot be read


def test_what_cannot_be_read_is_replaced_by_its_like_and_told(tmp_path: Path) -> None:
    for number in range(12):
        save_apng(tmp_path / f"{number:02d}.png", noise(number, 1 if number % 2 else 6))
    (tmp_path / "03.png").write_bytes(b"broken")  # nobody knows that it was a still: it is among the clips
    (tmp_path / "04.png").write_bytes((tmp_path / "04.png").read_bytes()[:60])
    save_frames(tmp_path / "walk", noise(0, 4))
    (tmp_path / "walk/frame_0001.png").write_bytes(b"broken")
    made = loader(tmp_path, image_share=0.4, validation_fraction=0.0, batch_size=13)
    batches = [batch for step in take(made, 6) for batch in step]
    assert all(batch.valid.all() for batch in batches)
    faults = {fault.split(":")[0].rsplit("/", 1)[1] for batch in batches for fault in batch.faults}
    assert faults == {"03.png", "04.png", "frame_0001.png"}
    keys = {key for batch in batches for key in batch.keys}
    assert not {"03", "04", "walk"} & keys
    assert [int(length) > 1 for batch in batches for length in batch.lengths] == [
        not (position + 1) * 2 // 5 > position * 2 // 5 for position in range(78)
    ]
    half = loader(tmp_path, validation_fraction=0.5, batch_size=1)
    unread = {batch.keys[0] for batch in half.validation() if not batch.valid.any()}
    assert unread == {half.source.key(int(index)) for index in half.held_out} & {"03", "04", "walk"}
    assert unread


def test_a_feed_of_a_dataset_in_python(tmp_path: Path) -> None:
    items = [{"key": str(number), "clip": noise(number, 6), "caption": f"clip {number}"} for number in range(8)]
    feed = Feed(
        source=as_clip_source(items), config=VideoDataConfig(resolution=16, frames=9, workers=2, validation_fraction=0.0),
        cut=Cut(8, None, 0, 1), seed=0, device=CPU, validation_samples=4, preview_samples=2, caches=tmp_path,
    )  # fmt: skip
    batch = take(ClipLoader.of(feed), 1)[0][0]
    assert sorted(zip(batch.keys, batch.captions, strict=True)) == [(str(number), f"clip {number}") for number in range(8)]
    for key, frames in zip(batch.keys, batch.frames, strict=True):
        assert np.array_equal(frames[:, :6].permute(1, 2, 3, 0).numpy(), noise(int(key), 6))
    assert batch.lengths.tolist() == [6] * 8


@pytest.mark.parametrize(("fps", "stride", "rate"), [(24.0, 1, 24.0), (24.0, 5, 4.8), (1000.0, 1, 240.0), (0.01, 64, 0.001)])
def test_the_rate_of_any_clip_is_one_that_a_config_may_have(fps: float, stride: int, rate: float) -> None:
    """It goes into the config of the run, which is read again."""
    source = as_clip_source([{"key": "still", "clip": noise(0, 1)}, {"key": "moves", "clip": Clip(noise(1, 3), fps)}])
    found = frame_rate(source, VideoDataConfig(stride=stride))
    assert found == rate
    assert VideoDataConfig(fps=found).fps == rate
    assert frame_rate(as_clip_source([{"key": "still", "clip": noise(0, 1)}]), VideoDataConfig()) is None
