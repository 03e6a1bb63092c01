"""Mesh files: small ones by hand, all against trimesh, and what must be refused."""

from __future__ import annotations

import base64
import json
import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import trimesh

from tessera.data.canonical import standardise
from tessera.media.meshes import LARGEST, MESH_SUFFIXES, Reading, TrimeshMissing, UnreadableMesh, read_mesh, turn_back, turn_up

REAL_DATA = os.environ.get("TESSERA_REAL_DATA")

# A unit square in the plane z = 3 of the file, a triangle beside it, an L of six corners in the plane y = 0.
OBJ = """# two objects\x85by one\u2028hand
mtllib never_opened.mtl
o square
v 0 0 3
v 1 0 3 1.0
v 1 1 3 0.1 0.2 0.3
v 0 1 3
vt 0 0
vn 0 0 1
f 1/1/1 2/1/1 3/1/1 4/1/1
o empty
o rest
v 0 0 0
v 0 0 2
v 1 0 2
v 1 0 1
v 2 0 1
v 2 0 0
usemtl wood
f 5//1 -5 7 8 \\
 9 -1
f 1 3 4
l 1 2
"""


def read(tmp_path: Path, name: str, content: bytes | str, up: str = "y") -> Reading:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_mesh(path, up)


def refused(tmp_path: Path, name: str, content: bytes | str) -> str:
    with pytest.raises(UnreadableMesh) as caught:
        read(tmp_path, name, content)
    assert caught.value.path == tmp_path / name
    assert "\n" not in caught.value.reason
    return caught.value.reason


def area(reading: Reading) -> float:
    a, b, c = (reading.mesh.vertices[reading.mesh.faces[:, index]] for index in range(3))
    return float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)


def ply(form: str, rows: bytes, count: str = "uchar", faces: int = 2) -> bytes:
    lines = ["ply", f"format {form} 1.0", "comment by \u00c5sa", "element vertex 4", "property float x", "property float y"]
    lines += ["property double z", "property uchar red", f"element face {faces}", "property float quality"]
    lines += [f"property list {count} int vertex_index", "element edge 1", "property int vertex1", "end_header\n"]
    return "\n".join(lines).encode() + rows


def gltf(**changed: object) -> dict[str, object]:
    """A triangle, placed twice: moved by (10, 0, 0), and mirrored in x under a node that turns it about y by 90 degrees."""
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 2, 0]], dtype="<f4").tobytes()
    content = points + np.array([0, 1, 2], dtype="<u2").tobytes()
    tree = {
        "asset": {"version": "2.0"},
        "scene": 0,
        "scenes": [{"nodes": [0, 1]}],
        "nodes": [
            {"mesh": 0, "translation": [10, 0, 0]},
            {"rotation": [0, 0.5**0.5, 0, 0.5**0.5], "children": [2]},
            {"mesh": 0, "scale": [-1, 1, 1]},
        ],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1, "material": 0}]}],
        "materials": [{"pbrMetallicRoughness": {"baseColorTexture": {"index": 0}}}],
        "textures": [{"source": 0}],
        "images": [{"uri": "http://127.0.0.1:9/never_fetched.png"}],
        "accessors": [
            {"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"},
            {"bufferView": 1, "componentType": 5123, "count": 3, "type": "SCALAR"},
        ],
        "bufferViews": [
            {"buffer": 0, "byteOffset": 0, "byteLength": 36},
            {"buffer": 0, "byteOffset": 36, "byteLength": 6},
        ],
        "buffers": [{"byteLength": 42, "uri": "data:;base64," + base64.b64encode(content).decode()}],
    }
    return {**tree, **changed}


