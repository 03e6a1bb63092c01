"""Batches: bytes in, [-1, 1] on the device, bytes out."""

from __future__ import annotations

import pytest
import torch

from tessera.batches import ImageBatch, to_uint8

CPU = torch.device("cpu")


def batch() -> ImageBatch:
    images = [torch.full((3, 2, 2), value, dtype=torch.uint8) for value in (0, 255, 51)]
    return ImageBatch.stack(images, ["a", "b", "c"], ["x", None, "z"], [5, 6, 9])


def test_a_stack_keeps_everything() -> None:
    made = batch()
    assert made.images.shape == (3, 3, 2, 2)
    assert made.images.dtype == torch.uint8
    assert made.valid.tolist() == [True, True, True]
    assert made.positions.tolist() == [5, 6, 9]
    assert made.positions.dtype == torch.int64
    assert made.keys == ("a", "b", "c")
    assert made.captions == ("x", None, "z")


def test_moving_makes_numbers_and_leaves_the_original() -> None:
    made = batch()
    moved = made.to(CPU)
    assert moved.images[:, 0, 0, 0].tolist() == pytest.approx([-1, 1, -0.6])
    assert made.images.dtype == torch.uint8
    assert moved.keys == made.keys
    again = moved.to(CPU)
    assert torch.equal(again.images, moved.images)  # floats are taken as they are


def test_every_byte_survives_the_way_in_and_out() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    moved = ImageBatch.stack(list(values), ["a"], [None], [0]).to(CPU)
    assert moved.images.min() == -1
    assert moved.images.max() == 1
    assert torch.equal(to_uint8(moved.images), values)
    assert torch.equal(to_uint8(moved.images.bfloat16().float()), to_uint8(moved.images.bfloat16()))


def test_the_way_out_clamps_and_rounds() -> None:
    assert to_uint8(torch.tensor([-3.0, -1.0, -0.9961, 0.0, 0.9999, 1.0, 7.0])).tolist() == [0, 0, 0, 128, 255, 255, 255]


def test_pictures_of_two_sizes_are_an_error() -> None:
    with pytest.raises(RuntimeError):
        ImageBatch.stack([torch.zeros(3, 2, 2), torch.zeros(3, 4, 4)], ["a", "b"], [None, None], [0, 1])
