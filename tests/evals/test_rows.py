"""Copies, oracle rows and the sentence on health."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.synth.shapes import ShapesOptions, Split, caption, draw, plan_shapes, sample_scene
from tessera.data.synth.shapes_oracle import oracle_accuracy
from tessera.evals.copies import few_note, find_copies, nearest, pixel_vectors
from tessera.evals.health import judge_accuracy, judge_distance, limiting
from tessera.evals.material import Side
from tessera.evals.oracle import readable, reference_rows, tally, wilson


def shapes(split: Split, n: int) -> Side:
    plan = plan_shapes(0, ShapesOptions(image_size=32))
    scenes = [sample_scene(plan, split, index) for index in range(n)]
    return Side(np.stack([draw(scene, 32) for scene in scenes]), tuple(map(caption, scenes)))


def noise(n: int, seed: int, d: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 30), m=st.integers(1, 60), seed=st.integers(0, 2**31))
def test_nearest_is_the_nearest(n: int, m: int, seed: int) -> None:
    queries, bank = noise(n, seed), noise(m, seed + 1)
    gaps = np.sqrt(np.square(queries[:, None].astype(float) - bank[None]).sum(2))
    index, distances = nearest(queries, bank)
    np.testing.assert_allclose(distances, gaps.min(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gaps[np.arange(n), index], gaps.min(1), rtol=1e-4, atol=1e-4)


def test_nearest_over_many_blocks_and_of_equals_the_first() -> None:
    bank = noise(20_000, 0, 3)
    bank[15_000] = bank[3]
    index, distances = nearest(bank[[3, 9_000, 19_999]], bank)
    assert index.tolist() == [3, 9_000, 19_999]
    assert distances.tolist() == [0, 0, 0]
    assert nearest(bank[:0], bank)[1].shape == (0,)


def test_copies_are_found_and_honest_samples_are_not() -> None:
    train, held_out = noise(500, 0), noise(400, 1)
    honest = find_copies(noise(400, 2), held_out, train).as_dict()
    assert honest["share"] < 0.04
    assert honest["held_out_share"] == pytest.approx(0.01)
    samples = noise(400, 2)
    samples[:100] = train[:100] + 1e-4
    found = find_copies(samples, held_out, train)
    assert 0.25 <= found.as_dict()["share"] < 0.28
    assert set(found.ranked[:100].tolist()) == set(range(100))
    assert found.indices[:100].tolist() == list(range(100))


def test_an_exact_copy_counts_where_the_data_hold_duplicates() -> None:
    train = noise(50, 0)
    copies = find_copies(train[:10], train[:30], train).as_dict()
    assert (copies["threshold"], copies["share"], copies["held_out_share"]) == (0.0, 1.0, 1.0)


def test_pixel_distance_is_the_root_mean_square() -> None:
    dark, light = np.zeros((1, 40, 40, 3), np.uint8), np.full((1, 40, 40, 3), 255, np.uint8)
    assert float(np.linalg.norm(pixel_vectors(dark) - pixel_vectors(light))) == pytest.approx(1.0, rel=1e-5)
    assert few_note(99) is not None
    assert few_note(100) is None


def test_wilson_by_the_book() -> None:
    """Newcombe 1998, table I, method 3: 81 of 263 and 0 of 20."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_tally_is_the_oracles_accuracy() -> None:
    side = shapes("heldout", 30)
    pictures, captions = side.pictures[::-1], [text or "" for text in side.captions]
    found = tally(pictures, captions).as_dict()
    assert {name: found[name] for name in found if name not in ("n", "interval")} == oracle_accuracy(pictures, captions)
    assert found["n"] == 30


def test_reference_rows_are_in_order() -> None:
    train, held_out = shapes("train", 300), shapes("heldout", 40)
    captions = [text or "" for text in held_out.captions]
    rows = {name: row.as_dict() for name, row in reference_rows(captions, held_out.pictures, *_pair(train), seed=0).items()}
    assert rows["real"]["joint"] == 1.0
    assert rows["chance"]["joint"] <= rows["nearest"]["joint"] < 0.2  # held-out combinations: no training picture has them
    assert rows["chance"]["colour"] < rows["nearest"]["colour"] < 1.0
    assert rows == {
        name: row.as_dict() for name, row in reference_rows(captions, held_out.pictures, *_pair(train), seed=0).items()
    }


def _pair(side: Side) -> tuple[np.ndarray, tuple[str | None, ...]]:
    return side.pictures, side.captions


def test_what_the_oracle_cannot_read_is_said() -> None:
    side = shapes("train", 3)
    assert readable(side.pictures, side.captions) is None
    assert "square RGB" in (readable(side.pictures[..., :1], side.captions) or "")
    assert "no caption of shapes" in (readable(side.pictures, ["a cat", "", ""]) or "")


def test_the_sentence_names_the_stage_that_loses_most() -> None:
    found = judge_accuracy(1.0, 0.77, 0.66)
    assert found.sentence == (
        "tokenizer reconstructions score 77 %, samples 66 %: the tokenizer loses 23 points, the generator 11 more: "
        "train the tokenizer first"
    )
    assert found.limit == "tokenizer"
    assert judge_accuracy(1.0, 0.95, 0.66).limit == "generator"
    assert judge_accuracy(1.0, 0.99, 0.98).sentence.endswith("neither limits quality")
    assert judge_accuracy(1.0, 0.8, None).limit == "tokenizer"
    assert judge_accuracy(1.0, None, 0.5).limit == "unknown"
    assert "50 points are lost" in judge_accuracy(1.0, None, 0.5).sentence
    assert judge_accuracy(1.0, None, None).limit == "unknown"


def test_the_same_by_distance() -> None:
    assert judge_distance("FD-x", 1.0, 8.0, 10.0).limit == "tokenizer"
    assert judge_distance("FD-x", 1.0, 2.0, 10.0).limit == "generator"
    assert judge_distance("FD-x", 1.0, 1.1, 1.2).limit == "neither"
    assert judge_distance("FD-x", 1.0, 3.0, None).limit == "tokenizer"
    assert judge_distance("FD-x", 1.0, None, 3.0).limit == "unknown"
    assert judge_distance("FD-x", 1.0, None, None).limit == "unknown"
    assert "FD-x is 1 for real pictures, 2 for reconstructions, 10 for samples" in judge_distance("FD-x", 1.0, 2.0, 10.0).sentence


@given(first=st.floats(-1, 1), second=st.floats(-1, 1), least=st.floats(0.01, 0.5))
def test_the_rule(first: float, second: float, least: float) -> None:
    limit = limiting(first, second, least)
    assert (limit == "neither") == (first < least and second < least)
    assert limit != "generator" or second > first
