"""The oracle of moving digits: it reads what was drawn, forgives what a tokenizer does, and finds what is wrong."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tessera.config.errors import UserError
from tessera.data.synth.digit_glyphs import load_glyphs
from tessera.data.synth.digit_reader import open_reader, pack_reader
from tessera.data.synth.digits import (
    BACKGROUND,
    COLOURS,
    DigitsOptions,
    Mover,
    Scene,
    caption,
    draw,
    oracle_reader,
)
from tessera.data.synth.digits_oracle import OTHER, open_oracle, oracle_accuracy
from tessera.data.synth.splits import SPLITS, Split
from tessera.media.clips import Frames
from tests.data.digit_makers import EIGHT, FULL, TINY, oracle_of, scenes_of

pytest.importorskip("sklearn")


def per_frame(change: Callable[[Image.Image], Image.Image]) -> Callable[[Frames], Frames]:
    return lambda clip: np.stack([np.asarray(change(Image.fromarray(frame)).convert("RGB")) for frame in clip])


def as_jpeg(picture: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=40)
    return Image.open(stream)


def noisy(clip: Frames) -> Frames:
    return np.clip(clip + np.random.default_rng(0).normal(0, 30, clip.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("split", SPLITS)
def test_the_oracle_reads_clean_clips(split: Split) -> None:
    scenes = scenes_of(split, 80)
    for count in (1, 2):
        some = [scene for scene in scenes if len(scene.movers) == count]
        shares = oracle_accuracy(oracle_of(), [draw(scene, FULL) for scene in some], [caption(scene) for scene in some])
        print(f"{split}, {count} digits, {len(some)} clips: {shares}")
        assert {name: shares[name] for name in ("count", "direction", "speed", "colour")} == dict.fromkeys(
            ("count", "direction", "speed", "colour"), 1.0
        )
        assert shares["joint"] >= 0.97


@pytest.mark.parametrize(
    ("name", "change", "floor"),
    [
        ("blur of 1", per_frame(lambda picture: picture.filter(ImageFilter.GaussianBlur(1))), 0.95),
        ("blur of 1.5", per_frame(lambda picture: picture.filter(ImageFilter.GaussianBlur(1.5))), 0.9),
        ("noise of 30", noisy, 0.95),
        ("JPEG 40", per_frame(as_jpeg), 0.9),
        ("4 levels", lambda clip: (np.round(clip / 85) * 85).astype(np.uint8), 0.95),
        ("9 frames", lambda clip: clip[:9], 0.95),
        ("the last 5 frames", lambda clip: clip[12:], 0.95),
    ],
)
def test_the_oracle_forgives(name: str, change: Callable[[Frames], Frames], floor: float) -> None:
    scenes = scenes_of("heldout", 24)
    shares = oracle_accuracy(oracle_of(), [change(draw(scene, FULL)) for scene in scenes], list(map(caption, scenes)))
    print(f"{name}: {shares}")
    assert shares["joint"] >= floor
    assert min(shares[word] for word in ("count", "direction", "speed", "colour")) >= 0.97


@pytest.mark.parametrize("options", [TINY, DigitsOptions(image_size=96, frames=9, num_directions=8)])
def test_the_oracle_reads_other_sizes(options: DigitsOptions) -> None:
    scenes = scenes_of("train", 30, options)
    shares = oracle_accuracy(oracle_of(options), [draw(scene, options) for scene in scenes], list(map(caption, scenes)))
    assert shares["joint"] >= 0.93
    assert min(shares[word] for word in ("count", "direction", "speed", "colour")) == 1.0


def test_one_wrong_word_is_found() -> None:
    oracle, right = oracle_of(), 0
    for scene in scenes_of("train", 12, EIGHT):
        clip = draw(scene, EIGHT)
        if not oracle.judge(clip, scene)["joint"]:
            continue
        right += 1
        first, *rest = (Mover(*mover.words) for mover in scene.movers)
        wrong = {
            "digit": Mover(str((int(first.digit) + 1) % 10), *first.words[1:]),
            "direction": Mover(first.digit, "up" if first.direction != "up" else "up left", *first.words[2:]),
            "speed": Mover(*first.words[:2], "fast" if first.speed == "slowly" else "slowly", first.colour),
            "colour": Mover(*first.words[:3], next(c for c in COLOURS if all(c != m.colour for m in scene.movers))),
        }
        for name, mover in wrong.items():
            verdict = oracle.judge(clip, Scene((mover, *rest)))
            assert [word for word, ok in verdict.items() if not ok] == [name, "joint"]
    assert right >= 10


def test_the_wrong_number_is_wrong_in_all() -> None:
    oracle = oracle_of()
    for scene in [scene for scene in scenes_of("train", 20) if len(scene.movers) == 2][:4]:
        one = Scene(scene.movers[:1])
        assert not any(oracle.judge(draw(scene, FULL), one).values())
        assert not any(oracle.judge(draw(one, FULL), scene).values())


def test_two_of_one_colour_are_two() -> None:
    glyph = load_glyphs("train").of(3)[0]
    low, high = (Mover("3", "right", "slowly", "red", glyph, 0.1, y, 0.34, 0.15) for y in (0.05, 0.6))
    clip = np.maximum(draw(Scene((low,)), FULL), draw(Scene((high,)), FULL))
    assert [(seen.digit, seen.colour) for seen in oracle_of().read(clip)] == [(OTHER, "red")] * 2


def test_what_comes_or_goes_is_not_kept() -> None:
    scene = next(scene for scene in scenes_of("train", 20) if len(scene.movers) == 1)
    clip = draw(scene, FULL)
    clip[11:] = BACKGROUND
    verdict = oracle_of().judge(clip, scene)
    assert [name for name, right in verdict.items() if not right] == ["count", "joint"]
    clip[2:] = BACKGROUND
    assert oracle_of().read(clip) == ()  # a flash


def test_a_digit_that_turns_into_another_is_none() -> None:
    mover = Mover("1", "right", "fast", "green", load_glyphs("train").of(1)[0], 0.1, 0.3, 0.34, 0.4)
    other = Mover("0", *mover.words[1:], load_glyphs("train").of(0)[0], 0.1, 0.3, 0.34, 0.4)
    clip = draw(Scene((mover,)), FULL)
    clip[8:] = draw(Scene((other,)), FULL)[8:]
    (seen,) = oracle_of().read(clip)
    assert (seen.digit, seen.direction, seen.speed, seen.kept) == (OTHER, "right", "fast", True)


def test_a_picture_has_no_motion() -> None:
    scene = next(scene for scene in scenes_of("train", 20) if len(scene.movers) == 1)
    for clip in (draw(scene, FULL)[:1], np.repeat(draw(scene, FULL)[:1], 9, axis=0)):
        verdict = oracle_of().judge(clip, scene)
        assert [name for name, right in verdict.items() if not right] == ["direction", "speed", "joint"]


def test_strange_clips_do_not_crash() -> None:
    rng, oracle = np.random.default_rng(0), oracle_of()
    for clip in (np.zeros((5, 64, 64, 3)), np.full((5, 64, 64, 3), 255), rng.integers(0, 256, (5, 64, 64, 3))):
        assert not any(oracle.judge(clip.astype(np.uint8), "a red 7 moves left slowly").values())
    for shape in ((64, 64, 3), (5, 64, 32, 3), (5, 64, 64, 1), (0, 64, 64, 3)):
        with pytest.raises(UserError, match="expected square frames"):
            oracle.read(np.zeros(shape, np.uint8))
    with pytest.raises(UserError, match="expected uint8"):
        oracle.read(np.zeros((5, 64, 64, 3), np.float32))


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"synth\.json"):
        open_oracle(tmp_path)
    (tmp_path / "synth.json").write_text('{"kind": "shapes", "frames": 9}')
    with pytest.raises(UserError, match="shapes"):
        open_oracle(tmp_path)
    (tmp_path / "synth.json").write_text('{"kind": "digits", "frames": 9}')
    for content in (b"no", pack_reader(oracle_reader())[:500]):
        (tmp_path / "digits.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"digits\.safetensors"):
            open_oracle(tmp_path)
    (tmp_path / "digits.safetensors").write_bytes(pack_reader(oracle_reader()))
    reader = open_reader(tmp_path / "digits.safetensors")
    np.testing.assert_array_equal(reader.known, oracle_reader().known)
