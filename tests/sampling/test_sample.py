"""`Session.sample`: a picture is a function of its own seed; parts of a picture, more around it, others like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tessera import pipeline
from tessera.config import UserError
from tessera.media.images import fit
from tessera.sampling.masks import alike
from tessera.sampling.request import make_request
from tessera.sampling.session import Session, load, shrunk
from tests.small import SUPERRES, generated, pictures, small_config, workshop

__all__ = ["generated", "pictures", "workshop"]

Pixels = npt.NDArray[np.uint8]
PROMPTS = ["a red circle", "", "two squares"]
OPTIONS = {"guidance": 2.0, "order": "confidence"}


@pytest.fixture(scope="module")
def session(generated: Path) -> Session:
    return load(generated, device="cpu")


@pytest.fixture(scope="module")
def picture(pictures: Path) -> Pixels:
    with Image.open(sorted((pictures / "train").glob("*.png"))[2]) as image:
        return np.asarray(image.convert("RGB").resize((16, 16)))


def pixels(drawn: list[Image.Image]) -> list[bytes]:
    return [image.tobytes() for image in drawn]


# ---- seeds


def test_what_is_promised_comes_out(session: Session) -> None:
    drawn = session.sample(PROMPTS, 2)
    assert [(image.mode, image.size) for image in drawn] == [("RGB", (16, 16))] * 6
    assert len(set(pixels(drawn))) > 3


@pytest.mark.parametrize(
    "options", [{}, OPTIONS, {"remask": 0.2}, {"temperature": 0.0}, {"top_p": 0.5, "guidance": 1.0}], ids=str
)
def test_a_picture_depends_on_its_own_seed_alone(session: Session, options: dict[str, Any]) -> None:
    together = pixels(session.sample(PROMPTS, 3, seed=5, options=options))
    for row, prompt in enumerate(PROMPTS):
        for k in range(3):
            assert pixels(session.sample(prompt, seed=5 + k, options=options)) == [together[3 * row + k]], (prompt, k)


def test_another_seed_is_another_picture(session: Session) -> None:
    drawn = pixels(session.sample("a", 8))
    assert len(set(drawn)) == 8
    assert drawn[1:] == pixels(session.sample("a", 7, seed=1))


def test_large_seeds(session: Session) -> None:
    assert pixels(session.sample("a", seed=2**62 - 1)) != pixels(session.sample("a", seed=2**62 - 2))


def test_runs_and_other_sessions_draw_the_same(session: Session, generated: Path) -> None:
    again = load(generated, device="cpu")
    again.sample(PROMPTS, options=OPTIONS)
    assert pixels(again.sample("a", 2)) == pixels(session.sample("a", 2))


def test_a_negative_prompt_needs_guidance(session: Session) -> None:
    with pytest.raises(UserError, match="guidance 1 is none"):
        session.sample("a red circle", negative="blue", options={"guidance": 1.0})


def test_a_negative_prompt_is_another_branch(session: Session) -> None:
    strong = {"guidance": 60.0, "guidance_ramp": False, "temperature": 0.0}
    plain, empty, other = (
        pixels(session.sample("a red circle", negative=negative, options=strong)) for negative in (None, "", "a blue square")
    )
    assert other != plain
    assert other != empty


# ---- from a picture


def masked(rows: slice, columns: slice) -> Pixels:
    mask = np.zeros((16, 16), np.uint8)
    mask[rows, columns] = 255
    return mask


@pytest.mark.parametrize("ring", [0, 1])
def test_inpainting_keeps_what_is_outside_of_the_mask(session: Session, picture: Pixels, ring: int) -> None:
    """To the bit; the mask lies on whole cells of two pixels, and the ring around it is drawn, too."""
    mask = masked(slice(4, 8), slice(6, 12))
    wide = masked(slice(4 - 2 * ring, 8 + 2 * ring), slice(6 - 2 * ring, 12 + 2 * ring)) > 0
    for drawn in session.sample("a red circle", 3, image=picture, mask=mask, options={"mask_ring": ring}):
        found = np.asarray(drawn)
        assert np.array_equal(found[~wide], picture[~wide])
        assert not np.array_equal(found[mask > 0], picture[mask > 0])


def test_inpainting_does_not_see_what_it_replaces(session: Session, picture: Pixels) -> None:
    mask = masked(slice(0, 8), slice(0, 16))
    other = picture.copy()
    other[:6] = 255 - other[:6]  # all of it well inside of the mask
    a, b = (pixels(session.sample("a", image=image, mask=mask)) for image in (picture, other))
    assert a == b


def test_masks_of_every_kind(session: Session, picture: Pixels, tmp_path: Path) -> None:
    mask = masked(slice(4, 8), slice(6, 12))
    Image.fromarray(mask).save(tmp_path / "mask.png")
    Image.fromarray(picture).save(tmp_path / "image.png")
    kinds = [mask, np.repeat(mask[:, :, None], 3, 2), Image.fromarray(mask).convert("1"), tmp_path / "mask.png"]
    wanted = pixels(session.sample("a", image=picture, mask=mask))
    assert all(pixels(session.sample("a", image=picture, mask=kind)) == wanted for kind in kinds)
    assert pixels(session.sample("a", image=str(tmp_path / "image.png"), mask=tmp_path / "mask.png")) == wanted


def test_everything_masked_is_a_picture_from_nothing(session: Session, picture: Pixels) -> None:
    full = np.full((16, 16), 255, np.uint8)
    assert pixels(session.sample("a", seed=3, image=picture, mask=full)) == pixels(session.sample("a", seed=3))


def test_outpainting_keeps_the_picture_smaller(session: Session, picture: Pixels) -> None:
    drawn = np.asarray(session.sample("a", image=picture, outpaint={"left": 0.5}, options={"mask_ring": 0})[0])
    assert drawn.shape == (16, 16, 3)
    assert np.array_equal(drawn[4:12, 8:16], fit(picture, 8))
    framed, redraw = shrunk(picture, {"left": 0.5})
    assert redraw.sum() == 16 * 16 - 8 * 8
    assert np.array_equal(framed[4:12, 8:16], fit(picture, 8))


def test_a_variation_shares_what_it_does_not_draw(session: Session, picture: Pixels) -> None:
    """All of it drawn anew is no longer a variation; hardly any of it is what the tokenizer keeps."""
    plain, kept = pixels(session.sample("a", seed=3)), session.encode(picture)
    assert pixels(session.sample("a", seed=3, image=picture, options={"variation": 1.0})) == plain
    assert pixels(session.sample("a", seed=3, image=picture, options={"variation": 1e-6})) == pixels(session.decode(kept))
    some = [pixels(session.sample("a", seed=seed, image=picture, options={"variation": 0.5})) for seed in (3, 3, 4)]
    assert some[0] == some[1] != some[2]
    assert some[0] not in (plain, pixels(session.decode(kept)))


def test_there_are_no_tokens_between_two_pictures(session: Session, picture: Pixels) -> None:
    for n in (1, 2):
        with pytest.raises(UserError, match=r"recipe muse draws by tokens.*towards is for recipe dalle2"):
            session.sample("a", n, image=picture, towards=picture)


# ---- a critic, a finer grid


def test_order_critic_needs_a_critic(session: Session) -> None:
    with pytest.raises(UserError, match=r"order critic needs a critic, and base has none; train one: base.critic.kind=net"):
        session.sample("a", options={"order": "critic"})


@pytest.mark.parametrize("critic", ["{kind: head}", "{kind: net, model: {width: 16, depth: 1, heads: 2}}"])
def test_a_critic_decides_the_order(critic: str, pictures: Path, tmp_path: Path) -> None:
    config = small_config(pictures, base__critic=critic, superres=SUPERRES, sample="{steps: 3, chunk: 4, superres: {steps: 2}}")
    session = load(pipeline.train(config, run=tmp_path / "run"), device="cpu")
    together = pixels(session.sample(["a", "b"], 2, options={"order": "critic"}))
    assert pixels(session.sample("b", seed=1, options={"order": "critic"})) == together[3:]
    assert session.sample("a")[0].size == (32, 32), "drawn on the finer grid"
    with pytest.raises(UserError, match="order critic needs a critic, and superres has none"):
        session.sample("a", options={"superres": {"order": "critic"}})


@pytest.fixture(scope="module")
def fine(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A finer generator has been trained, too: 32 pixels, in cells of 4 where base has its tokens."""
    config = small_config(pictures, superres=SUPERRES, sample="{steps: 3, chunk: 4, superres: {steps: 2}}")
    return load(pipeline.train(config, run=tmp_path_factory.mktemp("fine") / "run"), device="cpu")


