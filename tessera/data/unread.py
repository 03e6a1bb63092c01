"""The files that lie beside the samples and are not read: a listed folder in, a note for each kind of them out."""

from __future__ import annotations

import posixpath
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from tessera.data.folders import ARCHIVES, CAPTION_SUFFIXES, FAMILIES, Contents
from tessera.data.kinds import IMAGES

_TEXTS = (*CAPTION_SUFFIXES, ".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".xml")  # what captions come in elsewhere
_PAPERS = ("license", "licence", "readme", "notice", "copying")  # they come with data and are no data
_FAMILY_OF = {suffix: family for family, suffixes in FAMILIES.items() for suffix in suffixes}
_FAMILY_OF[""] = "no extension; name pictures .png or .jpg"
_CLIP_FAMILIES = {**_FAMILY_OF, ".tar": "tars; unpack them first"}
_MESH_PARTS = (".mtl", ".bin")  # materials, and buffers of .gltf files
_MESH_FAMILIES = {
    **dict.fromkeys(IMAGES.suffixes, "images; of meshes only the shape is learned"),
    **dict.fromkeys((".blend", ".fbx", ".dae", ".3ds", ".usdz", ".step"), "meshes of another format; export them as glb or obj"),
    **dict.fromkeys(ARCHIVES, "archives; unpack them first"),
}


def note_beside_images(contents: Contents) -> None:
    """What `captions.pair_captions` does not take: it speaks of caption files and metadata itself."""
    stems = {posixpath.splitext(image)[0] for image in contents.samples}
    _note_each(contents, contents.unread, lambda path: _beside_images(path, stems))


def note_beside_meshes(contents: Contents) -> None:
    """Materials, textures and buffers belong to meshes: they are counted, and whatever is a text is named."""
    told = "text or table not read; captions stand in NAME.txt beside NAME.obj, or in metadata.jsonl, .csv or .parquet"
    files = [path for path in contents.unread if not path.lower().endswith(_MESH_PARTS)]
    _note_each(contents, files, lambda _: told, "neither meshes nor captions", _MESH_FAMILIES)


def note_beside_clips(contents: Contents) -> None:
    """What `captions.pair_captions` does not take."""
    told = (
        "text or table not read; captions stand in NAME.txt beside NAME.mp4 or beside the folder NAME, "
        "or in metadata.jsonl, .csv or .parquet"
    )
    _note_each(contents, contents.unread, lambda _: told, "neither clips nor captions", _CLIP_FAMILIES)


def note_beside_tars(contents: Contents) -> None:
    told = "text or table beside the tars, not read; captions stand in the tars (NAME.txt or NAME.json with NAME.png)"
    _note_each(contents, [*contents.caption_files.values(), *contents.metadata, *contents.unread], lambda _: told)


def note_beside_stacks(contents: Contents, used: Iterable[str]) -> None:
    """`used` are the files whose lines became captions."""
    files = {*contents.caption_files.values(), *contents.metadata, *contents.unread}.difference(used)
    _note_each(contents, sorted(files), _beside_stacks)


def _note_each(
    contents: Contents, files: Iterable[str], told: Callable[[str], str], other: str = "neither pictures nor captions",
    family_of: Mapping[str, str] = _FAMILY_OF,
) -> None:  # fmt: skip
    """Texts one by one with their place, for captions may be lost with them; the others by their number."""
    others = Counter[str]()
    for path in files:
        suffix = posixpath.splitext(path)[1].lower()
        if posixpath.basename(path).lower().startswith(_PAPERS):
            continue
        if suffix in _TEXTS:
            contents.note(told(path), path)
        else:
            others[suffix] += 1
    families = defaultdict[str, list[str]](list)
    for suffix in sorted(others):
        families[family_of.get(suffix, other)].append(suffix)
    for family, suffixes in families.items():
        counts = ", ".join(f"{others[suffix]:,} {suffix}".strip() for suffix in suffixes)
        plural = "s" if sum(others[suffix] for suffix in suffixes) > 1 else ""
        contents.summaries.append(f"{counts} file{plural} not read: {family}")


def _beside_images(path: str, stems: set[str]) -> str:
    stem, suffix = posixpath.splitext(path)
    if stem in stems and suffix.lower() == ".json":
        return "json beside its image, not read in a folder; write its caption to a .txt of the same name"
    return "text or table not read; captions stand in NAME.txt beside NAME.png, or in metadata.jsonl, .csv or .parquet"


def _beside_stacks(path: str) -> str:
    if posixpath.basename(path) in ("captions.txt", "captions.jsonl"):
        return "captions that no stack takes, because there are several, or it has others; name them as their stack: NAME.txt"
    return "text or table beside the stacks, not read; captions of NAME.npy stand in NAME.txt or NAME.jsonl"
