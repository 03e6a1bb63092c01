"""Each measure of clips against a case whose answer is known."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.config import UserError, VideoDataConfig
from tessera.evals import ClipSide, clip_quality, load_clips
from tessera.evals.clip_attributes import Classifier, fit_classifier, read_all, slots_loss, tally_guesses
from tessera.evals.clip_features import fit_clip_extractor, reverse
from tessera.evals.clip_nets import FRAMES, ClipNet, shrink_clips, spread
from tessera.evals.clip_quality import clip_vectors, kept_of, steadiness, still
from tessera.evals.distances import frechet_distance
from tessera.evals.features import Extractor, load_extractor, save_extractor
from tessera.evals.nets import CPU, Fitting
from tessera.evals.retrieval import fit_retriever
from tessera.evals.slots import find_slots
from tests.evals.moving_blocks import blocks

REAL = os.environ.get("TESSERA_REAL_DATA")
TRAIN, TEST = blocks(160, 0), blocks(60, 1)
SHORT, LONGER = Fitting(steps=110, batch_size=8), Fitting(steps=60, batch_size=32)


@pytest.fixture(scope="module")
def extractor() -> Extractor:
    return fit_clip_extractor(TRAIN.clips, TRAIN.captions, SHORT)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return fit_classifier(TRAIN.clips, TRAIN.captions, find_slots(TRAIN.captions), SHORT)


def test_frames_are_spread_over_the_clip() -> None:
    clip = np.arange(17, dtype=np.uint8).reshape(-1, 1, 1, 1)
    assert spread(clip, 5).ravel().tolist() == [0, 4, 8, 12, 16]
    assert spread(clip[:2], 4).ravel().tolist() == [0, 0, 1, 1]
    assert spread(clip[:1], 3).ravel().tolist() == [0, 0, 0]
    small = shrink_clips(TEST.clips, 16)
    assert small.shape == (60, 3, FRAMES, 16, 16)
    np.testing.assert_array_equal(small[7, :, -1].permute(1, 2, 0), TEST.clips[7][-1])


def test_psnr_by_numpy_counts_the_frames_of_each_clip() -> None:
    rng = np.random.default_rng(0)
    made = tuple(np.clip(clip + rng.integers(-9, 10, clip.shape), 0, 255).astype(np.uint8) for clip in TEST.clips)
    errors = [np.square(a.astype(float) - b).mean() for a, b in zip(TEST.clips, made, strict=True)]
    firsts = [np.square(a[0].astype(float) - b[0]).mean() for a, b in zip(TEST.clips, made, strict=True)]
    found = kept_of(TEST.clips, made, CPU)
    assert found["psnr"] == pytest.approx(np.mean([10 * np.log10(255**2 / error) for error in errors]), rel=1e-5)
    assert found["psnr_first"] == pytest.approx(np.mean([10 * np.log10(255**2 / error) for error in firsts]), rel=1e-5)
    assert found["ssim"] is not None
    assert 0.2 < found["ssim"] < 0.999
    same = kept_of(TEST.clips, TEST.clips, CPU)
    assert (same["psnr"], same["ssim"]) == (100.0, pytest.approx(1.0))
    small = [clip[:, :8, :8] for clip in TEST.clips]
    assert kept_of(small, small, CPU)["ssim"] is None


def test_clips_that_are_compared_together_score_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of different lengths and sizes, a few frames at a time."""
    monkeypatch.setattr(clip_quality, "TOGETHER", 6000)
    rng = np.random.default_rng(1)
    sizes = [(3 + number % 3, 16 if number % 2 else 12) for number in range(50)]
    real = [rng.integers(0, 256, (length, side, 16, 3)).astype(np.uint8) for length, side in sizes]
    made = [np.clip(clip + rng.integers(-40, 41, clip.shape), 0, 255).astype(np.uint8) for clip in real]
    alone = [kept_of([a], [b], CPU) for a, b in zip(real, made, strict=True)]
    together = kept_of(real, made, CPU)
    for name, value in together.items():
        assert value == pytest.approx(np.mean([row[name] for row in alone]), rel=1e-5), name
    with pytest.raises(ValueError, match="zip"):
        kept_of(real, made[:-1], CPU)