@pytest.mark.parametrize("ring", [0, 1])
def test_inpainting_keeps_the_fine_picture_outside_of_the_mask(fine: Session, pictures: Path, ring: int) -> None:
    with Image.open(sorted((pictures / "train").glob("*.png"))[2]) as image:
        picture = np.asarray(image.convert("RGB"))
    mask, wide = np.zeros((32, 32), np.uint8), np.zeros((32, 32), bool)
    mask[8:16, 12:24] = 255
    wide[8 - 4 * ring : 16 + 4 * ring, 12 - 4 * ring : 24 + 4 * ring] = True
    for drawn in fine.sample("a red circle", 3, image=picture, mask=mask, options={"mask_ring": ring}):
        found = np.asarray(drawn)
        assert np.array_equal(found[~wide], picture[~wide])
        assert not np.array_equal(found[mask > 0], picture[mask > 0])
    other = picture.copy()
    other[9:15, 13:23] = 255 - other[9:15, 13:23]
    a, b = (pixels(fine.sample("a", image=image, mask=mask, options={"mask_ring": ring})) for image in (picture, other))
    assert a == b, "what is replaced does not shine through"
    frame = np.asarray(fine.sample("a", image=picture, outpaint={"left": 0.5}, options={"mask_ring": 0})[0])
    assert np.array_equal(frame[8:24, 16:32], fit(picture, 16))


