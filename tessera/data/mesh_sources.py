"""A folder of captioned mesh files in, numbered samples out. Opening reads no mesh: `mesh_check.py` and `mesh_cache.py` do.

A mesh is *standard* once it is cleaned, centred and scaled (`canonical.standardise`); what then cannot be used is a reject with
its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tessera.config import MeshDataConfig, UserError
from tessera.data.canonical import Cleaning, quantise, standardise
from tessera.data.captions import pair_captions
from tessera.data.folders import Contents, holds_nothing, list_folder
from tessera.data.sources import DatasetSource, Source, Stored, StringTable, entry, index_of
from tessera.data.unread import note_beside_meshes
from tessera.media.meshes import Mesh, Reading, TrimeshMissing, UnreadableMesh, mesh_from, read_mesh


class TooManyFaces(ValueError):
    """A mesh that is whole, and larger than the user wants."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MeshFolder(Stored):
    """The mesh files under one folder. Build it with `MeshFolder.open`."""

    kind = "meshes"
    layout = "folder"
    up: str
    _paths: StringTable

    @classmethod
    def open(cls, path: Path | str, config: MeshDataConfig) -> Self:
        """Lists the files and pairs them with captions."""
        return cls.of(list_folder(Path(path).absolute()), config)

    @classmethod
    def of(cls, contents: Contents, config: MeshDataConfig) -> Self:
        """Of a folder that was listed."""
        contents.take_meshes()
        if not contents.samples:
            raise holds_nothing(contents)
        pair_captions(
            contents, split_folders=config.split == "auto", class_folders=config.class_folders, name_captions=config.name_captions
        )
        note_beside_meshes(contents)
        index = index_of(contents, config.group_by)  # before the notes: it adds to them
        return cls(
            root=contents.root,
            rejects=tuple(contents.rejects),
            notes=contents.notes(),
            index=index,
            up=config.up,
            _paths=StringTable(contents.samples),
        )

    def path(self, index: int) -> Path:
        """Where the file lies."""
        return self.root / self._paths[index]

    def files(self) -> Iterator[Path]:
        return (self.path(index) for index in range(len(self)))

    def name(self, index: int) -> str:
        return self._paths[index]

    def read(self, index: int) -> Mesh:
        """As it stands in the file, z up; raises `UnreadableMesh`."""
        return self.reading(index).mesh

    def reading(self, index: int) -> Reading:
        """The mesh, and what was merged and triangulated for it."""
        try:
            return read_mesh(self.path(index), self.up)
        except TrimeshMissing as error:
            raise UserError(str(error)) from None


def standard(mesh: Mesh, config: MeshDataConfig) -> tuple[Mesh, Cleaning]:
    """A mesh as training takes it, and what was done to it; `ValueError` says why it cannot."""
    done, report = standardise(mesh)
    if not len(done.faces):
        raise ValueError(f"none of its {report.num_faces_before:,} faces is left: each repeats a vertex")
    if len(done.faces) > config.max_faces:
        raise TooManyFaces(
            f"{len(done.faces):,} faces, more than data.max_faces={config.max_faces:,}; raise it, or simplify the mesh"
        )
    if not len(quantise(done, config.bins)):
        raise ValueError(f"no face is left in {config.bins} bins; raise data.bins")
    return done, report


def refusal(error: Exception) -> str:
    """Why a mesh is a reject, without its path."""
    if isinstance(error, UnreadableMesh):
        return error.reason
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def as_mesh_source(dataset: Any) -> Source:
    """A `Source` as it is, or any object with `__len__` and `__getitem__` whose items have `key`, `mesh` (a `Mesh`, or vertices
    n 3 and faces m 3, z up), `caption` and perhaps `group`, as attributes or as entries of a mapping; read through once, here."""
    source = dataset if isinstance(dataset, Source) else MeshDataset(dataset)
    if not len(source):
        raise UserError(f"the dataset ({type(dataset).__name__}) has no samples; expected one or more")
    return source


class MeshDataset(DatasetSource):
    """A map-style dataset of meshes as a `Source`; see `as_mesh_source`."""

    def content(self, item: Any, index: int) -> Mesh:
        """Checked: what a file's reader would refuse is refused here."""
        mesh = entry(item, "mesh")
        try:
            vertices, faces = (mesh.vertices, mesh.faces) if hasattr(mesh, "vertices") else mesh
            return mesh_from(vertices, faces)
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"sample {index} of the dataset has no mesh: {error}; expected key, mesh and caption") from None
