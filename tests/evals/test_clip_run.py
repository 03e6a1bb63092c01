"""A session of clips as what is judged; its drawer and its tokenizer can be told by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import pipeline
from tessera.config import VideoEvaluateConfig
from tessera.contracts import Scene
from tessera.data.synth.digits import write_digits
from tessera.engine.dist import World
from tessera.evals import ClipMaterial, lines
from tessera.evals.clip_run import count_codes, draw_lengths, judge_clips, subject_of, tell_story
from tessera.evals.run import evaluate_run
from tessera.generators.autoregressive.grid_model import GridConfig
from tessera.recipes.clips.config import AutoregressiveBaseConfig, MaskedBaseConfig
from tessera.sampling.session import Session
from tests.evals.moving_blocks import blocks
from tests.sampling.clipmaker import ClipConfig, chunks, clip_session, colour_of, greys


class JudgedConfig(ClipConfig):
    """With what evaluation reads."""

    evaluate: VideoEvaluateConfig = VideoEvaluateConfig(n=8, fit_steps=1, resamples=0, stories=2)
    """How it is judged."""


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """With a generator, as far as a session can tell."""
    made = clip_session(tmp_path / "run")
    made.nets = {**made.nets, "base": {}}
    return made


def test_rows_of_one_length_are_drawn_together(session: Session) -> None:
    captions, lengths = ["up", "down", "left", "right", "up"], [4, 2, 4, 4, 2]
    drawn = draw_lengths(session, session.config.sample, captions, lengths, seed=7)
    for row, (caption, length, clip) in enumerate(zip(captions, lengths, drawn, strict=True)):
        assert [int(frame[0, 0, 0]) for frame in clip] == [colour_of(caption, 7 + row) + i for i in range(length)]
    assert [chunk.options.frames for chunk in chunks(session)] == [2, 4, 4], "two rows at once"


def test_a_story_is_one_clip(session: Session) -> None:
    scenes = (Scene("up", 3), Scene("down", 2), Scene("up", 1))
    frames = tell_story(session, session.config.sample, scenes, seed=5)
    up, down = colour_of("up", 5), colour_of("down", 5)
    assert [int(frame[0, 0, 0]) for frame in frames] == [up, up + 1, up + 2, down + 3, down + 4, up + 5]
    assert len(chunks(session)[-1].captions) == 1


def test_codes_are_counted_without_what_fills_up(session: Session) -> None:
    """Time stride 2, four blocks a frame: two clips of one frame and of four, which reach 1 and 3 latent frames."""
    clips = [np.full((1, 16, 16, 3), 9, np.uint8), np.full((4, 16, 16, 3), 200, np.uint8)]
    counts = count_codes(session, clips)
    assert counts.shape == (256,)
    assert (int(counts[9]), int(counts[200]), int(counts.sum())) == (4, 12, 16)


def test_what_a_session_can_do(session: Session, tmp_path: Path) -> None:
    material = ClipMaterial(blocks(8, 0), blocks(8, 1), 8, "")
    subject = subject_of(session, session.config.sample, material)
    assert subject.reconstruct is not None
    made = subject.reconstruct(material.held_out.clips)
    assert [clip.shape for clip in made] == [clip.shape for clip in material.held_out.clips]
    block = material.held_out.clips[0][0, :8, :8].astype(float).mean()
    assert made[0][0, 3, 3, 0] == pytest.approx(block, abs=1)
    alone = subject_of(clip_session(tmp_path / "alone"), session.config.sample, material)
    assert alone.sample is None
    assert alone.tell is None
    assert alone.count_codes is not None


@pytest.mark.parametrize("base", [MaskedBaseConfig(), AutoregressiveBaseConfig(model=GridConfig(width=32, depth=1, heads=2))])
def test_stories_are_told_where_clips_can_go_on(session: Session, base: MaskedBaseConfig | AutoregressiveBaseConfig) -> None:
    """Time stride 2: clips of 3 frames are two tokens long, and no such clip shows what follows the second."""
    material = ClipMaterial(blocks(8, 0), blocks(8, 1), 8, "")
    for frames, tells in ((1, False), (3, False), (5, True)):
        data = session.config.data.model_copy(update={"frames": frames})
        session.config = session.config.model_copy(update={"data": data, "base": base})
        subject = subject_of(session, session.config.sample, material)
        assert (subject.tell is not None, subject.least_scene) == (tells, 2)


def test_a_run_is_judged_by_its_folder(session: Session, tmp_path: Path) -> None:
    side = blocks(48, 3)
    for index, (clip, caption) in enumerate(zip(side.clips, side.captions, strict=True)):
        frames = [Image.fromarray(frame) for frame in clip]
        frames[0].save(tmp_path / f"{index:02}.png", save_all=True, append_images=frames[1:], duration=100)
        (tmp_path / f"{index:02}.txt").write_text(caption or "")
    data = session.config.data.model_copy(update={"path": str(tmp_path), "validation_fraction": 0.4})
    root = JudgedConfig(data=data)
    said: list[str] = []
    report = judge_clips(session, root, None, World(0, 1, torch.device("cpu")), said.append).report
    assert report["subject"]["stages"] == {"tokenizer": 2, "base": 3}
    assert set(report["fd"]["rows"]) == {"floor", "reconstruction", "samples"}
    assert report["identity"]["n"] == 2
    assert report["codes"]["vocab_size"] == 256
    assert report["codes"]["tokens"] > 0
    assert "telling 2 stories of three scenes" in said
    assert "drawing 8 clips from their captions" in said
    assert "oracle: these data have no oracle; `tessera data synth digits` makes some that have" in said
    assert lines(report)
    assert len(greys(session.sample("up")[0])) == 5


@pytest.mark.slow
def test_a_run_of_moving_digits_is_judged(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", 80, 0, image_size=32, frames=11)
    sets = (
        "engine.device=cpu", "data.resolution=16", "data.frames=9", "tokenizer.steps=2", "tokenizer.batch_size=4", "base.steps=2",
        "tokenizer.model={kind: conv, widths: [16, 16, 16], blocks: [1, 1, 1], time_downsamples: 2}", "tokenizer.critic=null",
        "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}", "base.batch_size=4", "sample.overlap=1",
        "base.model={width: 32, depth: 1, heads: 2}",
    )  # fmt: skip
    config = pipeline.resolve("phenaki", preset="tiny", data=str(tmp_path / "digits"), sets=sets)
    run = pipeline.train(config, run=tmp_path / "run")
    quick = ("evaluate.fit_steps=1", "evaluate.stories=2", "sample.steps=2")
    first, folder = evaluate_run(run, n=8, sets=quick, device="cpu")
    assert set(first.report["oracle"]["rows"]) == {"real", "shuffled", "still", "reversed", "reconstruction", "samples"}
    assert first.report["oracle"]["rows"]["real"]["direction"] == 1
    assert first.report["identity"]["n"] == 2
    assert first.report["loss"]["loss"] > 0
    assert (folder / "evaluation.png").is_file()
    assert evaluate_run(run, n=8, sets=quick, device="cpu")[0].report == first.report
