"""Stacks of pictures in .npy files: mapped, captioned line by line, and refused with their shape when they are something else."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.config import ImageDataConfig, UserError
from tessera.data.arrays import ArrayStacks
from tessera.data.check import check_folder
from tessera.data.opening import open_source
from tessera.data.sources import split_indices
from tessera.media.images import UnreadableImage


def stack(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def opened(path: Path, **config: Any) -> ArrayStacks:
    source = open_source(path, ImageDataConfig(**config))
    assert isinstance(source, ArrayStacks)
    return source


def save(path: Path, array: np.ndarray) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    return array


@pytest.mark.parametrize("order", ["C", "F"])
def test_pictures_of_a_stack(tmp_path: Path, order: Any) -> None:
    pictures = save(tmp_path / "images.npy", np.asarray(stack(5, 6, 7, 3), order=order))
    source = opened(tmp_path)
    assert [source.key(index) for index in range(5)] == [f"images/{number:06d}" for number in range(5)]
    for index in (4, 0, 2, -1):
        assert np.array_equal(source.read(index), pictures[index])
    assert len(pickle.dumps(source)) < 4000
    assert np.array_equal(pickle.loads(pickle.dumps(source)).read(3), pictures[3])
    report = check_folder(tmp_path)
    assert (report.layout, report.num_samples, report.sizes, report.formats) == ("arrays", 5, {"7x6": 5}, {"NPY": 5})
    with pytest.raises(IndexError):
        source.read(5)


def test_grey_and_transparent_stacks(tmp_path: Path) -> None:
    grey = save(tmp_path / "grey.npy", stack(2, 4, 4))
    glass = stack(2, 4, 4, 4)
    glass[..., 3] = 0
    save(tmp_path / "glass.npy", glass)
    source = opened(tmp_path, background=(1, 2, 3))
    assert [source.name(index) for index in range(4)] == ["glass.npy[0]", "glass.npy[1]", "grey.npy[0]", "grey.npy[1]"]
    assert source.read(0)[0, 0].tolist() == [1, 2, 3]
    assert np.array_equal(source.read(3), grey[1][..., None].repeat(3, -1))
    assert np.array_equal(opened(tmp_path, channels=1).read(2), grey[0][..., None])
    assert check_folder(tmp_path).modes == {"L": 2, "RGBA": 2}


@pytest.mark.parametrize("name", ["captions.txt", "images.txt"])
def test_captions_line_by_line(tmp_path: Path, name: str) -> None:
    save(tmp_path / "images.npy", stack(3, 4, 4, 3))
    (tmp_path / name).write_bytes("one\r\n\r\nthrée\r\n".encode())
    assert [opened(tmp_path).captions(index) for index in range(3)] == [("one",), (), ("thrée",)]


def test_captions_in_json(tmp_path: Path) -> None:
    save(tmp_path / "images.npy", stack(5, 4, 4, 3))
    lines = ['"one"', '["two", "deux"]', "null", json.dumps({"text": "four", "who": "ann"}), "{"]
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    source = opened(tmp_path / "images.npy", group_by="who")
    assert [source.captions(index) for index in range(5)] == [("one",), ("two", "deux"), (), ("four",), ()]
    assert [source.group(index) for index in range(5)][2:4] == ["images/000002", "ann"]
    assert [reject.path for reject in source.rejects] == ["captions.jsonl:5"]


def test_captions_of_several_stacks_stand_beside_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.npy", stack(1, 4, 4, 3))
        (tmp_path / f"{name}.txt").write_text(f"of {name}")
    (tmp_path / "captions.txt").write_text("of whom?")
    assert [opened(tmp_path).caption(index) for index in range(2)] == ["of a", "of b"]


def test_another_number_of_captions_is_the_users_error(tmp_path: Path) -> None:
    save(tmp_path / "images.npy", stack(3, 4, 4, 3))
    (tmp_path / "captions.txt").write_text("one\ntwo\n")
    with pytest.raises(UserError, match=r"captions\.txt has 2 lines, and images\.npy has 3 pictures; expected a line a picture"):
        opened(tmp_path)
    (tmp_path / "captions.txt").write_bytes(b"\xff\n\n\n")
    with pytest.raises(UserError, match=r"captions\.txt is not UTF-8"):
        opened(tmp_path)


def test_other_arrays_are_rejects(tmp_path: Path) -> None:
    save(tmp_path / "images.npy", stack(3, 4, 4, 3))
    save(tmp_path / "labels.npy", np.arange(3))
    save(tmp_path / "first.npy", stack(3, 3, 8, 8))
    save(tmp_path / "empty.npy", np.zeros((0, 4, 4, 3), np.uint8))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "images.npy").read_bytes()[:-1])
    source = opened(tmp_path)
    assert len(source) == 3
    reasons = {reject.path: reject.reason for reject in source.rejects}
    assert set(reasons) == {"labels.npy", "first.npy", "empty.npy", "objects.npy", "cut.npy"}
    assert "int64 shaped (3,); expected uint8" in reasons["labels.npy"]
    assert "channels stand first" in reasons["first.npy"]
    (tmp_path / "images.npy").unlink()
    with pytest.raises(UserError, match=r"holds \.npy files without pictures \(cut\.npy: "):
        opened(tmp_path)


def test_a_stack_larger_than_memory_is_only_mapped(tmp_path: Path) -> None:
    shape = (400, 8192, 8192, 3)  # 80 GB, none of them on the disk
    with (tmp_path / "images.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.truncate(file.tell() + int(np.prod(shape)))
    source = opened(tmp_path)
    assert len(source) == 400
    assert source.key(399) == "images/000399"


def test_a_stack_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    save(tmp_path / "images.npy", stack(3, 4, 4, 3))
    source = opened(tmp_path)
    content = (tmp_path / "images.npy").read_bytes()
    (tmp_path / "images.npy").write_bytes(content[:-10])
    with pytest.raises(UnreadableImage, match=r"images\.npy\[1\]: damaged"):
        source.read(1)


def test_split_folders_of_stacks(tmp_path: Path) -> None:
    save(tmp_path / "train/images.npy", stack(3, 4, 4, 3))
    save(tmp_path / "test/images.npy", stack(2, 4, 4, 3))
    (tmp_path / "test/captions.txt").write_text("one\ntwo")
    source = opened(tmp_path)
    assert split_indices(source, 0.0)[1].tolist() == [0, 1]
    assert source.captions(1) == ("two",)
