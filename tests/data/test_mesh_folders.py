"""Folders of meshes: which captions, which rejects, what is alike, and what `data check` says of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.config import MeshDataConfig, UserError
from tessera.data.canonical import standardise
from tessera.data.check import check_folder
from tessera.data.mesh_check import MeshReport, face_histogram
from tessera.data.mesh_survey import cells_of
from tessera.data.names import name_caption
from tessera.data.opening import open_source
from tessera.data.sources import split_indices
from tessera.media.mesh_files import encode_glb, encode_obj
from tessera.media.meshes import Mesh
from tests.data.mesh_makers import fan

REAL_DATA = os.environ.get("TESSERA_REAL_DATA")


def write(root: Path, names: str, mesh: Mesh | None = None) -> None:
    for place, name in enumerate(names.split()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        made = fan(4 + place, height=0.5 + place) if mesh is None else mesh
        path.write_bytes(encode_glb(made) if name.endswith(".glb") else encode_obj(made))


def captions(root: Path, **config: Any) -> dict[str, tuple[str, ...]]:
    source = open_source(root, MeshDataConfig(**config))
    return {source.key(index): source.captions(index) for index in range(len(source))}


def checked(root: Path, *sets: str) -> MeshReport:
    report = check_folder(root, sets=sets)
    assert isinstance(report, MeshReport)
    return report


# ---- captions


@pytest.mark.parametrize(
    ("path", "caption"),
    [
        ("furniture/chair_wooden-02.obj", "chair wooden"),
        ("city/building_A_withoutBase.glb", "building a without base"),
        ("chairs/0001.obj", "chairs"),
        ("apple/apple_000/mesh.obj", "apple"),
        ("02691156/1a04e3eab45ca15dd86060f189eb133/models/model_normalized.obj", ""),
        ("golden chair.ply", "golden chair"),
        ("train/lamps/7.off", "lamps"),
    ],
)
def test_names_as_captions(path: str, caption: str) -> None:
    assert name_caption(path.split("/")) == caption


def test_names_are_captions_only_where_nothing_else_is(tmp_path: Path) -> None:
    write(tmp_path, "furniture/chair_wooden-02.obj furniture/lamp.glb city/7.obj")
    assert captions(tmp_path) == {
        "city/7": ("city",), "furniture/chair_wooden-02": ("chair wooden",), "furniture/lamp": ("lamp",),
    }  # fmt: skip
    (note,) = [note for note in checked(tmp_path).notes if "names of files or folders" in note]
    assert "captions of 3 meshes: city/7.obj is 'city' (data.name_captions=false" in note
    assert captions(tmp_path, name_captions=False) == {
        "city/7": ("city",), "furniture/chair_wooden-02": ("furniture",), "furniture/lamp": ("furniture",),
    }  # fmt: skip
    assert set(captions(tmp_path, name_captions=False, class_folders=False).values()) == {()}
    (tmp_path / "furniture/lamp.txt").write_text("a lamp\na standing lamp\n")
    assert captions(tmp_path) == {
        "city/7": (), "furniture/chair_wooden-02": (), "furniture/lamp": ("a lamp", "a standing lamp"),
    }  # fmt: skip


def test_a_table_has_the_captions(tmp_path: Path) -> None:
    write(tmp_path, "a/one.obj a/two.obj")
    (tmp_path / "metadata.csv").write_text("file_name,text,family\na/one.obj,the first,x\na/three.obj,no,x\na/two.png,no,y\n")
    assert captions(tmp_path) == {"a/one": ("the first",), "a/two": ()}
    report = checked(tmp_path)
    assert [(reject.path, reject.reason) for reject in report.rejects] == [
        ("metadata.csv:3", "a/three.obj: no such file"), ("metadata.csv:4", "a/two.png: not a mesh file"),
    ]  # fmt: skip
    assert any("mesh that no row of the metadata names" in note for note in report.notes)
    source = open_source(tmp_path, MeshDataConfig(group_by="family"))
    assert [source.group(0), source.group(1)] == ["x", "a/two"]


def test_split_folders(tmp_path: Path) -> None:
    write(tmp_path, "train/a.obj train/b.obj val/c.obj loose.obj")
    report = checked(tmp_path)
    assert report.split == {"train": 2, "validation": 1}
    assert captions(tmp_path) == {"train/a": ("a",), "train/b": ("b",), "val/c": ("c",)}


# ---- what lies beside


def test_textures_and_materials_do_not_make_it_a_folder_of_pictures(tmp_path: Path) -> None:
    write(tmp_path, "a.obj b.obj")
    (tmp_path / "a.mtl").write_text("newmtl x\n")
    (tmp_path / "c.fbx").write_text("x")
    Image.new("RGB", (8, 8)).save(tmp_path / "texture.png")
    report = checked(tmp_path)
    assert report.kind == "meshes"
    assert any("1 .png file not read: images; of meshes only the shape" in note for note in report.notes)
    assert any("1 .fbx file not read: meshes of another format; export" in note for note in report.notes)
    assert not any(".mtl" in note for note in report.notes)
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    assert check_folder(tmp_path).kind == "images"  # as many; then it must be said
    assert check_folder(tmp_path, kind="meshes").kind == "meshes"
    with pytest.raises(UserError, match="expected images, clips or meshes"):
        check_folder(tmp_path, kind="videos")


def test_a_folder_without_meshes_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(UserError, match=r"holds no meshes: found 1 \.png file.*; expected a folder of obj, glb"):
        open_source(tmp_path, MeshDataConfig())


# ---- rejects and what was done


def test_the_report(tmp_path: Path) -> None:
    write(tmp_path, "large.obj", fan(900))
    write(tmp_path, "tent.glb", fan(60))
    (tmp_path / "broken.obj").write_text("not a mesh")
    (tmp_path / "line.obj").write_text("v 0 0 0\nv 1 0 0\nv 2 2 0\nf 1 2 1\n")
    quads = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv 0 1 0\nv 5 5 5\n"
    (tmp_path / "two.obj").write_text(quads + "o one\nf 1 2 3 4\nf 1 2 3\nf 4 5 1\no other\nf 1 3 2\n")
    report = checked(tmp_path)
    reasons = {reject.path: reject.reason for reject in report.rejects}
    assert reasons["large.obj"] == "900 faces, more than data.max_faces=800; raise it, or simplify the mesh"
    assert reasons["line.obj"] == "none of its 1 faces is left: each repeats a vertex"
    assert sorted(reasons) == ["broken.obj", "large.obj", "line.obj"]
    assert (report.num_samples, report.num_captioned, report.num_rejected, report.num_too_large) == (2, 2, 3, 1)
    assert report.faces == {"1-50": 1, "51-100": 1}
    tent, two = report.files
    assert (tent.path, tent.num_faces) == ("tent.glb", 60)
    assert (two.num_objects, two.num_triangulated, two.num_welded, two.num_unused) == (2, 1, 1, 1)
    assert (tent.num_flat_in_bins, two.num_flat_in_bins) == (0, 0)
    assert (two.num_faces_read, two.num_degenerate, two.num_duplicate, two.num_faces) == (5, 1, 1, 3)
    assert (two.centre, two.sides) == ((0.5, 0.0, 0.5), (1.0, 0.0, 1.0)), "of what faces use, turned up"
    assert json.loads(json.dumps(report.to_json()))["files"][1]["sides"] == [1.0, 0.0, 1.0]
    text = "\n".join(report.lines())
    assert "2 meshes, 2 captions, 3 rejects" in text
    assert "polygons triangulated 1, vertices welded 1, vertices unused 1, degenerate faces 1, duplicate faces 1" in text
    assert "reject   large.obj: 900 faces" in text
    assert "2 of 5 meshes cannot be read, and data.corrupt_budget" in text  # the large one is none of them
    more = checked(tmp_path, "data.max_faces=900")
    assert (more.num_too_large, more.num_samples) == (0, 3)
    with pytest.raises(UserError, match="max_face"):
        checked(tmp_path, "data.max_face=900")


def test_all_groups_of_equal_meshes_are_named_and_ten_are_shown(tmp_path: Path) -> None:
    for count in range(12):
        for copy in "ab":
            write(tmp_path, f"{count}-{copy}.obj", fan(40 + count))
    report = checked(tmp_path)
    assert len(report.duplicates) == report.num_exact_duplicates == 12
    same = [line for line in report.lines() if line.startswith("  same ")]
    assert len(same) == 10
    assert "  ... and 2 more" in report.lines()


def test_faces_without_area_are_counted_and_kept(tmp_path: Path) -> None:
    """A corner lies on the long side of another face: between them is a face whose three places are on one line."""
    (tmp_path / "gap.obj").write_text("v 0 0 0\nv 4 0 0\nv 0 4 0\nv 0 2 0\nv -2 2 0\nf 1 2 3\nf 1 3 4\nf 1 4 5\nf 4 3 5\n")
    report = checked(tmp_path, "data.bins=64")
    (gap,) = report.files
    assert (gap.num_faces, gap.num_faces_in_bins, gap.num_flat_in_bins) == (4, 4, 1)
    assert "faces without area 1" in "\n".join(report.lines())


def test_the_histogram_of_faces() -> None:
    assert face_histogram([1, 50, 51, 100, 101, 12800, 12801]) == {
        "1-50": 2, "51-100": 2, "101-200": 1, "6401-12800": 1, "over 12800": 1,
    }  # fmt: skip


# ---- near-duplicates


def refined(mesh: Mesh) -> Mesh:
    """Every triangle cut into three: the same surface."""
    centres = mesh.vertices[mesh.faces].mean(axis=1)
    middle = len(mesh.vertices) + np.arange(len(mesh.faces))
    parts = [np.stack([mesh.faces[:, a], mesh.faces[:, b], middle], axis=1) for a, b in ((0, 1), (1, 2), (2, 0))]
    return Mesh(np.concatenate([mesh.vertices, centres]), np.concatenate(parts))


def test_shapes_that_are_alike_share_a_group(tmp_path: Path) -> None:
    tent = fan(9, height=1.5)
    shapes = {
        "tent": tent,
        "copy": Mesh(tent.vertices[::-1] * 3 + 5, len(tent.vertices) - 1 - tent.faces),  # moved, scaled, renumbered
        "refined": refined(tent),
        "bent": Mesh(tent.vertices + 0.004 * np.random.default_rng(0).normal(size=tent.vertices.shape), tent.faces),
        "flat": fan(9, height=0.4),
        "square": fan(4, height=1.5),
    }
    for name, mesh in shapes.items():
        write(tmp_path, f"{name}.obj", mesh)
    report = checked(tmp_path)
    assert [sorted(group) for group in report.near_duplicates] == [["bent.obj", "copy.obj", "refined.obj", "tent.obj"]]
    assert [sorted(group) for group in report.duplicates] == [["copy.obj", "tent.obj"]]
    assert report.num_exact_duplicates == 1
    source = open_source(tmp_path, MeshDataConfig(group_near_duplicates=True, validation_fraction=0.5))
    groups = {source.key(index): source.group(index) for index in range(len(source))}
    assert len(set(groups.values())) == 3
    assert groups["tent"] == groups["copy"] == groups["refined"] == groups["bent"]
    train, held_out = (set(side.tolist()) for side in split_indices(source, 0.5))
    members = {index for index in range(len(source)) if groups[source.key(index)] == groups["tent"]}
    assert members <= train or members <= held_out


def test_cells_against_a_dense_cloud_of_points() -> None:
    """Every cell with some surface in it is marked, the slightest corners aside; and hardly any other."""
    mesh = standardise(fan(7, height=1.1))[0]
    rng, corners = np.random.default_rng(1), mesh.vertices[mesh.faces]
    weights = rng.dirichlet([1, 1, 1], size=(7, 40_000))
    points = np.einsum("fpk,fkc->fpc", weights, corners).reshape(-1, 3)
    bins = np.floor((points + 1) / 2 * 23).astype(int)
    counts = np.bincount(bins @ np.array([1, 23, 529]), minlength=23**3)
    dense = set(np.flatnonzero(counts).tolist())
    found = set(np.flatnonzero(np.unpackbits(cells_of(mesh))[: 23**3]).tolist())
    assert set(np.flatnonzero(counts > len(points) / len(dense) / 2).tolist()) <= found  # half of the average
    assert len(dense - found) < 0.1 * len(dense)
    assert len(found - dense) <= 0.01 * len(dense)


@pytest.mark.skipif(not REAL_DATA, reason="TESSERA_REAL_DATA names no folder of real data")
def test_the_low_poly_pack() -> None:
    report = checked(Path(str(REAL_DATA)) / "lowpoly")
    assert (report.num_samples, report.num_captioned, report.num_rejected) == (454, 454, 0)
    assert sum(report.faces.values()) == 454
    assert report.most_faces == 494
    assert any("city/car_taxi_wheel_rear_left.obj" in group for group in report.near_duplicates)