def test_obj(tmp_path: Path) -> None:
    got = read(tmp_path, "mesh.obj", OBJ, up="z")
    assert (got.objects, got.polygons) == (2, 2)
    assert got.mesh.vertices.dtype == np.float64
    assert got.mesh.faces.dtype == np.int64
    assert got.mesh.vertices[[2, 6]].tolist() == [[1, 1, 3], [1, 0, 2]]
    assert got.mesh.faces[:2].tolist() == [[0, 1, 2], [0, 2, 3]]
    assert got.mesh.faces[-1].tolist() == [0, 2, 3]
    assert len(got.mesh.faces) == 2 + 4 + 1
    assert area(got) == pytest.approx(1 + 3 + 0.5)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_backslash_joins_lines_but_not_the_one_behind_a_comment(end: str, tmp_path: Path) -> None:
    lines = ["# from C:\\models\\", "v 0 \\", "0 \\", "0", "v 1 0 0 # to C:\\", "v 1 1 \\", "0 # one", "f 1 2 \\", "3"]
    got = read(tmp_path, "mesh.obj", end.join(lines), up="z").mesh
    assert got.vertices.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert got.faces.tolist() == [[0, 1, 2]]


def test_y_up_is_turned_and_nothing_is_mirrored(tmp_path: Path) -> None:
    lying, standing = read(tmp_path, "mesh.obj", OBJ, up="z").mesh, read(tmp_path, "mesh.obj", OBJ).mesh
    assert standing.vertices[2].tolist() == [1, -3, 1]
    assert np.array_equal(standing.vertices, [[x, -z, y] for x, y, z in lying.vertices])
    assert not np.signbit(standing.vertices[standing.vertices == 0]).any()
    assert np.array_equal(turn_back(turn_up(lying.vertices)), lying.vertices)
    box = read(tmp_path, "box.obj", trimesh.creation.box((1, 2, 3)).export(file_type="obj")).mesh
    assert trimesh.Trimesh(box.vertices, box.faces).volume == pytest.approx(6)  # outside is still outside
    assert np.ptp(box.vertices, axis=0).tolist() == [1, 3, 2]
    with pytest.raises(ValueError, match="expected y or z"):
        read(tmp_path, "mesh.obj", OBJ, up="x")


@pytest.mark.parametrize(
    "head", ["OFF\n# none\n5 2 0", "OFF\n# one\x85two\u2028three\n5 2 0", "OFF 5 2 0", "OFF5 2 0", "COFF\n5 2 0"]
)
def test_off(tmp_path: Path, head: str) -> None:
    text = head + "\n0 0 0\n1 0 0 255 0 0 255\n1 1 0\n\n0 1 0 # last\n0 0 1\n4 0 1 2 3 255 0 0\n3  0 1 4\n"
    got = read(tmp_path, "mesh.off", text, up="z")
    assert (got.objects, got.polygons) == (1, 1)
    assert got.mesh.faces.tolist() == [[0, 1, 2], [0, 2, 3], [0, 1, 4]]
    assert got.mesh.vertices.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]]


def test_ply_text_and_binary(tmp_path: Path) -> None:
    places = [(0, 0, 0), (1, 0, 0.1), (1, 1, 0), (0, 1, 0)]
    text = "\n".join(f"{x} {y} {z} 7" for x, y, z in places) + "\n0.5 4 0 1 2 3\n0.5 3 3 1 0\n9\n"
    readings = [read(tmp_path, "text.ply", ply("ascii", text.encode()), up="z")]
    for form, order in (("binary_little_endian", "<"), ("binary_big_endian", ">")):
        rows = b"".join(struct.pack(f"{order}ffdB", *place, 7) for place in places)
        rows += struct.pack(f"{order}fH4i", 0.5, 4, 0, 1, 2, 3) + struct.pack(f"{order}fH3i", 0.5, 3, 3, 1, 0)
        readings.append(read(tmp_path, "binary.ply", ply(form, rows + b"\0\0\0\0", "ushort"), up="z"))
    for got in readings:
        assert got.mesh.vertices.tolist() == [list(place) for place in places]
        assert got.mesh.faces.tolist() == [[0, 1, 2], [0, 2, 3], [3, 1, 0]]
        assert (got.objects, got.polygons) == (1, 1)


