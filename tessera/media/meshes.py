"""Mesh files in, triangles out: OBJ, OFF and PLY (`polygon_files`), STL, GLB and glTF (trimesh). One mesh a file: its objects
are merged, polygons are triangulated, the transforms of a glTF scene are applied.

Nothing else is done to the data: vertices keep their order, none is welded or dropped, and a degenerate face stays. Materials,
textures and normals are passed over. A file that cannot be read in full raises `UnreadableMesh` with a reason of one line.
No network is asked and no file is opened beside the one named, except the buffers of a .gltf that lie in its folder.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from tessera.media.polygon_files import parse_obj, parse_off, parse_ply
from tessera.media.polygons import triangulate

Points: TypeAlias = npt.NDArray[np.float64]  # n 3
Triangles: TypeAlias = npt.NDArray[np.int64]  # f 3
Quads: TypeAlias = npt.NDArray[np.int64]  # q 4

MESH_SUFFIXES = (".obj", ".glb", ".gltf", ".ply", ".stl", ".off")  # the names of files that are taken for meshes

LARGEST = 1e60  # a coordinate: to triangulate, fourth powers of them are added up

_POLYGONS = {".obj": parse_obj, ".off": parse_off, ".ply": parse_ply}

# What a glTF may require and still be read as it is meant: materials and textures are passed over anyway.
_HARMLESS = ("KHR_materials_", "KHR_texture_", "EXT_texture_", "MSFT_texture_", "KHR_lights_punctual")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Triangles in space: x right, y back, z up."""

    vertices: Points  # n 3 float64
    faces: Triangles  # m 3 int64, corners counter-clockwise seen from outside
    quads: Quads | None = None  # q 4 int64: the same faces, two in one where they are a quad; triangles repeat their third corner


@dataclass(frozen=True, slots=True)
class Reading:
    """The mesh of a file, and what was merged and cut to make it."""

    mesh: Mesh
    objects: int  # `o` of an OBJ with faces, solids of an STL, primitives that a glTF scene places; 1 elsewhere
    polygons: int  # faces of more than three corners; 0 where a format has only triangles


class UnreadableMesh(Exception):
    """A mesh file that cannot be read in full."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(path, reason)  # both, so that a loader's worker can pickle it
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class TrimeshMissing(ImportError):
    """The package that reads STL and glTF is not installed; the message says how to get it."""


def read_mesh(path: Path, up: str = "y") -> Reading:
    """Read one file. `up` is the axis that points up in it, y or z; what leaves has z up."""
    if up not in ("y", "z"):
        raise ValueError(f"got up={up!r}; expected y or z")
    suffix = path.suffix.lower()
    if suffix not in MESH_SUFFIXES:
        raise UnreadableMesh(path, f"{suffix or 'no suffix'}; expected one of {' '.join(MESH_SUFFIXES)}")
    try:
        content = path.read_bytes()
        _check_content(content)
        reading = _read_polygons(content, suffix) if suffix in _POLYGONS else _read_triangles(content, suffix, path.parent)
        _check(reading.mesh)
    except TrimeshMissing:
        raise
    except OSError as error:
        raise UnreadableMesh(path, (error.strerror or str(error)).lower()) from error
    except ValueError as error:
        raise UnreadableMesh(path, str(error)) from error
    except (OverflowError, RecursionError) as error:  # an index of thirty digits, a thousand brackets
        raise UnreadableMesh(path, f"damaged: {error}") from error
    vertices = turn_up(reading.mesh.vertices) if up == "y" else reading.mesh.vertices
    return Reading(Mesh(vertices, reading.mesh.faces), reading.objects, reading.polygons)


def turn_up(points: Points) -> Points:
    """From y-up, as most files are, to z-up: (x, y, z) becomes (x, -z, y). No zero comes out negative."""
    return np.stack([points[:, 0], -points[:, 2], points[:, 1]], axis=1) + 0.0


def turn_back(points: Points) -> Points:
    """From z-up to y-up: the inverse of `turn_up`."""
    return np.stack([points[:, 0], points[:, 2], -points[:, 1]], axis=1) + 0.0


def _check_content(content: bytes) -> None:
    if not content:
        raise ValueError("the file is empty")
    if content.startswith(b"version https://git-lfs"):
        raise ValueError("a Git LFS pointer; fetch the mesh with `git lfs pull`")


def _check(mesh: Mesh) -> None:
    if len(mesh.faces) == 0:
        raise ValueError(f"no faces, {len(mesh.vertices)} vertices (a point cloud?)" if len(mesh.vertices) else "no faces")
    check_vertices(mesh.vertices)


def mesh_from(vertices: Any, faces: Any) -> Mesh:
    """From what Python may hold, arrays or lists; what a file's reader would refuse is refused here, with the reason."""
    try:
        points, corners = np.asarray(vertices, np.float64), np.asarray(faces)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; expected vertices, n x 3 numbers, and faces, m x 3 whole numbers") from None
    corners = corners.reshape(-1, 3).astype(np.int64) if corners.size == 0 else corners  # of an empty list numpy makes floats
    if points.ndim != 2 or points.shape[1] != 3 or corners.ndim != 2 or corners.shape[1] != 3 or corners.dtype.kind not in "iu":
        shapes = f"vertices {list(points.shape)} and faces {list(corners.shape)} of {corners.dtype}"
        raise ValueError(f"{shapes}; expected vertices, n x 3 numbers, and faces, m x 3 whole numbers")
    check_vertices(points)
    _check_indices(corners.ravel().astype(np.int64), len(points))
    return Mesh(points, corners.astype(np.int64))


