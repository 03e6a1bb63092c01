"""A path in, a source out: image files, webdataset tars or NumPy stacks, whichever lies there; or the clips, or the meshes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, overload

from tessera.config import (
    DataConfig,
    ImageDataConfig,
    MeshDataConfig,
    UserError,
    VideoDataConfig,
)
from tessera.data.arrays import ArrayStacks
from tessera.data.captions import names_side
from tessera.data.clip_sources import ClipFolder, ClipStacks, StoredClips, holds_stacks, reading_of
from tessera.data.clip_survey import near_clips
from tessera.data.folders import Contents, list_folder
from tessera.data.kinds import CLIPS, IMAGES, MESHES
from tessera.data.mesh_sources import MeshFolder
from tessera.data.mesh_survey import near_meshes
from tessera.data.shards import TarShards
from tessera.data.sources import ImageFolder, Reading, Stored, StoredImages, StringTable
from tessera.data.survey import merged_groups, near_pictures

S = TypeVar("S", bound=Stored)


@overload
def open_source(path: Path | str, config: VideoDataConfig) -> StoredClips: ...  # type: ignore[overload-overlap]  # a subclass
@overload
def open_source(path: Path | str, config: ImageDataConfig) -> StoredImages: ...
@overload
def open_source(path: Path | str, config: MeshDataConfig) -> MeshFolder: ...
def open_source(path: Path | str, config: ImageDataConfig | MeshDataConfig) -> Stored:
    """What the config asks for; what else lies there is named in the notes."""
    kind = CLIPS if isinstance(config, VideoDataConfig) else MESHES if isinstance(config, MeshDataConfig) else IMAGES
    contents = list_folder(Path(path).absolute(), kind)
    if isinstance(config, VideoDataConfig):  # which is an ImageDataConfig, too
        return open_clips(contents, config)
    return open_meshes(contents, config) if isinstance(config, MeshDataConfig) else open_images(contents, config)


def open_meshes(contents: Contents, config: MeshDataConfig) -> MeshFolder:
    """Of a folder that was listed."""
    source = MeshFolder.of(contents, config)
    refuse_groups(source, config)
    return _grouped(source, near_meshes(source, config)) if config.group_near_duplicates else source


def open_clips(contents: Contents, config: VideoDataConfig) -> StoredClips:
    """Files and folders of frames come first, arrays of one clip among them, then stacks of clips."""
    reading = reading_of(config)
    source: StoredClips = ClipStacks.of(contents, reading) if holds_stacks(contents) else ClipFolder.of(contents, reading)
    refuse_groups(source, config)
    if config.group_near_duplicates:
        source = _grouped(source, near_clips(source))
    return _noting_sides(source, config)


def open_images(contents: Contents, config: ImageDataConfig) -> StoredImages:
    """Image files come first, then tars, then arrays."""
    reading = Reading(
        channels=config.channels,
        background=config.background,
        min_side=round(max(config.size) * config.zoom),
        group_by=config.group_by,
        split_folders=config.split == "auto",
        class_folders=config.class_folders,
    )
    source = _sniffed(contents, reading)
    refuse_groups(source, config)
    if config.group_near_duplicates:
        source = _grouped(source, near_pictures(source))
    return _noting_sides(source, config)


def refuse_groups(source: Stored, config: DataConfig) -> None:
    """Groups decide nothing where folders do."""
    if source.index.held_out is not None and (config.group_by is not None or config.group_near_duplicates):
        option = "group_near_duplicates" if config.group_by is None else "group_by"
        raise UserError(
            f"data.{option} has no effect on {source.root}, whose folders are the split; "
            f"leave it out, or set data.split=hash to divide all {source.kind} anew"
        )


def _grouped(source: S, near: Sequence[Sequence[int]]) -> S:
    """Near-duplicates in one group."""
    groups = merged_groups(source, near)
    source = replace(source, index=replace(source.index, groups=StringTable(groups)))
    largest = max(Counter(groups).values())
    count = len(set(groups))
    told = f"{count:,} group{'s'[: count != 1]}, the largest of {largest:,} of {len(groups):,} samples"
    return _noting(source, f"near-duplicates share a group (data.group_near_duplicates): {told}")


def _sniffed(contents: Contents, reading: Reading) -> StoredImages:
    kinds = {"images": contents.samples, ".tar files": contents.shards, ".npy files": contents.arrays}
    present = [name for name, files in kinds.items() if files]
    for other in present[1:]:
        for path in kinds[other]:
            contents.note(f"{other} beside {present[0]}, not read; move them to a folder of their own", path)
    if present and present[0] == ".tar files":
        return TarShards.of(contents, reading)
    if present and present[0] == ".npy files":
        return ArrayStacks.of(contents, reading)
    return ImageFolder.of(contents, reading)


def _noting_sides(source: S, config: ImageDataConfig) -> S:
    sided = sum(names_side(source.captions(index)) for index in range(len(source))) if config.flip is True else 0
    if not sided:
        return source
    return _noting(
        source, f"sample whose caption names left or right, so it is not mirrored (data.flip=always: it is): {sided:,}"
    )


def _noting(source: S, note: str) -> S:
    return replace(source, notes=(*source.notes, note))
