"""OBJ, OFF and PLY: the formats whose faces have any number of corners. Bytes in; vertices, faces as they stand in the file and
the number of objects out. Colours, normals, textures and materials are passed over, and no other file is opened.

Read here and not by trimesh, which does not say what was a polygon and cuts a concave one as if it were convex: an L of area 3
becomes one of 4 (5.2). Our tests hold the two against each other. What is wrong with a file is a `ValueError` of one line.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Polygons:
    """What a file holds, before triangulation."""

    vertices: npt.NDArray[np.float64]  # n 3
    faces: Sequence[Sequence[int]]  # corners, counted from 0
    objects: int


_CONTINUED = re.compile(rb"^([^#\r\n]*)\\\r?\n", re.MULTILINE)  # by the next line; a comment is not, whose last folder ends so


def parse_obj(content: bytes) -> Polygons:
    """Wavefront. An index may count back from the last vertex; objects are the `o` that have faces."""
    vertices: list[list[float]] = []
    faces: list[list[int]] = []
    objects, current = set(), 0
    for number, line in enumerate(_lines(_CONTINUED.sub(rb"\1 ", content)), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if words[0] == "v":
            vertices.append(_point(words[1:], f"line {number}"))
        elif words[0] == "f":
            faces.append([_obj_index(word, len(vertices), number) for word in words[1:]])
            objects.add(current)
        elif words[0] == "o":
            current += 1
    return Polygons(_points(vertices), faces, len(objects))


def parse_off(content: bytes) -> Polygons:
    """Object File Format, as text; colours, normals and texture coordinates after the place of a vertex are passed over."""
    lines = [line.split("#", 1)[0].split() for line in _lines(content)]
    lines = [words for words in lines if words]
    kind, found, rest = lines[0][0].partition("OFF") if lines else ("", "", "")
    if not found or kind not in ("", "C", "N", "CN", "ST", "STC", "STN", "STCN") or "BINARY" in lines[0]:
        raise ValueError("no OFF header; expected a text file that starts with OFF")
    head = ([rest] if rest else []) + lines[0][1:]  # the counts may follow in the same line, or, in ModelNet, the same word
    rows = lines[1:]
    if not head:
        head, rows = (rows[0] if rows else []), rows[1:]
    num_vertices, num_faces = _counts(head)
    if len(rows) < num_vertices + num_faces:
        raise ValueError(f"{len(rows)} lines after the header; expected {num_vertices} vertices and {num_faces} faces")
    vertices = [_point(row, f"vertex {index}") for index, row in enumerate(rows[:num_vertices])]
    faces = []
    for index, row in enumerate(rows[num_vertices : num_vertices + num_faces]):
        corners = _whole(row[0], f"face {index}")
        if not 0 <= corners < len(row):
            raise ValueError(f"face {index} announces {corners} corners and has {len(row) - 1}")
        faces.append([_whole(word, f"face {index}") for word in row[1 : corners + 1]])
    return Polygons(_points(vertices), faces, 1)


def _counts(head: Sequence[str]) -> tuple[int, int]:
    if len(head) < 2:
        raise ValueError("the OFF header has no counts of vertices and faces")
    num_vertices, num_faces = (_whole(word, "the OFF header") for word in head[:2])
    if num_vertices < 0 or num_faces < 0:
        raise ValueError(f"the OFF header counts {num_vertices} vertices and {num_faces} faces")
    return num_vertices, num_faces


def _obj_index(word: str, num_vertices: int, line: int) -> int:
    """`7`, `7/1/3` or `-1`; what lies beyond the vertices is found when all of them are known."""
    index = _whole(word.split("/", 1)[0], f"line {line}")
    if index == 0 or index < -num_vertices:
        raise ValueError(f"line {line}: index {index} names no vertex")
    return index - 1 if index > 0 else num_vertices + index


def _whole(word: str, where: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{where}: {word[:40]!r} is no whole number") from None


def _point(words: Sequence[str], where: str) -> list[float]:
    try:
        point = [float(word) for word in words[:3]]
    except ValueError:
        point = []
    if len(point) != 3:
        raise ValueError(f"{where}: {' '.join(words)[:40]!r} is no place; expected three numbers")
    return point


def _points(vertices: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    return np.array(vertices, dtype=np.float64).reshape(-1, 3)


_PLY_TYPES = {
    "char": "b", "int8": "b", "uchar": "B", "uint8": "B", "short": "h", "int16": "h", "ushort": "H", "uint16": "H",
    "int": "i", "int32": "i", "uint": "I", "uint32": "I", "float": "f", "float32": "f", "double": "d", "float64": "d",
}  # fmt: skip
_PLY_FORMATS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


@dataclass(frozen=True, slots=True)
class _Property:
    name: str
    kind: str  # as `struct` writes it
    count_kind: str | None = None  # of a list: how its length is written


@dataclass(frozen=True, slots=True)
class _Element:
    name: str
    count: int
    properties: list[_Property] = field(default_factory=list)


def parse_ply(content: bytes) -> Polygons:
    """Polygon File Format: text, or binary of either byte order."""
    order, elements, start = _ply_header(content)
    rows = _text_rows(content[start:], elements) if order == "" else _binary_rows(content, start, order, elements)
    vertices: list[Sequence[float]] = []
    faces: list[Sequence[int]] = []
    for element, values in rows:
        if element.name == "vertex":
            vertices.append([values[name] for name in "xyz"])
        elif element.name == "face":
            faces.append(values.get("vertex_indices", values.get("vertex_index", ())))
    return Polygons(_points(vertices), faces, 1)


def _lines(content: bytes) -> list[str]:
    """Ended by line feeds and carriage returns alone: names and comments may hold whatever else."""
    return [line.decode("utf-8", "replace") for line in content.splitlines()]


def _ply_header(content: bytes) -> tuple[str, list[_Element], int]:
    head, found, _ = content.partition(b"end_header")
    if not content.startswith(b"ply") or not found:
        raise ValueError("no PLY header; expected a file that starts with `ply` and has a line `end_header`")
    start = content.find(b"\n", len(head)) + 1 or len(content)
    order, elements = None, list[_Element]()
    for line in _lines(head):
        match line.split():
            case ["format", kind, *_] if kind in _PLY_FORMATS:
                order = _PLY_FORMATS[kind]
            case ["element", name, count] if count.isdecimal():
                elements.append(_Element(name, int(count)))
            case ["property", "list", count_kind, kind, name] if elements and {count_kind, kind} <= _PLY_TYPES.keys():
                elements[-1].properties.append(_Property(name, _PLY_TYPES[kind], _PLY_TYPES[count_kind]))
            case ["property", kind, name] if elements and kind in _PLY_TYPES:
                elements[-1].properties.append(_Property(name, _PLY_TYPES[kind]))
            case [] | ["ply" | "comment" | "obj_info", *_]:
                pass
            case _:
                raise ValueError(f"the PLY header has a line that is not understood: {line[:60]!r}")
    if order is None:
        raise ValueError("the PLY header names no format")
    _check_ply(elements)
    return order, elements, start


def _check_ply(elements: Sequence[_Element]) -> None:
    """Vertices have x, y and z; faces are lists of whole numbers."""
    for element in elements:
        kinds = {entry.name: entry for entry in element.properties}
        if element.name == "vertex" and not all(name in kinds and kinds[name].count_kind is None for name in "xyz"):
            raise ValueError("the vertices of the PLY have no x, y and z")
        if element.name == "face":
            corners = kinds.get("vertex_indices", kinds.get("vertex_index"))
            if corners is None or corners.count_kind is None or corners.kind in "fd":
                raise ValueError("the faces of the PLY have no list vertex_indices of whole numbers")
        if any(entry.count_kind is not None and entry.count_kind in "fd" for entry in element.properties):
            raise ValueError(f"the PLY element {element.name} has a list whose length is no whole number")


def _text_rows(body: bytes, elements: Sequence[_Element]) -> Iterator[tuple[_Element, dict[str, Any]]]:
    words = iter(body.split())
    for element in elements:
        for index in range(element.count if element.properties else 0):
            where = f"{element.name} {index}"
            try:
                values: dict[str, Any] = {}
                for entry in element.properties:
                    read = float if entry.kind in "fd" else int
                    if entry.count_kind is None:
                        values[entry.name] = read(next(words))
                    else:
                        values[entry.name] = [read(next(words)) for _ in range(int(next(words)))]
            except StopIteration:
                raise ValueError(f"the file ends at {where}; {element.count} were announced") from None
            except ValueError:
                raise ValueError(f"{where} is not of the kinds of number that the header announces") from None
            yield element, values


def _binary_rows(content: bytes, at: int, order: str, elements: Sequence[_Element]) -> Iterator[tuple[_Element, dict[str, Any]]]:
    for element in elements:
        for index in range(element.count if element.properties else 0):
            values: dict[str, Any] = {}
            try:
                for entry in element.properties:
                    length = None
                    if entry.count_kind is not None:
                        (length,) = struct.unpack_from(order + entry.count_kind, content, at)
                        at += struct.calcsize(order + entry.count_kind)
                    layout = f"{order}{1 if length is None else max(length, 0)}{entry.kind}"
                    read = struct.unpack_from(layout, content, at)
                    at += struct.calcsize(layout)
                    values[entry.name] = read[0] if length is None else read
            except struct.error:
                raise ValueError(f"the file ends at {element.name} {index}; {element.count} were announced") from None
            yield element, values
