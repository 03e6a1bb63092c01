"""The whole evaluation of clips with models that are known: one that knows the answers, one that copies, one that is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.config import VideoDataConfig, VideoEvaluateConfig
from tessera.contracts import Scene
from tessera.evals import ClipMaterial, ClipSide, ClipSubject, Evaluation, evaluate_clips, lines, load_clips, write_evaluation
from tessera.evals.clip_attributes import Classifier
from tessera.evals.clip_evaluate import Clips
from tessera.evals.clip_stories import Story, identity_by_features, identity_by_slots, turned_back, write_stories
from tessera.evals.slots import find_slots
from tessera.media.clips import Frames
from tests.evals.moving_blocks import blocks

QUICK = VideoEvaluateConfig(n=12, fit_steps=1, resamples=3, stories=4)
MATERIAL = ClipMaterial(blocks(24, 0), blocks(24, 1), 30, "the validation split")


def darkened(clips: Clips) -> Clips:
    return [(clip // 4 * 4).astype(np.uint8) for clip in clips]


def knowing(material: ClipMaterial, asked: list[tuple[str, int, int]] | None = None) -> ClipSubject:
    """Answers with the true clips, in order; tells stories of true clips."""
    places = iter(range(len(material.held_out)))

    def sample(captions: Sequence[str], lengths: Sequence[int], seed: int) -> Clips:
        if asked is not None:
            asked.extend((caption, length, seed) for caption, length in zip(captions, lengths, strict=True))
        return [material.held_out.clips[next(places)] for _ in captions]

    def tell(stories: Sequence[Sequence[Scene]], seed: int) -> Clips:
        known = dict(zip(material.held_out.captions, material.held_out.clips, strict=True))
        return [np.resize(known[scenes[0].caption], (sum(scene.frames for scene in scenes), 16, 16, 3)) for scenes in stories]

    return ClipSubject(
        sample=sample, reconstruct=darkened, tell=tell, count_codes=lambda clips: torch.tensor([0.0, 1, 1, 2]) * len(clips),
        held_out_loss=lambda: {"base": 1.5}, about={"base": "step 3"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def known() -> Evaluation:
    return evaluate_clips(knowing(MATERIAL), MATERIAL, QUICK)


def test_a_perfect_model_scores_as_real_clips_do(known: Evaluation) -> None:
    report = known.report
    assert report["oracle"]["skipped"].startswith("these data have no oracle")
    rows = report["attributes"]["rows"]
    assert set(rows) == {"real", "reconstruction", "samples", "chance"}
    assert rows["samples"] == rows["real"]
    assert report["attributes"]["slots"] == {
        "blue/green/red": ["blue", "green", "red"], "down/left/right/up": ["down", "left", "right", "up"],
    }  # fmt: skip
    assert report["attributes"]["mean"] == pytest.approx(
        (rows["samples"]["blue/green/red"] + rows["samples"]["down/left/right/up"]) / 2
    )
    assert report["fd"]["rows"]["samples"]["value"] == pytest.approx(report["fd"]["rows"]["floor"]["value"])
    assert report["fd"]["name"].startswith("FD-clip-words-")
    assert "n=12 < d=64" in report["fd"]["note"]
    assert report["copies"]["pixels"]["median"] == report["copies"]["pixels"]["held_out_median"]
    assert report["retrieval"]["rows"]["samples"] == report["retrieval"]["rows"]["real"]
    assert report["reconstruction"]["psnr"] > 40 > report["reconstruction"]["rows"]["still"]["psnr"]
    assert report["flicker"]["rows"]["samples"] == report["flicker"]["rows"]["real"]
    assert report["codes"] == {"codes_used": 0.75, "perplexity": pytest.approx(2**1.5), "vocab_size": 4, "tokens": 48}
    assert report["loss"] == {"base": 1.5}
    assert report["health"]["measure"] == "attributes"
    assert report["notes"] == ["24 of 30 training clips are used (evaluate.train_samples)"]


def test_a_report_repeats_and_is_written(known: Evaluation, tmp_path: Path) -> None:
    written = write_evaluation(known, tmp_path / "evaluation")
    assert [path.name for path in written] == ["evaluation.json", "evaluation.png", "extractor.safetensors"]
    assert json.loads(written[0].read_text()) == known.report
    with Image.open(written[1]) as picture:
        assert picture.size[0] > 2 * 8 * 64
    again = evaluate_clips(knowing(MATERIAL), MATERIAL, QUICK.model_copy(update={"extractor": str(written[2])}))
    assert json.dumps(again.report) == json.dumps(known.report)


def test_lines_name_every_row(known: Evaluation) -> None:
    text = "\n".join(lines(known.report))
    words = (
        "chance", "floor", "real", "reconstruction", "samples", "still", "R@1", "health: ", "loss: ", "PSNR", "perplexity",
        "cosine", "down/left/right/up", "real clips", "training clips", "4 stories of three scenes",
    )  # fmt: skip
    assert [word for word in words if word not in text] == []
    assert "pictures" not in text


def test_captions_are_asked_at_the_length_of_their_clips() -> None:
    asked: list[tuple[str, int, int]] = []
    evaluate_clips(knowing(MATERIAL, asked), MATERIAL, QUICK.model_copy(update={"n": 7}))
    assert [row[:2] for row in asked] == list(zip(MATERIAL.held_out.captions[:7], MATERIAL.held_out.lengths[:7], strict=True))


def test_copies_are_caught() -> None:
    def sample(captions: Sequence[str], lengths: Sequence[int], seed: int) -> Clips:
        return [np.resize(clip, (length, 16, 16, 3)) for clip, length in zip(train.clips, lengths, strict=False)]

    train = ClipSide(tuple(np.repeat(clip[:1], 9, 0) for clip in MATERIAL.train.clips), MATERIAL.train.captions)  # stand still
    report = evaluate_clips(ClipSubject(sample=sample), replace(MATERIAL, train=train), QUICK).report
    assert report["copies"]["share"] == 1
    assert report["copies"]["pixels"]["median"] < 1e-6 < report["copies"]["pixels"]["held_out_median"]
    assert report["flicker"]["rows"]["samples"]["motion"] == 0


def test_what_is_missing_is_told() -> None:
    bare = ClipMaterial(
        ClipSide(MATERIAL.train.clips, (None,) * 24), ClipSide(MATERIAL.held_out.clips, (None,) * 24), 24, "the validation split"
    )
    report = evaluate_clips(ClipSubject(reconstruct=darkened), bare, QUICK).report
    assert "no slots" in report["attributes"]["skipped"]
    assert "needs captions" in report["retrieval"]["skipped"]
    assert report["fd"]["name"].startswith("FD-clip-turns-")
    assert report["health"]["measure"] == report["fd"]["name"]
    assert report["identity"] == {"skipped": "no stories are told"}
    assert report["copies"] == {"skipped": "no samples"}
    assert "skipped" in report["codes"]
    assert lines(report)


def test_tiny_data_give_notes_instead_of_numbers() -> None:
    tiny = replace(MATERIAL, held_out=MATERIAL.held_out[:5])
    report = evaluate_clips(knowing(tiny), tiny, QUICK).report
    for name in ("attributes", "fd", "kd", "copies", "retrieval", "identity"):
        assert "too few" in report[name]["skipped"]
    assert report["reconstruction"]["psnr"] > 40
    assert lines(report)
    asked = replace(knowing(tiny), held_out_loss=lambda: {"loss": 1 / 0})
    nothing = evaluate_clips(asked, replace(tiny, held_out=tiny.held_out[:0]), QUICK)
    assert nothing.sheet is None
    assert nothing.report["loss"] == {"skipped": "nothing is held out"}
    assert lines(nothing.report)


def test_clips_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="not as many, as long and as large"):
        evaluate_clips(ClipSubject(reconstruct=lambda clips: [clip[:-1] for clip in clips]), MATERIAL, QUICK)
    with pytest.raises(ValueError, match="expected uint8"):
        ClipSide((np.zeros((3, 4, 4, 3)),), ("a",))
    with pytest.raises(ValueError, match="frames of one size"):
        ClipSide((np.zeros((3, 4, 4, 3), np.uint8), np.zeros((3, 5, 4, 3), np.uint8)), ("a", "b"))


def test_stories_keep_the_caption_up_to_its_last_slot() -> None:
    slots = find_slots(MATERIAL.held_out.captions)
    stories = write_stories(MATERIAL.held_out, 5, slots, seed=0)
    assert len({story.scenes[0].caption for story in stories}) == 5
    for story in stories:
        captions = [scene.caption for scene in story.scenes]
        assert len(set(captions)) == 3
        assert len({caption.rpartition(" ")[0] for caption in captions}) == 1
        place = MATERIAL.held_out.captions.index(captions[0])
        assert [scene.frames for scene in story.scenes] == [MATERIAL.held_out.lengths[place]] * 3
    plain = write_stories(MATERIAL.held_out, 2, (), seed=0)
    assert [len({scene.caption for scene in story.scenes}) for story in plain] == [1, 1]


class Reader(Classifier):
    """Reads the value of each slot from the first pixel's channels."""

    def guess(self, clips: Clips) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([clip[0, 0, 0, :2] for clip in clips]).astype(np.int64)


