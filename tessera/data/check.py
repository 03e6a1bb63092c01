"""`tessera data check`: a folder in, a report out that a person or a program can read. Every file is read in full.

What is counted is what training would see: a sample is a picture that opens (here), a clip that can be decoded
(`clip_check.py`) or a mesh that can be used (`mesh_check.py`), and whatever is not is a reject with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tessera.config import Config, ImageDataConfig, MeshDataConfig, UserError, VideoDataConfig, build, parse_sets
from tessera.data.captions import names_side
from tessera.data.clip_check import check_clips, mostly_clips
from tessera.data.duplicates import near_groups
from tessera.data.folders import Contents, list_folder
from tessera.data.mesh_check import check_meshes
from tessera.data.opening import open_clips, open_images, open_meshes
from tessera.data.report import Report, Tally, counts, equal_groups, histogram
from tessera.data.sources import Reject, StoredImages, split_indices
from tessera.data.survey import Seen, survey

_NUM_SIZES = 10

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class ImageReport(Report):
    """What a folder of pictures holds."""

    num_naming_sides: int
    """Samples whose captions say left or right; `data.flip=true` does not mirror them."""
    sizes: Mapping[str, int]
    """width x height -> number of images: the ten most frequent, and `other`."""
    modes: Mapping[str, int]
    formats: Mapping[str, int]

    def facts(self) -> Iterator[str]:
        yield f"  sizes    {counts(self.sizes)}"
        yield f"  formats  {counts(self.formats)}; modes {counts(self.modes)}"

    def remarks(self) -> Iterator[str]:
        if self.num_naming_sides:
            yield f"  captions of {self.num_naming_sides:,} images say left or right; data.flip=true leaves these as they are"


class _ImageRoot(Config):
    data: ImageDataConfig = ImageDataConfig()


class _MeshRoot(Config):
    data: MeshDataConfig = MeshDataConfig()


class _ClipRoot(Config):
    data: VideoDataConfig = VideoDataConfig()


def check_folder(
    path: Path | str, *, kind: str | None = None, sets: Sequence[str] = (), progress: Progress | None = None
) -> Report:
    """Reads every file with a thread a core. `progress(done, total)` is called from this thread after each. Without a kind it is
    the one of most files; `sets` are options of the data section, as on the command line."""
    if kind not in (None, "images", "clips", "meshes"):
        raise UserError(f"kind {kind!r}: expected images, clips or meshes")
    contents = list_folder(Path(path).absolute())
    kind = kind or main_kind(contents)
    if kind == "clips":
        clips = build(_ClipRoot, [parse_sets(sets)]).data
        return check_clips(open_clips(contents, clips), clips, str(path), progress)
    if kind == "meshes":
        config = build(_MeshRoot, [parse_sets(sets)]).data
        return check_meshes(open_meshes(contents, config), config, str(path), progress)
    options = build(_ImageRoot, [parse_sets(sets)]).data
    return check_images(open_images(contents, options), options, str(path), progress)


def main_kind(contents: Contents) -> Literal["images", "clips", "meshes"]:
    """What most files are. Packs of meshes bring textures along; folders of pictures hardly ever bring meshes."""
    pictures = len(contents.samples) + len(contents.videos)
    if len(contents.meshes) > pictures + len(contents.shards) + len(contents.arrays):
        return "meshes"
    return "clips" if mostly_clips(contents) else "images"


def check_images(source: StoredImages, config: ImageDataConfig, path: str, progress: Progress | None = None) -> ImageReport:
    """Decodes every picture."""
    seen, rejects = dict[int, Seen](), list(source.rejects)
    for index, result in enumerate(survey(source)):
        if isinstance(result, Seen):
            seen[index] = result
        else:
            rejects.append(Reject(source.name(index), result.reason))
        if progress is not None:
            progress(index + 1, len(source))
    tally = Tally(
        source=source,
        config=config,
        seen=list(seen),
        num_unreadable=len(source) - len(seen),
        held_out=frozenset(split_indices(source, config.validation_fraction)[1].tolist()),
        equal=equal_groups({index: each.digest for index, each in seen.items()}),
        near=_alike(seen),
    )
    facts = [each.facts for each in seen.values()]
    return ImageReport(
        path=path,
        num_naming_sides=sum(map(names_side, tally.captions().values())),
        sizes=histogram((f"{each.width}x{each.height}" for each in facts), _NUM_SIZES),
        modes=histogram(each.mode for each in facts),
        formats=histogram(each.format for each in facts),
        **tally.fields(rejects, _animations(source, seen)),
    )


def _alike(seen: Mapping[int, Seen]) -> list[list[int]]:
    places = list(seen)
    return [[places[member] for member in group] for group in near_groups([each.print for each in seen.values()])]


def _animations(source: StoredImages, seen: Mapping[int, Seen]) -> Iterator[str]:
    animated = [source.name(index) for index, each in seen.items() if each.facts.animated]
    if animated:
        yield f"animation, of which only the first frame is read as an image: {len(animated):,} ({animated[0]}, ...)"