def test_flicker_by_hand() -> None:
    """Grey values 0, 51, 255: first differences 0.2 and 0.8, the second 0.6."""
    clip = np.repeat(np.array([0, 51, 255], np.uint8).reshape(3, 1, 1, 1), 4, axis=1)
    assert steadiness([clip]) == {"flicker": pytest.approx(0.6), "motion": pytest.approx(0.5)}
    assert steadiness([clip, clip[:1]])["motion"] == pytest.approx(0.5), "one frame does not move"
    assert steadiness([clip[:2]]) == {"flicker": None, "motion": pytest.approx(0.2)}
    ramp = np.arange(0, 250, 25, dtype=np.uint8).reshape(-1, 1, 1, 1)
    assert steadiness([ramp])["flicker"] == pytest.approx(0, abs=1e-6), "even change does not flicker"
    assert steadiness(still(TEST.clips)) == {"flicker": 0, "motion": 0}


def test_distances_of_vectors_are_those_of_pixels() -> None:
    a, b = np.full((5, 16, 16, 3), 100, np.uint8), np.full((9, 16, 16, 3), 151, np.uint8)
    first, second = clip_vectors([a, b])
    assert np.linalg.norm(first - second) == pytest.approx(0.2, rel=1e-5)


def test_the_same_clips_are_at_no_distance_and_others_at_the_floor(extractor: Extractor) -> None:
    real, other = extractor.extract(TEST.clips), extractor.extract(blocks(60, 2).clips)
    floor = frechet_distance(real, other)
    assert frechet_distance(real, real) < 1e-6 * floor
    noise = np.random.default_rng(3)
    noisy = [np.clip(clip + noise.normal(0, 60, clip.shape), 0, 255).astype(np.uint8) for clip in TEST.clips]
    assert frechet_distance(extractor.extract(noisy), other) > 2 * floor


def test_the_extractor_sees_time(extractor: Extractor) -> None:
    """Clips that move right or up, against the same backwards: every frame is as likely in both."""
    assert extractor.name.startswith("clip-words-")
    refuse_backwards(extractor)


@pytest.mark.slow
def test_without_captions_the_extractor_sees_time_too() -> None:
    train = towards(TRAIN)
    fitted = fit_clip_extractor(train.clips, (None,) * len(train), LONGER)
    assert fitted.name.startswith("clip-turns-")
    refuse_backwards(fitted)


def refuse_backwards(fitted: Extractor) -> None:
    one, two = towards(blocks(120, 5)), towards(blocks(120, 6))
    floor = frechet_distance(fitted.extract(one.clips), fitted.extract(two.clips))
    backwards = fitted.extract([clip[::-1] for clip in one.clips])
    assert frechet_distance(backwards, fitted.extract(two.clips)) > 1.5 * floor


def towards(side: ClipSide) -> ClipSide:
    kept = [index for index, caption in enumerate(side.captions) if (caption or "").split()[-1] in ("right", "up")]
    return ClipSide(tuple(side.clips[index] for index in kept), tuple(side.captions[index] for index in kept))


def test_an_extractor_is_saved_and_is_of_one_medium(extractor: Extractor, tmp_path: Path) -> None:
    save_extractor(extractor, tmp_path / "extractor.safetensors")
    loaded = load_extractor(tmp_path / "extractor.safetensors", CPU, "clip")
    assert (loaded.name, loaded.sha256) == (extractor.name, extractor.sha256)
    np.testing.assert_array_equal(loaded.extract(TEST.clips), extractor.extract(TEST.clips))
    with pytest.raises(UserError, match="of another medium"):
        load_extractor(tmp_path / "extractor.safetensors", CPU)