def test_base_alone_draws_while_superres_is_still_untrained(pictures: Path, generated: Path, tmp_path: Path) -> None:
    config = small_config(pictures, superres=SUPERRES)
    run = pipeline.train(config, run=tmp_path / "run", stage="tokenizer")
    with pytest.raises(UserError, match=r"stage base has not been trained yet \(trained: tokenizer\); tessera resume goes on"):
        load(run, device="cpu").sample("a")
    pipeline.resume(run, stage="base")
    assert load(run, device="cpu").sample("a")[0].size == (16, 16)


# ---- wrong requests


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"prompts": []}, "nothing to draw"),
        ({"prompts": [3]}, "a prompt is 3; expected text"),
        ({"n": 0}, "n is 0; expected 1 or more"),
        ({"n": 2.5}, "n is 2.5"),
        ({"n": 100_001}, "at most 100,000 in all"),
        ({"seed": -1}, "seed is -1; expected a whole number"),
        ({"seed": 2**62 - 2, "n": 3}, "the last sample would have the seed 4611686018427387904; .* lower the seed"),
        ({"seed": 2**62}, r"seed is 4611686018427387904; expected a whole number from 0 to 4611686018427387903 \(2\^62 - 1\)"),
        ({"mask": "x.png"}, "mask is given without an image"),
        ({"outpaint": {"left": 0.5}}, "outpaint is given without an image"),
        ({"image": "x.png", "mask": "y.png", "outpaint": {"left": 0.5}}, "give one of them"),
        ({"image": "x.png", "outpaint": {"up": 0.5}}, "expected left, right, top or bottom"),
        ({"image": "x.png", "outpaint": {"left": 0.5, "right": 0.45}}, "leaves less than a tenth"),
        ({"options": {"stepps": 3}}, r"sample.stepps \(options\): unknown key; did you mean 'sample.steps'"),
        ({"options": {"steps": 0}}, r"sample.steps \(options\): found 0"),
        ({"image": "nowhere.png"}, "nowhere.png: no such file"),
    ],
    ids=str,
)
def test_a_wrong_request_is_told(session: Session, call: dict[str, Any], said: str) -> None:
    prompts = call.pop("prompts", "a") if "prompts" in call else "a"
    with pytest.raises(UserError, match=said):
        session.sample(prompts, **call)


def test_a_mask_without_white(session: Session, picture: Pixels) -> None:
    with pytest.raises(UserError, match="the mask has no white pixel"):
        session.sample("a", image=picture, mask=np.zeros((16, 16), np.uint8))


def test_a_mask_is_cut_as_its_picture_is(session: Session, picture: Pixels, tmp_path: Path) -> None:
    wide = np.pad(picture, ((0, 0), (8, 8), (0, 0)))  # of which the middle is seen
    mask = masked(slice(4, 8), slice(6, 12))
    (drawn,) = pixels(session.sample("a", image=picture, mask=mask))
    assert pixels(session.sample("a", image=wide, mask=np.pad(mask, ((0, 0), (8, 8))))) == [drawn]
    with pytest.raises(UserError, match=r"proportions than its picture: it is 1 times as wide as high, and the picture 2 times"):
        session.sample("a", image=wide, mask=mask)
    Image.fromarray(mask).save(tmp_path / "m.png")
    with pytest.raises(UserError, match=r"the mask .*m\.png has other proportions"):
        session.sample("a", image=wide, mask=tmp_path / "m.png")
    sides = np.zeros((16, 32), np.uint8)
    sides[:, :4] = 255
    with pytest.raises(UserError, match="white only where nothing is left once it is cut to the middle and scaled to 16 x 16"):
        session.sample("a", image=wide, mask=sides)


def test_proportions_are_alike_but_for_rounding() -> None:
    assert alike((427, 640), (213, 320))
    assert alike((214, 320), (427, 640))
    assert alike((100, 33), (300, 100))
    assert not alike((427, 640), (427, 642))
    assert not alike((320, 480), (480, 320))


def test_a_mask_that_is_partly_transparent(session: Session, picture: Pixels, tmp_path: Path) -> None:
    """Editors erase to transparency: whether that is to be drawn is anybody's guess."""
    mask = Image.fromarray(masked(slice(4, 8), slice(6, 12))).convert("RGBA")
    whole = pixels(session.sample("a", image=picture, mask=mask))
    assert whole == pixels(session.sample("a", image=picture, mask=mask.convert("L"))), "an alpha channel that hides nothing"
    mask.putpixel((0, 0), (0, 0, 0, 254))
    mask.save(tmp_path / "mask.png")
    palette = Image.new("P", (16, 16), 1)
    palette.info["transparency"] = 1
    for given in (mask, np.asarray(mask), palette, tmp_path / "mask.png"):
        with pytest.raises(UserError, match=r"the mask.* has transparent pixels.*; save it without transparency"):
            session.sample("a", image=picture, mask=given)


def test_rows_and_seeds(session: Session) -> None:
    request = make_request(session.config.sample, ["x", "y"], n=2, seed=7)
    assert request.rows() == [("x", 7), ("x", 8), ("y", 7), ("y", 8)]