def test_a_picture_is_no_scene() -> None:
    """Nor is a clip that is shorter than what a token holds: its scene might add none."""
    side = ClipSide(tuple(np.zeros((length, 8, 8, 3), np.uint8) for length in (1, 4, 3, 5, 9)), ("a", "b", "b", "a", None))
    stories = write_stories(side, 5, (), seed=0, least=4)
    assert [[(scene.caption, scene.frames) for scene in story.scenes] for story in stories] == [
        [("b", 4)] * 3, [("a", 5)] * 3, [("", 9)] * 3,
    ]  # fmt: skip
    assert [story.scenes[0].frames for story in write_stories(side, 2, (), seed=0)] == [1, 4]


def test_identity_by_hand() -> None:
    """Three stories of a red block (value 2) that moves left, right, up: one keeps its colour, one is blue throughout, one
    changes. What the captions change is not judged."""
    slots = tuple(find_slots(MATERIAL.train.captions))
    scenes = tuple(Scene(f"a red block moves {move}", 2) for move in ("left", "right", "up"))
    shown = ([2, 2, 2], [0, 0, 0], [2, 2, 1])
    clips = [np.repeat(np.array([[[[c, m, 0]]] for c, m in zip(row, (1, 2, 3), strict=True)], np.uint8), 2, 0) for row in shown]
    found = identity_by_slots([Story(scenes, clip) for clip in clips], Reader(slots, None, ""))  # type: ignore[arg-type]
    rows = found["rows"]
    assert rows == {
        "kept": {"joint": pytest.approx(2 / 3), "blue/green/red": pytest.approx(2 / 3)},
        "right": {"joint": pytest.approx(1 / 3), "blue/green/red": pytest.approx(1 / 3)},
        "apart": {"joint": 0, "blue/green/red": 0},
    }
    assert found["kept"] == pytest.approx(2 / 3)