def test_an_extractor_repeats_and_hangs_on_no_neighbour(extractor: Extractor) -> None:
    quick = Fitting(steps=2, batch_size=4)
    one, two, other = (fit_clip_extractor(TRAIN.clips, TRAIN.captions, replace(quick, seed=seed)) for seed in (0, 0, 1))
    assert one.sha256 == two.sha256 != other.sha256
    np.testing.assert_allclose(extractor.extract(TEST.clips[3:4])[0], extractor.extract(TEST.clips)[3], atol=1e-4)
    assert extractor.extract([]).shape == (0, 64)
    with pytest.raises(ValueError, match="got none"):
        fit_clip_extractor([], [], SHORT)


def test_reversal_turns_time_only() -> None:
    clips = torch.arange(2 * 3).view(2, 1, 3, 1, 1).float()
    assert reverse(clips, torch.tensor([False, True])).flatten().tolist() == [0, 1, 2, 5, 4, 3]


def test_attributes_are_found_and_shuffled_captions_are_at_chance(classifier: Classifier) -> None:
    right = classifier.tally(TEST.clips, TEST.captions).as_dict()
    assert right["blue/green/red"] > 0.9
    assert right["down/left/right/up"] > 0.8
    backwards = classifier.tally([clip[::-1] for clip in TEST.clips], TEST.captions).as_dict()
    assert backwards["blue/green/red"] > 0.9
    assert backwards["down/left/right/up"] < 0.2, "backwards is the other way"
    others = blocks(60, 7).captions
    shuffled = classifier.tally(TEST.clips, others).as_dict()
    assert shuffled["blue/green/red"] == pytest.approx(1 / 3, abs=0.2)
    assert shuffled["down/left/right/up"] == pytest.approx(1 / 4, abs=0.2)
    assert shuffled["joint"] < 0.25


def test_guesses_are_counted_by_hand() -> None:
    slots = find_slots(TRAIN.captions)
    asked = read_all(slots, ["a red block moves up", "a blue block moves left", "a green block", "nothing"])
    assert asked.tolist() == [[2, 3], [0, 1], [1, -1], [-1, -1]]
    found = tally_guesses(slots, np.array([[2, 3], [0, 0], [1, 2], [0, 0]]), asked).as_dict()
    assert found["blue/green/red"] == 1
    assert found["down/left/right/up"] == 0.5
    assert found["joint"] == pytest.approx(2 / 3), "a clip of whose caption nothing is known is not judged"
    assert found["n"] == 3


def test_what_a_caption_does_not_say_is_no_target() -> None:
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    loss = slots_loss(logits, torch.tensor([[1, -1], [-1, -1]]), [3, 4])
    chances = logits[0, :3].log_softmax(0)
    assert float(loss.total) == pytest.approx(float(-0.95 * chances[1] - 0.05 * chances.mean()), rel=1e-5)


@pytest.mark.slow
def test_clips_find_their_captions() -> None:
    model = fit_retriever(TRAIN.clips, TRAIN.captions, LONGER)
    scores = model.pictures(TEST.clips) @ model.captions(TEST.captions).T
    best = [TEST.captions[index] for index in scores.argmax(1)]
    assert np.mean([a == b for a, b in zip(best, TEST.captions, strict=True)]) > 0.5


def test_a_net_of_pictures_of_every_size() -> None:
    for side in (16, 32, 64):
        assert ClipNet(1, side, 8)(torch.zeros(2, 1, 3, side, side)).shape == (2, 8)


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="TESSERA_REAL_DATA names no folder")
def test_attributes_of_real_clips() -> None:
    """Two to three minutes on one core. Measured on the validation split: see docs/evaluation.md."""
    config = VideoDataConfig(path=str(Path(REAL or "") / "sprites"), validation_fraction=0.1)
    material = load_clips(config, most_train=2000, most_held_out=300, seed=0)
    slots = find_slots(material.train.captions)
    fitting = Fitting(steps=300, batch_size=32)
    found = fit_classifier(material.train.clips, material.train.captions, slots, fitting)
    row = found.tally(material.held_out.clips, material.held_out.captions).as_dict()
    for word, least in {"walks": 0.95, "left": 0.95, "blond": 0.95, "leather": 0.9, "skirt": 0.4, "afro": 0.6}.items():
        (slot,) = (slot for slot in slots if word in slot.values)
        share = row[slot.name]
        assert isinstance(share, float)
        assert share > least
