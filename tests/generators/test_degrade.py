"""What upsamplers see: scaling against Pillow, crops by ramps, noise and blur of the degree that is told."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from tessera.generators.diffusion.degrade import (
    BlurConfig,
    NoiseConfig,
    add_noise,
    blur,
    crop,
    degrade,
    draw_levels,
    draw_places,
    resize,
    sample_levels,
)

SIZES = [(8, 8), (5, 7), (12, 4), (32, 40), (33, 19)]


def pictures(num: int = 2, size: tuple[int, int] = (16, 20), seed: int = 0) -> Tensor:
    return torch.rand(num, 3, *size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def ramps(num: int, height: int, width: int) -> Tensor:
    """b 2 h w: each pixel holds its row and its column."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns]).float().expand(num, -1, -1, -1)


# ---- scaling


@pytest.mark.parametrize("size", SIZES)
def test_pictures_are_scaled_as_pillow_does(size: tuple[int, int]) -> None:
    images = pictures()
    found = resize(images, size)
    for image, scaled in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        wanted = Image.fromarray(image.numpy(), mode="F").resize((size[1], size[0]), Image.Resampling.BICUBIC)
        np.testing.assert_allclose(scaled.numpy(), np.asarray(wanted), rtol=0, atol=2e-5)


def test_fine_stripes_become_grey_and_not_other_stripes() -> None:
    """Nearest neighbours would make them black or white."""
    stripes = torch.ones(1, 1, 32, 32)
    stripes[..., ::2] = -1
    assert resize(stripes, (8, 8)).abs().max() < 0.1


def test_scaling_shifts_nothing() -> None:
    ramp = ramps(1, 64, 80)
    there_and_back = resize(resize(ramp, (16, 20)), (64, 80))
    torch.testing.assert_close(there_and_back[..., 20:-20, 20:-20], ramp[..., 20:-20, 20:-20], rtol=0, atol=1e-3)


def test_what_overshoots_is_cut_off_where_a_limit_is_given() -> None:
    edge = torch.ones(1, 1, 16, 16)
    edge[..., :8] = -1
    assert resize(edge, (32, 32)).max() > 1.01
    assert resize(edge, (32, 32), limit=1.0).abs().max() == 1
    assert resize(edge, (16, 16)) is edge


# ---- crops


def test_target_and_condition_are_cut_at_the_same_place() -> None:
    places = draw_places(3, 5, torch.arange(100, 164), (20, 30), (8, 12))
    target, condition = (crop(part, places, (8, 12)) for part in (ramps(64, 20, 30), 2 * ramps(64, 20, 30)))
    assert target.shape == (64, 2, 8, 12)
    assert torch.equal(condition, 2 * target)
    assert torch.equal(target[:, :, 0, 0].long(), places)
    assert torch.equal(target - target[:, :, :1, :1], ramps(64, 8, 12)), "in one piece, upright"


def test_crops_lie_everywhere_and_are_functions_of_seed_step_and_position() -> None:
    positions = torch.arange(4000)
    places = draw_places(0, 0, positions, (10, 9), (8, 4))
    assert {tuple(place) for place in places.tolist()} == {(row, column) for row in range(3) for column in range(6)}
    assert torch.bincount(places[:, 0] * 6 + places[:, 1]).div(4000 / 18).sub(1).abs().max() < 0.3
    parts = [draw_places(0, 0, positions[start : start + 7], (10, 9), (8, 4)) for start in range(0, 70, 7)]
    assert torch.equal(torch.cat(parts), places[:70])
    for other in (draw_places(1, 0, positions, (10, 9), (8, 4)), draw_places(0, 1, positions, (10, 9), (8, 4))):
        assert (other != places).any(1).float().mean() > 0.8
    assert not draw_places(0, 0, positions, (8, 4), (8, 4)).any()
    with pytest.raises(ValueError, match="a crop of 8 x 10 does not fit into pictures of 10 x 9"):
        draw_places(0, 0, positions, (10, 9), (8, 10))


def test_a_part_of_the_enlarged_picture_is_what_the_whole_shows_there() -> None:
    """The smaller picture is enlarged first and cut then: a part knows what lies around it, as in use."""
    images, positions = pictures(4, (32, 32)), torch.arange(4)
    config = NoiseConfig()
    low = degrade(config, resize(images, (16, 16)), (32, 32), draw_levels(config, 0, 1, positions), 0, 1, positions)
    places = draw_places(0, 1, positions, (32, 32), (12, 8))
    found = crop(low, places, (12, 8))
    for row, (top, left) in enumerate(places.tolist()):
        assert torch.equal(found[row], low[row, :, top : top + 12, left : left + 8])


