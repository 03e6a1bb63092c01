"""A folder of meshes in, a report out: faces, what cleaning did to each file, what is rejected and why, what is alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.config import MeshDataConfig
from tessera.data.folders import Reject
from tessera.data.mesh_sources import MeshFolder
from tessera.data.mesh_survey import SeenMesh, near_shapes, survey_meshes
from tessera.data.report import Report, Tally, counts, equal_groups
from tessera.data.sources import split_indices

_LIMITS = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)  # of the faces histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFile:
    """What was done to one file, and what is left of it."""

    path: str
    num_objects: int
    """Objects that were merged; 1: nothing was."""
    num_triangulated: int
    """Faces of more than three corners that were cut into triangles."""
    centre: tuple[float, ...]
    """Of its bounding box as it was read, x, y, z with z up; it is moved to 0."""
    sides: tuple[float, ...]
    """Of that box; the longest is scaled to 1.9."""
    num_welded: int
    num_unused: int
    num_degenerate: int
    num_duplicate: int
    num_faces_read: int
    """Triangles before cleaning."""
    num_faces: int
    """Triangles after cleaning; `data.max_faces` looks at these."""
    num_faces_in_bins: int
    """Triangles once vertices in one bin are welded: what training sees without augmentation."""
    num_flat_in_bins: int
    """Of those, the ones without area, three places on a line. They are kept: without them, neighbours would come apart."""

    @classmethod
    def of(cls, path: str, seen: SeenMesh) -> MeshFile:
        done = seen.cleaning
        return cls(
            path=path,
            num_objects=seen.objects,
            num_triangulated=seen.polygons,
            centre=seen.centre,
            sides=seen.sides,
            num_welded=done.num_welded,
            num_unused=done.num_unused,
            num_degenerate=done.num_degenerate,
            num_duplicate=done.num_duplicate,
            num_faces_read=done.num_faces_before,
            num_faces=done.num_faces_after,
            num_faces_in_bins=seen.num_faces,
            num_flat_in_bins=seen.num_flat,
        )


@dataclass(frozen=True, kw_only=True)
class MeshReport(Report):
    """What a folder of meshes holds."""

    up: str
    bins: int
    faces: Mapping[str, int]
    """Range of face counts -> number of meshes."""
    fewest_faces: int
    median_faces: int
    most_faces: int
    totals: Mapping[str, int]
    """What was merged, triangulated, welded and removed in all files together."""
    num_too_large: int
    """Rejects that have more faces than data.max_faces."""
    files: tuple[MeshFile, ...]

    def facts(self) -> Iterator[str]:
        yield f"  faces    {counts(self.faces)}"
        if self.num_samples:
            yield f"           fewest {self.fewest_faces:,}, median {self.median_faces:,}, most {self.most_faces:,}"
        yield f"  cleaned  {counts(self.totals)}"
        yield f"  read     {self.up} is up in the files (data.up); {self.bins} bins a side (data.bins)"


def check_meshes(
    source: MeshFolder, config: MeshDataConfig, path: str, progress: Callable[[int, int], None] | None = None
) -> MeshReport:
    """Reads and cleans every mesh."""
    seen, rejects, num_unusable, num_too_large = dict[int, SeenMesh](), list(source.rejects), 0, 0
    for index, result in enumerate(survey_meshes(source, config)):
        if isinstance(result, SeenMesh):
            seen[index] = result
        else:
            rejects.append(Reject(source.name(index), result.reason))
            num_too_large += result.too_large
            num_unusable += not result.too_large
        if progress is not None:
            progress(index + 1, len(source))
    places = list(seen)
    tally = Tally(
        source=source,
        config=config,
        seen=places,
        num_unreadable=num_unusable,
        held_out=frozenset(split_indices(source, config.validation_fraction)[1].tolist()),
        equal=equal_groups({index: each.digest for index, each in seen.items()}),
        near=[[places[member] for member in group] for group in near_shapes(list(seen.values()))],
    )
    files = tuple(MeshFile.of(source.name(index), each) for index, each in seen.items())
    found = np.array([file.num_faces for file in files] or [0])
    return MeshReport(
        path=path,
        up=config.up,
        bins=config.bins,
        faces=face_histogram([file.num_faces for file in files]),
        fewest_faces=int(found.min()),
        median_faces=int(np.median(found)),
        most_faces=int(found.max()),
        totals=_totals(files),
        num_too_large=num_too_large,
        files=files,
        **tally.fields(rejects, ()),
    )


def face_histogram(numbers: Sequence[int]) -> dict[str, int]:
    """Ranges that double, those without meshes left out."""
    found = dict[str, int]()
    for low, high in zip((0, *_LIMITS), (*_LIMITS, None), strict=True):
        count = sum(low < number and (high is None or number <= high) for number in numbers)
        if count:
            found[f"{low + 1}-{high}" if high is not None else f"over {low}"] = count
    return found


def _totals(files: Sequence[MeshFile]) -> dict[str, int]:
    return {
        "files with several objects": sum(file.num_objects > 1 for file in files),
        "polygons triangulated": sum(file.num_triangulated for file in files),
        "vertices welded": sum(file.num_welded for file in files),
        "vertices unused": sum(file.num_unused for file in files),
        "degenerate faces": sum(file.num_degenerate for file in files),
        "duplicate faces": sum(file.num_duplicate for file in files),
        "faces lost in bins": sum(file.num_faces - file.num_faces_in_bins for file in files),
        "faces without area": sum(file.num_flat_in_bins for file in files),
    }
