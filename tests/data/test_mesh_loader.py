"""Mesh batches: a function of seed and step, cut by ranks, padded little; varied by draws inside the box."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.batches import MeshBatch, Text
from tessera.config import MeshDataConfig
from tessera.data.canonical import quantise, standardise
from tessera.data.loader import Feed
from tessera.data.mesh_cache import MeshCache, write_meshes
from tessera.data.mesh_sources import MeshFolder
from tessera.data.meshes import CachedMeshes, MeshItem, MeshLoader, collate_meshes, drawn_corners, faces_at, padded_length, varied
from tessera.data.order import Cut, Order, Windows
from tessera.media.meshes import Mesh
from tessera.text.encoders import NoTextReader
from tests.data.mesh_makers import fan, write_fans

VARIED: dict[str, Any] = {"scale": 1.25, "yaw": "any", "shift": 0.05}
SIZES = [3 + (7 * place * place) % 90 for place in range(61)]


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    home = tmp_path_factory.mktemp("meshes")
    write_fans(home / "data", SIZES)
    config = MeshDataConfig(workers=0, validation_fraction=0.2, **VARIED)
    made = Feed(
        source=MeshFolder.open(home / "data", config), config=config, cut=Cut(8, None, 0, 1), seed=5, device=torch.device("cpu"),
        validation_samples=10, preview_samples=4, caches=home / "cache", say=lambda line: None, show=lambda line: None,
    )  # fmt: skip
    write_meshes(made)
    return made


def loader(feed: Feed, cut: Cut | None = None, **values: Any) -> MeshLoader:
    config = feed.config.model_copy(update=values)
    return MeshLoader(replace(feed, config=config, cut=cut or feed.cut), MeshCache(write_meshes(feed)), NoTextReader())


def take(made: MeshLoader, first_step: int, count: int) -> list[list[MeshBatch]]:
    stream = made.batches(first_step)
    found = [list(batches) for batches in itertools.islice(stream, count)]
    stream.close()
    return found


def same(one: MeshBatch, two: MeshBatch) -> bool:
    tensors = all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("corners", "num_faces", "positions", "valid"))
    return tensors and (one.keys, one.captions) == (two.keys, two.captions)


# ---- which samples


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_window_holds_each_of_its_positions_once(size: int, batch_size: int, width: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 9, size)
    order = Order(size, seed)

    def lengths_at(positions: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return lengths[[order.locate(int(position))[1] for position in positions]]

    windows = Windows(Cut(batch_size, None, 0, 1), seed, lengths_at, width)
    steps = list(itertools.islice(windows.all_micro_batches(0), 3 * width))
    assert all(len(step) == batch_size for step in steps)
    for window in range(3):
        batches = steps[window * width : (window + 1) * width]
        start = window * width * batch_size
        assert sorted(itertools.chain(*batches)) == list(range(start, start + width * batch_size))
        ranges = sorted((lengths_at(np.array(batch)).min(), lengths_at(np.array(batch)).max()) for batch in batches)
        assert all(high <= low for (_, high), (low, _) in itertools.pairwise(ranges))  # cut from the sorted window


def test_windows_are_shuffled_by_the_seed() -> None:
    def firsts(seed: int) -> list[int]:
        stream = Windows(Cut(2, None, 0, 1), seed, lambda positions: positions).all_micro_batches(0)
        return [batch[0] for batch in itertools.islice(stream, 32)]

    assert firsts(0) != firsts(1)
    assert sorted(firsts(0)) == list(range(0, 64, 2)) != firsts(0)
    assert [first - 32 for first in firsts(0)[16:]] != firsts(0)[:16]


def test_lengths_are_those_of_the_samples_that_the_stream_names(feed: Feed) -> None:
    samples = loader(feed).samples
    assert isinstance(samples, CachedMeshes)
    positions = np.arange(30, 3 * len(samples.indices))
    wanted = [samples.cache.num_faces[samples.indices[samples.order.locate(int(position))[1]]] for position in positions]
    assert faces_at(samples, positions).tolist() == [int(number) for number in wanted]


def test_every_sample_comes_once_an_epoch(feed: Feed) -> None:
    made = loader(feed, Cut(7, None, 0, 1))
    num_train = len(made.train)  # positions 0 ... are all in the first windows
    seen = {
        position: key
        for (batch,) in take(made, 0, 32)
        for position, key in zip(batch.positions.tolist(), batch.keys, strict=True)
    }
    assert sorted(seen) == list(range(32 * 7))
    for epoch in range(32 * 7 // num_train):
        epoch_keys = [seen[position] for position in range(epoch * num_train, (epoch + 1) * num_train)]
        assert sorted(epoch_keys) == sorted(feed.source.key(int(index)) for index in made.train)


@pytest.mark.parametrize("first_step", [1, 15, 16, 21])
def test_starting_anywhere_is_the_tail_of_the_whole(feed: Feed, first_step: int) -> None:
    cut = Cut(6, 4, 0, 1)
    whole, late = take(loader(feed, cut), 0, 24), take(loader(feed, cut), first_step, 24 - first_step)
    for one, two in zip(whole[first_step:], late, strict=True):
        assert len(one) == len(two) == 2
        assert all(map(same, one, two))


def test_ranks_see_slices_of_one_batch(feed: Feed) -> None:
    alone = take(loader(feed, Cut(7, 2, 0, 1)), 3, 20)
    ranks = [take(loader(feed, Cut(7, 2, rank, 2)), 3, 20) for rank in range(2)]
    for step, together in enumerate(alone):
        whole = {item: face for batch in together for item, face in unpadded(batch).items()}
        parts = [item for rank in ranks for batch in rank[step] for item in unpadded(batch).items()]
        assert [item for item, _ in parts] == list(whole)  # in the same order
        assert all(torch.equal(face, whole[item]) for item, face in parts)


def unpadded(batch: MeshBatch) -> dict[tuple[int, str, str | None], torch.Tensor]:
    names = zip(batch.positions.tolist(), batch.keys, batch.captions, strict=True)
    return {name: batch.corners[row, : batch.num_faces[row]] for row, name in enumerate(names)}


def test_workers_change_nothing(feed: Feed) -> None:
    alone, workers = take(loader(feed), 2, 6), take(loader(feed, workers=2), 2, 6)
    assert all(same(one, two) for (one,), (two,) in zip(alone, workers, strict=True))


# ---- padding


def test_padding_is_small(feed: Feed) -> None:
    """Against the same stream cut where it lies."""
    made = loader(feed, scale=1.0, yaw="none", shift=0.0)
    sorted_batches = take(made, 0, 32)
    made.stream = made.cut
    plain_batches = take(made, 0, 32)
    assert sum(int(batch.num_faces.sum()) for (batch,) in sorted_batches) == sum(
        int(batch.num_faces.sum()) for (batch,) in plain_batches
    )
    assert share_of_padding(sorted_batches) < 0.2 < 0.45 < share_of_padding(plain_batches)


def share_of_padding(steps: list[list[MeshBatch]]) -> float:
    used = sum(int(batch.num_faces.sum()) for step in steps for batch in step)
    return 1 - used / sum(batch.corners.shape[0] * batch.corners.shape[1] for step in steps for batch in step)


def test_padded_lengths() -> None:
    lengths = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    lengths += [80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
    for number in range(1, 1025):
        assert padded_length(number) == next(length for length in lengths if length >= number)


def test_a_batch_is_zero_behind_the_end_of_a_mesh(feed: Feed) -> None:
    ((batch,),) = take(loader(feed), 0, 1)
    assert batch.corners.dtype == torch.int16
    assert batch.num_faces.dtype == batch.positions.dtype == torch.int64
    inside = torch.arange(batch.corners.shape[1]) < batch.num_faces[:, None]
    assert (batch.corners[~inside] == 0).all()
    assert (batch.corners[inside] > 0).flatten(1).any(1).all()
    moved = batch.to(torch.device("cpu"))
    assert moved.corners.dtype == torch.int64
    assert torch.equal(moved.corners, batch.corners.long())
    assert moved.keys == batch.keys


def test_text_is_read_with_captions_and_keys() -> None:
    samples = [(f"k{number}", f"caption {number}") for number in range(3)]
    heard: list[Any] = []

    def read(captions: Any, keys: Any) -> Text:
        heard.append((captions, keys))
        return Text(torch.ones(3, 1, dtype=torch.int64))

    corners = quantise(standardise(fan(5))[0], 32)
    batch = collate_meshes([MeshItem(key, caption, 7, corners) for key, caption in samples], read)
    assert heard == [(("caption 0", "caption 1", "caption 2"), ("k0", "k1", "k2"))]
    assert batch.corners.shape == (3, 6, 3, 3)
    assert batch.text.mask.all()


# ---- one sample


@pytest.mark.parametrize("options", [{"scale": 2.0}, {"yaw": "quarters"}, {"yaw": "any"}, {"shift": 0.5}, VARIED])
def test_variation_stays_in_the_box_and_is_a_function_of_the_draw(options: dict[str, Any]) -> None:
    mesh, config = standardise(fan(11, height=0.3))[0], MeshDataConfig(**options)
    found = set()
    for draw in range(40):
        moved = varied(mesh, config, draw)
        assert np.abs(moved.vertices).max() <= 1
        assert np.array_equal(moved.faces, mesh.faces)
        assert np.array_equal(moved.vertices, varied(mesh, config, draw).vertices)
        found.add(moved.vertices.tobytes())
    assert len(found) == (4 if options == {"yaw": "quarters"} else 40)


def test_each_variation_does_what_it_says() -> None:
    box = standardise(fan(4, height=0.5))[0]
    size = np.ptp(box.vertices, axis=0)
    ratios = np.array([np.ptp(varied(box, MeshDataConfig(scale=1.5), draw).vertices, axis=0) / size for draw in range(300)])
    relative = ratios / ratios[:, :1]  # of two axes: between 1 / 1.5^2 and 1.5^2, on either side of 1
    assert relative.max() <= 1.5**2 * 1.001
    assert relative.min() >= 1.5**-2 * 0.999
    assert relative[:, 1].max() > 1.7
    assert relative[:, 1].min() < 1 / 1.7
    corners = {tuple(map(tuple, varied(box, MeshDataConfig(yaw="quarters"), draw).vertices.tolist())) for draw in range(40)}
    x, y, z = box.vertices.T
    assert corners == {tuple(map(tuple, np.stack([*turn, z], axis=1).tolist())) for turn in ((x, y), (-y, x), (-x, -y), (y, -x))}
    turned = varied(box, MeshDataConfig(yaw="any"), 3)
    assert np.allclose(turned.vertices[:, 2] / np.ptp(turned.vertices[:, 2]), z / np.ptp(z), atol=1e-5)  # up stays up
    shifts = np.array([varied(box, MeshDataConfig(shift=0.2), draw).vertices - box.vertices for draw in range(300)])
    assert np.ptp(shifts, axis=1).max() < 2e-6  # all vertices alike
    assert np.abs(shifts).max(axis=(0, 1)) == pytest.approx([0.05, 0.05, 0.2], abs=0.01)  # as far as there is room


def test_turning_keeps_faces_the_right_way_round() -> None:
    """The signed volume under a tent is that of the tent, whatever is drawn."""

    def volume(mesh: Mesh) -> float:
        a, b, c = (mesh.vertices[mesh.faces[:, corner]] for corner in range(3))
        return float((np.cross(a, b) * c).sum() / 6)

    tent = standardise(fan(9))[0]
    tent = Mesh(tent.vertices - [0, 0, tent.vertices[:, 2].min()], tent.faces)
    assert volume(tent) > 0
    for draw in range(10):
        moved = varied(tent, MeshDataConfig(scale=1.5, yaw="any"), draw)
        assert volume(Mesh(moved.vertices - [0, 0, moved.vertices[:, 2].min()], moved.faces)) > 0


def test_a_mesh_that_a_draw_would_flatten_is_taken_as_it_is() -> None:
    thin = standardise(Mesh(np.array([[0, 0, 0], [1, 0, 0.0], [1, 0, 0.04]]), np.array([[0, 1, 2]])))[0]
    config = MeshDataConfig(scale=4.0, shift=0.05, bins=64)
    counts = Counter(len(drawn_corners(thin, config, draw)) for draw in range(60))
    assert counts == {1: 60}
    assert any(len(quantise(varied(thin, config, draw), 64)) == 0 for draw in range(60))  # or nothing was tried


def test_draws_differ_by_epoch_and_validation_is_fixed(feed: Feed) -> None:
    made = loader(feed, workers=0)
    samples = made.samples
    size = len(made.train)
    first = {samples[position].key: samples[position].corners for position in range(size)}
    second = {samples[position].key: samples[position].corners for position in range(size, 2 * size)}
    assert all(not np.array_equal(first[key], second[key]) for key in first)
    one, two = made.validation(), loader(feed, Cut(8, None, 0, 1), scale=1.0, yaw="none", shift=0.0).validation()
    assert len(one) == 2
    assert all(map(same, one, two))
    assert sum(int(batch.valid.sum()) for batch in one) == 10
    keys = [key for batch in one for key, valid in zip(batch.keys, batch.valid.tolist(), strict=True) if valid]
    assert sorted(keys) == sorted(feed.source.key(int(index)) for index in made.held_out[:10]), "each once"
    counts = [int(number) for batch in one for number in batch.num_faces[batch.valid]]
    assert counts == sorted(counts)
    assert same(made.preview(), made.preview())
    assert made.preview().corners.shape[0] == 4


def test_validation_meshes_are_the_files(feed: Feed) -> None:
    made = loader(feed)
    names = {feed.source.key(index): index for index in range(len(feed.source))}
    for batch in made.validation():
        for row, key in enumerate(batch.keys):
            wanted = quantise(standardise(feed.source.read(names[key]))[0], feed.config.bins)
            assert np.array_equal(batch.corners[row, : batch.num_faces[row]].numpy(), wanted)


def test_samples_travel_to_workers_without_the_arrays(feed: Feed) -> None:
    samples = loader(feed).samples
    assert samples[0].corners.shape[1:] == (3, 3)  # opens a shard
    again = pickle.loads(pickle.dumps(samples))
    assert np.array_equal(again[5].corners, samples[5].corners)