def check_vertices(vertices: Points) -> None:
    """Numbers that can be computed with, or why not."""
    if not np.isfinite(vertices).all():
        raise ValueError("a vertex is not finite")
    if (largest := np.abs(vertices).max(initial=0)) > LARGEST:
        raise ValueError(f"a vertex has a coordinate of size {largest:.4g}; expected {LARGEST:g} or less: scale the mesh down")


def _check_indices(indices: npt.NDArray[np.int64], num_vertices: int, first: int = 0) -> None:
    """Each is a vertex; `first` is what the file calls the first one."""
    wrong = indices[(indices < 0) | (indices >= num_vertices)]
    if len(wrong):
        raise ValueError(f"a face names vertex {wrong[0] + first} (counted from {first}); there are {num_vertices}")


def _read_polygons(content: bytes, suffix: str) -> Reading:
    found = _POLYGONS[suffix](content)
    counts = np.array([len(face) for face in found.faces], dtype=np.int64)
    if np.any(counts < 3):
        raise ValueError(f"a face has {counts.min()} corners; expected three or more")
    indices = np.array([index for face in found.faces for index in face], dtype=np.int64)
    _check_indices(indices, len(found.vertices), first=int(suffix == ".obj"))
    check_vertices(found.vertices)
    mesh = Mesh(found.vertices, triangulate(found.vertices, found.faces))
    return Reading(mesh, found.objects, int((counts > 3).sum()))


def _read_triangles(content: bytes, suffix: str, folder: Path) -> Reading:
    """STL and glTF through trimesh, told to change nothing."""
    try:
        import trimesh
    except ImportError as error:
        raise TrimeshMissing(
            f"a {suffix} file needs trimesh, which is not installed: pip install 'tessera-gen[mesh]'; .obj, .off and .ply do not"
        ) from error
    if suffix in (".glb", ".gltf"):
        content, suffix = _self_contained(content, suffix, folder), ".gltf"
    else:
        _check_stl(content)
    try:
        scene = trimesh.load_scene(io.BytesIO(content), file_type=suffix[1:], resolver=None, process=False, skip_materials=True)
        parts = [(scene.geometry[name], matrix) for matrix, name in (scene.graph[node] for node in scene.graph.nodes_geometry)]
    except Exception as error:  # damaged files leak a dozen kinds
        raise ValueError(f"damaged: {' '.join(str(error).split())[:200] or type(error).__name__}") from error
    parts = [(part, np.asarray(matrix)) for part, matrix in parts if isinstance(part, trimesh.Trimesh) and len(part.faces)]
    return Reading(_merged(parts), len(parts), 0)


def _check_stl(content: bytes) -> None:
    """Whole or not: trimesh takes what it finds in a text that is cut short, and finds nothing in a binary one."""
    (announced,) = struct.unpack_from("<I", content, 80) if len(content) >= 84 else (-1,)
    if len(content) == 84 + 50 * announced:
        return
    words = content.lower().split()
    if words[:1] != [b"solid"] or b"facet" not in words:
        raise ValueError(f"{len(content)} bytes, and neither a text nor the length that a binary STL announces: cut short?")
    counts = [words.count(word) for word in (b"vertex", b"endfacet", b"endsolid")]
    if counts[0] != 3 * counts[1] or counts[2] == 0:
        raise ValueError(f"a text of {counts[0]} vertices, {counts[1]} whole facets and {counts[2]} whole solids: cut short?")


