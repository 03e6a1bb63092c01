"""Mesh files as they are written: read back by our reader and by trimesh, and the GLB taken apart by hand."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import trimesh

from tessera.media.mesh_files import encode_glb, encode_obj, encode_ply
from tessera.media.meshes import Mesh, UnreadableMesh, read_mesh

ENCODERS = {"obj": encode_obj, "ply": encode_ply, "glb": encode_glb}
EMPTY = Mesh(np.empty((0, 3)), np.empty((0, 3), dtype=np.int64))


def noise(num_vertices: int = 7, num_faces: int = 11, seed: int = 0) -> Mesh:
    rng = np.random.default_rng(seed)
    vertices = rng.normal(size=(num_vertices, 3))
    vertices[0] = [0.1, 1 / 3, 1e-12]
    vertices[1] = [-0.0, 0.0, 0.0]
    return Mesh(vertices, np.array([rng.permutation(num_vertices)[:3] for _ in range(num_faces)]))


@pytest.mark.parametrize("form", ENCODERS)
def test_what_is_written_is_read_back(tmp_path: Path, form: str) -> None:
    mesh = noise()
    path = tmp_path / f"mesh.{form}"
    path.write_bytes(ENCODERS[form](mesh))
    got = read_mesh(path)
    exact = mesh.vertices.astype(np.float32) if form == "glb" else mesh.vertices
    assert np.array_equal(got.mesh.vertices, exact)
    assert np.array_equal(got.mesh.faces, mesh.faces)
    assert (got.objects, got.polygons) == (1, 0)
    other = trimesh.load_mesh(io.BytesIO(path.read_bytes()), file_type=form, process=False, maintain_order=True)
    assert np.array_equal(other.vertices, np.stack([exact[:, 0], exact[:, 2], -exact[:, 1]], axis=1))  # y-up
    assert np.array_equal(other.faces, mesh.faces)


@pytest.mark.parametrize("form", ENCODERS)
def test_equal_meshes_give_equal_bytes(form: str) -> None:
    assert ENCODERS[form](noise()) == ENCODERS[form](noise())
    zeros = Mesh(noise().vertices + 0.0, noise().faces)  # -0.0 has become 0.0
    assert ENCODERS[form](zeros) == ENCODERS[form](noise())
    assert ENCODERS[form](noise(seed=1)) != ENCODERS[form](noise())


@pytest.mark.parametrize("form", ENCODERS)
def test_an_empty_mesh_is_a_valid_file_without_faces(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"mesh.{form}"
    path.write_bytes(ENCODERS[form](EMPTY) or b"\n")
    with pytest.raises(UnreadableMesh, match="no faces"):
        read_mesh(path)


def test_obj_is_plain_text() -> None:
    mesh = Mesh(np.array([[0.5, 1, 2], [0, 0, 0], [1, 0, 0]]), np.array([[0, 1, 2]]))
    assert encode_obj(mesh) == b"v 0.5 2.0 -1.0\nv 0.0 0.0 0.0\nv 1.0 0.0 0.0\nf 1 2 3\n"


@pytest.mark.parametrize(("num_vertices", "component", "size"), [(5, 5123, 2), (65535, 5123, 2), (65536, 5125, 4)])
def test_glb_structure(num_vertices: int, component: int, size: int) -> None:
    mesh = noise(num_vertices, 3)
    content = encode_glb(mesh)
    magic, version, length = struct.unpack_from("<4sII", content)
    assert (magic, version, length) == (b"glTF", 2, len(content))
    json_length, json_kind = struct.unpack_from("<I4s", content, 12)
    assert (json_length % 4, json_kind) == (0, b"JSON")
    tree = json.loads(content[20 : 20 + json_length])
    binary_length, binary_kind = struct.unpack_from("<I4s", content, 20 + json_length)
    binary = content[28 + json_length :]
    assert (binary_length, binary_kind, len(binary) % 4) == (len(binary), b"BIN\0", 0)
    assert 0 <= binary_length - tree["buffers"][0]["byteLength"] <= 3

    positions, indices = tree["accessors"]
    assert [(entry["componentType"], entry["type"], entry["count"]) for entry in (positions, indices)] == [
        (5126, "VEC3", num_vertices),
        (component, "SCALAR", 9),
    ]
    for accessor, width in ((positions, 4), (indices, size)):
        view = tree["bufferViews"][accessor["bufferView"]]
        assert view["byteOffset"] % width == 0
        assert view["byteOffset"] + view["byteLength"] <= tree["buffers"][0]["byteLength"]
    stored = np.frombuffer(binary, "<f4", num_vertices * 3).reshape(-1, 3)
    assert positions["min"] == stored.min(axis=0).tolist()
    assert positions["max"] == stored.max(axis=0).tolist()
    found = np.frombuffer(binary, f"<u{size}", 9, tree["bufferViews"][1]["byteOffset"])
    assert np.array_equal(found.reshape(-1, 3), mesh.faces)
    assert tree["meshes"][0]["primitives"][0]["attributes"] == {"POSITION": 0}
    assert tree["scenes"][tree["scene"]]["nodes"] == [0]