def test_likeness_by_hand() -> None:
    scene = np.array([[1.0, 0], [0, 2]])
    assert identity_by_features([scene, scene * 3, scene]) == {"within": pytest.approx(1), "across": pytest.approx(0)}


def test_sides_of_a_folder(tmp_path: Path) -> None:
    side = blocks(20, 3)
    for index, (clip, caption) in enumerate(zip(side.clips, side.captions, strict=True)):
        frames = [Image.fromarray(frame) for frame in clip]
        frames[0].save(tmp_path / f"{index:02}.png", save_all=True, append_images=frames[1:], duration=100)
        (tmp_path / f"{index:02}.txt").write_text(caption or "")
    config = VideoDataConfig(path=str(tmp_path), resolution=16, frames=6, validation_fraction=0.25)
    found = load_clips(config, most_train=100, most_held_out=100, seed=0)
    assert (found.origin, found.oracle, found.captioned) == ("the validation split", None, True)
    assert len(found.train) + len(found.held_out) == 20
    assert len(found.held_out) > 0
    assert len(found.train) == found.num_train
    known = {(caption, min(len(clip), 6)) for caption, clip in zip(side.captions, side.clips, strict=True)}
    both = [
        *zip(found.train.captions, found.train.lengths, strict=True),
        *zip(found.held_out.captions, found.held_out.lengths, strict=True),
    ]
    assert set(both) == known
    short = [clip for clip in side.clips if len(clip) <= 6]
    assert any(np.array_equal(short[0], clip) for clip in (*found.train.clips, *found.held_out.clips))


