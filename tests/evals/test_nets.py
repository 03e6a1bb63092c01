"""The extractors and the retrieval model: deterministic, named by their weights, able to tell what they were fitted for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tessera.config import UserError
from tessera.evals.features import (
    Extractor,
    fit_extractor,
    inception_extractor,
    load_extractor,
    save_extractor,
    turned,
)
from tessera.evals.nets import CPU, Fitting, Pictures, shrink, side_for
from tessera.evals.retrieval import candidates_for, chance, fit_retriever, phrase_ids, recall, unit
from tessera.evals.words import nearest_captions, phrases_of, telling_words, which_words, words_of

COLOURS = {"red": (220, 30, 30), "green": (0, 165, 60), "blue": (30, 60, 225), "black": (20, 20, 20)}
PLACES = {"left": slice(0, 8), "right": slice(8, 16)}
SHORT = Fitting(steps=60, batch_size=32)


def blocks(n: int, seed: int) -> tuple[Pictures, list[str]]:
    """A coloured half of a white picture, with noise, and its words."""
    rng = np.random.default_rng(seed)
    pictures, captions = np.full((n, 16, 16, 3), 245, np.uint8), []
    for picture in pictures:
        colour, place = rng.choice(list(COLOURS)), rng.choice(list(PLACES))
        picture[:, PLACES[place]] = COLOURS[colour]
        picture[:] = np.clip(picture + rng.normal(0, 6, picture.shape), 0, 255)
        captions.append(f"a {colour} block on the {place}")
    return pictures, captions


@pytest.fixture(scope="module")
def extractor() -> Extractor:
    return fit_extractor(*blocks(200, 0), SHORT)


def test_words_are_lower_case_and_telling_ones_differ_between_captions() -> None:
    assert words_of("A Red, circle!") == ["a", "red", "circle"]
    assert words_of(None) == []
    captions = ["a red cat", "a blue cat", "a red dog", None]
    assert telling_words(captions) == ["a", "cat", "red"]  # blue and dog occur once
    assert telling_words(captions[:3]) == ["cat", "red"]  # all three have an a
    assert which_words(["red red cat", None], ["cat", "dog", "red"]).tolist() == [[1, 0, 1], [0, 0, 0]]
    assert phrases_of("a red cat") == ["a", "red", "cat", "a red", "red cat", "a red cat"]


def test_the_nearest_caption_shares_most_phrases() -> None:
    known = ["a blue ring", "a red circle left of a blue ring", "a blue ring left of a red circle", None]
    assert nearest_captions(["a blue ring left of a red square", "a ring", "zebra"], known).tolist() == [2, 0, 0]


def test_nearest_captions_in_many_blocks() -> None:
    known = [f"picture number {k}" for k in range(2500)]
    assert nearest_captions([known[7], known[2400]], known).tolist() == [7, 2400]


def test_a_picture_enters_at_a_size_it_has() -> None:
    assert [side_for(height) for height in (8, 16, 31, 32, 64, 256)] == [16, 16, 16, 32, 64, 64]
    assert shrink(np.full((3, 40, 40, 3), 7, np.uint8), 16).unique().tolist() == [7]
    with pytest.raises(ValueError, match="expected uint8"):
        shrink(np.zeros((1, 4, 4, 3), np.float32), 16)


def test_the_extractor_repeats_and_is_named_by_its_weights(extractor: Extractor) -> None:
    before = torch.get_rng_state()
    again, other = fit_extractor(*blocks(200, 0), SHORT), fit_extractor(*blocks(200, 0), Fitting(60, 32, seed=1))
    assert torch.equal(before, torch.get_rng_state())
    assert again.name == extractor.name == f"words-{extractor.sha256[:8]}"
    assert other.name != extractor.name
    pictures, _ = blocks(20, 5)
    np.testing.assert_array_equal(again.extract(pictures), extractor.extract(pictures))
    assert extractor.extract(pictures).shape == (20, 64)
    assert extractor.extract(pictures[:0]).shape == (0, 64)


def test_its_distance_is_never_called_fid(extractor: Extractor) -> None:
    assert extractor.measure_name("FD") == f"FD-words-{extractor.sha256[:8]}"
    assert extractor.measure_name("KD") == f"KD-words-{extractor.sha256[:8]}"


def test_features_keep_what_captions_say(extractor: Extractor) -> None:
    """The nearest neighbour by features has the same caption, for pictures that were not fitted."""
    train, words = blocks(200, 0)
    pictures, captions = blocks(60, 9)
    gaps = np.square(extractor.extract(pictures)[:, None] - extractor.extract(train)[None]).sum(2)
    assert np.mean([words[i] == caption for i, caption in zip(gaps.argmin(1), captions, strict=True)]) > 0.95


def test_without_captions_turns_are_told() -> None:
    pictures, _ = blocks(50, 0)
    found = fit_extractor(pictures, [None] * 50, Fitting(steps=3, batch_size=8))
    assert found.name == f"turns-{found.sha256[:8]}"
    assert found.extract(pictures).shape == (50, 64)
    same = fit_extractor(pictures, ["a block"] * 50, Fitting(steps=3, batch_size=8))  # captions that tell nothing
    assert same.name == found.name


def test_turns_and_blurs() -> None:
    images = torch.randn(8, 3, 6, 6)
    made = turned(images, torch.arange(8))
    for quarters in range(4):
        torch.testing.assert_close(made[quarters], torch.rot90(images[quarters], quarters, (1, 2)))
        assert made[4 + quarters].std() < 0.6 * images[4 + quarters].std()


def test_a_saved_extractor_comes_back(extractor: Extractor, tmp_path: Path) -> None:
    save_extractor(extractor, tmp_path / "deep" / "extractor.safetensors")
    loaded = load_extractor(tmp_path / "deep" / "extractor.safetensors", CPU)
    assert (loaded.name, loaded.sha256) == (extractor.name, extractor.sha256)
    pictures, _ = blocks(5, 1)
    np.testing.assert_array_equal(loaded.extract(pictures), extractor.extract(pictures))


def test_what_is_no_extractor_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no tensors")
    for path in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(UserError, match=r"evaluate.extractor: .* is no extractor"):
            load_extractor(path, CPU)


class FakeInception(nn.Module):
    """As the published file behaves: bytes in, chances or features out."""

    def forward(self, x: Tensor, return_features: bool = False, no_output_bias: bool = False) -> Tensor:
        assert x.dtype == torch.uint8
        assert x.shape[1] == 3
        means = x.float().mean([2, 3])
        return means.repeat(1, 2) if return_features else (means + (0 if no_output_bias else 1)).softmax(1)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_torchscript_inception_gives_fid(channels: int) -> None:
    wrapped = inception_extractor(torch.jit.script(FakeInception()), "0" * 64)
    pictures = np.full((3, 32, 32, channels), 9, np.uint8)
    assert wrapped.extract(pictures).tolist() == [[9.0] * 6] * 3
    assert [wrapped.measure_name(kind) for kind in ("FD", "KD", "IS")] == ["FID", "KID", "IS"]
    assert wrapped.classify is not None
    np.testing.assert_allclose(wrapped.classify(pictures), np.full((3, 3), 1 / 3), rtol=1e-6)
    with pytest.raises(ValueError, match="was not fitted here"):
        save_extractor(wrapped, Path("nowhere"))


def test_retrieval_finds_captions_of_new_pictures() -> None:
    model = fit_retriever(*blocks(300, 0), SHORT)
    pictures, captions = blocks(60, 7)
    candidates = candidates_for(captions, 8, seed=0)
    right = recall(model.pictures(pictures), model.captions(captions), candidates)
    shuffled = recall(model.pictures(pictures[::-1].copy()), model.captions(captions), candidates)
    assert right["r@1"] > 0.9
    assert shuffled["r@1"] < 0.4
    assert model.sha256 == fit_retriever(*blocks(300, 0), SHORT).sha256


def test_candidates_are_other_texts_and_ones_own() -> None:
    captions = ["x", "y", "x", "z", "w"]
    table = candidates_for(captions, 3, seed=1)
    assert table.shape == (5, 3)
    for index, row in enumerate(table):
        assert row[0] == index
        assert len({captions[place] for place in row}) == 3
    assert candidates_for(captions, 32, seed=1).shape == (5, 4)
    assert candidates_for(["x"] * 4, 32, seed=1).shape == (4, 1)


def test_recall_by_hand() -> None:
    rows = np.eye(8, dtype=np.float32)
    candidates = candidates_for([str(k) for k in range(8)], 8, seed=0)
    assert recall(rows, rows, candidates) == {"r@1": 1.0, "r@5": 1.0}
    assert recall(np.zeros((8, 8), np.float32), rows, candidates) == {"r@1": 0.0, "r@5": 0.0}  # all tied: nothing is found
    assert chance(32) == {"r@1": 1 / 32, "r@5": 5 / 32}
    assert chance(2) == {"r@1": 0.5, "r@5": 1.0}


def test_phrases_as_numbers() -> None:
    ids = phrase_ids(["a red cat", None, "word " * 200])
    assert (ids > 0).sum(1).tolist() == [6, 0, 96]
    assert torch.equal(ids[0], phrase_ids(["A red, cat"])[0])
    assert np.linalg.norm(unit(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)), axis=1).tolist() == pytest.approx([1, 0])
