"""Captioned shapes: the same seed draws the same set, held-out combinations stay out, and the oracle reads what was drawn."""

import hashlib
import json
import math
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.config.errors import UserError
from tessera.data.synth import shapes as synth
from tessera.data.synth.shapes import (
    COLOURS,
    INVERSE,
    PLACES,
    SHAPES,
    SIZES,
    Draws,
    Plan,
    Scene,
    Shape,
    ShapesOptions,
    Split,
    caption,
    count_points,
    draw,
    parse_caption,
    plan_shapes,
    sample_scene,
    write_shapes,
)
from tessera.data.synth.shapes_oracle import AREAS, oracle_accuracy, read_scene, score

DEMO = ShapesOptions(image_size=32, max_shapes=1, num_shapes=3, num_colours=4, num_places=4, sizes=False)
TINY = ShapesOptions(image_size=32, max_shapes=2, num_shapes=2, num_colours=2, num_places=2)


def scenes_of(plan: Plan, split: Split, count: int) -> list[Scene]:
    return [sample_scene(plan, split, index) for index in range(count)]


def triples_in(scene: Scene) -> list[tuple[str, str, str | None]]:
    return [] if scene.relation else [(s.shape, s.colour, s.place) for s in scene.shapes]


def readings_in(scene: Scene) -> list[tuple[str, str, str, str]]:
    if scene.relation is None:
        return []
    a, b = scene.shapes
    return [(a.shape, a.colour, scene.relation, b.shape), (b.shape, b.colour, INVERSE[scene.relation], a.shape)]


