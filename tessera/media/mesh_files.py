"""Meshes to the bytes of OBJ, PLY and GLB files: indexed, y-up, and equal meshes give equal bytes. A mesh without faces is
written too, as a valid file that holds nothing to see. OBJ and PLY hold quads where a mesh has them, GLB knows none.
"""

from __future__ import annotations

import json
import struct

from tessera.media.meshes import Mesh, turn_back

_ALIGNMENT = 4
_JSON, _BIN = b"JSON", b"BIN\0"
_FLOAT, _USHORT, _UINT = 5126, 5123, 5125  # component types of glTF 2.0, section 3.6.2.2
_VERTEX_BUFFER, _INDEX_BUFFER = 34962, 34963
_RESTART = 65535  # the uint16 that glTF does not allow as an index


def encode_obj(mesh: Mesh) -> bytes:
    """Wavefront text; every number is written so that it is read back exactly."""
    lines = [f"v {x!r} {y!r} {z!r}" for x, y, z in turn_back(mesh.vertices).tolist()]
    lines += ["f " + " ".join(str(corner + 1) for corner in face) for face in polygons_of(mesh)]
    return "".join(f"{line}\n" for line in lines).encode()


def encode_ply(mesh: Mesh) -> bytes:
    """Binary, little-endian, with double coordinates: exact too."""
    faces = polygons_of(mesh)
    header = [
        "ply", "format binary_little_endian 1.0",
        f"element vertex {len(mesh.vertices)}", *(f"property double {axis}" for axis in "xyz"),
        f"element face {len(faces)}", "property list uchar int vertex_indices",
        "end_header",
    ]  # fmt: skip
    text = "".join(f"{line}\n" for line in header)
    corners = b"".join(struct.pack(f"<B{len(face)}i", len(face), *face) for face in faces)
    return text.encode() + turn_back(mesh.vertices).astype("<f8").tobytes() + corners


def polygons_of(mesh: Mesh) -> list[list[int]]:
    """Corners of each face, counted from 0."""
    if mesh.quads is None:
        return mesh.faces.tolist()
    return [face[:3] if face[2] == face[3] else face for face in mesh.quads.tolist()]


def encode_glb(mesh: Mesh) -> bytes:
    """glTF 2.0, binary: one mesh of float32 positions, matt grey and seen from both sides. It has no normals, so a viewer
    shades it flat (section 3.7.2.1)."""
    if len(mesh.faces) == 0:
        return _glb({"asset": {"version": "2.0"}, "scene": 0, "scenes": [{}]}, b"")
    positions = turn_back(mesh.vertices).astype("<f4")
    short = len(positions) <= _RESTART
    indices = mesh.faces.astype("<u2" if short else "<u4")
    placed = positions.tobytes()  # 12 bytes a vertex: what follows is aligned
    tree = {
        "asset": {"version": "2.0", "generator": "tessera"},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1, "material": 0, "mode": 4}]}],
        "materials": [
            {
                "pbrMetallicRoughness": {"baseColorFactor": [0.8, 0.8, 0.8, 1.0], "metallicFactor": 0.0, "roughnessFactor": 1.0},
                "doubleSided": True,
            }
        ],
        "accessors": [
            {
                "bufferView": 0,
                "componentType": _FLOAT,
                "count": len(positions),
                "type": "VEC3",
                "min": positions.min(axis=0).tolist(),
                "max": positions.max(axis=0).tolist(),
            },
            {"bufferView": 1, "componentType": _USHORT if short else _UINT, "count": indices.size, "type": "SCALAR"},
        ],
        "bufferViews": [
            {"buffer": 0, "byteOffset": 0, "byteLength": len(placed), "target": _VERTEX_BUFFER},
            {"buffer": 0, "byteOffset": len(placed), "byteLength": indices.nbytes, "target": _INDEX_BUFFER},
        ],
        "buffers": [{"byteLength": len(placed) + indices.nbytes}],
    }
    return _glb(tree, placed + indices.tobytes())


def _glb(tree: dict[str, object], binary: bytes) -> bytes:
    """Section 4.4: a header of 12 bytes; chunks of length, kind and content, padded with spaces (JSON) or zeros."""
    chunks = _chunk(_JSON, json.dumps(tree, separators=(",", ":")).encode(), b" ")
    if binary:
        chunks += _chunk(_BIN, binary, b"\0")
    return struct.pack("<4sII", b"glTF", 2, 12 + len(chunks)) + chunks


def _chunk(kind: bytes, content: bytes, padding: bytes) -> bytes:
    content += padding * (-len(content) % _ALIGNMENT)
    return struct.pack("<I4s", len(content), kind) + content