@pytest.mark.parametrize("form", ["stl", "stl_ascii", "glb", "ply", "off", "obj"])
def test_what_trimesh_writes(tmp_path: Path, form: str) -> None:
    got = read(tmp_path, f"mesh.{form[:3]}", SPHERE.export(file_type=form), up="z")
    assert (got.objects, got.polygons) == (1, 0)
    assert got.mesh.vertices[got.mesh.faces] == pytest.approx(SPHERE.triangles, abs=1e-6)
    assert len(got.mesh.vertices) == (3 * len(SPHERE.faces) if form.startswith("stl") else len(SPHERE.vertices))


def test_the_scene_of_a_gltf_is_placed_and_a_mirror_keeps_outside_outside(tmp_path: Path) -> None:
    got = read(tmp_path, "mesh.gltf", json.dumps(gltf()), up="z")
    assert (got.objects, got.polygons) == (2, 0)
    moved, mirrored = sorted(got.mesh.vertices[got.mesh.faces].round(12).tolist(), key=lambda face: -max(p[0] for p in face))
    assert moved == [[10, 0, 0], [11, 0, 0], [10, 2, 0]]
    # (x, y, z) -> (-x, y, z) -> a turn about y by 90 degrees, (z, y, -x): (1, 0, 0) comes to (0, 0, 1); corners in reverse
    assert mirrored == [[0, 2, 0], [0, 0, 1], [0, 0, 0]]
    again = read(tmp_path, "mesh.gltf", json.dumps(gltf()), up="z").mesh
    assert np.array_equal(again.vertices, got.mesh.vertices)


def test_the_buffer_of_a_gltf_may_lie_beside_it_and_nowhere_else(tmp_path: Path) -> None:
    content = base64.b64decode(gltf()["buffers"][0]["uri"].partition(",")[2])
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a b.bin").write_bytes(content)
    (tmp_path / "out.bin").write_bytes(content)
    (folder / "link.bin").symlink_to(tmp_path / "out.bin")
    assert read(folder, "mesh.gltf", json.dumps(gltf(buffers=[{"byteLength": 42, "uri": "a%20b.bin"}]))).objects == 2
    outside = [
        "../out.bin",
        "%2e%2e/out.bin",
        str(tmp_path / "out.bin"),
        "link.bin",
        "http://127.0.0.1:9/out.bin",
        "file:///etc/passwd",
    ]
    for uri in outside:
        reason = refused(folder, "mesh.gltf", json.dumps(gltf(buffers=[{"byteLength": 42, "uri": uri}])))
        assert "only files in the folder" in reason
    assert "not there" in refused(folder, "mesh.gltf", json.dumps(gltf(buffers=[{"byteLength": 42, "uri": "gone.bin"}])))
    assert "shorter" in refused(folder, "mesh.gltf", json.dumps(gltf(buffers=[{"byteLength": 99, "uri": "a%20b.bin"}])))