def test_draws_are_splitmix64() -> None:
    draws = Draws()  # the published first outputs for the state 0
    assert [draws.bits() for _ in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_version_1_is_pinned() -> None:
    """A change of these bytes is a new version: raise VERSION, and say so to whoever compares with older sets."""
    plan = plan_shapes(7, ShapesOptions())
    digest = hashlib.sha256()
    for scene in scenes_of(plan, "train", 40) + scenes_of(plan, "heldout", 40):
        digest.update(caption(scene).encode() + draw(scene, 64).tobytes())
    assert (synth.VERSION, digest.hexdigest()[:16]) == (1, "a5bb4973ed0fd46f")


def test_sample_depends_on_seed_split_and_index_only(tmp_path: Path) -> None:
    few, many, other = (tmp_path / name for name in ("few", "many", "other"))
    write_shapes(few, 9, 3)
    write_shapes(many, 24, 3)
    write_shapes(other, 9, 4)
    for name in [f"train/{i:06d}.png" for i in range(9)] + ["heldout/000000.png"]:
        assert (few / name).read_bytes() == (many / name).read_bytes()
        assert (few / name).read_bytes() != (other / name).read_bytes()
    lines = [(folder / "train/metadata.jsonl").read_text().splitlines() for folder in (few, many)]
    assert lines[0] == lines[1][:9]


def test_folder(tmp_path: Path) -> None:
    about = write_shapes(tmp_path / "a/b", 17, 0, image_size=32, max_shapes=2)
    assert json.loads((tmp_path / "a/b/synth.json").read_text()) == json.loads(json.dumps(about))
    assert (about["kind"], about["version"], about["seed"], about["n"], about["max_shapes"]) == ("shapes", 1, 0, 17, 2)
    for split, count in (("train", 17), ("heldout", 2)):
        folder = tmp_path / "a/b" / split
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        assert [row["file_name"] for row in rows] == [f"{i:06d}.png" for i in range(count)]
        assert len(list(folder.iterdir())) == count + 1
        assert all(score(np.asarray(Image.open(folder / row["file_name"])), row["text"])["joint"] for row in rows)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b"}  # no partial folder stays behind


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_shapes(tmp_path / "empty", 1, 0)
    (tmp_path / "file").write_text("mine")
    for taken in ("empty", "file"):
        with pytest.raises(UserError, match="nothing is overwritten"):
            write_shapes(tmp_path / taken, 1, 0)
    assert (tmp_path / "file").read_text() == "mine"


def test_interrupted_call_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(scene: Scene, image_size: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(synth, "draw", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_shapes(tmp_path / "out", 5, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [{"n": 0}, {"image_size": 16}, {"num_places": 1}, {"num_places": 2}, {"num_colours": 9}, {"max_shapes": 4}]
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        write_shapes(tmp_path / "out", **({"n": 1, "seed": 0} | options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("seed", "options"), [(0, ShapesOptions()), (1, ShapesOptions()), (-5, DEMO), (2, TINY)])
def test_held_out_combinations_stay_out(seed: int, options: ShapesOptions) -> None:
    plan = plan_shapes(seed, options)
    for scene in scenes_of(plan, "train", 1500):
        assert plan.held_triples.isdisjoint(triples_in(scene)), caption(scene)
        assert plan.held_readings.isdisjoint(readings_in(scene)), caption(scene)
    for scene in scenes_of(plan, "heldout", 300):
        assert plan.held_triples.issuperset(triples_in(scene)), caption(scene)
        assert plan.held_readings.issuperset(readings_in(scene)), caption(scene)
    kinds = {split: {len(scene.shapes) for scene in scenes_of(plan, split, 60)} for split in synth.SPLITS}
    assert kinds == {split: set(range(1, options.max_shapes + 1)) for split in synth.SPLITS}


def test_an_eighth_is_held_out_and_changes_with_the_seed() -> None:
    plans = [plan_shapes(seed, ShapesOptions()) for seed in range(3)]
    assert [len(plan.held_triples) for plan in plans] == [200 // 8] * 3
    assert {len(plan.held_readings) for plan in plans} <= {800 // 8, 800 // 8 + 1}  # two readings may come at once
    assert len({plan.held_triples for plan in plans}) == len({plan.held_readings for plan in plans}) == 3


@pytest.mark.parametrize("options", [ShapesOptions(), DEMO, TINY])
def test_every_pair_of_words_is_trained(options: ShapesOptions) -> None:
    for seed in range(10):
        plan = plan_shapes(seed, options)
        allowed = [(s, c, p) for p, nouns in plan.choices["train"].items() for s, c in nouns]
        sides = (options.num_shapes, options.num_colours, options.num_places)
        for a, b in combinations(range(3), 2):
            assert len({(triple[a], triple[b]) for triple in allowed}) == sides[a] * sides[b]
        readings = {reading for pair in plan.pairs["train"] for reading in pair}
        if options.max_shapes > 1:
            sides = (options.num_shapes, options.num_colours, 4, options.num_shapes)
            for a, b in combinations(range(4), 2):
                assert len({(reading[a], reading[b]) for reading in readings}) == sides[a] * sides[b]


def test_captions() -> None:
    red = Shape("circle", "red", "large", "top left")
    blue, green = Shape("square", "blue", "small"), Shape("triangle", "green", "large")
    assert caption(Scene((red,))) == "a large red circle in the top left"
    assert caption(Scene((blue, green), "left of")) == "a small blue square left of a large green triangle"
    three = Scene((red, replace(blue, place="center"), Shape("ring", "orange", None, "bottom right")))
    expected = "a large red circle in the top left, a small blue square in the center and an orange ring in the bottom right"
    assert caption(three) == expected
    assert parse_caption(expected) == three


def test_captions_and_scenes_are_inverse() -> None:
    nouns = [Shape(*words) for words in product(SHAPES, COLOURS, [*SIZES, None])]
    for noun in nouns:
        for place in PLACES:
            scene = Scene((replace(noun, place=place),))
            assert parse_caption(caption(scene)) == scene
    for (a, b), relation in product(product(nouns, repeat=2), INVERSE):
        assert parse_caption(caption(Scene((a, b), relation))) == Scene((a, b), relation)
    for scene in scenes_of(plan_shapes(0, ShapesOptions()), "train", 300):
        words = Scene(tuple(Shape(*shape.words) for shape in scene.shapes), scene.relation)
        assert parse_caption(caption(scene)) == words


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a dog",
        "a large red circle in the top left ",
        "A large red circle in the top left",
        "an large red circle in the top left",
        "a orange circle in the center",
        "a red circle, a red circle in the center",
        "a red ring in the center and a red circle in the center",
        "a red circle left of a blue square in the center",
        "a red circle in the top left and a blue ring in the center and a red ring in the top right",
    ],
)
def test_other_text_is_no_caption(text: str) -> None:
    assert parse_caption(text) is None
    with pytest.raises(UserError, match="no caption of shapes"):
        score(np.full((64, 64, 3), 245, np.uint8), text)


def test_shapes_stay_apart_and_inside() -> None:
    plan = plan_shapes(0, ShapesOptions())
    for scene in scenes_of(plan, "train", 1500) + scenes_of(plan, "heldout", 300):
        for shape in scene.shapes:
            assert all(shape.radius <= middle <= 1 - shape.radius for middle in (shape.x, shape.y))
        for a, b in combinations(scene.shapes, 2):
            assert (math.dist((a.x, a.y), (b.x, b.y)) - a.radius - b.radius) * 64 >= 2


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_covers_its_area_within_its_circle(shape: str) -> None:
    side = 128
    whole = slice(0, side)
    count = count_points(Shape(shape, "red", None, None, 0.5, 0.5, 0.4), whole, whole, side)
    assert count.sum() / (16 * (0.4 * side) ** 2) == pytest.approx(AREAS[shape], rel=0.01)
    ticks = np.arange(side) + 0.5
    assert count.sum(axis=0) @ ticks / count.sum() == pytest.approx(side / 2, abs=0.2)
    assert count.sum(axis=1) @ ticks / count.sum() == pytest.approx(side / 2, abs=0.2)
    assert np.array_equal(draw(Scene((Shape(shape, "red", None, None, 0.5, 0.5, 0.4),)), side)[count == 0][0], (245, 245, 245))
    far = np.hypot(ticks[:, None] - side / 2, ticks - side / 2) > 0.4 * side + 1
    assert not count[far].any()


@pytest.mark.parametrize(("image_size", "least"), [(32, 0.99), (64, 0.999), (128, 0.999)])
def test_oracle_reads_clean_pictures(image_size: int, least: float) -> None:
    plan = plan_shapes(11, ShapesOptions(image_size=image_size))
    scenes = scenes_of(plan, "train", 250) + scenes_of(plan, "heldout", 100)
    accuracy = oracle_accuracy([draw(scene, image_size) for scene in scenes], [caption(scene) for scene in scenes])
    assert set(accuracy) == {"count", "shape", "colour", "size", "place", "relation", "joint"}
    assert accuracy["joint"] >= least, accuracy


def test_oracle_reads_the_demo_set() -> None:
    scenes = scenes_of(plan_shapes(0, DEMO), "train", 200)
    pictures = [draw(scene, 32).astype(np.float32) / 127.5 - 1 for scene in scenes]
    accuracy = oracle_accuracy(pictures, [caption(scene) for scene in scenes])
    assert accuracy == dict.fromkeys(("count", "shape", "colour", "place", "joint"), 1.0)


def soften(picture: np.ndarray, deviation: float) -> np.ndarray:
    ticks = np.arange(-8, 9)
    kernel = np.exp(-(ticks**2) / (2 * deviation**2))
    for axis in (0, 1):
        width = [(8, 8) if k == axis else (0, 0) for k in range(3)]
        padded = np.pad(picture.astype(float), width, mode="edge")
        size = picture.shape[axis]
        picture = sum(w * padded.take(range(k, k + size), axis) for k, w in enumerate(kernel / kernel.sum()))
    return picture


@pytest.mark.parametrize(("blur", "noise"), [(0.0, 16.5), (1.8, 0.0), (1.3, 12.0)])
def test_oracle_reads_reconstructions(blur: float, noise: float) -> None:
    """About as far from the original as a small tokenizer leaves it."""
    rng = np.random.default_rng(0)
    scenes = scenes_of(plan_shapes(12, ShapesOptions()), "train", 150)
    pictures, signal = [], []
    for scene in scenes:
        clean = draw(scene, 64)
        damaged = (soften(clean, blur) if blur else clean) + rng.normal(0, noise, clean.shape)
        signal.append(10 * math.log10(255**2 / ((damaged - clean) ** 2).mean()))
        pictures.append(damaged / 127.5 - 1)
    assert 22 < np.mean(signal) < 26
    accuracy = oracle_accuracy(pictures, [caption(scene) for scene in scenes])
    assert accuracy["joint"] >= 0.95, accuracy


def swapped(scene: Scene) -> list[tuple[str, Scene]]:
    """Every scene that differs in one word, with that word's kind."""
    found = [("relation", Scene(scene.shapes, other)) for other in INVERSE if scene.relation not in (None, other)]
    lists = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "place": PLACES}
    for index, shape in enumerate(scene.shapes):
        for kind, words in lists.items():
            for word in words:
                if getattr(shape, kind) not in (None, word):
                    changed = replace(shape, **{kind: word})
                    found.append((kind, Scene((*scene.shapes[:index], changed, *scene.shapes[index + 1 :]), scene.relation)))
    return found


def test_one_wrong_word_is_noticed() -> None:
    kinds = set()
    for scene in scenes_of(plan_shapes(13, ShapesOptions()), "train", 30):
        picture = draw(scene, 64)
        for kind, wrong in swapped(scene):
            verdict = score(picture, wrong)
            assert not verdict["joint"], (caption(scene), caption(wrong))
            assert not verdict[kind], (caption(scene), caption(wrong))
            assert verdict["count"]
            kinds.add(kind)
    assert kinds == {"shape", "colour", "size", "place", "relation"}


def test_order_of_objects_does_not_matter() -> None:
    for scene in scenes_of(plan_shapes(14, ShapesOptions()), "train", 60):
        picture = draw(scene, 64)
        turned = Scene(scene.shapes[::-1], INVERSE[scene.relation] if scene.relation else None)
        assert score(picture, turned)["joint"]
        assert score(picture, caption(turned))["joint"]


def test_wrong_number_of_shapes_is_wrong() -> None:
    scenes = [scene for scene in scenes_of(plan_shapes(15, ShapesOptions()), "train", 60) if len(scene.shapes) == 3]
    for scene in scenes:
        fewer = Scene(scene.shapes[:1])
        assert not any(score(draw(scene, 64), fewer).values())
        assert not any(score(draw(fewer, 64), scene).values())


@pytest.mark.parametrize("level", [0, 20, 128, 245, 255])
@pytest.mark.parametrize("noise", [0, 60])
def test_blank_and_noise_are_no_scene(level: int, noise: int) -> None:
    rng = np.random.default_rng(level)
    picture = np.clip(level + rng.normal(0, noise, (64, 64, 3)), 0, 255).astype(np.uint8)
    for text in ("a red circle in the center", "a small black ring left of a large black square"):
        assert not any(score(picture, text).values())


def test_strange_pictures_do_not_crash() -> None:
    rng = np.random.default_rng(0)
    uniform = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    broken = np.full((64, 64, 3), np.nan, np.float32)
    for picture in (uniform, broken, np.where(uniform > 128, np.inf, -np.inf), rng.normal(0, 1, (32, 32, 3))):
        assert not any(score(picture, "a large black square in the center").values())
    speck = draw(Scene((Shape("circle", "red", None, None, 0.3, 0.3, 0.03),)), 64)
    assert read_scene(speck) == Scene(())
    for shape in ((64, 64), (3, 64, 64), (64, 32, 3)):
        with pytest.raises(UserError, match="expected a square one"):
            read_scene(np.zeros(shape, np.uint8))
    with pytest.raises(UserError, match="expected uint8"):
        read_scene(np.zeros((64, 64, 3), np.int64))


def test_a_blob_of_two_colours_has_no_colour() -> None:
    picture = draw(Scene((Shape("square", "red", "large", "center", 0.5, 0.5, 0.155),)), 64)
    picture[32:][picture[32:, :, 1] < 100] = COLOURS["blue"]
    (found,) = read_scene(picture).shapes
    assert (found.shape, found.colour, found.place) == ("square", "other", "center")