def _merged(parts: list[tuple[Any, npt.NDArray[np.float64]]]) -> Mesh:
    """Placed by their matrices. One that mirrors turns the faces round, as glTF wants it (section 3.7.4)."""
    vertices, faces, num_vertices = [np.empty((0, 3))], [np.empty((0, 3), dtype=np.int64)], 0
    for part, matrix in parts:
        points, corners = np.asarray(part.vertices, dtype=np.float64), np.asarray(part.faces, dtype=np.int64)
        _check_indices(corners.ravel(), len(points))
        if not np.array_equal(matrix, np.eye(4)):
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then is refused
                points = points @ matrix[:3, :3].T + matrix[:3, 3]
        vertices.append(points)
        faces.append((corners if np.linalg.det(matrix[:3, :3]) >= 0 else corners[:, ::-1]) + num_vertices)
        num_vertices += len(points)
    return Mesh(np.concatenate(vertices), np.concatenate(faces))


def _self_contained(content: bytes, suffix: str, folder: Path) -> bytes:
    """The text of a glTF whose buffers stand in it, so that trimesh has nothing to open; images are taken out. What trimesh
    would read wrongly and say nothing is refused."""
    text, binary = _chunks(content) if suffix == ".glb" else (content, None)
    try:
        tree = json.loads(text)
    except ValueError:
        raise ValueError("its JSON is damaged") from None
    if not isinstance(tree, dict):
        raise ValueError("its JSON is no glTF")
    try:
        _refuse_unread(tree)
        for index, buffer in enumerate(tree.get("buffers", [])):
            data = binary if index == 0 and "uri" not in buffer else _buffer(str(buffer.get("uri", "")), folder)
            if data is None or len(data) < buffer["byteLength"]:
                raise ValueError(f"buffer {index} is shorter than announced")
            buffer["uri"] = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
        tree.pop("images", None)
        tree.pop("textures", None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its JSON is no glTF: {type(error).__name__} {error}") from error
    return json.dumps(tree).encode()


def _refuse_unread(tree: dict[str, Any]) -> None:
    required = [name for name in tree.get("extensionsRequired", []) if not str(name).startswith(_HARMLESS)]
    if required:
        raise ValueError(f"requires {', '.join(map(str, required))}, which is not read; export it uncompressed")
    accessors = tree.get("accessors", [])
    for mesh in tree.get("meshes", []):
        for primitive in mesh["primitives"]:
            mode = primitive.get("mode", 4)
            used = [primitive["attributes"].get("POSITION"), primitive.get("indices")]
            for accessor in (accessors[index] for index in used if isinstance(index, int) and index < len(accessors)):
                if "sparse" in accessor or "bufferView" not in accessor:
                    raise ValueError("has sparse or empty accessors, which are not read")
            if mode == 6:
                raise ValueError("has triangle fans, which are not read; export triangles")


def _chunks(content: bytes) -> tuple[bytes, bytes | None]:
    """The JSON and the binary chunk of a GLB (glTF 2.0, section 4.4)."""
    if len(content) < 20 or content[:4] != b"glTF":
        raise ValueError("no GLB header")
    version, length = struct.unpack_from("<II", content, 4)
    if version != 2:
        raise ValueError(f"glTF version {version}; only version 2 is read")
    if length > len(content):
        raise ValueError(f"{len(content)} bytes of {length}: the file is cut short")
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= length:
        size, kind = struct.unpack_from("<I4s", content, at)
        found.setdefault(kind, content[at + 8 : at + 8 + size])
        at += 8 + size
    if b"JSON" not in found:
        raise ValueError("the GLB has no JSON chunk")
    return found[b"JSON"], found.get(b"BIN\0")


def _buffer(uri: str, folder: Path) -> bytes:
    """The bytes of a data URI, or of a file in the folder or under it."""
    if uri.startswith("data:"):
        try:
            return base64.b64decode(uri.partition("base64,")[2], validate=True)
        except binascii.Error:
            raise ValueError("a buffer's data URI is damaged") from None
    path = (folder / unquote(uri)).resolve()
    if not uri or "://" in uri or not path.is_relative_to(folder.resolve()):
        raise ValueError(f"a buffer is {uri[:80]!r}; only files in the folder of the .gltf are read")
    if not path.is_file():
        raise ValueError(f"its buffer {uri[:80]!r} is not there")
    return path.read_bytes()