# ---- noise


def test_noise_is_of_the_level_that_is_told() -> None:
    levels, positions = torch.tensor([-2.0, 0.0, 3.0, 8.0]), torch.arange(4)
    clean = torch.ones(4, 3, 64, 64)
    found = degrade(NoiseConfig(), clean, (64, 64), levels, 0, 0, positions)
    signal, deviation = found.flatten(1).mean(1), found.flatten(1).std(1)
    torch.testing.assert_close(2 * (signal / deviation).log(), levels, rtol=0, atol=0.15)
    torch.testing.assert_close(signal**2 + deviation**2, torch.ones(4), rtol=0, atol=0.04)
    assert torch.equal(add_noise(clean, found, torch.full((4,), math.inf)), clean)


def test_noise_is_a_function_of_seed_step_and_position() -> None:
    small, config = pictures(6, (4, 4)), NoiseConfig()
    positions = torch.arange(40, 46)
    levels = draw_levels(config, 7, 3, positions)
    whole = degrade(config, small, (8, 8), levels, 7, 3, positions)
    part = degrade(config, small[2:4], (8, 8), draw_levels(config, 7, 3, positions[2:4]), 7, 3, positions[2:4])
    assert torch.equal(whole[2:4], part)
    assert not torch.equal(degrade(config, small, (8, 8), levels, 7, 4, positions), whole)
    assert not torch.equal(degrade(config, small, (8, 8), levels, 8, 3, positions), whole)


def test_levels_fill_their_range_evenly() -> None:
    drawn = draw_levels(NoiseConfig(levels=(-1.0, 3.0)), 0, 0, torch.arange(8000))
    assert torch.histc(drawn, 8, -1, 3).div(1000).sub(1).abs().max() < 0.15
    assert torch.equal(sample_levels(NoiseConfig(sample_level=2.5), torch.arange(3)), torch.full((3,), 2.5))


# ---- blur


def test_each_row_is_blurred_by_its_own_gaussian() -> None:
    images, sigmas, radius = pictures(3, (9, 11)).double(), torch.tensor([0.4, 1.0, 0.0]), 3
    found = blur(images, sigmas, radius).numpy()
    for row, sigma in enumerate(sigmas.tolist()):
        padded = np.pad(images[row].numpy(), ((0, 0), (radius, radius), (radius, radius)), mode="reflect")
        wanted, total = np.zeros((3, 9, 11)), 0.0
        for down in range(-radius, radius + 1):
            for right in range(-radius, radius + 1):
                weight = math.exp(-(down**2 + right**2) / (2 * sigma**2)) if sigma else float(down == right == 0)
                wanted += weight * padded[:, radius + down : radius + down + 9, radius + right : radius + right + 11]
                total += weight
        np.testing.assert_allclose(found[row], wanted / total, rtol=0, atol=1e-6)


def test_the_level_of_a_blur_says_its_deviation() -> None:
    config, positions = BlurConfig(sigmas=(0.5, 1.0), prob=0.3), torch.arange(5000)
    levels = draw_levels(config, 0, 0, positions)
    sigmas = torch.exp(-levels / 2)
    blurred = sigmas > 0
    assert blurred.float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.histc(sigmas[blurred], 5, 0.5, 1.0).div(blurred.sum() / 5).sub(1).abs().max() < 0.2
    assert levels[~blurred].isposinf().all()
    assert sample_levels(BlurConfig(), positions).isposinf().all()
    images = pictures(5000, (4, 4))
    found = degrade(config, images, (4, 4), levels, 0, 0, positions)
    assert torch.equal(found[~blurred], images[~blurred])
    torch.testing.assert_close(found[blurred], blur(images[blurred], sigmas[blurred], config.radius), rtol=0, atol=1e-5)


def test_a_blur_is_as_exact_under_autocast() -> None:
    images, sigmas = pictures(), torch.tensor([0.5, 0.8])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(blur(images, sigmas, 2), blur(images, sigmas, 2).float())
        found = blur(images, sigmas, 2)
    assert torch.equal(found, blur(images, sigmas, 2))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError, match="the lower one comes first"):
        NoiseConfig(levels=(3.0, 1.0))
    with pytest.raises(ValidationError, match="must be above 0, the lower one first"):
        BlurConfig(sigmas=(0.0, 1.0))
    with pytest.raises(ValueError, match="too small for a blur that reaches 3 pixels"):
        blur(pictures(1, (3, 8)), torch.ones(1), 3)
