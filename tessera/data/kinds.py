"""The kinds of samples that a folder may hold, in the words of messages."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.media.clips import CLIP_SUFFIXES
from tessera.media.images import IMAGE_SUFFIXES
from tessera.media.meshes import MESH_SUFFIXES


@dataclass(frozen=True, slots=True)
class Kind:
    """What the samples are."""

    noun: str
    an: str  # with its article
    many: str
    suffixes: tuple[str, ...]
    expected: str


IMAGES = Kind(
    "image", "an image", "images", IMAGE_SUFFIXES,
    "expected a folder of png, jpg, jpeg, webp, gif or bmp files, subfolders included; or of webdataset .tar shards; "
    "or of .npy stacks of uint8 pictures",
)  # fmt: skip
MESHES = Kind(
    "mesh", "a mesh", "meshes", MESH_SUFFIXES,
    "expected a folder of obj, glb, gltf, ply, stl or off files, subfolders included",
)  # fmt: skip
CLIPS = Kind(
    "clip", "a clip", "clips", tuple(dict.fromkeys((*CLIP_SUFFIXES, *IMAGE_SUFFIXES))),
    "expected a folder of gif, apng, webp, mp4, webm, mkv, mov or avi files, of folders of numbered pictures, or of single "
    "pictures, subfolders included; or of .npy files of uint8 frames",
)  # fmt: skip