SPHERE = trimesh.creation.icosphere(subdivisions=1)
GOOD = "v 0 0 0\nv 1 0 0\nv 0 1 0\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("mesh.obj", "", "the file is empty"),
        ("mesh.obj", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("mesh.obj", GOOD, "no faces, 3 vertices (a point cloud?)"),
        ("mesh.obj", "hello\n", "no faces"),
        ("mesh.obj", GOOD + "f 1 2 4\n", "a face names vertex 4 (counted from 1); there are 3"),
        ("mesh.off", "OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 3\n", "a face names vertex 3 (counted from 0); there are 3"),
        ("mesh.obj", GOOD + "f 1 2 0\n", "line 4: index 0 names no vertex"),
        ("mesh.obj", GOOD + "f 1 2 -4\n", "line 4: index -4 names no vertex"),
        ("mesh.obj", GOOD + "f 1 2\n", "a face has 2 corners"),
        ("mesh.obj", GOOD + "f 1 2 x\n", "line 4: 'x' is no whole number"),
        ("mesh.obj", GOOD + "v 1 nan 0\nf 1 2 3\n", "a vertex is not finite"),
        ("mesh.obj", GOOD + "v 1 1e999 0\nf 1 2 4 3\n", "a vertex is not finite"),
        ("mesh.obj", GOOD + "v 1 -1e308 0\nf 1 2 4 3\n", "a vertex has a coordinate of size 1e+308; expected 1e+60 or less"),
        ("mesh.gltf", json.dumps(gltf(nodes=[{"mesh": 0, "scale": [1e70] * 3}, {}])), "a vertex has a coordinate of size"),
        ("mesh.obj", GOOD + "v 1 2\nf 1 2 3\n", "line 4: '1 2' is no place"),
        ("mesh.off", "3 1 0\n", "no OFF header"),
        ("mesh.off", "OFF BINARY\n", "no OFF header"),
        ("mesh.off", "OFF\n", "no counts"),
        ("mesh.off", "OFF\n3 1 0\n0 0 0\n1 0 0\n", "2 lines after the header; expected 3 vertices and 1 faces"),
        ("mesh.off", "OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n4 0 1 2\n", "face 0 announces 4 corners and has 3"),
        ("mesh.off", "OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 -2\n", "a face names vertex -2"),
        ("mesh.ply", "solid\n", "no PLY header"),
        ("mesh.ply", ply("ascii", b"0 0 0 7 1 0 0 7"), "the file ends at vertex 2; 4 were announced"),
        ("mesh.ply", ply("binary_little_endian", bytes(17 * 4 + 3)), "the file ends at face 0; 2 were announced"),
        ("mesh.ply", ply("ascii", b"0 0 0 7 " * 4 + b"0.5 3.5 1 2 3 1"), "face 0 is not of the kinds of number"),
        ("mesh.ply", ply("ascii", b"0 0 0 7 " * 4 + b"7", faces=0), "no faces, 4 vertices (a point cloud?)"),
        ("mesh.ply", ply("ebcdic", b""), "a line that is not understood: 'format ebcdic 1.0'"),
        ("mesh.stl", "hello, this is no solid at all", "neither a text nor the length"),
        ("mesh.stl", SPHERE.export(file_type="stl")[:-50], "neither a text nor the length"),
        ("mesh.stl", SPHERE.export(file_type="stl_ascii")[:-400], "cut short?"),
        ("mesh.glb", SPHERE.export(file_type="glb")[:-4], "the file is cut short"),
        ("mesh.glb", "glTF", "no GLB header"),
        ("mesh.glb", struct.pack("<4sII", b"glTF", 1, 20) + bytes(8), "glTF version 1"),
        ("mesh.glb", struct.pack("<4sII", b"glTF", 2, 999) + bytes(8), "20 bytes of 999: the file is cut short"),
        ("mesh.gltf", "{", "its JSON is damaged"),
        ("mesh.gltf", "[]", "its JSON is no glTF"),
        ("mesh.gltf", json.dumps(gltf(meshes=[{}])), "its JSON is no glTF: KeyError 'primitives'"),
        ("mesh.gltf", json.dumps(gltf(nodes=[])), "damaged"),
        ("mesh.gltf", json.dumps(gltf(scenes=[{}])), "no faces"),
        ("mesh.gltf", json.dumps(gltf(extensionsRequired=["KHR_draco_mesh_compression"])), "requires KHR_draco_mesh_compression"),
        ("mesh.gltf", json.dumps(gltf(meshes=[{"primitives": [{"attributes": {"POSITION": 0}, "mode": 6}]}])), "triangle fans"),
        ("mesh.gltf", json.dumps(gltf(accessors=[{"componentType": 5126, "count": 3, "type": "VEC3"}] * 2)), "sparse or empty"),
        ("mesh.obj", GOOD + f"f 1 2 {10**30}\n", "damaged"),
        ("mesh.gltf", "[" * 100_000, "damaged"),
        ("mesh.ply", f"ply\nformat ascii 1.0\nelement vertex {10**15}\nproperty int a\nend_header\n", "no x, y and z"),
        ("mesh.ply", f"ply\nformat ascii 1.0\nelement other {10**15}\nend_header\n", "no faces"),
        ("mesh.fbx", "x", ".fbx; expected one of .obj .glb .gltf .ply .stl .off"),
    ],
)  # fmt: skip
def test_what_is_broken_is_refused_with_its_reason(tmp_path: Path, name: str, content: bytes | str, reason: str) -> None:
    assert reason in refused(tmp_path, name, content)


