"""Captioned moving digits: the same seed draws the same set, held-out combinations stay out."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.config.errors import UserError
from tessera.data.synth import digits as synth
from tessera.data.synth.digit_glyphs import NUM_GLYPHS, STARTS, WRITERS, all_glyphs, ink, load_glyphs
from tessera.data.synth.digit_reader import accuracy, centres, crop
from tessera.data.synth.digits import (
    BACKGROUND,
    COLOURS,
    DIGITS,
    DIRECTIONS,
    SPEEDS,
    DigitsOptions,
    Mover,
    Scene,
    caption,
    draw,
    draw_indexed,
    oracle_reader,
    parse_caption,
    plan_digits,
    sample_scene,
    to_gif,
    write_digits,
)
from tessera.data.synth.digits_oracle import open_oracle
from tessera.data.synth.splits import SPLITS
from tessera.media.clips import Frames
from tests.data.digit_makers import EIGHT, FULL, TINY, oracle_of, scenes_of

pytest.importorskip("sklearn")


def decoded(path: Path) -> Frames:
    with Image.open(path) as file:
        frames = []
        for index in range(file.n_frames):
            file.seek(index)
            frames.append(np.asarray(file.convert("RGB")))
    return np.stack(frames)


# ---- whose digits


def test_writers_are_runs_of_one_form() -> None:
    """Every writer filled in the same form, thirty digits in order and then the same hundred: so the borders can be seen."""
    labels = all_glyphs()[1]
    ends = (*STARTS[1:], NUM_GLYPHS)
    for start, end in zip(STARTS, ends, strict=True):
        text = "".join(map(str, labels[start:end]))
        assert 120 <= len(text) <= 130
        assert text.find("0955650") in (28, 29, 30)  # some digits of some writers are missing
        assert text.endswith(("90898", "90893", "4908"))


def test_parts_share_no_digit() -> None:
    parts = {part: set(load_glyphs(part).indices.tolist()) for part in WRITERS}
    assert all(parts[a].isdisjoint(parts[b]) for a, b in combinations(parts, 2))
    assert set.union(*parts.values()) == set(range(NUM_GLYPHS))
    for split in SPLITS:
        used = {mover.glyph for scene in scenes_of(split, 300) for mover in scene.movers}
        assert used <= parts[split]
        assert len(used) > 100
    for scene in scenes_of("train", 50):
        assert all(str(all_glyphs()[1][mover.glyph]) == mover.digit for mover in scene.movers)


def test_without_scikit_learn_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_digits(tmp_path / "made", 2, 0, frames=5)
    all_glyphs.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"tessera-gen\[eval\]"):
        write_digits(tmp_path / "other", 2, 0)
    assert not (tmp_path / "other").exists()
    clip, text = decoded(tmp_path / "made/train/000000.gif"), (tmp_path / "made/train/000000.txt").read_text().strip()
    assert set(open_oracle(tmp_path / "made").judge(clip, text)) == {*("count", "digit", "direction", "speed", "colour", "joint")}


def test_the_reader_reads_other_writers() -> None:
    shares = {split: accuracy(oracle_reader(), load_glyphs(split)) for split in ("train", "heldout")}
    print(f"digits of other writers: {shares}")
    assert min(shares.values()) >= 0.985


def test_ink_is_bicubic_by_an_independent_hand() -> None:
    """Against the interpolation written out for one pixel, and moved by whole pixels."""
    glyph = all_glyphs()[0][3]
    drawn = ink(glyph, np.array([5.3, 8.3]), np.array([4.0, 2.0]), 22.0, 40)

    def weight(d: float) -> float:
        d = abs(d)
        return 1.5 * d**3 - 2.5 * d**2 + 1 if d < 1 else -0.5 * d**3 + 2.5 * d**2 - 4 * d + 2 if d < 2 else 0.0

    for row, column in product((9, 13, 20), (9, 14, 18)):
        u, v = ((column + 0.5 - 5.3) / 22 * 8 - 0.5, (row + 0.5 - 4) / 22 * 8 - 0.5)
        value = sum(weight(v - i) * weight(u - j) * glyph[i, j] for i in range(8) for j in range(8))
        assert drawn[0, row, column] == pytest.approx(min(max((value - 0.2) / 0.45, 0), 1))
    np.testing.assert_allclose(drawn[1, :-2, 3:], drawn[0, 2:, :-3], atol=1e-12)


def test_a_crop_follows_its_middle() -> None:
    """A digit cut out around its centre is the same wherever it lies; what is over the edge is dark."""
    glyph = all_glyphs()[0][8]
    pair = ink(glyph, np.array([10.0, 30.0]), np.array([12.0, 25.0]), 22.0, 64)
    first, second = crop(pair, centres(pair), 28.0)
    np.testing.assert_allclose(first, second, atol=1e-9)
    assert first.sum() == pytest.approx(pair[0].sum(), rel=1e-6)
    assert crop(pair[:1], np.array([[0.5, 0.5]]), 28.0)[0, :13, :13].sum() == 0
    doubled = np.repeat(np.repeat(pair[:1], 2, axis=1), 2, axis=2)
    np.testing.assert_allclose(crop(doubled, centres(doubled), 56.0)[0], first, atol=0.3)


# ---- what is drawn


def test_version_1_is_pinned() -> None:
    """A change of these is a new version: raise VERSION, and say so to whoever compares with older sets. Pixels are compared by
    their sums: libraries of linear algebra round the last bit of a product differently."""
    digest, sums = hashlib.sha256(), []
    for split in SPLITS:
        for scene in scenes_of(split, 12, seed=7):
            digest.update(caption(scene).encode())
            sums.append(draw(scene, FULL).astype(np.int64).sum(axis=(0, 1, 2)))
    assert (synth.VERSION, digest.hexdigest()[:16]) == (1, "338ced9430deda40")
    np.testing.assert_allclose(np.sum(sums, axis=0), [42620703, 39899548, 54185555], rtol=1e-5)


def test_folder(tmp_path: Path) -> None:
    about = write_digits(tmp_path / "a/b", 17, 3, frames=9)
    assert json.loads((tmp_path / "a/b/synth.json").read_text()) == json.loads(json.dumps(about))
    assert (about["kind"], about["version"], about["seed"], about["n"], about["frames"]) == ("digits", 1, 3, 17, 9)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b"}  # no partial folder stays behind
    assert {path.name for path in (tmp_path / "a/b").iterdir()} == {"train", "heldout", "synth.json", "digits.safetensors"}
    plan, oracle = plan_digits(3, DigitsOptions(frames=9)), open_oracle(tmp_path / "a/b")
    for split, count in (("train", 17), ("heldout", 2)):
        names = sorted(path.name for path in (tmp_path / "a/b" / split).iterdir())
        assert names == sorted(f"{index:06d}{suffix}" for index in range(count) for suffix in (".gif", ".txt"))
        for index in range(count):
            path, scene = tmp_path / "a/b" / split / f"{index:06d}.gif", sample_scene(plan, split, index)
            assert path.with_suffix(".txt").read_text() == caption(scene) + "\n"
            np.testing.assert_array_equal(decoded(path), draw(scene, plan.options))
            verdict = oracle.judge(decoded(path), caption(scene))
            assert all(right for name, right in verdict.items() if name not in ("digit", "joint"))
    with Image.open(path) as file:
        assert file.info["duration"] == 100


def test_sample_depends_on_seed_split_and_index_only(tmp_path: Path) -> None:
    few, many, other = (tmp_path / name for name in ("few", "many", "other"))
    for folder, n, seed in ((few, 3, 3), (many, 9, 3), (other, 3, 4)):
        write_digits(folder, n, seed, image_size=32, frames=5)
    for name in [f"train/{index:06d}.gif" for index in range(3)] + ["heldout/000000.gif"]:
        assert (few / name).read_bytes() == (many / name).read_bytes()
        assert (few / name).read_bytes() != (other / name).read_bytes()
    assert (few / "digits.safetensors").read_bytes() == (other / "digits.safetensors").read_bytes()


@pytest.mark.parametrize("option", [{"n": 0}, {"image_size": 16}, {"frames": 4}, {"max_digits": 3}, {"num_directions": 9}])
def test_bad_options_are_named(tmp_path: Path, option: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(option))):
        write_digits(tmp_path / "out", **({"n": 1, "seed": 0} | option))
    assert not list(tmp_path.iterdir())


def test_digits_stay_inside_and_move_as_they_are_told() -> None:
    """Seen in the pixels of single digits: ink never meets the edge, and its centre moves straight by the way that was drawn."""
    for scene in scenes_of("train", 40, EIGHT) + scenes_of("heldout", 20, EIGHT):
        for mover in scene.movers:
            clip = draw(Scene((mover,)), EIGHT)
            lit = (clip != np.array(BACKGROUND)).any(axis=3)
            assert lit.any(axis=(1, 2)).all()
            assert not any(edge.any() for edge in (lit[:, 0], lit[:, -1], lit[:, :, 0], lit[:, :, -1]))
            x, y = (np.array([np.average(np.nonzero(frame)[axis]) for frame in lit]) for axis in (1, 0))
            expected = np.array(DIRECTIONS[mover.direction]) * mover.way * 64
            np.testing.assert_allclose([x[-1] - x[0], y[-1] - y[0]], expected, atol=1.2)
            low, high = SPEEDS[mover.speed]
            assert low <= mover.way <= high


def test_two_digits_start_apart_and_the_last_named_covers() -> None:
    pairs = [scene for scene in scenes_of("train", 1200) if len(scene.movers) == 2]
    assert 500 < len(pairs) < 700
    for scene in pairs:
        assert scene.movers[0].colour != scene.movers[1].colour
    for scene in pairs[:60]:
        alone = [(draw(Scene((mover,)), FULL)[0] != np.array(BACKGROUND)).any(axis=2) for mover in scene.movers]
        assert not (alone[0] & alone[1]).any()
    mover = Mover("1", "left", "slowly", "red", load_glyphs("train").of(1)[0], 0.4, 0.4, 0.34, 0.15)
    under, over = mover, Mover(*mover.words[:3], "blue", mover.glyph, mover.x, mover.y, mover.height, mover.way)
    np.testing.assert_array_equal(
        (draw(Scene((under, over)), FULL) == np.array(COLOURS["blue"])).all(axis=3),
        (draw(Scene((over,)), FULL) == np.array(COLOURS["blue"])).all(axis=3),
    )


def test_a_gif_of_every_level_is_exact() -> None:
    """Two digits over each other use the most colours: they still fit, and decode to the same."""
    one, two = load_glyphs("train").of(8)[:2]
    scene = Scene(
        (
            Mover("8", "left", "fast", "red", one, 0.5, 0.3, 0.36, 0.4),
            Mover("8", "right", "fast", "cyan", two, 0.1, 0.3, 0.36, 0.4),
        )
    )
    indices, colours = draw_indexed(scene, FULL)
    assert 40 < len(colours) <= 256
    with Image.open(io.BytesIO(to_gif(indices, colours))) as file:
        for index in range(17):
            file.seek(index)
            np.testing.assert_array_equal(np.asarray(file.convert("RGB")), colours[indices[index]])


def test_a_mover_without_a_place_cannot_be_drawn() -> None:
    with pytest.raises(UserError, match="cannot be drawn"):
        draw(Scene((Mover("1", "left", "fast", "red"),)), FULL)


# ---- what is said


@pytest.mark.parametrize(("seed", "options"), [(0, FULL), (1, EIGHT), (-5, TINY)])
def test_held_out_combinations_stay_out(seed: int, options: DigitsOptions) -> None:
    plan = plan_digits(seed, options)
    size = options.num_kinds * options.num_directions * 2 * options.num_colours
    assert len(plan.held) == size // 8
    for split in SPLITS:
        said = {mover.words for scene in scenes_of(split, 400, options, seed) for mover in scene.movers}
        assert said <= plan.held if split == "heldout" else said.isdisjoint(plan.held)
        counts = {len(scene.movers) for scene in scenes_of(split, 60, options, seed)}
        assert counts == set(range(1, options.max_digits + 1))
    allowed = [cell for cells in plan.choices["train"].values() for cell in cells]
    sides = (options.num_kinds, options.num_directions, 2, options.num_colours)
    for a, b, c in combinations(range(4), 3):  # every triple of words, so every pair and every word
        assert len({(cell[a], cell[b], cell[c]) for cell in allowed}) == sides[a] * sides[b] * sides[c]


def test_captions_and_scenes_are_inverse() -> None:
    movers = [Mover(*words) for words in product(DIGITS, DIRECTIONS, SPEEDS, COLOURS)]
    for mover in movers:
        assert parse_caption(caption(Scene((mover,)))) == Scene((mover,))
    assert len({caption(Scene((mover,))) for mover in movers}) == 960
    for scene in scenes_of("train", 200, EIGHT):
        assert parse_caption(caption(scene)) == Scene(tuple(Mover(*mover.words) for mover in scene.movers))
    two = Scene((Mover("7", "left", "slowly", "red"), Mover("3", "up right", "fast", "green")))
    assert caption(two) == "a red 7 moves left slowly and a green 3 moves up right fast"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a red 7",
        "A red 7 moves left slowly",
        "a red 7 moves left slowly ",
        "a red 12 moves left slowly",
        "a red \u0663 moves left slowly",
        "a red 7 moves left slowly and",
        "a red 7 moves left slowly and a red 3 moves up fast",
        "a red 7 moves left slowly and a blue 3 moves up fast and a green 1 moves up fast",
    ],
)
def test_other_texts_are_no_captions(text: str) -> None:
    assert parse_caption(text) is None
    with pytest.raises(UserError, match="no caption of moving digits"):
        oracle_of().judge(np.zeros((5, 64, 64, 3), np.uint8), text)