class Told:
    """An oracle that reads digit and colour from the first pixel: 100 and more is a red 3."""

    def judge(self, clip: Frames, asked: str) -> dict[str, bool]:
        right, forth = (clip[0, 0, 0, 0] >= 100) == ("red 3" in asked), bool(clip[-1, 0, 0, 0] > clip[0, 0, 0, 0])
        way = forth == ("right" in asked)
        return {"digit": right, "colour": right, "direction": way, "joint": right and way}


def rising(first: int) -> Frames:
    return np.repeat(np.arange(first, first + 4, dtype=np.uint8).reshape(4, 1, 1, 1), 16 * 16 * 3, 1).reshape(4, 16, 16, 3)


def test_an_oracle_judges_rows_and_stories() -> None:
    """Half of the clips are a red 3, half a blue 7, all move right. Told stories forget what they are in the last scene."""
    captions = ("a red 3 moves right slowly", "a blue 7 moves right slowly") * 4
    side = ClipSide(tuple(rising(100 if "red" in caption else 10) for caption in captions), captions)
    material = ClipMaterial(side, side, 8, "", Told())

    def tell(stories: Sequence[Sequence[Scene]], seed: int) -> Clips:
        assert [scene.caption for scene in stories[1]] == [captions[1], "a blue 7 moves left slowly", captions[1]]
        starts = [100 if "red" in scenes[0].caption else 10 for scenes in stories]
        return [np.concatenate([rising(start), rising(start)[::-1], rising(100)]) for start in starts]

    report = evaluate_clips(
        ClipSubject(sample=lambda texts, lengths, seed: [rising(100)] * len(texts), tell=tell), material, QUICK
    ).report
    rows = report["oracle"]["rows"]
    assert rows["real"]["joint"] == 1
    assert (rows["samples"]["joint"], rows["samples"]["direction"]) == (0.5, 1)
    assert (rows["reversed"]["direction"], rows["reversed"]["digit"]) == (0, 1)
    assert rows["still"]["joint"] == 0
    assert rows["samples"]["directions"] == {"right": {"direction": 1, "joint": 0.5, "n": 8}}
    assert report["identity"]["rows"]["kept"] == {"joint": 0.5, "digit": 0.5, "colour": 0.5}
    assert report["identity"]["rows"]["apart"] == {"joint": 0, "digit": 0, "colour": 0}
    assert report["attributes"] == {"skipped": "an oracle judges these data"}
    assert report["health"]["measure"] == "oracle"
    assert "directions: right 100.0 of 8" in "\n".join(lines(report))


def test_digits_turn_back() -> None:
    assert [turned_back(way) for way in ("left", "up", "up left", "down right")] == ["right", "down", "down right", "up left"]