def test_the_largest_and_smallest_coordinates_are_read_as_any(tmp_path: Path) -> None:
    dart = [(0, 0, 0), (4, 1, 0), (0, 2, 0), (1, 1, 0)]  # concave
    found = []
    for size in (1.0, LARGEST / 4, 1e-100):
        lines = [f"v {x * size!r} {y * size!r} {z * size!r}" for x, y, z in dart]
        with np.errstate(over="raise", invalid="raise"):
            mesh = read(tmp_path, "mesh.obj", "\n".join([*lines, "f 1 2 3 4", ""])).mesh
            found.append(standardise(mesh)[0])
    assert all(np.array_equal(other.vertices, found[0].vertices) for other in found)
    assert all(np.array_equal(other.faces, found[0].faces) for other in found)


@pytest.mark.parametrize("form", ["obj", "off", "ply", "stl", "stl_ascii", "glb", "gltf"])
def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path: Path, form: str) -> None:
    whole = json.dumps(gltf()).encode() if form == "gltf" else SPHERE.export(file_type=form)
    whole, rng, refusals = whole.encode() if isinstance(whole, str) else whole, np.random.default_rng(0), 0
    for index in range(60):
        content = bytearray(whole[: rng.integers(1, len(whole)) if index % 2 else len(whole)])
        for at in rng.integers(0, min(len(content), 600), 3):
            content[at] = rng.integers(0, 256)
        try:
            read(tmp_path, f"mesh.{form.removesuffix('_ascii')}", bytes(content))
        except UnreadableMesh:
            refusals += 1
    assert refusals > 5


def test_indices_of_a_gltf_beyond_its_vertices_are_refused(tmp_path: Path) -> None:
    tree = gltf()
    content = base64.b64decode(tree["buffers"][0]["uri"].partition(",")[2])
    tree["buffers"][0]["uri"] = "data:;base64," + base64.b64encode(content[:36] + struct.pack("<HHH", 0, 1, 7)).decode()
    refused(tmp_path, "mesh.gltf", json.dumps(tree))


def test_a_file_that_is_not_there_and_the_error_in_a_worker(tmp_path: Path) -> None:
    with pytest.raises(UnreadableMesh, match="no such file or directory") as caught:
        read_mesh(tmp_path / "gone.obj")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_without_trimesh_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trimesh", None)
    assert read(tmp_path, "mesh.obj", OBJ).objects == 2
    with pytest.raises(TrimeshMissing, match=r"a \.gltf file needs trimesh.*pip install 'tessera-gen\[mesh\]'"):
        read(tmp_path, "mesh.gltf", json.dumps(gltf()))


def test_suffixes_in_capitals(tmp_path: Path) -> None:
    assert all(suffix == suffix.lower() for suffix in MESH_SUFFIXES)
    assert read(tmp_path, "MESH.OBJ", OBJ).polygons == 2


@pytest.mark.skipif(not REAL_DATA, reason="TESSERA_REAL_DATA names no folder of real data")
def test_real_objects_agree_with_trimesh() -> None:
    """Polygons counted by the corners of each `f`; the number, area and volume of the triangles by trimesh."""
    paths = sorted(Path(str(REAL_DATA), "lowpoly").rglob("*.obj"))[::12]
    assert len(paths) > 30
    for path in paths:
        got, other = read_mesh(path), trimesh.load_mesh(path, process=False, skip_materials=True)
        assert got.polygons == sum(len(line.split()) > 4 for line in path.read_text().splitlines() if line.startswith("f "))
        assert len(got.mesh.faces) == len(other.faces)
        assert area(got) == pytest.approx(other.area, rel=1e-9)
        assert trimesh.Trimesh(got.mesh.vertices, got.mesh.faces, process=False).volume == pytest.approx(
            other.volume, rel=1e-6, abs=1e-9
        )
