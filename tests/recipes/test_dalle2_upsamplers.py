"""Upsamplers: what they learn from, and which of them draw where some are not trained yet."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tessera import pipeline
from tessera.batches import PairBatch, TextStates
from tessera.config import TarEmbeddingsConfig, UserError
from tessera.contracts import Chunk, Context, Way
from tessera.generators.diffusion.degrade import NoiseConfig
from tessera.recipes.dalle2.config import UpsamplerConfig
from tessera.recipes.dalle2.drawing import Painter
from tessera.recipes.dalle2.nets import read_upsampler, upsampler_nets
from tessera.sampling.serve import draw_to_files
from tessera.sampling.session import Session, load
from tessera.sampling.uses import after_training
from tests.cli.conftest import tessera
from tests.recipes.test_dalle2_drawing import photo, run, session, workshop

__all__ = ["photo", "run", "session", "tessera", "workshop"]


def test_a_gap_between_trained_stages_is_told(session: Session) -> None:
    assert session.config.upsampler1.resolution == 32
    second = session.config.upsampler1.model_copy(update={"resolution": 48})
    config = session.config.model_copy(update={"upsampler2": second})
    trained = {name: nets for name, nets in session.nets.items() if name != "upsampler1"}
    painter = Painter(config, {**trained, "upsampler2": upsampler_nets(config, second)}, torch.device("cpu"))
    seeds = torch.arange(2)
    with pytest.raises(UserError, match="upsampler2 enlarges what upsampler1 draws, which is not trained yet; train it, too"):
        painter(Chunk(["a red circle"] * 2, seeds, config.sample))
    alone = config.sample.model_copy(update={"start": "upsampler2"})
    assert painter.start_size(alone) == (32, 32)
    one, two = painter(Chunk([""] * 2, seeds, alone, pictures=torch.zeros(2, 3, 32, 32)))
    assert one.size == two.size == (48, 48)


def test_a_picture_that_is_fitted_before_it_is_enlarged(run: Path, photo: Image.Image, tmp_path: Path) -> None:
    sizes = {
        "fits": (16, 16),
        "wide": (40, 24),
        "low": (40, 16),
        "large": (32, 32),
        "small": (9, 9),
        "tall": (10, 30),
        "near": (33, 32),
    }
    for name, size in sizes.items():
        photo.resize(size).save(tmp_path / f"{name}.png")

    def told(name: str, *sets: str) -> str:
        image = tmp_path / f"{name}.png"
        said = draw_to_files(run, [""], named={"image": image}, flags={}, sets=sets, out=tmp_path / f"{name}{len(sets)}").by
        return said.partition("pictures are 32 px")[2].replace(f"{tmp_path}/", "")

    assert told("wide") == told("small") == ""  # a variation
    for name, wanted in {
        "wide": "40 px wide and 24 high, and was cropped and made smaller",
        "low": "40 px wide and 16 high, and was cropped",
        "large": "32 px, and was made smaller",
        "small": "9 px, and was made larger",
        "tall": "10 px wide and 30 high, and was cropped and made larger",
        "near": "33 px wide and 32 high, and was cropped and made smaller",
    }.items():
        assert told(name, "sample.start=upsampler1") == f"; {name}.png is {wanted} first: what is enlarged is 16 px"
    assert told("fits", "sample.start=upsampler1") == ""


def test_only_stages_that_draw_are_told(run: Path, photo: Image.Image, tmp_path: Path) -> None:
    """In words and in the JSON: where an upsampler starts, none of those before it."""
    photo.resize((16, 16)).save(tmp_path / "small.png")
    for folder, sets, wanted in (
        ("alone", ["sample.start=upsampler1"], ["upsampler1"]),
        ("all", [], ["embedder", "prior", "base", "upsampler1"]),
    ):
        image = {"image": tmp_path / "small.png"}
        drawn = draw_to_files(run, [""], named=image, flags={}, sets=sets, out=tmp_path / folder)
        assert re.findall(r"(\w+) step 4", drawn.by) == wanted
        assert list(json.loads((tmp_path / folder / "0.json").read_text())["made_by"]["stages"]) == wanted


def test_the_json_of_an_enlarged_picture_draws_it_again_whatever_the_run_says_since(
    run: Path, photo: Image.Image, tmp_path: Path
) -> None:
    mine = Path(shutil.copytree(run, tmp_path / "mine"))
    photo.save(tmp_path / "photo.png")

    def drawn(folder: str, *sets: str, request: Path | None = None) -> bytes:
        named = {"image": tmp_path / "photo.png"} if request is None else {}
        prompts = [""] if request is None else []
        made = draw_to_files(mine, prompts, request_file=request, named=named, flags={}, sets=sets, out=tmp_path / folder)
        return made.samples[0].path.read_bytes()

    first, written = drawn("first", "sample.start=upsampler1"), tmp_path / "first" / "0.json"
    assert set(json.loads(written.read_text())["sample"]) == {"upsampler", "start", "chunk", "compile"}
    pipeline.resume(mine, sets=["sample.steps=4", "sample.prior.steps=3", "sample.guidance=5", "sample.upsampler.steps=3"])
    assert load(mine, device="cpu").config.sample.steps == 4
    assert drawn("again", request=written) == first
    with pytest.raises(UserError, match="=7 is not for upsampler1"):
        drawn("other", "sample.start=upsampler1", "sample.steps=7")


# ---- what the commands say comes next


def with_stages(run: Path, place: Path, stages: Sequence[str]) -> Path:
    """A copy in which no other ones are trained."""
    skip = {"embedder", "prior", "base", "upsampler1"} - set(stages)
    return Path(shutil.copytree(run, place, ignore=lambda folder, names: skip & set(names)))


@pytest.mark.parametrize(
    ("stages", "way"),
    [
        (["embedder", "base"], '"" --image FILE'),
        (["embedder", "base", "upsampler1"], '"" --image FILE'),
        (["embedder", "prior", "base"], '"PROMPT"'),
        (["upsampler1"], '"" --image FILE --set sample.start=upsampler1'),
    ],
    ids=" ".join,
)
def test_the_next_command_works_whatever_is_trained(
    run: Path, photo: Image.Image, tmp_path: Path, tessera: Callable[..., Any], stages: list[str], way: str
) -> None:
    """After training, after an export, and after drawing."""
    mine = with_stages(run, tmp_path / "mine", stages)
    photo.save(tmp_path / "FILE", "PNG")
    assert after_training(mine, stages[-1]).startswith(f"tessera sample {mine} {way}")
    ended = tessera("export", mine, "--out", "both")
    assert ended.out.splitlines()[-1] == f"next: tessera sample both {way}"
    for model in (mine, "both"):
        ended = tessera("sample", model, *shlex.split(way))
        assert ended.code == 0, ended.err
        again, *judge = ended.out.splitlines()[-1].split("   or   ")
        following = shlex.split(again.partition("   ")[0].removeprefix("next: tessera "))
        assert tessera(*following, "--out", f"{model}-again").code == 0
        data = " --set data.path=FOLDER" if model == "both" else ""
        assert judge == ([f"tessera evaluate {model}{data}"] if "base" in stages else [])
    card = (tmp_path / "both" / "README.md").read_text()
    assert ('model.sample("PROMPT"' in card) == ("prior" in stages)
    assert ('model.sample("", image="picture.png"' in card) == ("prior" not in stages)


def test_an_export_that_draws_nothing_is_trained_on(run: Path, tmp_path: Path, tessera: Callable[..., Any]) -> None:
    mine = with_stages(run, tmp_path / "mine", ["embedder", "prior"])
    assert tessera("export", mine, "--out", "both").out.splitlines()[-1] == f"next: tessera resume {mine}"


def test_without_anything_that_embeds_pictures_an_embedding_is_asked_for(session: Session) -> None:
    config = session.config.model_copy(update={"embeddings": TarEmbeddingsConfig()})
    assert session.recipe.way(config, ["base", "upsampler1"]) == Way("embedding", lacks="prior")


def test_where_an_upsampler_between_others_is_missing_the_last_one_draws(session: Session) -> None:
    config = session.config.model_copy(update={"upsampler2": session.config.upsampler1})
    assert session.recipe.way(config, ["prior", "base", "upsampler2"]) == Way("image", "upsampler2")
    assert session.recipe.way(config, ["prior", "base", "upsampler1"]) == Way("prompt")


# ---- parts that they learn from


def ramps(num: int, height: int, width: int) -> torch.Tensor:
    """b 2 h w in [-1, 1]: each pixel tells its row and its column."""
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    return torch.stack([rows, columns]).expand(num, -1, -1, -1)


def test_target_and_condition_are_parts_of_one_place() -> None:
    """Whatever the place, both tell the same one; noise that nobody would see."""
    num, height, width, side = 64, 40, 48, 16
    stage = UpsamplerConfig(resolution=height, crop=side, low=NoiseConfig(levels=(40.0, 40.0)))
    everything, positions = torch.ones(num, dtype=torch.bool), torch.arange(num)
    names = ("",) * num
    batch = PairBatch(ramps(num, height, width), None, TextStates.none(num, 8), everything, positions, names, names)
    example = read_upsampler(stage, (height // 2, width // 2), {}, batch, Context(3, 5, positions))
    assert example.condition.low is not None
    pixels = torch.tensor([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    target, low = ((part + 1) * pixels for part in (example.clean, example.condition.low))
    assert target.shape == low.shape == (num, 2, side, side)
    torch.testing.assert_close(low, target, rtol=0, atol=0.5)  # pixels; scaling bends ramps at borders, by 0.37
    corners = target[:, :, 0, 0]
    torch.testing.assert_close(target - corners[:, :, None, None], ((ramps(num, side, side) + 1) * (side - 1) / 2), msg="upright")
    assert len({tuple(corner) for corner in corners.round().int().tolist()}) > num // 2, "each has its own place"
