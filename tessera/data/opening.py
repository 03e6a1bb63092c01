"""A path in, a source out: image files, webdataset tars or NumPy stacks, whichever lies there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from tessera.config import ImageDataConfig, UserError
from tessera.data.arrays import ArrayStacks
from tessera.data.captions import names_side
from tessera.data.folders import Contents, list_folder
from tessera.data.shards import TarShards
from tessera.data.sources import ImageFolder, Reading, StoredImages, StringTable
from tessera.data.survey import merged_groups


def open_source(path: Path | str, config: ImageDataConfig) -> StoredImages:
    """Image files come first, then tars, then arrays; what else lies there is named in the notes."""
    reading = Reading(
        channels=config.channels,
        background=config.background,
        min_side=round(config.resolution * config.zoom),
        group_by=config.group_by,
        split_folders=config.split == "auto",
        class_folders=config.class_folders,
    )
    source = _sniffed(list_folder(Path(path).absolute()), reading)
    if source.index.held_out is not None and (config.group_by is not None or config.group_near_duplicates):
        option = "group_near_duplicates" if config.group_by is None else "group_by"
        raise UserError(
            f"data.{option} has no effect on {path}, whose folders are the split; "
            f"leave it out, or set data.split=hash to divide all pictures anew"
        )
    if config.group_near_duplicates:
        groups = merged_groups(source)
        source = replace(source, index=replace(source.index, groups=StringTable(groups)))
        largest = max(Counter(groups).values())
        told = f"{len(set(groups)):,} groups, the largest of {largest:,} of {len(groups):,} samples"
        source = _noting(source, f"near-duplicates share a group (data.group_near_duplicates): {told}")
    sided = sum(names_side(source.captions(index)) for index in range(len(source))) if config.flip is True else 0
    if sided:
        source = _noting(
            source, f"sample whose caption names left or right, so it is not mirrored (data.flip=always: it is): {sided:,}"
        )
    return source


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


def _noting(source: StoredImages, note: str) -> StoredImages:
    return replace(source, notes=(*source.notes, note))
